package hwreport_test

import (
	"crypto/x509"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/hardwaretest"
	"github.com/muster-k8s/muster/trust/internal/hwreport"
)

// published is what two vendors have published at a time.
type published struct {
	t     testing.TB
	amd   *hardwaretest.AMD
	intel *hardwaretest.Intel
}

func (p published) vendors() hwreport.Vendors {
	return hwreport.Vendors{AMD: p.amd.Authorities(), Intel: []*x509.Certificate{p.intel.Root.Cert}, IntelPCK: p.intel.PCKAuthorities()}
}

// list returns a list that an authority has issued so long after Now.
func (p published) list(a *hardwaretest.Authority, after time.Duration, revoked ...*x509.Certificate) []byte {
	return a.CRL(p.t, func(l *x509.RevocationList) { l.ThisUpdate = hardwaretest.Now.Add(after) }, revoked...)
}

// answers returns Intel's answers, issued so long after Now, of an evaluation.
func (p published) answers(after time.Duration, evaluation int, models ...string) (infos [][]byte, identity []byte) {
	for _, m := range models {
		i := hardwaretest.TCBInfo()
		i["fmspc"], i["issueDate"], i["tcbEvaluationDataNumber"] = m, hardwaretest.Now.Add(after), evaluation
		infos = append(infos, p.intel.Signing.Answer(p.t, "tcbInfo", i))
	}
	q := hardwaretest.QEIdentity()
	q["issueDate"], q["tcbEvaluationDataNumber"] = hardwaretest.Now.Add(after), evaluation
	return infos, p.intel.Signing.Answer(p.t, "enclaveIdentity", q)
}

const otherModel = "50806f000000"

// collateral is of Now, for two models.
func (p published) collateral() *attestv1.Collateral {
	c := p.intel.Collateral(p.t, hardwaretest.TCBInfo(), hardwaretest.QEIdentity())
	out := &attestv1.Collateral{AmdCrls: [][]byte{p.list(p.amd.Root, -time.Hour), p.list(p.amd.Root, 0)}, TcbInfoChain: c.TCBInfoChain, QeIdentityChain: c.QEIdentityChain}
	out.TcbInfos, out.QeIdentity = p.answers(0, 18, hardwaretest.FMSPC, otherModel)
	out.IntelCrls = [][]byte{p.list(p.intel.Root, 0), p.list(p.intel.Platform, 0), p.list(p.intel.Processor, 0)}
	return out
}

