package measure

import (
	"crypto"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/internal/image/uki"
	"github.com/muster-k8s/muster/internal/image/uki/ukitest"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func image(t *testing.T, change map[string]string) []byte {
	t.Helper()
	var parts []uki.Section
	for _, s := range [][2]string{{".osrel", "ID=x\n"}, {".cmdline", "quiet root=x \x00"}, {".linux", string(ukitest.Program(512))}, {".initrd", "ram"}} {
		if c, ok := change[s[0]]; ok {
			s[1] = c
		}
		parts = append(parts, uki.Section{Name: s[0], Data: []byte(s[1])})
	}
	b, err := uki.Build(ukitest.Program(1024), parts)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func predict(t *testing.T, b []byte, secure bool) policyfile.Measurements {
	t.Helper()
	m, err := Boot{UKI: b, SecureBoot: secure, Bank: crypto.SHA256}.Predict("x")
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// sum is the hash of a bank over some data.
func sum(bank crypto.Hash, parts ...[]byte) []byte {
	h := bank.New()
	for _, p := range parts {
		h.Write(p)
	}
	return h.Sum(nil)
}

// chain implements the definition: digests of digests, from zeros.
func chain(bank crypto.Hash, digests ...[]byte) string {
	v := make([]byte, bank.Size())
	for _, d := range digests {
		v = sum(bank, v, d)
	}
	return hex.EncodeToString(v)
}

func TestPCRsAreTheChainsOfTheSpecifications(t *testing.T) {
	for name, bank := range attest.Banks {
		t.Run(name, func(t *testing.T) { chains(t, name, bank) })
	}
	if m, err := (Boot{UKI: image(t, nil), Bank: crypto.MD5}).Predict("x"); err == nil {
		t.Errorf("of a bank that no policy has: %+v", m)
	}
}

func chains(t *testing.T, name string, bank crypto.Hash) {
	t.Helper()
	b := image(t, nil)
	whole, err := uki.Authenticode(b, bank)
	if err != nil {
		t.Fatal(err)
	}
	inner, err := uki.Authenticode(ukitest.Program(512), bank)
	if err != nil {
		t.Fatal(err)
	}
	sha := func(s string) []byte { return sum(bank, []byte(s)) }
	action, separator := sha("Calling EFI Application from Boot Option"), sha("\x00\x00\x00\x00")
	m, err := Boot{UKI: b, Bank: bank}.Predict("x")
	if err != nil {
		t.Fatal(err)
	}
	s, err := Boot{UKI: b, SecureBoot: true, Bank: bank}.Predict("x")
	if err != nil || m.Bank != name || s.Bank != name {
		t.Fatalf("bank %q and %q, %v", m.Bank, s.Bank, err)
	}
	for what, x := range map[string][2]string{
		"PCR 4":                  {m.PCRs["4"], chain(bank, action, separator, whole, inner)},
		"PCR 4 with Secure Boot": {s.PCRs["4"], chain(bank, action, separator, whole)},
		"PCR 9":                  {m.PCRs["9"], chain(bank, sha("q\x00u\x00i\x00e\x00t\x00 \x00r\x00o\x00o\x00t\x00=\x00x\x00\x00\x00"), sha("ram"))},
		"PCR 11": {m.PCRs["11"], chain(bank, sha(".linux\x00"), sha(string(ukitest.Program(512))), sha(".osrel\x00"), sha("ID=x\n"),
			sha(".cmdline\x00"), sha("quiet root=x \x00"), sha(".initrd\x00"), sha("ram"))},
	} {
		if x[0] != x[1] {
			t.Errorf("%s is %s, want %s", what, x[0], x[1])
		}
	}
	if m.PCRs["9"] != s.PCRs["9"] || m.PCRs["11"] != s.PCRs["11"] {
		t.Error("Secure Boot changes PCR 9 or 11")
	}
}

func TestAChangeOfAnyPartShows(t *testing.T) {
	before := predict(t, image(t, nil), false)
	other := ukitest.Program(512)
	other[len(other)-1] ^= 1
	for part, pcrs := range map[string][]string{".osrel": {"4", "11"}, ".cmdline": {"4", "9", "11"}, ".linux": {"4", "11"}, ".initrd": {"4", "9", "11"}} {
		changed := "changed"
		if part == ".linux" {
			changed = string(other)
		}
		after := predict(t, image(t, map[string]string{part: changed}), false)
		for _, n := range pcrs {
			if before.PCRs[n] == after.PCRs[n] {
				t.Errorf("%s changed, PCR %s didn't", part, n)
			}
		}
	}
}

func TestAPolicyCanBeMadeOfThePredictions(t *testing.T) {
	b := image(t, nil)
	// A root that tests of policies use.
	root, err := os.ReadFile(filepath.FromSlash("../../policyfile/testdata/ek-root.pem"))
	if err != nil {
		t.Fatal(err)
	}
	text, err := policyfile.Build(policyfile.Template{
		Measurements: []policyfile.Measurements{predict(t, b, false), predict(t, b, true)},
		NodeCIDRs:    []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, Roles: []string{"worker"}, AnyFirmware: true, Roots: []policyfile.Root{{PEM: string(root), Operator: true, Key: attest.EKP256}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := policyfile.Parse(text); err != nil {
		t.Fatal(err)
	}
	for pcr, want := range map[int]int{4: 2, 9: 1, 11: 1, 12: 1} {
		values := regexp.MustCompile(fmt.Sprintf(`index: %d, value: "([0-9a-f]*)"`, pcr)).FindAllString(string(text), -1)
		if slices.Sort(values); len(values) != 2 || len(slices.Compact(values)) != want {
			t.Errorf("PCR %d has the values %v", pcr, values)
		}
	}
}

func TestWhatIsNotOurImageIsNotForetold(t *testing.T) {
	whole := image(t, nil)
	for name, b := range map[string][]byte{
		"nothing": nil, "no sections": ukitest.Program(512), "cut off": whole[:len(whole)-512],
		"a kernel that firmware can't start": image(t, map[string]string{".linux": "kernel"}),
	} {
		if m, err := (Boot{UKI: b, Bank: crypto.SHA256}).Predict("x"); err == nil {
			t.Errorf("%s: %v", name, m)
		}
	}
}
