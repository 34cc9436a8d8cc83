package policyfile

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// Level is the severity of a finding.
type Level string

// The levels.
const (
	// Insecure is for a setting that weakens the cluster.
	Insecure Level = "insecure"
	// Warning is for a setting that does not or may not have the intended effect.
	Warning Level = "warning"
)

// Finding is a property of a policy that its owner should know.
type Finding struct {
	Level Level  `json:"level"`
	Field string `json:"field"`
	Text  string `json:"text"`
}

// soon is how long before its end a root causes a warning.
const soon = 90 * 24 * time.Hour

// Check returns the policy and its findings. An error means that no service would accept the policy.
func Check(text []byte, now time.Time) (*attest.Policy, []Finding, error) {
	p, b, err := Parse(text)
	if err != nil {
		return nil, nil, err
	}
	m := &attestv1.Policy{}
	if err := protojson.Unmarshal(b, m); err != nil {
		return nil, nil, err // impossible: Parse read the same bytes
	}
	var found []Finding
	add := func(l Level, field, format string, args ...any) {
		found = append(found, Finding{l, field, fmt.Sprintf(format, args...)})
	}
	for _, s := range p.Insecure() {
		add(Insecure, "insecure."+s, "%s", switches[s])
	}
	if m.GetTpm2() == nil {
		add(Warning, "tpm2", "no TPM rules: no machine is accepted")
	}
	if len(p.ControlPlanes()) == 0 {
		add(Warning, "controlPlanes", "empty: no machine may serve joinservice or kms, so none can join; muster init lists the first machine, muster enroll --role control-plane the others")
	}
	if len(m.GetRoles()) == 0 {
		add(Warning, "roles", "empty: no machine may join as anything; list worker, control-plane")
	}
	if len(m.GetNodeCidrs()) == 0 {
		add(Warning, "nodeCidrs", "empty: no node may have an address, so none can join")
	}
	for _, s := range m.GetNodeCidrs() {
		if c, err := netip.ParsePrefix(s); err == nil && c.Bits() < wide(c) {
			add(Warning, "nodeCidrs", "%s is wide: a node may have any address in it that is still free", s)
		}
	}
	images, classes := map[string]string{}, map[string]string{} // names by values
	for i, c := range m.GetTpm2().GetImages() {
		if other, ok := images[valuesOf(c.GetPcrs(), nil)]; ok {
			add(Warning, fmt.Sprintf("tpm2.images[%d]", i), "%s has the same values as %s: after the removal of one of the two, the image is still accepted", c.GetName(), other)
		}
		images[valuesOf(c.GetPcrs(), nil)] = c.GetName()
	}
	for i, c := range m.GetTpm2().GetClasses() {
		if other, ok := classes[valuesOf(c.GetPcrs(), c.GetEventLog())]; ok {
			add(Warning, fmt.Sprintf("tpm2.classes[%d]", i), "%s has the same values as %s: after the removal of one of the two, the firmware is still accepted", c.GetName(), other)
		}
		classes[valuesOf(c.GetPcrs(), c.GetEventLog())] = c.GetName()
		checkClass(c, func(format string, args ...any) { add(Warning, fmt.Sprintf("tpm2.classes[%d]", i), format, args...) })
	}
	if n := len(m.GetTpm2().GetBareMachineIds()); n > 0 {
		add(Warning, "tpm2.bareMachineIds", "%d machines without an EK certificate: only this list, and no authority, shows that their TPMs are genuine; use only IDs that you have read on the machines themselves", n)
	}
	if len(m.GetTpm2().GetNitroRoots()) > 0 && len(m.GetTpm2().GetBareMachineIds()) > 0 {
		add(Warning, "tpm2.bareMachineIds", "an instance of AWS that is listed here and in machineIds of tpm2.nitroRoots is two machines, and a ban of one leaves the other (A8): list each in one place")
	}
	for i, r := range m.GetTpm2().GetPlatformRoots() {
		if len(r.GetMachineIds()) == 0 && len(r.GetProjects()) > 0 {
			add(Warning, fmt.Sprintf("tpm2.platformRoots[%d].machineIds", i), "empty: whoever may create a virtual machine in the projects can let it join as a worker, if it boots an accepted image")
		}
	}
	if len(m.GetTpm2().GetNitroRoots()) > 0 && m.GetTpm2().GetBank() != "sha384" {
		add(Warning, "tpm2.nitroRoots", "AWS's documents have PCRs of the bank sha384 alone, and tpm2.bank is %s: no machine is accepted by one", m.GetTpm2().GetBank())
	}
	if len(m.GetTpm2().GetMachineIds()) == 0 && len(m.GetTpm2().GetEkRoots()) > 0 {
		add(Warning, "tpm2.machineIds", "empty: every machine that a root certifies and that booted an accepted image may join as a worker")
	}
	for i, r := range m.GetTpm2().GetEkRoots() {
		if r.GetMinFirmwareVersion() == "" && !r.GetOperator() {
			add(Warning, fmt.Sprintf("tpm2.ekRoots[%d].minFirmwareVersion", i), "not set: TPMs of this vendor with firmware that has known weaknesses are accepted; muster verify shows a machine's version, the vendor's advisories name the repaired ones")
		}
	}
	own := operatorRoots(m)
	for _, a := range p.Authorities() {
		if slices.Contains(own, a.Field) && ofTPMVendor(a.Certificate) {
			add(Warning, a.Field+".operator", "the subject or issuer of %q is a TPM vendor: this root certifies the TPMs of all its customers. Unless it is your own, set operator: false, and list machines instead in tpm2.machineIds (--machine-id)", a.Certificate.Subject)
		}
	}
	checkHardware(m.GetHardware(), p.CollateralEnds(), now, func(field, format string, args ...any) { add(Warning, field, format, args...) })
	found = append(found, checkRoots(p.Authorities(), now)...)
	return p, found, nil
}