// TestCollateralThatIsWorseThanThePolicysIsNamed changes one part of collateral that is as good as the policy's.
func TestCollateralThatIsWorseThanThePolicysIsNamed(t *testing.T) {
	p := published{t, hardwaretest.NewAMD(t), hardwaretest.NewIntel(t)}
	all := &attestv1.HardwarePolicy{SevSnp: &attestv1.SevSnpRules{MinTcb: []*attestv1.SevSnpTcb{{Product: "Milan"}}}, AzureTdx: &attestv1.TdxRules{}, Collateral: p.collateral()}
	all.Collateral.AmdCrls[0] = p.list(p.amd.Root, -time.Hour, p.amd.VLEK.Cert)
	onlyAMD, onlyIntel := &attestv1.HardwarePolicy{AzureSevSnp: all.SevSnp, Collateral: all.Collateral}, &attestv1.HardwarePolicy{Tdx: all.AzureTdx, Collateral: all.Collateral}
	none := &attestv1.HardwarePolicy{SevSnp: all.SevSnp}
	noAMD := func(c *attestv1.Collateral) { c.AmdCrls = nil }
	noIntel := func(c *attestv1.Collateral) { c.TcbInfos, c.QeIdentity, c.IntelCrls = nil, nil, nil }
	const missing = `2 different documents named "revocation list of ARK test", and the new collateral has 1`
	for name, tt := range map[string]struct {
		rules  *attestv1.HardwarePolicy
		change func(*attestv1.Collateral)
		want   string // part of the only reason, or of the last one; empty: none
	}{
		"the same": {all, func(*attestv1.Collateral) {}, ""},
		"newer": {all, func(c *attestv1.Collateral) {
			c.AmdCrls = [][]byte{p.list(p.amd.Root, time.Hour), p.list(p.amd.Root, 2*time.Hour, p.amd.VLEK.Cert)}
			c.TcbInfos, c.QeIdentity = p.answers(time.Hour, 19, otherModel, hardwaretest.FMSPC)
			c.IntelCrls = [][]byte{p.list(p.intel.Processor, time.Hour), p.list(p.intel.Platform, time.Hour), p.list(p.intel.Root, 0)}
		}, ""},
		"no lists of AMD":                         {all, noAMD, "Milan, and no revocation list of AMD: fetch with --product Milan"},
		"no lists of AMD, Azure":                  {onlyAMD, noAMD, "--product Milan"},
		"no lists of AMD, without rules for them": {onlyIntel, noAMD, ""},
		"nothing of Intel":                        {all, noIntel, "no TCB data of Intel: fetch with --fmspc"},
		"nothing of Intel, the guest's own":       {onlyIntel, noIntel, "--fmspc"},
		"nothing of Intel, without rules for it":  {onlyAMD, noIntel, ""},
		"no identity":                             {all, func(c *attestv1.Collateral) { c.QeIdentity = nil }, "no TCB data of Intel"},
		"a model is missing":                      {all, func(c *attestv1.Collateral) { c.TcbInfos = c.TcbInfos[:1] }, "--fmspc " + otherModel},
		"a model is missing, without rules":       {onlyAMD, func(c *attestv1.Collateral) { c.TcbInfos = c.TcbInfos[:1] }, ""},
		"older TCB info": {all, func(c *attestv1.Collateral) {
			c.TcbInfos, _ = p.answers(-time.Second, 18, hardwaretest.FMSPC)
			c.TcbInfos = append(c.TcbInfos, all.GetCollateral().GetTcbInfos()[1])
		}, "TCB info of " + hardwaretest.FMSPC},
		"TCB info of an older evaluation": {all, func(c *attestv1.Collateral) {
			c.TcbInfos, _ = p.answers(time.Hour, 17, hardwaretest.FMSPC)
			c.TcbInfos = append(c.TcbInfos, all.GetCollateral().GetTcbInfos()[1])
		}, "evaluation 17"},
		"both, the older first": {all, func(c *attestv1.Collateral) {
			older, _ := p.answers(-time.Hour, 17, hardwaretest.FMSPC)
			c.TcbInfos = slices.Concat(older, c.GetTcbInfos())
		}, "two TCB infos of the model " + hardwaretest.FMSPC},
		"one of AMD's lists twice, with a byte behind it": {all, func(c *attestv1.Collateral) {
			l := p.list(p.amd.Root, time.Hour, p.amd.VLEK.Cert)
			c.AmdCrls = [][]byte{l, slices.Concat(l, []byte{0})}
		}, missing},
		"older identity":                                          {all, func(c *attestv1.Collateral) { _, c.QeIdentity = p.answers(-time.Second, 18) }, "identity of the quoting enclave is of"},
		"older list of Intel's root":                              {all, func(c *attestv1.Collateral) { c.IntelCrls[0] = p.list(p.intel.Root, -time.Second) }, "Intel SGX Root CA is of"},
		"older list of an authority":                              {all, func(c *attestv1.Collateral) { c.IntelCrls[2] = p.list(p.intel.Processor, -time.Second) }, "PCK Processor CA is of"},
		"the older of AMD's lists twice":                          {all, func(c *attestv1.Collateral) { c.AmdCrls[1] = c.AmdCrls[0] }, missing},
		"one of AMD's two lists is missing":                       {all, func(c *attestv1.Collateral) { c.AmdCrls = [][]byte{p.list(p.amd.Root, time.Hour, p.amd.VLEK.Cert)} }, missing},
		"AMD's lists in another order":                            {all, func(c *attestv1.Collateral) { c.AmdCrls[0], c.AmdCrls[1] = c.AmdCrls[1], c.AmdCrls[0] }, ""},
		"a new list of AMD in place of the one with a revocation": {all, func(c *attestv1.Collateral) { c.AmdCrls[0] = p.list(p.amd.Root, time.Hour) }, "and the new collateral does not"},
		"one of AMD's two lists, and the policy has none":         {none, func(c *attestv1.Collateral) { c.AmdCrls = c.AmdCrls[1:] }, "one of AMD's two revocation lists for processors of the line Milan"},
		"both of AMD's lists, and the policy has none":            {none, func(*attestv1.Collateral) {}, ""},
	} {
		next := proto.CloneOf(all.GetCollateral())
		tt.change(next)
		why, err := hwreport.Worse(tt.rules, next, p.vendors())
		most := 1
		if tt.want == missing { // the rules lack it, too
			most = 2
		}
		named := slices.ContainsFunc(why, func(s string) bool { return strings.Contains(s, tt.want) })
		if err != nil || (tt.want == "") != (len(why) == 0) || len(why) > most || len(why) > 0 && !named {
			t.Errorf("%s: %q, %v, want one about %q", name, why, err, tt.want)
		}
	}
	if _, err := hwreport.Worse(all, &attestv1.Collateral{AmdCrls: [][]byte{{1}}}, p.vendors()); err == nil {
		t.Error("a list that is none was compared")
	}
}

