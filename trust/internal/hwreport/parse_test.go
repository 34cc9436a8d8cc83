package hwreport_test

import (
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/internal/hwreport"
)

var digest = strings.Repeat("4d", 48)

// tcb returns the lowest TCB of a line; that of Turin has an FMC.
func tcb(product string, bootLoader, tee, snp, microcode uint32) *attestv1.SevSnpTcb {
	out := &attestv1.SevSnpTcb{Product: product, BootLoader: &bootLoader, Tee: &tee, Snp: &snp, Microcode: &microcode}
	if product == "Turin" {
		out.Fmc = new(uint32(1))
	}
	return out
}

func complete() *attestv1.HardwarePolicy {
	snp := func() *attestv1.SevSnpRules {
		return &attestv1.SevSnpRules{
			MinTcb: []*attestv1.SevSnpTcb{tcb("Milan", 255, 0, 0, 0), tcb("Turin", 0, 0, 0, 0)}, Keys: []string{"vcek", "vlek"}, Providers: []string{"CN=cc.test"},
			Chips: []string{strings.Repeat("ab", 64), strings.Repeat("ab", 8)}, Measurements: []string{digest}, IdKeys: []string{digest}, MaxVmpl: 3,
			AllowGuestPolicy: []string{"SMT", "MIGRATE_MA", "CXL"}, RequireGuestPolicy: []string{"SINGLE_SOCKET", "MEM_AES_256_XTS", "RAPL_DIS", "CIPHERTEXT_HIDING", "PAGE_SWAP_DISABLE"},
		}
	}
	tdx := func() *attestv1.TdxRules {
		return &attestv1.TdxRules{
			Statuses: []string{"UpToDate", "SWHardeningNeeded"}, Modules: []*attestv1.TdxModule{{Major: 1, Svn: new(uint32(255))}, {Major: 255, Svn: new(uint32)}}, Mrtds: []string{digest},
			RequireAttributes: []string{"SEPT_VE_DISABLE"}, AllowAttributes: []string{"PKS", "PERFMON"},
		}
	}
	return &attestv1.HardwarePolicy{Require: []string{"sev-snp", "tdx", "azure-sev-snp", "azure-tdx"}, SevSnp: snp(), Tdx: tdx(), AzureSevSnp: snp(), AzureTdx: tdx()}
}

