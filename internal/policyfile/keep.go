package policyfile

import (
	"errors"
	"fmt"
	"slices"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
)

// KeepRules returns text, a new policy, with those rules of the previous policy that [Build] does not write, and a
// description of them. Classes are kept if text has none and does not accept any firmware; revocations, if text has no
// tpm2.revoked; the minimum firmware version of a root's TPMs, if text has none for this root; rules for hardware reports
// and their collateral, if text has none.
func KeepRules(text, before []byte) (kept []byte, what []string, err error) {
	m, err := message(text)
	if err != nil {
		return nil, nil, err
	}
	if m.GetTpm2() == nil {
		return text, nil, nil
	}
	old, err := message(before)
	if err != nil {
		return nil, nil, fmt.Errorf("the previous policy: %w", err)
	}
	if classes := old.GetTpm2().GetClasses(); len(m.GetTpm2().GetClasses()) == 0 && len(classes) > 0 && !m.GetInsecure().GetAnyFirmware() {
		for _, c := range classes {
			if text, err = AddClass(text, m.GetSerial(), c); err != nil {
				return nil, nil, err
			}
		}
		what = append(what, fmt.Sprintf("%d machine classes", len(classes)))
	}
	doc, err := document(text)
	if err != nil {
		return nil, nil, err
	}
	tpm := tpmRules(m.GetTpm2(), old.GetTpm2())
	hardware, err := keepHardware(doc.Content[0], m, old)
	if err != nil {
		return nil, nil, err
	}
	if hardware != "" {
		what = append(what, hardware)
	} else if len(tpm) == 0 {
		return text, what, nil
	}
	for _, k := range tpm {
		if err := k.write(field(doc.Content[0], "tpm2")); err != nil {
			return nil, nil, fmt.Errorf("policy: %s: %w", k.what, err)
		}
		what = append(what, k.what)
	}
	if text, err = encode(doc); err != nil {
		return nil, nil, err
	}
	if _, _, err := Parse(text); err != nil {
		return nil, nil, err
	}
	return text, what, nil
}

// rule is a rule that is kept, and how it is written into tpm2 of a policy's file.
type rule struct {
	what  string
	write func(tpm *yaml.Node) error
}

// tpmRules returns the rules about TPMs that old has and m lacks.
func tpmRules(m, old *attestv1.Tpm2Policy) (out []rule) {
	if r := old.GetRevoked(); r != nil && m.GetRevoked() == nil {
		out = append(out, rule{
			fmt.Sprintf("%d revoked keys and %d revoked certificates", len(r.GetKeys()), len(r.GetCertificates())),
			func(tpm *yaml.Node) error { return field(tpm, "revoked").Encode(revokedFields(r)) },
		})
	}
	for i, r := range m.GetEkRoots() {
		for _, o := range old.GetEkRoots() {
			if !sameKey(o.GetPem(), r.GetPem()) || r.GetMinFirmwareVersion() != "" || o.GetMinFirmwareVersion() == "" {
				continue
			}
			out = append(out, rule{
				fmt.Sprintf("minFirmwareVersion of tpm2.ekRoots[%d]", i),
				func(tpm *yaml.Node) error {
					roots := field(tpm, "ekRoots")
					if roots.Kind != yaml.SequenceNode || i >= len(roots.Content) {
						return errors.New("the file has no list of roots")
					}
					return field(roots.Content[i], "minFirmwareVersion").Encode(o.GetMinFirmwareVersion())
				},
			})
			break
		}
	}
	return out
}

// revokedFields returns revocations in the form of the policy's file.
func revokedFields(r *attestv1.Revoked) any {
	type certificate struct {
		IssuerKey string `yaml:"issuerKey"`
		Serial    string `yaml:"serial"`
	}
	out := struct {
		Keys         []string      `yaml:"keys,omitempty"`
		Certificates []certificate `yaml:"certificates,omitempty"`
	}{Keys: r.GetKeys()}
	for _, c := range r.GetCertificates() {
		out.Certificates = append(out.Certificates, certificate{c.GetIssuerKey(), c.GetSerial()})
	}
	return out
}

func message(text []byte) (*attestv1.Policy, error) {
	b, err := ToJSON(text)
	if err != nil {
		return nil, err
	}
	m := &attestv1.Policy{}
	if err := protojson.Unmarshal(b, m); err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	return m, nil
}

// SameRules reports whether two policies, in YAML or JSON, differ in nothing but the serial and the order of control planes and machines.
func SameRules(a, b []byte) (bool, error) {
	x, err := message(a)
	if err != nil {
		return false, err
	}
	y, err := message(b)
	if err != nil {
		return false, err
	}
	x.Serial, y.Serial = 0, 0
	for _, m := range []*attestv1.Policy{x, y} {
		slices.Sort(m.ControlPlanes)
		for _, name := range listsOf(m.GetTpm2()) {
			if list := listOf(m.GetTpm2(), name); list != nil {
				slices.Sort(*list)
			}
		}
	}
	return proto.Equal(x, y), nil
}