func TestWhatWasNotRequestedIsRefused(t *testing.T) {
	p := published{t, hardwaretest.NewAMD(t), hardwaretest.NewIntel(t)}
	for name, tt := range map[string]struct {
		products, models []string
		change           func(*attestv1.Collateral)
		want             string
	}{
		"all":                             {[]string{"Milan", "Turin"}, []string{strings.ToUpper(hardwaretest.FMSPC), otherModel}, func(*attestv1.Collateral) {}, ""},
		"one list of AMD":                 {[]string{"Milan"}, nil, func(c *attestv1.Collateral) { c.AmdCrls = c.AmdCrls[:1] }, "for Milan, 1 are"},
		"the same list of AMD twice":      {[]string{"Milan"}, nil, func(c *attestv1.Collateral) { c.AmdCrls[1] = c.AmdCrls[0] }, "for Milan, 1 are"},
		"the same with a byte behind it":  {[]string{"Milan"}, nil, func(c *attestv1.Collateral) { c.AmdCrls[1] = slices.Concat(c.AmdCrls[0], []byte{0}) }, "for Milan, 1 are"},
		"a list of another root":          {[]string{"Milan"}, nil, func(c *attestv1.Collateral) { c.AmdCrls[1] = p.list(p.amd.VCEK, 0) }, "for Milan, 1 are"},
		"an unknown line":                 {[]string{"Naples"}, nil, func(*attestv1.Collateral) {}, "for Naples, 0 are"},
		"TCB info of another model":       {nil, []string{hardwaretest.FMSPC, otherModel}, func(c *attestv1.Collateral) { c.TcbInfos[1] = c.TcbInfos[0] }, otherModel},
		"TCB info of a model that is cut": {nil, []string{hardwaretest.FMSPC[:10]}, func(*attestv1.Collateral) {}, "another model"},
	} {
		c := p.collateral()
		tt.change(c)
		err := hwreport.Covers(c, tt.products, tt.models, p.vendors())
		if tt.want == "" && err != nil || tt.want != "" && (attest.ReasonOf(err) != hardware.Collateral || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v, want an error about %q", name, err, tt.want)
		}
	}
}

// Two lists of one root: the first end counts, in either order.
func TestSeveralListsOfAnIssuerEndWithTheFirst(t *testing.T) {
	v := hardwaretest.NewAMD(t)
	early := v.Root.CRL(t, func(l *x509.RevocationList) { l.NextUpdate = hardwaretest.Now.Add(time.Hour) })
	for name, lists := range map[string][][]byte{"early first": {early, v.List, v.VCEK.CRL(t, nil)}, "early last": {v.List, early, v.VCEK.CRL(t, nil)}} {
		ends, err := hwreport.CollateralOf(&attestv1.Collateral{AmdCrls: lists}, hwreport.Vendors{}).Ends()
		if err != nil || len(ends) != 2 || !ends[0].Time.Equal(hardwaretest.Now.Add(time.Hour)) || ends[1].Time.Equal(ends[0].Time) {
			t.Errorf("%s: %+v, %v", name, ends, err)
		}
	}
	if _, err := hwreport.CollateralOf(&attestv1.Collateral{AmdCrls: [][]byte{early, {1}}}, hwreport.Vendors{}).Ends(); err == nil {
		t.Error("a list that is none has an end")
	}
}
