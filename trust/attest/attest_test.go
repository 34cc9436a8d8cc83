package attest

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/encoding/protojson"
	"pgregory.net/rapid"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/checked"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestStatementIsTheDocumentedFormula(t *testing.T) {
	var b Binding
	for i := range b {
		b[i] = byte(i)
	}
	want := sha256.Sum256(append([]byte("muster-atls/1 statement\x00\x07machine"), b[:]...))
	if got := NewStatement(PurposeMachine, b); got != Statement(want) {
		t.Errorf("statement %x, want %x", got, want)
	}
	if NewStatement(PurposeMachine, b) == NewStatement(PurposePublic, b) {
		t.Error("two purposes share a statement (A5)")
	}
}

// ca makes a certificate authority for endorsement keys.
func ca(t testing.TB, name string) (*x509.Certificate, string) {
	t.Helper()
	return certificate(t, name, true)
}

// noAuthority makes a self-signed certificate that may not issue others.
func noAuthority(t testing.TB) string {
	t.Helper()
	_, text := certificate(t, "server", false)
	return text
}

func certificate(t testing.TB, name string, isCA bool) (*x509.Certificate, string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: isCA, BasicConstraintsValid: true,
		NotBefore: time.Unix(0, 0), NotAfter: time.Unix(1<<32, 0), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, k.Public(), k)
	if err != nil {
		t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return c, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

func value(b byte) []byte { return []byte(strings.Repeat(string(rune(b)), 32)) }

// facts are those of a machine that booted an image that goodPolicy accepts.
func facts(root *x509.Certificate) *checked.Facts {
	f := &checked.Facts{Format: attestv1.Format_FORMAT_TPM2, Bank: crypto.SHA256, AKKind: "ecc-p256"}
	f.Endorsement = checked.Endorsement{EndorsedBy: "ek-certificate", Machine: MachineIDOf([]byte("ek")), KeyKind: "ecc-p256", Root: root}
	for i := range f.PCRs {
		f.PCRs[i] = make([]byte, 32)
	}
	for _, i := range []int{4, 9, 11} {
		f.PCRs[i] = value('a')
	}
	for _, i := range []int{0, 2, 3, 7} {
		f.PCRs[i] = value('f')
	}
	f.Chain = []checked.Certificate{{Subject: "CN=machine", Key: MachineIDOf([]byte("ek")), Serial: "1f"}, {Subject: "CN=issuer", Key: [32]byte{2}, Serial: "2f"}, {Subject: "CN=root", Key: [32]byte{3}, Serial: "3f"}}
	f.FirmwareVersion = 0x0007_0055_0011_0500
	return f
}

func goodPolicy(rootPEM string) *attestv1.Policy {
	zero, a := hex.EncodeToString(make([]byte, 32)), hex.EncodeToString(value('a'))
	t := &attestv1.Tpm2Policy{Bank: "sha256", EkRoots: []*attestv1.EkRoot{{Pem: rootPEM, Operator: true, Key: "ecc-p256"}}}
	image := &attestv1.Image{Name: "image-a"}
	for _, i := range []uint32{4, 9, 11} {
		image.Pcrs = append(image.Pcrs, &attestv1.PcrValue{Index: i, Value: a})
	}
	for _, i := range []uint32{8, 12, 13, 14} {
		image.Pcrs = append(image.Pcrs, &attestv1.PcrValue{Index: i, Value: zero})
	}
	class := &attestv1.MachineClass{Name: "class-a"}
	for _, i := range []uint32{0, 2, 3, 7} {
		class.Pcrs = append(class.Pcrs, &attestv1.PcrValue{Index: i, Value: hex.EncodeToString(value('f'))})
	}
	t.Images, t.Classes = []*attestv1.Image{image}, []*attestv1.MachineClass{class}
	return &attestv1.Policy{Version: 2, Serial: 7, Tpm2: t, Roles: []string{"worker"}, NodeCidrs: []string{"192.168.77.0/24", "fd00::/64"}}
}

func encode(t testing.TB, p *attestv1.Policy) []byte {
	t.Helper()
	b, err := protojson.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Invariant A6.
func TestParsePolicy(t *testing.T) {
	_, pemRoot := ca(t, "operator")
	_, vendorRoot := ca(t, "vendor")
	for name, tt := range map[string]struct {
		change func(*attestv1.Policy)
		want   string // part of the error; empty: accepted
	}{
		"a complete policy is read":              {change: func(*attestv1.Policy) {}},
		"a policy without TPM rules is read":     {change: func(p *attestv1.Policy) { p.Tpm2 = nil }},
		"another version is refused":             {func(p *attestv1.Policy) { p.Version = 1 }, "version is 1"},
		"no version is refused":                  {func(p *attestv1.Policy) { p.Version = 0 }, "version is 0"},
		"no serial is refused":                   {func(p *attestv1.Policy) { p.Serial = 0 }, "serial is missing"},
		"an unknown role is refused":             {func(p *attestv1.Policy) { p.Roles = []string{"master"} }, `role "master"`},
		"a CIDR with host bits is refused":       {func(p *attestv1.Policy) { p.NodeCidrs = []string{"10.0.0.1/8"} }, "nodeCidrs"},
		"a CIDR that is none is refused":         {func(p *attestv1.Policy) { p.NodeCidrs = []string{"everywhere"} }, "nodeCidrs"},
		"an unknown bank is refused":             {func(p *attestv1.Policy) { p.Tpm2.Bank = "sha1" }, "tpm2.bank"},
		"no root is refused":                     {func(p *attestv1.Policy) { p.Tpm2.EkRoots = nil }, "ekRoots is empty"},
		"a root that is no PEM is refused":       {func(p *attestv1.Policy) { p.Tpm2.EkRoots[0].Pem = "x" }, "exactly one PEM"},
		"two certificates in a root are refused": {func(p *attestv1.Policy) { p.Tpm2.EkRoots[0].Pem += pemRoot }, "exactly one PEM"},
		"a vendor's root alone is refused":       {func(p *attestv1.Policy) { p.Tpm2.EkRoots[0].Operator = false }, "insecure.anyMachine"},
		"a vendor's root behind the operator's is refused": {func(p *attestv1.Policy) {
			p.Tpm2.EkRoots = append(p.Tpm2.EkRoots, &attestv1.EkRoot{Pem: vendorRoot, Key: "ecc-p256"})
		}, "insecure.anyMachine"},
		"a vendor's root before the operator's is refused": {func(p *attestv1.Policy) {
			p.Tpm2.EkRoots = append([]*attestv1.EkRoot{{Pem: vendorRoot, Key: "ecc-p256"}}, p.Tpm2.EkRoots...)
		}, "insecure.anyMachine"},
		"a root without a kind of key is refused":   {func(p *attestv1.Policy) { p.Tpm2.EkRoots[0].Key = "" }, "ekRoots[0].key"},
		"a root with an unknown kind is refused":    {func(p *attestv1.Policy) { p.Tpm2.EkRoots[0].Key = "ecc-p521" }, "ekRoots[0].key"},
		"a root for any kind is refused":            {func(p *attestv1.Policy) { p.Tpm2.EkRoots[0].Key = "any" }, "ekRoots[0].key"},
		"a kind in capitals is refused":             {func(p *attestv1.Policy) { p.Tpm2.EkRoots[0].Key = "RSA-2048" }, "ekRoots[0].key"},
		"a root twice, with the same kind, is read": {change: func(p *attestv1.Policy) { p.Tpm2.EkRoots = append(p.Tpm2.EkRoots, p.Tpm2.EkRoots[0]) }},
		"roots for different kinds are read": {change: func(p *attestv1.Policy) {
			p.Tpm2.EkRoots = append(p.Tpm2.EkRoots, &attestv1.EkRoot{Pem: vendorRoot, Operator: true, Key: "rsa-2048"})
		}},
		"a root twice, with another kind, is refused": {func(p *attestv1.Policy) {
			p.Tpm2.EkRoots = append(p.Tpm2.EkRoots, &attestv1.EkRoot{Pem: pemRoot, Operator: true, Key: "rsa-2048"})
		}, "has the public key of tpm2.ekRoots[0]"},
		"a root that is no authority is refused": {func(p *attestv1.Policy) { p.Tpm2.EkRoots[0].Pem = noAuthority(t) }, "not a certificate authority"},
		"a second root that is no authority is refused": {func(p *attestv1.Policy) {
			p.Tpm2.EkRoots = append(p.Tpm2.EkRoots, &attestv1.EkRoot{Pem: noAuthority(t), Operator: true, Key: "ecc-p256"})
		}, "not a certificate authority"},
		"a vendor's root with anyMachine is read": {change: func(p *attestv1.Policy) {
			p.Tpm2.EkRoots[0].Operator = false
			p.Insecure = &attestv1.InsecureSwitches{AnyMachine: true}
		}},
		"a vendor's root with named machines is read": {change: func(p *attestv1.Policy) {
			p.Tpm2.EkRoots[0].Operator = false
			p.Tpm2.MachineIds = []string{MachineIDOf([]byte("ek")).String()}
		}},
		"a machine ID twice is refused": {func(p *attestv1.Policy) {
			p.Tpm2.MachineIds = slices.Repeat([]string{MachineIDOf([]byte("ek")).String()}, 2)
		}, "tpm2.machineIds lists"},
		"a machine without a certificate twice is refused": {func(p *attestv1.Policy) {
			p.Tpm2.BareMachineIds = slices.Repeat([]string{MachineIDOf([]byte("ek")).String()}, 2)
		}, "tpm2.bareMachineIds lists"},
		"a machine of a cloud twice is refused": {func(p *attestv1.Policy) {
			p.Tpm2.PlatformRoots = []*attestv1.PlatformRoot{{Pem: vendorRoot, Provider: "gcp", Key: "ecc-p256", MachineIds: slices.Repeat([]string{MachineIDOf([]byte("ek")).String()}, 2)}}
		}, "tpm2.platformRoots[0].machineIds lists"},
		"a machine of AWS twice is refused": {func(p *attestv1.Policy) {
			p.Tpm2.NitroRoots = []*attestv1.NitroRoot{{Pem: vendorRoot, MachineIds: slices.Repeat([]string{MachineIDOf([]byte("ek")).String()}, 2)}}
		}, "tpm2.nitroRoots[0].machineIds lists"},
		"a machine ID in capitals is refused":              {func(p *attestv1.Policy) { p.Tpm2.MachineIds = []string{strings.Repeat("AB", 32)} }, "machineIds"},
		"no image is refused":                              {func(p *attestv1.Policy) { p.Tpm2.Images = nil }, "want 1 to 64"},
		"more images than allowed are refused":             {func(p *attestv1.Policy) { p.Tpm2.Images = slices.Repeat(p.Tpm2.Images, MaxImages+1) }, "want 1 to 64"},
		"an image without a name is refused":               {func(p *attestv1.Policy) { p.Tpm2.Images[0].Name = "" }, "tpm2.images[0].name"},
		"a name that a log line could not have is refused": {func(p *attestv1.Policy) { p.Tpm2.Images[0].Name = "a\nb" }, "tpm2.images[0].name"},
		"two images of one name are refused":               {func(p *attestv1.Policy) { p.Tpm2.Images = slices.Repeat(p.Tpm2.Images, 2) }, "stands twice"},
		"an image that lacks a PCR is refused":             {func(p *attestv1.Policy) { p.Tpm2.Images[0].Pcrs = p.Tpm2.Images[0].Pcrs[1:] }, "want [4 8 9 11 12 13 14]"},
		"an image that lists the firmware is refused": {func(p *attestv1.Policy) {
			p.Tpm2.Images[0].Pcrs = append(p.Tpm2.Images[0].Pcrs, p.Tpm2.Classes[0].Pcrs[0])
		}, "want [4 8 9 11 12 13 14]"},
		"two values of a PCR are refused": {func(p *attestv1.Policy) {
			p.Tpm2.Images[0].Pcrs = append(p.Tpm2.Images[0].Pcrs, p.Tpm2.Images[0].Pcrs[0])
		}, "PCR 4 twice"},
		"a value for the lock's PCR is refused":     {func(p *attestv1.Policy) { p.Tpm2.Images[0].Pcrs[0].Index = 15 }, "PCR 15 cannot"},
		"a value of another bank's size is refused": {func(p *attestv1.Policy) { p.Tpm2.Images[0].Pcrs[0].Value += "00" }, "64 lower-case"},
		"no class is refused":                       {func(p *attestv1.Policy) { p.Tpm2.Classes = nil }, "insecure.anyFirmware"},
		"no class with anyFirmware is read": {change: func(p *attestv1.Policy) {
			p.Tpm2.Classes, p.Insecure = nil, &attestv1.InsecureSwitches{AnyFirmware: true}
		}},
		"more classes than allowed are refused": {func(p *attestv1.Policy) { p.Tpm2.Classes = slices.Repeat(p.Tpm2.Classes, MaxClasses+1) }, "more than 64"},
		"a class without PCRs is refused":       {func(p *attestv1.Policy) { p.Tpm2.Classes[0].Pcrs = nil }, "lacks PCR 0"},
		"a class that lacks the drivers is refused": {func(p *attestv1.Policy) {
			p.Tpm2.Classes[0].Pcrs = slices.Delete(p.Tpm2.Classes[0].Pcrs, 1, 2)
		}, "lacks PCR 2"},
		"a class that lists a PCR of the image is refused": {func(p *attestv1.Policy) {
			p.Tpm2.Classes[0].Pcrs = append(p.Tpm2.Classes[0].Pcrs, p.Tpm2.Images[0].Pcrs[0])
		}, "lists PCR 4"},
		"a class with rules alone is read": {change: func(p *attestv1.Policy) {
			p.Tpm2.Classes[0].Pcrs, p.Tpm2.Classes[0].EventLog = nil, &attestv1.EventLogRules{}
		}},
		"a class with both is read": {change: func(p *attestv1.Policy) { p.Tpm2.Classes[0].EventLog = &attestv1.EventLogRules{} }},
		"a driver that is no digest is refused": {func(p *attestv1.Policy) {
			p.Tpm2.Classes[0].EventLog = &attestv1.EventLogRules{Drivers: []string{"driver.efi"}}
		}, "eventLog.drivers[0]"},
		"Secure Boot without keys is refused": {func(p *attestv1.Policy) {
			p.Tpm2.Classes[0].EventLog = &attestv1.EventLogRules{SecureBoot: &attestv1.SecureBootRule{}}
		}, "eventLog.secureBoot"},
	} {
		t.Run(name, func(t *testing.T) {
			p := goodPolicy(pemRoot)
			tt.change(p)
			_, err := ParsePolicy(encode(t, p))
			switch {
			case tt.want == "" && err != nil:
				t.Fatal(err)
			case tt.want == "":
			case err == nil || !strings.Contains(err.Error(), tt.want):
				t.Errorf("error %v, want one with %q", err, tt.want)
			case ReasonOf(err) != attestv1.Reason_REASON_POLICY_INVALID:
				t.Errorf("reason %s", ReasonOf(err))
			}
		})
	}
	for name, json := range map[string]string{
		"an empty object":   `{}`,
		"an empty file":     ``,
		"an unknown field":  `{"version":2,"serial":"1","acceptEverything":true}`,
		"a repeated field":  `{"version":2,"version":2,"serial":"1"}`,
		"more than 256 KiB": `{"version":2,"serial":"1"}` + strings.Repeat(" ", MaxPolicySize),
	} {
		t.Run(name+" is refused", func(t *testing.T) {
			if _, err := ParsePolicy([]byte(json)); ReasonOf(err) != attestv1.Reason_REASON_POLICY_INVALID {
				t.Errorf("error %v", err)
			}
		})
	}
}

func TestAppraise(t *testing.T) {
	root, pemRoot := ca(t, "operator")
	foreign, _ := ca(t, "another authority")
	_, otherRoot := ca(t, "another operator's")
	cluster := [32]byte{1}
	for name, tt := range map[string]struct {
		policy func(*attestv1.Policy)
		facts  func(*checked.Facts)
		locks  []Lock
		want   attestv1.Reason
		class  string // empty: class-a
	}{
		"a machine that booted the image is accepted": {locks: []Lock{Unlocked()}},
		"a changed boot PCR is refused":               {facts: func(f *checked.Facts) { f.PCRs[4] = value('b') }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_POLICY_REFUSED},
		"something in PCR 12 is refused":              {facts: func(f *checked.Facts) { f.PCRs[12] = value('b') }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_POLICY_REFUSED},
		"another root is refused":                     {facts: func(f *checked.Facts) { f.Root = foreign }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_EK_UNTRUSTED},
		"the same authority with another certificate is accepted": {facts: func(f *checked.Facts) {
			f.Root = &x509.Certificate{Raw: []byte("renewed"), RawSubject: root.RawSubject, RawSubjectPublicKeyInfo: root.RawSubjectPublicKeyInfo}
		}, locks: []Lock{Unlocked()}},
		"the name of the authority with another key is refused": {facts: func(f *checked.Facts) {
			f.Root = &x509.Certificate{RawSubject: root.RawSubject, RawSubjectPublicKeyInfo: foreign.RawSubjectPublicKeyInfo}
		}, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_EK_UNTRUSTED},
		"the key of the authority with another name is refused": {facts: func(f *checked.Facts) {
			f.Root = &x509.Certificate{RawSubject: foreign.RawSubject, RawSubjectPublicKeyInfo: root.RawSubjectPublicKeyInfo}
		}, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_EK_UNTRUSTED},
		"a key of another kind below the root is refused": {facts: func(f *checked.Facts) { f.KeyKind = "rsa-2048" }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_EK_UNTRUSTED},
		"a key of no kind is refused":                     {facts: func(f *checked.Facts) { f.KeyKind = "" }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_EK_UNTRUSTED},
		"a key of the root's kind is accepted": {
			policy: func(p *attestv1.Policy) { p.Tpm2.EkRoots[0].Key = "rsa-2048" },
			facts:  func(f *checked.Facts) { f.KeyKind = "rsa-2048" }, locks: []Lock{Unlocked()},
		},
		"an RSA AK where all roots are for RSA is accepted": {
			policy: func(p *attestv1.Policy) { p.Tpm2.EkRoots[0].Key = "rsa-2048" },
			facts:  func(f *checked.Facts) { f.KeyKind, f.AKKind = "rsa-2048", "rsa-2048" }, locks: []Lock{Unlocked()},
		},
		"an RSA AK of an ECC EK is refused": {facts: func(f *checked.Facts) { f.AKKind = "rsa-2048" }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_EK_UNTRUSTED},
		"an RSA AK where another root is for ECC is refused": {
			policy: func(p *attestv1.Policy) {
				p.Tpm2.EkRoots[0].Key = "rsa-2048"
				p.Tpm2.EkRoots = append(p.Tpm2.EkRoots, &attestv1.EkRoot{Pem: otherRoot, Operator: true, Key: "ecc-p384"})
			},
			facts: func(f *checked.Facts) { f.KeyKind, f.AKKind = "rsa-2048", "rsa-2048" },
			locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_EK_UNTRUSTED,
		},
		"another bank is refused": {facts: func(f *checked.Facts) { f.Bank = crypto.SHA384 }, locks: []Lock{AnyLock()}, want: attestv1.Reason_REASON_POLICY_REFUSED},
		"a machine that is not listed is refused": {
			policy: func(p *attestv1.Policy) { p.Tpm2.MachineIds = []string{strings.Repeat("00", 32)} },
			locks:  []Lock{Unlocked()}, want: attestv1.Reason_REASON_POLICY_REFUSED,
		},
		"a listed machine is accepted": {
			policy: func(p *attestv1.Policy) { p.Tpm2.MachineIds = []string{MachineIDOf([]byte("ek")).String()} },
			locks:  []Lock{Unlocked()},
		},
		"a policy without TPM rules refuses":      {policy: func(p *attestv1.Policy) { p.Tpm2 = nil }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_FORMAT_NONE},
		"no expected lock refuses":                {want: attestv1.Reason_REASON_LOCK_FOREIGN},
		"the zero lock matches nothing":           {locks: []Lock{{}}, want: attestv1.Reason_REASON_LOCK_FOREIGN},
		"a locked machine is no unlocked one":     {facts: func(f *checked.Facts) { f.PCRs[15] = LockValue(crypto.SHA256, cluster) }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_LOCK_FOREIGN},
		"a machine of this cluster is accepted":   {facts: func(f *checked.Facts) { f.PCRs[15] = LockValue(crypto.SHA256, cluster) }, locks: []Lock{Unlocked(), LockedTo(cluster)}},
		"a machine of another cluster is refused": {facts: func(f *checked.Facts) { f.PCRs[15] = LockValue(crypto.SHA256, [32]byte{2}) }, locks: []Lock{Unlocked(), LockedTo(cluster)}, want: attestv1.Reason_REASON_LOCK_FOREIGN},
		"other firmware is refused":               {facts: func(f *checked.Facts) { f.PCRs[0] = value('b') }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_POLICY_REFUSED},
		"a driver is refused":                     {facts: func(f *checked.Facts) { f.PCRs[2] = value('b') }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_POLICY_REFUSED},
		"other keys are refused":                  {facts: func(f *checked.Facts) { f.PCRs[7] = value('b') }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_POLICY_REFUSED},
		"other firmware of a second class is accepted": {
			policy: func(p *attestv1.Policy) {
				p.Tpm2.Classes = append(p.Tpm2.Classes, another(p.GetTpm2().GetClasses()[0]))
			},
			facts: func(f *checked.Facts) { f.PCRs[0] = value('b') }, locks: []Lock{Unlocked()}, class: "class-b",
		},
		"values of two classes don't add up": {
			policy: func(p *attestv1.Policy) {
				c := another(p.GetTpm2().GetClasses()[0])
				c.Pcrs[1].Value = c.GetPcrs()[0].GetValue()
				p.Tpm2.Classes = append(p.Tpm2.Classes, c)
			},
			facts: func(f *checked.Facts) { f.PCRs[2] = value('b') }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_POLICY_REFUSED,
		},
		"values of two images don't add up": {
			policy: func(p *attestv1.Policy) {
				other := &attestv1.Image{Name: "image-b"}
				for _, v := range p.GetTpm2().GetImages()[0].GetPcrs() {
					other.Pcrs = append(other.Pcrs, &attestv1.PcrValue{Index: v.GetIndex(), Value: hex.EncodeToString(value('b'))})
				}
				p.Tpm2.Images = append(p.Tpm2.Images, other)
			},
			facts: func(f *checked.Facts) { f.PCRs[9] = value('b') }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_POLICY_REFUSED,
		},
		"any firmware is accepted if the owner says so": {
			policy: func(p *attestv1.Policy) {
				p.Tpm2.Classes, p.Insecure = nil, &attestv1.InsecureSwitches{AnyFirmware: true}
			},
			facts: func(f *checked.Facts) { f.PCRs[0] = value('b') }, locks: []Lock{Unlocked()}, class: "none",
		},
		"the class is named although any firmware would do": {
			policy: func(p *attestv1.Policy) { p.Insecure = &attestv1.InsecureSwitches{AnyFirmware: true} }, locks: []Lock{Unlocked()},
		},
		"any firmware is not any image": {
			policy: func(p *attestv1.Policy) { p.Insecure = &attestv1.InsecureSwitches{AnyFirmware: true} },
			facts:  func(f *checked.Facts) { f.PCRs[4] = value('b') }, locks: []Lock{Unlocked()}, want: attestv1.Reason_REASON_POLICY_REFUSED,
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, f := goodPolicy(pemRoot), facts(root)
			if tt.policy != nil {
				tt.policy(p)
			}
			if tt.facts != nil {
				tt.facts(f)
			}
			policy, err := ParsePolicy(encode(t, p))
			if err != nil {
				t.Fatal(err)
			}
			got, err := policy.For(tt.locks...).Appraise(context.Background(), claimsOf(f))
			want := tt.want
			if want == 0 {
				want = attestv1.Reason_REASON_ACCEPTED
			}
			if ReasonOf(err) != want {
				t.Fatalf("%v, want %s", err, want)
			}
			class := map[string]string{"": "class-a", "none": ""}[tt.class]
			if tt.class == "class-b" {
				class = tt.class
			}
			if err == nil && (got != Appraisal{PolicySerial: 7, Image: "image-a", Class: class}) {
				t.Errorf("appraisal %+v", got)
			}
		})
	}
	t.Run("no claims are refused", func(t *testing.T) {
		policy, err := ParsePolicy(encode(t, goodPolicy(pemRoot)))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := policy.Appraise(Claims{}, AnyLock()); err == nil {
			t.Error("the zero Claims were accepted")
		}
		if _, err := new(Policy).Appraise(claimsOf(facts(root)), AnyLock()); err == nil {
			t.Error("the zero Policy accepted")
		}
	})
	t.Run("all mismatches are named with both values", func(t *testing.T) {
		policy, err := ParsePolicy(encode(t, goodPolicy(pemRoot)))
		if err != nil {
			t.Fatal(err)
		}
		f := facts(root)
		f.PCRs[4], f.PCRs[9] = value('x'), value('y')
		_, err = policy.Appraise(claimsOf(f), Unlocked())
		m := MismatchesOf(err)
		if len(m) != 2 || m[0].PCR != 4 || m[1].PCR != 9 || string(m[1].Seen) != string(value('y')) || string(m[1].Expected) != string(value('a')) {
			t.Errorf("mismatches %v", m)
		}
	})
}

// everyBootPCR and everyFirmwarePCR are the registers that docs/threat-model.md and the policy's schema list.
// They are repeated here, so that the test fails if the program loses one.
var (
	everyBootPCR     = []int{4, 8, 9, 11, 12, 13, 14}
	everyFirmwarePCR = []int{0, 2, 3, 7}
)

// Invariant A2.
func TestAnyChangedBootPCRIsRefused(t *testing.T) {
	root, pemRoot := ca(t, "operator")
	policy, err := ParsePolicy(encode(t, goodPolicy(pemRoot)))
	if err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		f := facts(root)
		i := rapid.SampledFrom(append(slices.Clone(everyBootPCR), everyFirmwarePCR...)).Draw(t, "pcr")
		bit := rapid.IntRange(0, 255).Draw(t, "bit")
		v := append([]byte(nil), f.PCRs[i]...)
		v[bit/8] ^= 1 << (bit % 8)
		f.PCRs[i] = v
		if _, err := policy.Appraise(claimsOf(f), Unlocked()); ReasonOf(err) != attestv1.Reason_REASON_POLICY_REFUSED {
			t.Fatalf("PCR %d with bit %d flipped: %v", i, bit, err)
		}
	})
}

