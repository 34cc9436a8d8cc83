package policyfile

import (
	"bytes"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/explain"
	"github.com/muster-k8s/muster/trust/attest"
)

// Measurements are the PCR values that an image leads to, as its build predicts them. Values that were read from a machine
// instead would mean trust in whatever booted there.
type Measurements struct {
	// Version of this file's format: 1.
	Version int `json:"version"`
	// Bank is "sha256", "sha384" or "sha512".
	Bank string `json:"bank"`
	// Image names the image, for the comment.
	Image string `json:"image"`
	// PCRs maps PCR numbers to values in lower-case hexadecimal digits.
	PCRs map[string]string `json:"pcrs"`
}

// ParseMeasurements reads measurements.json.
func ParseMeasurements(text []byte) (Measurements, error) {
	var m Measurements
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&m); err != nil {
		return m, fmt.Errorf("measurements: %w", err)
	}
	if m.Version != 1 {
		return m, fmt.Errorf("measurements: version %d, this program reads 1", m.Version)
	}
	if _, err := m.values(); err != nil {
		return m, fmt.Errorf("measurements: %w", err)
	}
	return m, nil
}

// values returns the registers in order. It adds the boot PCRs that must be zero, since an image build does not predict
// them; a given value is kept.
func (m Measurements) values() (map[int]string, error) {
	bank, ok := attest.Banks[m.Bank]
	if !ok {
		return nil, fmt.Errorf("bank %q: want sha256, sha384 or sha512", m.Bank)
	}
	out := map[int]string{}
	for key, v := range m.PCRs {
		i, err := strconv.Atoi(key)
		if err != nil || strconv.Itoa(i) != key || !slices.Contains([]int{4, 8, 9, 11, 12, 13, 14}, i) {
			return nil, fmt.Errorf("PCR %q: an image is measured into 4, 8, 9 and 11 to 14", key)
		}
		if b, err := hex.DecodeString(v); err != nil || len(b) != bank.Size() || hex.EncodeToString(b) != v {
			return nil, fmt.Errorf("PCR %d: want %d lower-case hexadecimal digits", i, 2*bank.Size())
		}
		out[i] = v
	}
	for _, i := range []int{8, 12, 13, 14} {
		if _, ok := out[i]; !ok {
			out[i] = strings.Repeat("0", 2*bank.Size())
		}
	}
	for _, i := range []int{4, 9, 11} {
		if _, ok := out[i]; !ok {
			return nil, fmt.Errorf("PCR %d is missing: it measures what was booted", i)
		}
	}
	return out, nil
}

// Root is a certificate authority of endorsement keys.
type Root struct {
	// PEM is one certificate.
	PEM string
	// Operator is whether it issues for the owner's machines only.
	Operator bool
	// Key is the one kind of endorsement key that it certifies.
	Key attest.EKKind
}

// Template is the content of a new policy.
type Template struct {
	// Measurements of one or more images, all in one bank.
	Measurements []Measurements
	Roots        []Root
	// MachineIDs may be empty if every root is the operator's.
	MachineIDs []attest.MachineID
	// BareMachineIDs are machines whose TPMs have no endorsement key certificate.
	BareMachineIDs []attest.MachineID
	// Platforms are rules for virtual machines of clouds.
	Platforms []*attestv1.PlatformRoot
	// Nitro are rules for virtual machines of AWS, by NitroTPM's documents.
	Nitro []*attestv1.NitroRoot
	// ControlPlanes may be empty: muster init and muster enroll list them.
	ControlPlanes []ControlPlane
	NodeCIDRs     []netip.Prefix
	Roles         []string
	// Serial of the policy; 0 means 1.
	Serial uint64
	// Classes are the firmware that machines may have.
	Classes []*attestv1.MachineClass
	// AllowPlainState, AnyMachine and AnyFirmware are insecure switches.
	AllowPlainState, AnyMachine, AnyFirmware bool
}

