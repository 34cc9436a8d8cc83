package policyfile

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// parseIncomplete parses a policy that may have no classes yet. The result accepts any firmware.
func parseIncomplete(text []byte) (*attest.Policy, error) {
	b, err := ToJSON(text)
	if err != nil {
		return nil, err
	}
	m := &attestv1.Policy{}
	if err := protojson.Unmarshal(b, m); err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	if m.Insecure == nil {
		m.Insecure = &attestv1.InsecureSwitches{}
	}
	m.Insecure.AnyFirmware = true
	if b, err = protojson.Marshal(m); err != nil {
		return nil, err
	}
	return attest.ParsePolicy(b)
}

// ParseForClass returns the policy for appraising a machine whose firmware is to become a class: text, with any firmware
// accepted.
func ParseForClass(text []byte) (*attest.Policy, error) { return parseIncomplete(text) }

// Firmware holds Reference Values of firmware, as its maker publishes them or as they were observed on a machine.
type Firmware struct {
	// Version of this file's format: 1.
	Version int `json:"version"`
	// Bank is "sha256", "sha384" or "sha512".
	Bank string `json:"bank"`
	// PCRs maps PCR numbers, 0 to 3 and 5 to 7, to values in lower-case hexadecimal digits; 0, 2, 3 and 7 are required.
	PCRs map[string]string `json:"pcrs"`
}

// ParseFirmware reads a file of Reference Values of firmware as a class of this name, for policies of the bank.
func ParseFirmware(name string, text []byte, bank string) (*attestv1.MachineClass, error) {
	var f Firmware
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&f); err != nil {
		return nil, fmt.Errorf("firmware values: %w", err)
	}
	if f.Version != 1 {
		return nil, fmt.Errorf("firmware values: version %d, this program reads 1", f.Version)
	}
	if f.Bank != bank {
		return nil, fmt.Errorf("firmware values: bank %q, the policy has %q", f.Bank, bank)
	}
	values := map[int]string{}
	for key, v := range f.PCRs {
		i, err := strconv.Atoi(key)
		if err != nil || strconv.Itoa(i) != key {
			return nil, fmt.Errorf("firmware values: PCR %q is no number", key)
		}
		values[i] = v
	}
	c := &attestv1.MachineClass{Name: name}
	for _, i := range slices.Sorted(maps.Keys(values)) {
		c.Pcrs = append(c.Pcrs, &attestv1.PcrValue{Index: uint32(i), Value: values[i]})
	}
	return c, nil
}

// ClassOf returns a class from an attested machine: the values of PCR 0, 2, 3 and 7, or rules over its event log.
func ClassOf(name string, c attest.Claims, eventLog bool) (*attestv1.MachineClass, error) {
	out := &attestv1.MachineClass{Name: name}
	if !eventLog {
		for _, i := range []int{0, 2, 3, 7} {
			out.Pcrs = append(out.Pcrs, &attestv1.PcrValue{Index: uint32(i), Value: hex.EncodeToString(c.PCR(i))})
		}
		return out, nil
	}
	fw, err := c.Firmware()
	if err != nil {
		return nil, fmt.Errorf("no rules can be made of its event log: %w", err)
	}
	if len(fw.DriverConfig) > 0 {
		return nil, fmt.Errorf("it has measured driver configuration into PCR 3 (%s), which rules over the event log do not accept: make a class of values", fw.DriverConfig[0].Text)
	}
	rules := &attestv1.EventLogRules{}
	for _, d := range fw.Drivers {
		if digest := hex.EncodeToString(d.Digest); !slices.Contains(rules.GetDrivers(), digest) {
			rules.Drivers = append(rules.Drivers, digest)
		}
	}
	if fw.SecureBoot {
		key := func(name string) string { return hex.EncodeToString(fw.Keys[name]) }
		rules.SecureBoot = &attestv1.SecureBootRule{Pk: key("PK"), Kek: key("KEK"), Db: key("db")}
	}
	out.EventLog = rules
	return out, nil
}

// AddClass returns the policy with another class and another serial; the rest, including comments, is unchanged. A class of
// the same name is an error.
func AddClass(text []byte, serial uint64, c *attestv1.MachineClass) ([]byte, error) {
	doc, err := document(text)
	if err != nil {
		return nil, err
	}
	root := doc.Content[0]
	tpm := field(root, "tpm2")
	if tpm.Kind != yaml.MappingNode {
		return nil, errors.New("policy: tpm2 is missing: make the policy by muster policy from-measurements")
	}
	var item yaml.Node
	if err := item.Encode(classFields(c)); err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	*field(root, "serial") = yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: strconv.FormatUint(serial, 10)}
	list := field(tpm, "classes")
	if list.Kind != yaml.SequenceNode { // missing, or null
		*list = yaml.Node{Kind: yaml.SequenceNode}
	}
	list.Style = 0
	list.Content = append(list.Content, &item)
	out, err := encode(doc)
	if err != nil {
		return nil, err
	}
	if _, _, err := Parse(out); err != nil {
		return nil, err
	}
	return out, nil
}

// classFields returns a class in the form of the policy's file.
func classFields(c *attestv1.MachineClass) any {
	type value struct {
		Index uint32 `yaml:"index"`
		Value string `yaml:"value"`
	}
	type keys struct {
		PK  string `yaml:"pk"`
		KEK string `yaml:"kek"`
		DB  string `yaml:"db"`
	}
	type rules struct {
		Drivers    []string `yaml:"drivers"`
		SecureBoot *keys    `yaml:"secureBoot,omitempty"`
	}
	out := struct {
		Name     string  `yaml:"name"`
		PCRs     []value `yaml:"pcrs,omitempty"`
		EventLog *rules  `yaml:"eventLog,omitempty"`
	}{Name: c.GetName()}
	for _, v := range c.GetPcrs() {
		out.PCRs = append(out.PCRs, value{v.GetIndex(), v.GetValue()})
	}
	if l := c.GetEventLog(); l != nil {
		out.EventLog = &rules{Drivers: append([]string{}, l.GetDrivers()...)}
		if k := l.GetSecureBoot(); k != nil {
			out.EventLog.SecureBoot = &keys{k.GetPk(), k.GetKek(), k.GetDb()}
		}
	}
	return out
}