// TestRulesThatAreRefused changes one thing of rules that are accepted (A10).
func TestRulesThatAreRefused(t *testing.T) {
	repeat := func(s string, n int) (out []string) {
		for range n {
			out = append(out, s)
		}
		return out
	}
	type change = func(*attestv1.HardwarePolicy)
	snp := func(f func(*attestv1.SevSnpRules)) change {
		return func(p *attestv1.HardwarePolicy) { f(p.GetSevSnp()) }
	}
	tdx := func(f func(*attestv1.TdxRules)) change {
		return func(p *attestv1.HardwarePolicy) { f(p.GetTdx()) }
	}
	listed := func(f func(*attestv1.Collateral)) change {
		return func(p *attestv1.HardwarePolicy) { p.Collateral = &attestv1.Collateral{}; f(p.GetCollateral()) }
	}
	for name, tt := range map[string]struct {
		change change
		want   string // part of the error; empty: accepted
	}{
		"complete rules":                 {func(*attestv1.HardwarePolicy) {}, ""},
		"nothing":                        {func(p *attestv1.HardwarePolicy) { *p = attestv1.HardwarePolicy{} }, ""},
		"unknown kind":                   {func(p *attestv1.HardwarePolicy) { p.Require[0] = "sgx" }, `"sgx" is no kind`},
		"kind twice":                     {func(p *attestv1.HardwarePolicy) { p.Require[1] = "sev-snp" }, "sev-snp twice"},
		"required SEV-SNP without rules": {func(p *attestv1.HardwarePolicy) { p.SevSnp = nil }, "lists sev-snp, and there are no rules"},
		"SEV-SNP without rules that none requires": {func(p *attestv1.HardwarePolicy) { p.SevSnp, p.Require = nil, p.Require[1:] }, ""},
		"required TDX without rules":               {func(p *attestv1.HardwarePolicy) { p.Tdx = nil }, "lists tdx, and there are no rules"},
		"required Azure SEV-SNP without rules":     {func(p *attestv1.HardwarePolicy) { p.AzureSevSnp = nil }, "lists azure-sev-snp, and there are no rules"},
		"required Azure TDX without rules":         {func(p *attestv1.HardwarePolicy) { p.AzureTdx = nil }, "lists azure-tdx, and there are no rules"},
		"empty rules for SEV-SNP":                  {func(p *attestv1.HardwarePolicy) { p.SevSnp = &attestv1.SevSnpRules{} }, "hardware.sevSnp.minTcb is empty"},
		"empty rules for TDX":                      {func(p *attestv1.HardwarePolicy) { p.Tdx = &attestv1.TdxRules{} }, "hardware.tdx.statuses is empty"},
		"empty rules for SEV-SNP on Azure":         {func(p *attestv1.HardwarePolicy) { p.AzureSevSnp = &attestv1.SevSnpRules{} }, "hardware.azureSevSnp.minTcb is empty"},
		"empty rules for TDX on Azure":             {func(p *attestv1.HardwarePolicy) { p.AzureTdx = &attestv1.TdxRules{} }, "hardware.azureTdx.statuses is empty"},
		"any measurement on Azure": {func(p *attestv1.HardwarePolicy) {
			p.AzureSevSnp.Measurements, p.AzureSevSnp.IdKeys, p.AzureSevSnp.AnyMeasurement = nil, nil, true
		}, "any TPM's key as its own"},
		"any MRTD on Azure":                {func(p *attestv1.HardwarePolicy) { p.AzureTdx.Mrtds, p.AzureTdx.AnyMrtd = nil, true }, "any TPM's key as its own"},
		"no minimum TCB":                   {snp(func(r *attestv1.SevSnpRules) { r.MinTcb = nil }), "minTcb is empty"},
		"unknown product":                  {snp(func(r *attestv1.SevSnpRules) { r.MinTcb[0].Product = "Naples" }), `"Naples"`},
		"product in other letters":         {snp(func(r *attestv1.SevSnpRules) { r.MinTcb[0].Product = "milan" }), `"milan"`},
		"product twice":                    {snp(func(r *attestv1.SevSnpRules) { r.MinTcb[1].Product = "Milan" }), "at most once"},
		"part of a TCB of 256":             {snp(func(r *attestv1.SevSnpRules) { r.MinTcb[0].BootLoader = new(uint32(256)) }), "0 to 255"},
		"microcode of 256":                 {snp(func(r *attestv1.SevSnpRules) { r.MinTcb[0].Microcode = new(uint32(256)) }), "0 to 255"},
		"FMC of Milan":                     {snp(func(r *attestv1.SevSnpRules) { r.MinTcb[0].Fmc = new(uint32(1)) }), "only Turin"},
		"minimum TCB without boot loader":  {snp(func(r *attestv1.SevSnpRules) { r.MinTcb[0].BootLoader = nil }), "Milan: name each part"},
		"minimum TCB without tee":          {snp(func(r *attestv1.SevSnpRules) { r.MinTcb[0].Tee = nil }), "Milan: name each part"},
		"minimum TCB without SNP":          {snp(func(r *attestv1.SevSnpRules) { r.MinTcb[1].Snp = nil }), "Turin: name each part"},
		"minimum TCB without microcode":    {snp(func(r *attestv1.SevSnpRules) { r.MinTcb[0].Microcode = nil }), "Milan: name each part"},
		"Turin without FMC":                {snp(func(r *attestv1.SevSnpRules) { r.MinTcb[1].Fmc = nil }), "Turin: name each part"},
		"Milan with an FMC of 0":           {snp(func(r *attestv1.SevSnpRules) { r.MinTcb[0].Fmc = new(uint32) }), ""},
		"no keys":                          {snp(func(r *attestv1.SevSnpRules) { r.Keys = nil }), "keys is empty"},
		"unknown key":                      {snp(func(r *attestv1.SevSnpRules) { r.Keys[0] = "VCEK" }), "want vcek or vlek"},
		"VLEK without providers":           {snp(func(r *attestv1.SevSnpRules) { r.Providers = nil }), "providers"},
		"providers without VLEK":           {snp(func(r *attestv1.SevSnpRules) { r.Keys = r.Keys[:1] }), "providers"},
		"65 providers":                     {snp(func(r *attestv1.SevSnpRules) { r.Providers = repeat("CN=a", 65) }), "1 to 64"},
		"64 providers":                     {snp(func(r *attestv1.SevSnpRules) { r.Providers = repeat("CN=a", 64) }), ""},
		"VCEK without chips":               {snp(func(r *attestv1.SevSnpRules) { r.Chips = nil }), "chips or anyChip"},
		"VCEK of any chip":                 {snp(func(r *attestv1.SevSnpRules) { r.Chips, r.AnyChip = nil, true }), ""},
		"chips and any chip":               {snp(func(r *attestv1.SevSnpRules) { r.AnyChip = true }), "chips or anyChip"},
		"chips without VCEK":               {snp(func(r *attestv1.SevSnpRules) { r.Keys = r.Keys[1:] }), "chips or anyChip"},
		"chip of 63 bytes":                 {snp(func(r *attestv1.SevSnpRules) { r.Chips[0] = r.Chips[0][2:] }), "128 lower-case"},
		"chip of 9 bytes":                  {snp(func(r *attestv1.SevSnpRules) { r.Chips[1] += "ab" }), "128 lower-case"},
		"chip in capitals":                 {snp(func(r *attestv1.SevSnpRules) { r.Chips[1] = strings.Repeat("AB", 8) }), "128 lower-case"},
		"1025 chips":                       {snp(func(r *attestv1.SevSnpRules) { r.Chips = repeat(r.Chips[1], 1025) }), "more than 1024"},
		"1024 chips":                       {snp(func(r *attestv1.SevSnpRules) { r.Chips = repeat(r.Chips[1], 1024) }), ""},
		"no measurement":                   {snp(func(r *attestv1.SevSnpRules) { r.Measurements, r.IdKeys = nil, nil }), "want either anyMeasurement"},
		"measurements and any measurement": {snp(func(r *attestv1.SevSnpRules) { r.AnyMeasurement = true }), "want either anyMeasurement"},
		"measurement of SHA-256":           {snp(func(r *attestv1.SevSnpRules) { r.Measurements[0] = digest[:64] }), "sevSnp.measurements"},
		"ID key of SHA-256":                {snp(func(r *attestv1.SevSnpRules) { r.IdKeys[0] = digest[:64] }), "sevSnp.idKeys"},
		"1025 measurements":                {snp(func(r *attestv1.SevSnpRules) { r.Measurements = repeat(digest, 1025) }), "more than 1024"},
		"VMPL 4":                           {snp(func(r *attestv1.SevSnpRules) { r.MaxVmpl = 4 }), "maxVmpl is 4"},
		"debugging allowed":                {snp(func(r *attestv1.SevSnpRules) { r.AllowGuestPolicy[0] = "DEBUG" }), `"DEBUG"`},
		"SMT required":                     {snp(func(r *attestv1.SevSnpRules) { r.RequireGuestPolicy[0] = "SMT" }), `"SMT"`},
		"no statuses":                      {tdx(func(r *attestv1.TdxRules) { r.Statuses = nil }), "statuses is empty"},
		"unknown status":                   {tdx(func(r *attestv1.TdxRules) { r.Statuses[0] = "Fine" }), `"Fine"`},
		"revoked TCBs":                     {tdx(func(r *attestv1.TdxRules) { r.Statuses[0] = "Revoked" }), `"Revoked"`},
		"no modules":                       {tdx(func(r *attestv1.TdxRules) { r.Modules = nil }), "modules is empty"},
		"module 256":                       {tdx(func(r *attestv1.TdxRules) { r.Modules[0].Major = 256 }), "0 to 255"},
		"module with SVN 256":              {tdx(func(r *attestv1.TdxRules) { r.Modules[0].Svn = new(uint32(256)) }), "0 to 255"},
		"module without SVN":               {tdx(func(r *attestv1.TdxRules) { r.Modules[0].Svn = nil }), "svn of version 1"},
		"module twice":                     {tdx(func(r *attestv1.TdxRules) { r.Modules[1].Major = 1 }), "version 1 twice"},
		"no MRTD":                          {tdx(func(r *attestv1.TdxRules) { r.Mrtds = nil }), "want either mrtds or anyMrtd"},
		"MRTDs and any MRTD":               {tdx(func(r *attestv1.TdxRules) { r.AnyMrtd = true }), "want either mrtds or anyMrtd"},
		"MRTD of SHA-256":                  {tdx(func(r *attestv1.TdxRules) { r.Mrtds[0] = digest[:64] }), "tdx.mrtds"},
		"debug TDs required":               {tdx(func(r *attestv1.TdxRules) { r.RequireAttributes[0] = "DEBUG" }), `"DEBUG"`},
		"debug TDs allowed":                {tdx(func(r *attestv1.TdxRules) { r.AllowAttributes[0] = "DEBUG" }), `"DEBUG"`},
		"list of AMD that is none":         {listed(func(c *attestv1.Collateral) { c.AmdCrls = [][]byte{{1}} }), "collateral: from AMD"},
		"list of Intel that is none":       {listed(func(c *attestv1.Collateral) { c.IntelCrls = [][]byte{{1}} }), "collateral: from Intel"},
		"TCB info that is none":            {listed(func(c *attestv1.Collateral) { c.TcbInfos = [][]byte{[]byte("{}")} }), "tcbInfo 0"},
		"identity that is none":            {listed(func(c *attestv1.Collateral) { c.QeIdentity = []byte("{}") }), "enclaveIdentity"},
		"collateral of Intel":              {func(p *attestv1.HardwarePolicy) { p.Collateral = collateral(t) }, ""},
		"collateral of more than 128 KiB":  {listed(func(c *attestv1.Collateral) { c.TcbInfoChain = make([]byte, 128<<10+1) }), "131073 bytes"},
		"collateral of 128 KiB":            {listed(func(c *attestv1.Collateral) { c.TcbInfoChain = make([]byte, 128<<10) }), ""},
		"nine lists": {func(p *attestv1.HardwarePolicy) {
			p.Collateral = collateral(t)
			l := p.GetCollateral().GetIntelCrls()[0]
			p.Collateral.IntelCrls = [][]byte{l, l, l, l, l, l, l, l, l}
		}, "9 revocation lists"},
		"eight lists": {func(p *attestv1.HardwarePolicy) {
			p.Collateral = collateral(t)
			l := p.GetCollateral().GetIntelCrls()[0]
			p.Collateral.IntelCrls = [][]byte{l, l, l, l, l, l, l, l}
		}, ""},
		"TCB info of a model twice": {func(p *attestv1.HardwarePolicy) {
			p.Collateral = collateral(t)
			p.Collateral.TcbInfos = append(p.Collateral.TcbInfos, p.GetCollateral().GetTcbInfos()[0])
		}, "two TCB infos of the model"},
		"33 TCB infos": {func(p *attestv1.HardwarePolicy) {
			p.Collateral = collateral(t)
			one := p.GetCollateral().GetTcbInfos()[0][:0]
			p.Collateral.TcbInfos = nil
			for range 33 {
				p.Collateral.TcbInfos = append(p.Collateral.TcbInfos, one)
			}
		}, "33 TCB infos"},
	} {
		p := complete()
		tt.change(p)
		_, err := hwreport.Parse(p, hwreport.RealVendors())
		switch {
		case tt.want == "":
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		case err == nil || !strings.Contains(err.Error(), tt.want) || attest.ReasonOf(err) != attestv1.Reason_REASON_POLICY_INVALID:
			t.Errorf("%s: error %v, want one about %q", name, err, tt.want)
		}
	}
}
