package policyfile_test

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
)

var march = time.Date(2026, 3, 20, 0, 0, 0, 0, time.UTC)

// collateral is Intel's of March 2026.
func collateral(t *testing.T) *attestv1.Collateral {
	t.Helper()
	file := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join("..", "..", "trust", "attest", "hardware", "testdata", "tdx", "collateral-2026-03", name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	return &attestv1.Collateral{
		TcbInfos: [][]byte{file("tcb_info_90c06f000000.json")}, TcbInfoChain: file("tcb_signing_chain.pem"), QeIdentity: file("td_qe_identity.json"),
		QeIdentityChain: file("qe_identity_signing_chain.pem"), IntelCrls: [][]byte{file("root_ca_crl.der"), file("pck_crl_platform.der")},
	}
}

const hardwareRules = `
# Our machines are confidential ones.
hardware:
  require: [tdx]
  tdx:
    statuses: [UpToDate] # nothing else
    modules:
      - {major: 1, svn: 5}
    mrtds:
      - "4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d"
`

func TestCollateralIsWrittenIntoAPolicy(t *testing.T) {
	for name, text := range map[string]string{"with rules": hardwareRules, "without rules": "", "with an empty object": "hardware: {}\n", "with null": "hardware:\n"} {
		before := string(read(t, "policy.yaml")) + text
		got, err := policyfile.SetCollateral([]byte(before), 8, collateral(t))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		p, _, err := policyfile.Parse(got)
		if err != nil || p.Serial() != 8 || len(p.CollateralEnds()) != 4 {
			t.Errorf("%s: %v\n%s", name, err, got)
		}
		if text == hardwareRules && (!strings.Contains(string(got), "# nothing else") || !strings.Contains(string(got), "# Our machines")) {
			t.Errorf("the comments are gone:\n%s", got)
		}
		again, err := policyfile.SetCollateral(got, 9, &attestv1.Collateral{})
		if err != nil || strings.Contains(string(again), "tcbInfos") {
			t.Errorf("%s: replaced by nothing: %v\n%s", name, err, again)
		}
	}
	if _, err := policyfile.SetCollateral([]byte(string(read(t, "policy.yaml"))+"hardware: [1]\n"), 8, collateral(t)); err == nil {
		t.Error("a list in place of the rules was replaced")
	}
	if _, err := policyfile.SetCollateral(read(t, "policy.yaml"), 8, &attestv1.Collateral{AmdCrls: [][]byte{{1}}}); err == nil {
		t.Error("a list that is none was written")
	}
}

// TestRulesForHardwareReportsAreKept: a policy that was made anew from measurements must not accept machines without reports.
func TestRulesForHardwareReportsAreKept(t *testing.T) {
	old, err := policyfile.SetCollateral([]byte(string(read(t, "policy.yaml"))+hardwareRules), 8, collateral(t))
	if err != nil {
		t.Fatal(err)
	}
	built := read(t, "policy.yaml")
	got, what, err := policyfile.KeepRules(built, old)
	if err != nil || !slices.Equal(what, []string{"the rules for hardware reports"}) {
		t.Fatalf("%q, %v", what, err)
	}
	if p, json, err := policyfile.Parse(got); err != nil || len(p.CollateralEnds()) != 4 || !strings.Contains(string(json), `"require":["tdx"]`) {
		t.Errorf("%v\n%s", err, got)
	}
	got, what, err = policyfile.KeepRules([]byte(string(built)+hardwareRules), old)
	if err != nil || !slices.Equal(what, []string{"the collateral for hardware reports"}) {
		t.Fatalf("%q, %v", what, err)
	}
	if p, _, err := policyfile.Parse(got); err != nil || len(p.CollateralEnds()) != 4 {
		t.Errorf("%v\n%s", err, got)
	}
	lifted := string(built) + "hardware: {collateral: {}}\n"
	if got, what, err = policyfile.KeepRules([]byte(lifted), old); err != nil || len(what) != 0 || string(got) != lifted {
		t.Errorf("rules that the owner has removed are kept: %q, %v", what, err)
	}
}

func TestCheckReportsWhatHardwareRulesDoNotRestrict(t *testing.T) {
	with, err := policyfile.SetCollateral([]byte(string(read(t, "policy.yaml"))+hardwareRules), 8, collateral(t))
	if err != nil {
		t.Fatal(err)
	}
	weak := strings.Replace(hardwareRules, "require: [tdx]", "require: []", 1)
	weak, _, _ = strings.Cut(weak, "    mrtds:")
	weak += "    anyMrtd: true\n"
	signed := string(read(t, "policy.yaml")) + "hardware:\n  azureSevSnp: {minTcb: [{product: Milan, bootLoader: 0, tee: 0, snp: 0, microcode: 0}], keys: [vcek], anyChip: true, idKeys: [\"" + strings.Repeat("4d", 48) + "\"]}\n"
	azure := strings.NewReplacer("require: [tdx]", "require: [azure-tdx]", "  tdx:", "  azureTdx:")
	for name, tt := range map[string]struct {
		text  string
		at    time.Time
		about string
		want  bool
	}{
		"no collateral":                   {string(read(t, "policy.yaml")) + hardwareRules, march, "no TCB data of Intel: fetch with --fmspc", true},
		"collateral of one vendor of two": {string(with) + "  sevSnp: {minTcb: [{product: Milan, bootLoader: 0, tee: 0, snp: 0, microcode: 0}, {product: Genoa, bootLoader: 0, tee: 0, snp: 0, microcode: 0}], keys: [vcek], anyChip: true, anyMeasurement: true}\n", march, "of the line Genoa, and no revocation list of AMD", true},
		"valid collateral":                {string(with), march.Add(-10 * 24 * time.Hour), "hardware.collateral", false},
		"collateral that ends soon":       {string(with), march.Add(20 * 24 * time.Hour), "hardware.collateral: the ", true},
		"collateral that has ended":       {string(with), march.Add(90 * 24 * time.Hour), "ended on", true},
		"nothing required":                {string(read(t, "policy.yaml")) + weak, march, "hardware.require: empty", true},
		"a kind required":                 {string(with), march, "hardware.require", false},
		"any measurement":                 {string(read(t, "policy.yaml")) + weak, march, "hardware.tdx.anyMrtd: a quote only", true},
		"measurements":                    {string(with), march, "anyMrtd", false},
		"reports that can be lent":        {string(with), march, "lend its reports", true},
		"data of any evaluation":          {string(with), march, "hardware.tdx.minEvaluationNumber: not set", true},
		"data of any, on Azure":           {string(read(t, "policy.yaml")) + azure.Replace(hardwareRules), march, "hardware.azureTdx.minEvaluationNumber: not set", true},
		"data of a lowest evaluation":     {string(read(t, "policy.yaml")) + hardwareRules + "    minEvaluationNumber: 18\n", march, "minEvaluationNumber", false},
		"guests of any SVN":               {signed, march, "hardware.azureSevSnp.minGuestSvn: not set", true},
		"guests of a lowest SVN":          {strings.Replace(signed, "anyChip", "minGuestSvn: 5, anyChip", 1), march, "minGuestSvn", false},
		"less privileged levels":          {strings.Replace(signed, "anyChip", "maxVmpl: 2, anyChip", 1), march, "hardware.azureSevSnp.maxVmpl: 2", true},
		"the most privileged level":       {signed, march, "maxVmpl", false},
		"no rules for reports at all":     {string(read(t, "policy.yaml")), march, "hardware", false},
		"any chip": {string(read(t, "policy.yaml")) + "hardware:\n  sevSnp: {minTcb: [{product: Milan, bootLoader: 0, tee: 0, snp: 0, microcode: 0}], keys: [vcek], anyChip: true, anyMeasurement: true}\n", march,
			"hardware.sevSnp.anyChip: every", true},
	} {
		_, found, err := policyfile.Check([]byte(tt.text), tt.at)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		has := slices.ContainsFunc(found, func(f policyfile.Finding) bool { return strings.Contains(f.Field+": "+f.Text, tt.about) })
		if has != tt.want {
			t.Errorf("%s: %t, %+v", name, has, found)
		}
	}
}

func TestCollateralThatIsWorseThanThePolicysIsNamed(t *testing.T) {
	with, err := policyfile.SetCollateral([]byte(string(read(t, "policy.yaml"))+hardwareRules), 8, collateral(t))
	if err != nil {
		t.Fatal(err)
	}
	other := collateral(t)
	other.IntelCrls = other.GetIntelCrls()[:0]
	for name, tt := range map[string]struct {
		text string
		next *attestv1.Collateral
		want string
	}{
		"the same":                {string(with), collateral(t), ""},
		"nothing":                 {string(with), &attestv1.Collateral{}, "no TCB data of Intel"},
		"no revocation lists":     {string(with), other, "no TCB data of Intel"},
		"nothing for no rules":    {string(read(t, "policy.yaml")), &attestv1.Collateral{}, ""},
		"the first for the rules": {string(read(t, "policy.yaml")) + hardwareRules, collateral(t), ""},
	} {
		why, err := policyfile.WorseCollateral([]byte(tt.text), tt.next)
		if err != nil || (tt.want == "") != (len(why) == 0) || tt.want != "" && !strings.Contains(why[0], tt.want) {
			t.Errorf("%s: %q, %v", name, why, err)
		}
	}
	if _, err := policyfile.WorseCollateral([]byte("hardware: ["), collateral(t)); err == nil {
		t.Error("a text that is no policy was compared")
	}
}

// A policy from a repository may have the collateral of last month.
func TestCollateralOfAPolicyThatIsOlderIsNamed(t *testing.T) {
	policy := func(rules string, c *attestv1.Collateral) string {
		out, err := policyfile.SetCollateral([]byte(string(read(t, "policy.yaml"))+rules), 8, c)
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	older := collateral(t)
	older.TcbInfos[0] = bytes.Replace(older.GetTcbInfos()[0], []byte(`"tcbEvaluationDataNumber":18`), []byte(`"tcbEvaluationDataNumber":17`), 1)
	newest, plain := policy(hardwareRules, collateral(t)), string(read(t, "policy.yaml"))
	for name, tt := range map[string]struct {
		before, after string
		want          string // part of the only reason; empty: none
	}{
		"the same":                  {newest, newest, ""},
		"an older evaluation":       {newest, policy(hardwareRules, older), "evaluation 17, and that of the policy"},
		"a newer evaluation":        {policy(hardwareRules, older), newest, ""},
		"the first":                 {plain, newest, ""},
		"none, without rules":       {newest, plain + "hardware: {collateral: {}}\n", ""},
		"none, for rules":           {newest, policy(hardwareRules, &attestv1.Collateral{}), "no TCB data of Intel"},
		"none, and no rules before": {plain, plain, ""},
		"one that is not valid":     {plain + "hardware: {collateral: {amdCrls: [AAAA]}}\n", newest, ""},
	} {
		why, err := policyfile.OlderCollateral([]byte(tt.before), []byte(tt.after))
		if err != nil || (tt.want == "") != (len(why) == 0) || len(why) > 1 || len(why) == 1 && !strings.Contains(why[0], tt.want) {
			t.Errorf("%s: %q, %v, want one about %q", name, why, err, tt.want)
		}
	}
}

// The machines of the page have Secure Boot off, which rules refuse by default.
func TestTheRulesOfThePageAboutAzureAreComplete(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "platforms", "azure.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, block, _ := strings.Cut(string(page), "```yaml\n")
	block, _, _ = strings.Cut(block, "```")
	if !strings.Contains(string(page), "--enable-secure-boot false") || !strings.Contains(block, "azureAllowNoSecureBoot: true") {
		t.Errorf("the rules refuse machines whose Secure Boot is off:\n%s", block)
	}
	if _, found, err := policyfile.Check([]byte(string(read(t, "policy.yaml"))+block), march); err != nil || slices.ContainsFunc(found, func(f policyfile.Finding) bool { return strings.HasSuffix(f.Field, "minGuestSvn") }) {
		t.Errorf("the rules accept every paravisor that the ID key has ever signed: %v, %+v", err, found)
	}
	if _, json, err := policyfile.Parse([]byte(string(read(t, "policy.yaml")) + block)); err != nil || !strings.Contains(string(json), `"require":["azure-sev-snp"]`) {
		t.Errorf("%v\n%s", err, block)
	}
}