// Build returns a commented policy in YAML. It passes [Parse], unless it has neither Classes nor AnyFirmware: then [AddClass] completes it.
func Build(t Template) ([]byte, error) {
	if len(t.Measurements) == 0 {
		return nil, errors.New("policy: no measurements were given")
	}
	if len(t.NodeCIDRs) == 0 {
		return nil, errors.New("policy: no node network was given, so no node could have an address: give --node-cidr")
	}
	images, err := imagesOf(t.Measurements)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }

	line("# Muster policy: which machines may be in the cluster. Edit it, increase serial, then run")
	line("#   muster policy check FILE    and    muster policy apply FILE")
	line("# docs/operate.md explains each field.")
	line("version: 2")
	line("# Incremented with every change; a cluster never goes back to a lower one.")
	line("serial: %d", max(t.Serial, 1))
	line("# What machines may become. A control plane must be enrolled by you beforehand: muster enroll.")
	line("roles: [%s]", strings.Join(t.Roles, ", "))
	line("# Node addresses must lie in one of these networks.")
	line("nodeCidrs:")
	for _, c := range t.NodeCIDRs {
		line("  - %s", c)
	}
	line("# Machine IDs of the control planes: no machine believes a joinservice or kms on another one. muster init,")
	line("# enroll --role control-plane, replace and forget keep the list.")
	writeControlPlanes(line, t.ControlPlanes)
	line("tpm2:")
	writeMachines(line, t)
	writeBareMachines(line, t)
	line("  # Authorities that certify TPMs. operator: true means that the authority issues for your machines only;")
	line("  # a TPM vendor's root also certifies the TPMs that an attacker bought. key: the one kind of endorsement key")
	line("  # that it certifies, ecc-p256, ecc-p384 or rsa-2048: a TPM has several, and would be a machine for each.")
	if len(t.Roots) == 0 {
		line("  ekRoots: []")
	} else {
		line("  ekRoots:")
	}
	for _, r := range t.Roots {
		if err := writeRoot(line, r); err != nil {
			return nil, err
		}
	}
	if err := writePlatforms(line, t.Platforms); err != nil {
		return nil, err
	}
	if err := writeNitro(line, t.Nitro); err != nil {
		return nil, err
	}
	line("  bank: %s", t.Measurements[0].Bank)
	line("  # What machines may boot. One has all values of one image.")
	line("  images:")
	for _, m := range images {
		writeBoot(line, m.GetName(), m.GetPcrs())
	}
	line("  # What firmware they may have: muster policy add-class NAME --from MACHINE:9000 takes it from a machine that you trust.")
	if len(t.Classes) == 0 {
		line("  classes: []")
	} else {
		line("  classes:")
	}
	for _, m := range t.Classes {
		writeBoot(line, m.GetName(), m.GetPcrs())
	}
	line("# Switches that weaken the cluster; each that is on is shown by muster status.")
	line("insecure:")
	line("  # Accept any machine that a vendor's root certifies, the attacker's too.")
	line("  anyMachine: %t", t.AnyMachine)
	line("  # Accept machines whose state is not on an encrypted disk.")
	line("  allowPlainState: %t", t.AllowPlainState)
	line("  # Accept any firmware and any driver that it loads, which can change what is booted unseen.")
	line("  anyFirmware: %t", t.AnyFirmware)
	if _, err := parseIncomplete(b.Bytes()); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

func writeControlPlanes(line func(string, ...any), list []ControlPlane) {
	if len(list) == 0 {
		line("controlPlanes: []")
		return
	}
	line("controlPlanes:")
	for _, c := range list {
		line("  - %q", c.Machine.String())
	}
}

func writeMachines(line func(string, ...any), t Template) {
	line("  # Machine IDs: SHA-256 of the endorsement key's SubjectPublicKeyInfo; muster verify shows a machine's.")
	if len(t.MachineIDs) == 0 {
		line("  # None listed: any machine that a root below certifies.")
		line("  machineIds: []")
		return
	}
	line("  machineIds:")
	for _, id := range t.MachineIDs {
		line("    - %q", id.String())
	}
}

// writeBareMachines lists machines that nothing but the list makes acceptable.
func writeBareMachines(line func(string, ...any), t Template) {
	if len(t.BareMachineIDs) == 0 {
		return
	}
	line("  # Machines whose TPM has no endorsement key certificate. Only this list shows that a TPM is genuine, and yours:")
	line("  # take the ID from the machine itself (its console), not from the network.")
	line("  bareMachineIds:")
	for _, id := range t.BareMachineIDs {
		line("    - %q", id.String())
	}
}

func writeRoot(line func(string, ...any), r Root) error {
	block, _ := pem.Decode([]byte(r.PEM))
	if block == nil {
		return errors.New("policy: an EK root is no PEM certificate")
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return fmt.Errorf("policy: EK root: %w", err)
	}
	line("    # %q, valid until %s, SHA-256 %x", c.Subject.String(), c.NotAfter.UTC().Format("2006-01-02"), sha256.Sum256(c.Raw))
	line("    - operator: %t", r.Operator)
	line("      key: %s", r.Key)
	writePEM(line, r.PEM)
	return nil
}

