package policyfile

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// CollateralSoon is how long before its end collateral causes a warning. Intel's lasts 30 days.
const CollateralSoon = 10 * 24 * time.Hour

// SetCollateral returns the policy with other collateral and another serial; the rest, including comments, is unchanged.
func SetCollateral(text []byte, serial uint64, c *attestv1.Collateral) ([]byte, error) {
	doc, err := document(text)
	if err != nil {
		return nil, err
	}
	root := doc.Content[0]
	*field(root, "serial") = yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: strconv.FormatUint(serial, 10)}
	if err := writeCollateral(root, c); err != nil {
		return nil, err
	}
	out, err := encode(doc)
	if err != nil {
		return nil, err
	}
	if _, err := parseIncomplete(out); err != nil { // its classes may follow
		return nil, err
	}
	return out, nil
}

// WorseCollateral returns why collateral must not take the place of that of a policy, in YAML or JSON: see
// [attest.WorseCollateral].
func WorseCollateral(text []byte, c *attestv1.Collateral) ([]string, error) {
	m, err := message(text)
	if err != nil {
		return nil, err
	}
	return attest.WorseCollateral(m.GetHardware(), c)
}

// OlderCollateral returns why the collateral of the policy after is worse than that of the policy before, for the rules
// of after: see [attest.WorseCollateral]. A policy before that is not valid has none.
func OlderCollateral(before, after []byte) ([]string, error) {
	old, err := message(before)
	if err != nil {
		return nil, err
	}
	next, err := message(after)
	if err != nil {
		return nil, err
	}
	h := next.GetHardware()
	if _, _, err := Parse(before); err != nil || h == nil {
		return nil, nil //nolint:nilerr // it is about to be replaced
	}
	c := h.GetCollateral()
	h.Collateral = old.GetHardware().GetCollateral()
	return attest.WorseCollateral(h, c)
}

// writeCollateral writes collateral into a policy's document.
func writeCollateral(root *yaml.Node, c *attestv1.Collateral) error {
	hardware := field(root, "hardware")
	if hardware.Kind != 0 && hardware.Kind != yaml.MappingNode && hardware.Tag != "!!null" {
		return errors.New("policy: hardware is no object")
	}
	if hardware.Kind != yaml.MappingNode {
		*hardware = yaml.Node{Kind: yaml.MappingNode}
	}
	value, err := messageNode(c)
	if err != nil {
		return fmt.Errorf("policy: hardware.collateral: %w", err)
	}
	*field(hardware, "collateral") = *value
	return nil
}

// messageNode returns a message in the form of the policy's file.
func messageNode(m proto.Message) (*yaml.Node, error) {
	b, err := protojson.Marshal(m)
	if err != nil {
		return nil, err
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(b, &doc); err != nil { // JSON is YAML
		return nil, err
	}
	if len(doc.Content) != 1 {
		return nil, errors.New("it has no content")
	}
	plain(doc.Content[0])
	return doc.Content[0], nil
}

// plain has collections written in lines, not in braces.
func plain(n *yaml.Node) {
	if n.Kind == yaml.MappingNode || n.Kind == yaml.SequenceNode {
		n.Style = 0
	}
	for _, c := range n.Content {
		plain(c)
	}
}

// keepHardware writes rules for hardware reports that old has and m lacks into a policy's document, and returns their
// description; empty if there is nothing to keep. Without them a policy would accept machines without a report.
func keepHardware(root *yaml.Node, m, old *attestv1.Policy) (string, error) {
	switch h := old.GetHardware(); {
	case m.GetHardware() == nil && h != nil:
		value, err := messageNode(h)
		if err != nil {
			return "", fmt.Errorf("policy: hardware: %w", err)
		}
		*field(root, "hardware") = *value
		return "the rules for hardware reports", nil
	case m.GetHardware() != nil && m.GetHardware().GetCollateral() == nil && h.GetCollateral() != nil:
		return "the collateral for hardware reports", writeCollateral(root, h.GetCollateral())
	}
	return "", nil
}

// checkHardware reports what the rules for hardware reports do not restrict, and what ends soon.
func checkHardware(h *attestv1.HardwarePolicy, ends []attest.CollateralEnd, now time.Time, add func(field, format string, args ...any)) {
	if h == nil {
		return
	}
	if len(h.GetRequire()) == 0 {
		add("hardware.require", "empty: machines without a hardware report are accepted")
	}
	for name, r := range map[string]*attestv1.SevSnpRules{"hardware.sevSnp": h.GetSevSnp(), "hardware.azureSevSnp": h.GetAzureSevSnp()} {
		if r.GetAnyChip() {
			add(name+".anyChip", "every processor of the lines in minTcb is accepted, also one that an attacker has bought")
		}
		if r.GetAnyMeasurement() {
			add(name+".anyMeasurement", "a report only shows that some guest runs on such a processor")
		}
		if v := r.GetMaxVmpl(); v > 0 {
			add(name+".maxVmpl", "%d: less privileged software of an accepted guest can ask for a report too, and is then believed as much as the most privileged, VMPL 0", v)
		}
		if len(r.GetIdKeys()) > 0 && r.GetMinGuestSvn() == 0 {
			add(name+".minGuestSvn", "not set: every guest that one of idKeys has ever signed is accepted, also one with known weaknesses; set the lowest guest SVN that you accept, muster verify shows a machine's")
		}
	}
	for name, r := range map[string]*attestv1.TdxRules{"hardware.tdx": h.GetTdx(), "hardware.azureTdx": h.GetAzureTdx()} {
		if r != nil && r.GetMinEvaluationNumber() == 0 {
			add(name+".minEvaluationNumber", "not set: TCB data of any age are accepted if Intel has signed them lately, and Intel signs even years-old data again on request; set the lowest number that muster collateral verify shows for data that you have fetched from Intel itself")
		}
	}
	if h.GetTdx().GetAnyMrtd() {
		add("hardware.tdx.anyMrtd", "a quote only shows that some trust domain runs on such a processor")
	}
	if h.GetSevSnp() != nil || h.GetTdx() != nil {
		add("hardware", "sevSnp and tdx show that an accepted guest took part in the session, not that it is this machine: root on one can lend its reports to another machine")
	}
	for _, lack := range attest.CollateralLacks(h) {
		add("hardware.collateral", "every report of the kind is refused with HARDWARE_COLLATERAL: %s; run muster collateral fetch, then muster collateral apply FILE, with --policy FILE if there is no cluster yet", lack)
	}
	for _, e := range ends {
		if end := e.Time.UTC().Format(time.DateOnly); now.After(e.Time) {
			add("hardware.collateral", "the %s ended on %s: reports that need it are refused; run muster collateral fetch, then muster collateral apply FILE", e.Name, end)
		} else if e.Time.Sub(now) < CollateralSoon {
			add("hardware.collateral", "the %s ends on %s: before, run muster collateral fetch, then muster collateral apply FILE", e.Name, end)
		}
	}
}