// valuesOf returns what an image or class accepts, for comparisons.
func valuesOf(pcrs []*attestv1.PcrValue, log *attestv1.EventLogRules) string {
	var all []string
	for _, v := range pcrs {
		all = append(all, fmt.Sprintf("%d %s", v.GetIndex(), v.GetValue()))
	}
	slices.Sort(all)
	return fmt.Sprint(all, log)
}

// checkClass reports what rules over the event log do not restrict.
func checkClass(c *attestv1.MachineClass, add func(format string, args ...any)) {
	if c.GetEventLog() == nil {
		return
	}
	has := func(pcr uint32) bool {
		return slices.ContainsFunc(c.GetPcrs(), func(v *attestv1.PcrValue) bool { return v.GetIndex() == pcr })
	}
	if !has(0) {
		add("%s: PCR 0 is not listed, so firmware of any maker and version is accepted, if it measures what it should; whoever can change a machine's firmware can change what it boots", c.GetName())
	}
	if c.GetEventLog().GetSecureBoot() == nil && !has(7) {
		add("%s: Secure Boot may be off, and have any keys", c.GetName())
	}
}

var switches = map[string]string{
	"anyMachine":        "any machine that an authority of the policy certifies is accepted, an attacker's too: that of any buyer of a TPM, or of any customer of a cloud",
	"allowSelfAsserted": "evidence that only the peer itself asserts would be accepted",
	"anyFirmware":       "machines may have any firmware, and any driver that it loads; these run before what the image measures, and can change it unseen",
	"allowPlainState":   "machines may keep their state, and the cluster's secrets in it, on a disk that is not encrypted",
}

func wide(c netip.Prefix) int {
	if c.Addr().Is4() {
		return 8
	}
	return 32
}

func checkRoots(all []attest.Authority, now time.Time) []Finding {
	var found []Finding
	for _, a := range all {
		field, c := a.Field, a.Certificate
		switch {
		case now.After(c.NotAfter):
			found = append(found, Finding{Warning, field, fmt.Sprintf("%q expired on %s: no machine below it is accepted", c.Subject, c.NotAfter.UTC().Format(time.DateOnly))})
		case now.Before(c.NotBefore):
			found = append(found, Finding{Warning, field, fmt.Sprintf("%q is valid from %s only", c.Subject, c.NotBefore.UTC().Format(time.DateOnly))})
		case now.Add(soon).After(c.NotAfter):
			found = append(found, Finding{Warning, field, fmt.Sprintf("%q expires on %s: replace it before", c.Subject, c.NotAfter.UTC().Format(time.DateOnly))})
		}
	}
	return found
}