func writePEM(line func(string, ...any), text string) {
	line("      pem: |")
	for l := range strings.Lines(strings.TrimSpace(text)) {
		line("        %s", strings.TrimRight(l, "\r\n"))
	}
}

// writePlatforms writes the rules for virtual machines of clouds, if there are any.
func writePlatforms(line func(string, ...any), list []*attestv1.PlatformRoot) error {
	if len(list) == 0 {
		return nil
	}
	line("  # Authorities of clouds for the keys of virtual machines, and which machines are accepted: any customer has")
	line("  # such machines, so projects (gcp) or machineIds list yours. key: the one kind of key, ecc-p256 or rsa-2048.")
	line("  platformRoots:")
	for _, r := range list {
		if err := writeAuthority(line, r.GetPem()); err != nil {
			return err
		}
		line("    - provider: %q", r.GetProvider())
		line("      key: %q", r.GetKey())
		writeNames(line, "projects", r.GetProjects())
		writeNames(line, "zones", r.GetZones())
		writeNames(line, "machineIds", r.GetMachineIds())
		writePEM(line, r.GetPem())
	}
	return nil
}

// writeNitro writes the rules for virtual machines of AWS, if there are any.
func writeNitro(line func(string, ...any), list []*attestv1.NitroRoot) error {
	if len(list) == 0 {
		return nil
	}
	line("  # Authorities of AWS for the attestation documents of NitroTPMs, and which machines are accepted: any customer can")
	line("  # rent one, and documents name no account.")
	line("  nitroRoots:")
	for _, r := range list {
		if err := writeAuthority(line, r.GetPem()); err != nil {
			return err
		}
		line("    - machineIds:")
		for _, id := range r.GetMachineIds() {
			line("        - %q", id)
		}
		writePEM(line, r.GetPem())
	}
	return nil
}

// writeAuthority describes a cloud's authority in a comment.
func writeAuthority(line func(string, ...any), text string) error {
	block, _ := pem.Decode([]byte(text))
	if block == nil {
		return errors.New("policy: an authority of a cloud is no PEM certificate")
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return fmt.Errorf("policy: authority of a cloud: %w", err)
	}
	line("    # %q, valid until %s, SHA-256 %x", c.Subject.String(), c.NotAfter.UTC().Format("2006-01-02"), sha256.Sum256(c.Raw))
	return nil
}

// writeNames writes a list of a rule, unless it is empty.
func writeNames(line func(string, ...any), name string, values []string) {
	if len(values) == 0 {
		return
	}
	line("      %s:", name)
	for _, v := range values {
		line("        - %q", v)
	}
}

func writeBoot(line func(string, ...any), name string, pcrs []*attestv1.PcrValue) {
	line("    - name: %q", name)
	line("      pcrs:")
	for _, v := range pcrs {
		line("        - {index: %d, value: %q} # %s", v.GetIndex(), v.GetValue(), explain.Meanings[int(v.GetIndex())])
	}
}

// imagesOf returns an image for each build. The same build with Secure Boot is a separate image, with another PCR 4.
func imagesOf(all []Measurements) (out []*attestv1.Image, err error) {
	names := map[string]int{}
	for _, m := range all {
		if m.Bank != all[0].Bank {
			return nil, fmt.Errorf("policy: measurements of the banks %s and %s: a policy has one", all[0].Bank, m.Bank)
		}
		values, err := m.values()
		if err != nil {
			return nil, fmt.Errorf("policy: image %q: %w", m.Image, err)
		}
		name := NameOf(m.Image)
		if names[name]++; names[name] > 1 {
			name = fmt.Sprintf("%s-%d", name, names[name])
		}
		image := &attestv1.Image{Name: name}
		for _, i := range slices.Sorted(maps.Keys(values)) {
			image.Pcrs = append(image.Pcrs, &attestv1.PcrValue{Index: uint32(i), Value: values[i]})
		}
		out = append(out, image)
	}
	return out, nil
}

// NameOf returns s in the form of an image's name in a policy.
func NameOf(s string) string {
	s = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '.' {
			return r
		}
		return '-'
	}, strings.ToLower(s))
	return strings.Trim(s[:min(len(s), 60)], "-.")
}