func TestPolicyAnswers(t *testing.T) {
	_, pemRoot := ca(t, "operator")
	m := goodPolicy(pemRoot)
	m.Insecure = &attestv1.InsecureSwitches{AllowPlainState: true, AnyFirmware: true}
	p, err := ParsePolicy(encode(t, m))
	if err != nil {
		t.Fatal(err)
	}
	if !p.AllowsRole("worker") || p.AllowsRole("control-plane") || p.AllowsRole("") {
		t.Error("roles")
	}
	for a, want := range map[string]bool{"192.168.77.9": true, "::ffff:192.168.77.9": true, "192.168.78.9": false, "fd00::1": true, "fd00:0:0:1::1": false} {
		if got := p.AllowsAddress(netip.MustParseAddr(a)); got != want {
			t.Errorf("%s: %v", a, got)
		}
	}
	if got := fmt.Sprint(p.Insecure()); got != "[allowPlainState anyFirmware]" || !p.AllowsPlainState() {
		t.Errorf("insecure %s", got)
	}
}

func FuzzParsePolicy(f *testing.F) {
	_, pemRoot := ca(f, "operator")
	f.Add(encode(f, goodPolicy(pemRoot)))
	f.Add([]byte(`{"version":2,"serial":"1"}`))
	f.Fuzz(func(t *testing.T, json []byte) {
		p, err := ParsePolicy(json)
		if err != nil {
			if ReasonOf(err) != attestv1.Reason_REASON_POLICY_INVALID {
				t.Fatal(err)
			}
			return
		}
		if _, err := p.Appraise(Claims{}, AnyLock()); err == nil {
			t.Fatal("empty claims were accepted")
		}
	})
}
