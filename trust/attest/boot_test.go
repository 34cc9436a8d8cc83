package attest

import (
	"context"
	"crypto"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/checked"
)

// Invariant A9.
func TestEveryPCRIsNeeded(t *testing.T) {
	_, pemRoot := ca(t, "operator")
	without := func(list []*attestv1.PcrValue, i int) []*attestv1.PcrValue {
		return slices.DeleteFunc(list, func(v *attestv1.PcrValue) bool { return v.GetIndex() == uint32(i) })
	}
	for _, i := range append(slices.Clone(everyBootPCR), everyFirmwarePCR...) {
		p := goodPolicy(pemRoot)
		p.Tpm2.Images[0].Pcrs = without(p.GetTpm2().GetImages()[0].GetPcrs(), i)
		p.Tpm2.Classes[0].Pcrs = without(p.GetTpm2().GetClasses()[0].GetPcrs(), i)
		if _, err := ParsePolicy(encode(t, p)); ReasonOf(err) != attestv1.Reason_REASON_POLICY_INVALID {
			t.Errorf("a policy without PCR %d was accepted: %v", i, err)
		}
	}
}

// Each event in front of the driver has the longest text.
func TestLongEventsHideNoDriver(t *testing.T) {
	root, pemRoot := ca(t, "operator")
	p, err := ParsePolicy(encode(t, goodPolicy(pemRoot)))
	if err != nil {
		t.Fatal(err)
	}
	f := facts(root)
	f.PCRs[2] = value('x')
	for _, path := range []string{strings.Repeat("A", 256), strings.Repeat("é", 256), strings.Repeat(`\`, 245) + "driver.efi"} {
		f.Events = append(f.Events, Event{PCR: 2, Type: "EV_EFI_BOOT_SERVICES_DRIVER", Text: path})
	}
	_, err = p.Appraise(claimsOf(f), Unlocked())
	const most = 848 // of a record of the audit log
	if at := strings.Index(fmt.Sprint(err), `driver.efi"`); ReasonOf(err) != attestv1.Reason_REASON_POLICY_REFUSED || at < 0 || at > most {
		t.Errorf("the driver is at %d: %v", at, err)
	}
	f.Events = append(f.Events, slices.Repeat(f.Events[:1], 1024)...)
	if _, err = p.Appraise(claimsOf(f), Unlocked()); len(fmt.Sprint(err)) > 2048 || !strings.Contains(fmt.Sprint(err), "and 1011 more") {
		t.Errorf("%d bytes: %v", len(fmt.Sprint(err)), err)
	}
}

// longLog returns a policy that lists another machine, and an unlisted one whose event log has 1,020 drivers and configurations that no
// class accepts.
func longLog(t testing.TB, images, classes int) (*Policy, *checked.Facts) {
	t.Helper()
	root, pemRoot := ca(t, "operator")
	m := goodPolicy(pemRoot)
	m.Tpm2.MachineIds = []string{strings.Repeat("00", 32)}
	image := m.GetTpm2().GetImages()[0]
	m.Tpm2.Images, m.Tpm2.Classes = nil, nil
	for i := range images {
		next := proto.CloneOf(image)
		next.Name = fmt.Sprintf("image-%d", i)
		m.Tpm2.Images = append(m.Tpm2.Images, next)
	}
	for i := range classes {
		m.Tpm2.Classes = append(m.Tpm2.Classes, &attestv1.MachineClass{Name: fmt.Sprintf("class-%d", i), EventLog: &attestv1.EventLogRules{}})
	}
	p, err := ParsePolicy(encode(t, m))
	if err != nil {
		t.Fatal(err)
	}
	f := facts(root)
	f.Firmware = &checked.Firmware{SecureBoot: true, DriverConfig: slices.Repeat([]Event{{PCR: 3, Type: "EV_EFI_VARIABLE_DRIVER_CONFIG", Digest: value('c')}}, 20)}
	for i := range 1000 {
		f.Firmware.Drivers = append(f.Firmware.Drivers, Event{PCR: 2, Type: "EV_EFI_BOOT_SERVICES_DRIVER", Text: "driver.efi", Digest: slices.Concat(value('d')[:30], []byte{byte(i >> 8), byte(i)})})
	}
	f.Events = slices.Concat(f.Firmware.Drivers, f.Firmware.DriverConfig)
	return p, f
}

// A peer of which nothing but its own evidence is known must not make a refusal expensive: each image and class differs from
// the machine in a long event log, and only the closest one is described.
func TestARefusalCostsNoMoreForALongLog(t *testing.T) {
	p, f := longLog(t, MaxImages, MaxClasses)
	for _, image := range []string{"as listed", "other"} {
		if image == "other" {
			for _, i := range everyBootPCR {
				f.PCRs[i] = value('x')
			}
		}
		c := claimsOf(f)
		var err error
		if n := testing.AllocsPerRun(1, func() {
			p.Compare(c)
			var list string
			if list, err = p.AppraiseAsListed(c, Unlocked()); list != "tpm2.machineIds" {
				t.Errorf("list %q", list)
			}
		}); n > 20000 {
			t.Errorf("image %s: %.0f allocations", image, n)
		}
		bad := MismatchesOf(err)
		if image == "as listed" && (len(bad) > 40 || !strings.Contains(err.Error(), "PCR 2: 984 more events") || !strings.Contains(err.Error(), "PCR 3: 4 more events")) {
			t.Errorf("%d mismatches: %v", len(bad), err)
		}
		if len(bad) == 0 {
			t.Errorf("image %s: accepted: %v", image, err)
		}
	}
}

// BenchmarkUnlistedMachine measures what a joinservice adds for a peer with genuine evidence that the policy does not list: the refusal, and how
// it differs from the policy.
func BenchmarkUnlistedMachine(b *testing.B) {
	for _, n := range []int{3, MaxClasses} {
		b.Run(fmt.Sprintf("%d images and classes", n), func(b *testing.B) {
			p, f := longLog(b, n, n)
			c := claimsOf(f)
			for b.Loop() {
				_, err := p.Appraise(c, Unlocked())
				p.Compare(c)
				if list, as := p.AppraiseAsListed(c, Unlocked()); err == nil || as == nil || list == "" {
					b.Fatal(err, as, list)
				}
			}
		})
	}
}

// Invariant A9.
func TestEventLogRules(t *testing.T) {
	root, pemRoot := ca(t, "operator")
	driver := func(b byte) Event {
		return Event{PCR: 2, Type: "EV_EFI_BOOT_SERVICES_DRIVER", Text: "driver.efi", Digest: value(b)}
	}
	pk, kek, db, other := value(1), value(2), value(3), value(4)
	for name, tt := range map[string]struct {
		rules    func(*attestv1.EventLogRules)
		firmware func(*checked.Firmware)
		facts    func(*checked.Facts)
		want     string // part of the error; empty: accepted
	}{
		"firmware without drivers is accepted": {},
		"a driver is refused":                  {firmware: func(f *checked.Firmware) { f.Drivers = []Event{driver('d')} }, want: `PCR 2: EV_EFI_BOOT_SERVICES_DRIVER "driver.efi"`},
		"a listed driver is accepted": {
			rules:    func(r *attestv1.EventLogRules) { r.Drivers = []string{hex.EncodeToString(value('d'))} },
			firmware: func(f *checked.Firmware) { f.Drivers = []Event{driver('d'), driver('d')} },
		},
		"a driver beside a listed one is refused": {
			rules:    func(r *attestv1.EventLogRules) { r.Drivers = []string{hex.EncodeToString(value('d'))} },
			firmware: func(f *checked.Firmware) { f.Drivers = []Event{driver('d'), driver('e')} }, want: "PCR 2",
		},
		"a driver's configuration is refused": {
			firmware: func(f *checked.Firmware) {
				f.DriverConfig = []Event{{PCR: 3, Type: "EV_EFI_VARIABLE_DRIVER_CONFIG", Digest: value('d')}}
			}, want: "PCR 3",
		},
		"Secure Boot that is off is refused": {firmware: func(f *checked.Firmware) { f.SecureBoot = false }, want: "PCR 7: Secure Boot is off"},
		"Secure Boot that is off is accepted if no rule requires it": {
			rules:    func(r *attestv1.EventLogRules) { r.SecureBoot = nil },
			firmware: func(f *checked.Firmware) { f.SecureBoot, f.Keys["PK"] = false, other },
		},
		"another platform key is refused":     {firmware: func(f *checked.Firmware) { f.Keys["PK"] = other }, want: "the digest of PK"},
		"another KEK is refused":              {firmware: func(f *checked.Firmware) { f.Keys["KEK"] = other }, want: "the digest of KEK"},
		"another db is refused":               {firmware: func(f *checked.Firmware) { f.Keys["db"] = other }, want: "the digest of db"},
		"a key that is missing is refused":    {firmware: func(f *checked.Firmware) { delete(f.Keys, "db") }, want: "the digest of db"},
		"another dbx is accepted":             {firmware: func(f *checked.Firmware) { f.Keys["dbx"] = other }},
		"a machine without a log is refused":  {facts: func(f *checked.Facts) { f.Firmware = nil }, want: "no event log"},
		"an unusable log is refused":          {facts: func(f *checked.Facts) { f.Firmware, f.FirmwareErr = nil, errors.New("PCR 2 has no separator") }, want: "PCR 2 has no separator"},
		"other firmware is accepted":          {facts: func(f *checked.Facts) { f.PCRs[0] = value('x') }},
		"an image that is not the one is not": {facts: func(f *checked.Facts) { f.PCRs[4] = value('x') }, want: "PCR 4"},
	} {
		t.Run(name, func(t *testing.T) {
			p, f := goodPolicy(pemRoot), facts(root)
			rules := &attestv1.EventLogRules{SecureBoot: &attestv1.SecureBootRule{Pk: hex.EncodeToString(pk), Kek: hex.EncodeToString(kek), Db: hex.EncodeToString(db)}}
			f.Firmware = &checked.Firmware{SecureBoot: true, Keys: map[string][]byte{"PK": pk, "KEK": kek, "db": db, "dbx": value(9)}}
			if tt.rules != nil {
				tt.rules(rules)
			}
			if tt.firmware != nil {
				tt.firmware(f.Firmware)
			}
			if tt.facts != nil {
				tt.facts(f)
			}
			p.Tpm2.Classes = []*attestv1.MachineClass{{Name: "rules", EventLog: rules}}
			policy, err := ParsePolicy(encode(t, p))
			if err != nil {
				t.Fatal(err)
			}
			_, err = policy.Appraise(claimsOf(f), Unlocked())
			switch {
			case tt.want == "" && err != nil:
				t.Error(err)
			case tt.want == "":
			case ReasonOf(err) != attestv1.Reason_REASON_POLICY_REFUSED || !strings.Contains(err.Error(), tt.want):
				t.Errorf("%v, want POLICY_REFUSED with %q", err, tt.want)
			}
		})
	}
}

// A machine whose Secure Boot was switched off, and its keys deleted, differs from its own class in
// PCR 7 alone, although several rules fail for it. From another machine's class, whose Secure Boot
// is off as well, it differs in PCR 0.
func TestTheClassThatIsNamedDiffersInTheFewestPCRs(t *testing.T) {
	root, pemRoot := ca(t, "operator")
	p, f := goodPolicy(pemRoot), facts(root)
	key := hex.EncodeToString(value(1))
	p.Tpm2.Classes = append(p.Tpm2.Classes, &attestv1.MachineClass{Name: "secure", EventLog: &attestv1.EventLogRules{SecureBoot: &attestv1.SecureBootRule{Pk: key, Kek: key, Db: key}}})
	policy, err := ParsePolicy(encode(t, p))
	if err != nil {
		t.Fatal(err)
	}
	f.PCRs[0], f.Firmware = value('x'), &checked.Firmware{Keys: map[string][]byte{"PK": value(2), "KEK": value(2), "db": value(2)}}
	if _, err = policy.Appraise(claimsOf(f), Unlocked()); err == nil || !strings.Contains(err.Error(), "class secure") || !strings.Contains(err.Error(), "Secure Boot is off") {
		t.Error(err)
	}
}

func TestSameBootAcceptsOnlyTheSameBoot(t *testing.T) {
	root, _ := ca(t, "image")
	foreign, _ := ca(t, "other")
	own := map[int][]byte{}
	for _, i := range everyBootPCR {
		own[i] = facts(root).PCRs[i]
	}
	s, err := NewSameBoot(crypto.SHA256, own, []*x509.Certificate{root})
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	if _, err := s.For(AnyLock()).Appraise(ctx, claimsOf(facts(root))); err != nil {
		t.Error(err)
	}
	f := facts(root)
	f.PCRs[11] = value('b')
	if _, err := s.For(AnyLock()).Appraise(ctx, claimsOf(f)); ReasonOf(err) != attestv1.Reason_REASON_POLICY_REFUSED {
		t.Errorf("another image: %v", err)
	}
	if _, err := s.For(AnyLock()).Appraise(ctx, claimsOf(facts(foreign))); ReasonOf(err) != attestv1.Reason_REASON_EK_UNTRUSTED {
		t.Errorf("another root: %v", err)
	}
	for _, i := range everyBootPCR {
		f := facts(root)
		f.PCRs[i] = value('b')
		if _, err := s.For(AnyLock()).Appraise(ctx, claimsOf(f)); ReasonOf(err) != attestv1.Reason_REASON_POLICY_REFUSED {
			t.Errorf("another PCR %d: %v", i, err)
		}
		kept := own[i]
		for name, wrong := range map[string][]byte{"a missing": nil, "a short": kept[1:], "a long": append(kept[:32:32], 0)} {
			own[i] = wrong
			if _, err := NewSameBoot(crypto.SHA256, own, []*x509.Certificate{root}); ReasonOf(err) != attestv1.Reason_REASON_MACHINE_CONFIG {
				t.Errorf("%s PCR %d was taken for agreement: %v", name, i, err)
			}
		}
		own[i] = kept
	}
	if _, err := s.For().Appraise(ctx, claimsOf(facts(root))); ReasonOf(err) != attestv1.Reason_REASON_LOCK_FOREIGN {
		t.Errorf("no expected lock: %v", err)
	}
	if _, err := NewSameBoot(crypto.SHA256, own, nil); err == nil {
		t.Error("no roots were taken for any root")
	}
}

// another returns a copy of class c with another value of PCR 0.
func another(c *attestv1.MachineClass) *attestv1.MachineClass {
	out := &attestv1.MachineClass{Name: "class-b"}
	for _, v := range c.GetPcrs() {
		out.Pcrs = append(out.Pcrs, &attestv1.PcrValue{Index: v.GetIndex(), Value: v.GetValue()})
	}
	out.Pcrs[0].Value = hex.EncodeToString(value('b'))
	return out
}

// What the cluster has stored of a machine shows what the policy certainly refuses.
func TestAPolicyMayMatchStoredValues(t *testing.T) {
	_, pemRoot := ca(t, "operator")
	m, other := MachineID{1}, MachineID{2}
	const accepted, refused = attestv1.Reason_REASON_ACCEPTED, attestv1.Reason_REASON_POLICY_REFUSED
	for name, tt := range map[string]struct {
		change func(*attestv1.Policy)
		pcr    int // that has another value
		want   attestv1.Reason
	}{
		"as booted":        {pcr: -1, want: accepted},
		"another image":    {pcr: 4, want: refused},
		"other firmware":   {pcr: 7, want: refused},
		"a PCR of no rule": {pcr: 10, want: accepted},
		"any firmware": {func(p *attestv1.Policy) {
			p.Tpm2.Classes, p.Insecure = nil, &attestv1.InsecureSwitches{AnyFirmware: true}
		}, 7, accepted},
		"a second image": {func(p *attestv1.Policy) {
			second := proto.CloneOf(p.GetTpm2().GetImages()[0])
			second.Name, second.Pcrs[0].Value = "image-b", hex.EncodeToString(value('x'))
			p.Tpm2.Images = append(p.Tpm2.Images, second)
		}, 4, accepted},
		"not listed":                    {func(p *attestv1.Policy) { p.Tpm2.MachineIds = []string{other.String()} }, -1, refused},
		"listed":                        {func(p *attestv1.Policy) { p.Tpm2.MachineIds = []string{m.String()} }, -1, accepted},
		"revoked":                       {func(p *attestv1.Policy) { p.Tpm2.Revoked = &attestv1.Revoked{Keys: []string{m.String()}} }, -1, attestv1.Reason_REASON_EK_UNTRUSTED},
		"rules over the event log, too": {func(p *attestv1.Policy) { p.Tpm2.Classes[0].EventLog = &attestv1.EventLogRules{} }, -1, accepted},
	} {
		t.Run(name, func(t *testing.T) {
			p := goodPolicy(pemRoot)
			if tt.change != nil {
				tt.change(p)
			}
			parsed, err := ParsePolicy(encode(t, p))
			if err != nil {
				t.Fatal(err)
			}
			values := map[int][]byte{0: value('f'), 2: value('f'), 3: value('f'), 7: value('f'), 4: value('a'), 9: value('a'), 11: value('a')}
			for _, i := range []int{8, 12, 13, 14} {
				values[i] = make([]byte, 32)
			}
			if tt.pcr >= 0 {
				values[tt.pcr] = value('x')
			}
			if err := parsed.MayMatch(m, values); ReasonOf(err) != tt.want {
				t.Errorf("%v, want %s", err, ReasonName(tt.want))
			}
		})
	}
	p, err := ParsePolicy(encode(t, goodPolicy(pemRoot)))
	if err != nil {
		t.Fatal(err)
	}
	values := map[int][]byte{4: value('a'), 9: value('a'), 11: value('a'), 0: value('f'), 2: value('f'), 3: value('f'), 7: value('x')}
	for _, i := range []int{8, 12, 13, 14} {
		values[i] = make([]byte, 32)
	}
	if image, class := p.Names(values); image != "image-a" || class != "" {
		t.Errorf("image %q, class %q", image, class)
	}
	if err := p.MayMatch(m, nil); ReasonOf(err) != refused { // A3
		t.Errorf("without values: %v", err)
	}
}
