package hwreport

import (
	"crypto/x509"
	"maps"
	"slices"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest/hcl"
	"github.com/muster-k8s/muster/trust/attest/snp"
	"github.com/muster-k8s/muster/trust/attest/tdx"
	"github.com/muster-k8s/muster/trust/internal/endorsement"
)

// Limits of a policy's rules.
const (
	maxValues     = 1024 // chips, measurements, ID keys, MRTDs
	maxProviders  = 64
	maxCollateral = 128 << 10 // bytes
	maxLists      = 8
	maxTCBInfos   = 32
)

// Vendors are the certificates to which reports must chain.
type Vendors struct {
	AMD   snp.Authorities
	Intel []*x509.Certificate
	// IntelPCK are Intel's authorities for PCKs. Quotes have their certificates, so only their revocation lists are checked by these.
	IntelPCK []*x509.Certificate
}

// RealVendors returns AMD's and Intel's.
func RealVendors() Vendors {
	return Vendors{AMD: snp.AMD(), Intel: tdx.Intel(), IntelPCK: tdx.PCKAuthorities()}
}

// Parse reads the rules of a policy; nil means that it has none. Rules by which no report could be
// accepted are refused with POLICY_INVALID, as are contradictions.
func Parse(m *attestv1.HardwarePolicy, v Vendors) (Rules, error) {
	if m == nil {
		return Rules{}, nil
	}
	var r Rules
	for _, step := range []func() error{
		func() (err error) { r.snp, err = parseSNP("hardware.sevSnp", m.GetSevSnp()); return err },
		func() (err error) { r.tdx, err = parseTDX("hardware.tdx", m.GetTdx()); return err },
		func() error { return r.parseAzure(m) },
		func() error { return r.parseRequire(m.GetRequire()) },
		func() error { return r.parseCollateral(m.GetCollateral(), v) },
	} {
		if err := step(); err != nil {
			return Rules{}, err
		}
	}
	return r, nil
}

func (r *Rules) parseRequire(list []string) error {
	for _, s := range list {
		k := Kind(s)
		switch {
		case !slices.Contains(Kinds, k):
			return endorsement.Invalid("hardware.require: %q is no kind of report: want %s", s, Or(Kinds))
		case slices.Contains(r.require, k):
			return endorsement.Invalid("hardware.require lists %s twice", k)
		case !r.has(k): // A3
			return endorsement.Invalid("hardware.require lists %s, and there are no rules for it: no machine could be accepted", k)
		}
		r.require = append(r.require, k)
	}
	return nil
}

func (r *Rules) parseAzure(m *attestv1.HardwarePolicy) error {
	s, err := parseSNP("hardware.azureSevSnp", m.GetAzureSevSnp())
	if err != nil {
		return err
	}
	if s != nil {
		if s.AnyMeasurement {
			return endorsement.Invalid("hardware.azureSevSnp.anyMeasurement: any guest could name any TPM's key as its own; list the paravisor's measurements or idKeys")
		}
		r.azureSNP = &hcl.Rules{SNP: *s, AllowNoSecureBoot: m.GetAzureAllowNoSecureBoot()}
	}
	t, err := parseTDX("hardware.azureTdx", m.GetAzureTdx())
	if err != nil {
		return err
	}
	if t != nil {
		if t.AnyMRTD {
			return endorsement.Invalid("hardware.azureTdx.anyMrtd: any guest could name any TPM's key as its own; list the paravisor's mrtds")
		}
		r.azureTDX = &hcl.Rules{TDX: *t, AllowNoSecureBoot: m.GetAzureAllowNoSecureBoot()}
	}
	return nil
}

var allowedGuestPolicy = map[string]snp.GuestPolicy{"SMT": snp.PolicySMT, "MIGRATE_MA": snp.PolicyMigrationAgent, "CXL": snp.PolicyCXL}

var requiredGuestPolicy = map[string]snp.GuestPolicy{
	"SINGLE_SOCKET": snp.PolicySingleSocket, "MEM_AES_256_XTS": snp.PolicyAES256XTS, "RAPL_DIS": snp.PolicyRAPLDisabled,
	"CIPHERTEXT_HIDING": snp.PolicyCiphertextHiding, "PAGE_SWAP_DISABLE": snp.PolicyNoPageSwap,
}

func parseSNP(field string, m *attestv1.SevSnpRules) (*snp.Rules, error) {
	if m == nil {
		return nil, nil
	}
	r := &snp.Rules{
		MinTCB: map[snp.Product]snp.TCB{}, Providers: m.GetProviders(), AnyChip: m.GetAnyChip(), AnyMeasurement: m.GetAnyMeasurement(),
		MaxVMPL: m.GetMaxVmpl(), MinGuestSVN: m.GetMinGuestSvn(), RequirePlatform: m.GetRequirePlatformInfo(),
	}
	for _, t := range m.GetMinTcb() {
		p := snp.Product(t.GetProduct())
		if _, twice := r.MinTCB[p]; twice || !slices.Contains(snp.Products, p) {
			return nil, endorsement.Invalid("%s.minTcb: product %q: want each of %q at most once", field, p, snp.Products)
		}
		named := []*uint32{t.BootLoader, t.Tee, t.Snp, t.Microcode}
		if p == snp.Turin {
			named = append(named, t.Fmc)
		}
		if slices.Contains(named, nil) { // A10: no absent value means "any"
			return nil, endorsement.Invalid("%s.minTcb: %s: name each part: bootLoader, tee, snp and microcode, of Turin fmc too; 0 accepts every version of it", field, p)
		}
		parts := []uint32{t.GetFmc(), t.GetBootLoader(), t.GetTee(), t.GetSnp(), t.GetMicrocode()}
		if slices.Max(parts) > 255 || p != snp.Turin && t.GetFmc() != 0 {
			return nil, endorsement.Invalid("%s.minTcb: %s: each part is 0 to 255, and only Turin has an fmc", field, p)
		}
		r.MinTCB[p] = snp.TCB{FMC: uint8(parts[0]), BootLoader: uint8(parts[1]), TEE: uint8(parts[2]), SNP: uint8(parts[3]), Microcode: uint8(parts[4])}
	}
	for _, k := range m.GetKeys() {
		if k != string(snp.VCEK) && k != string(snp.VLEK) {
			return nil, endorsement.Invalid("%s.keys: %q: want vcek or vlek", field, k)
		}
		r.Keys = append(r.Keys, snp.Key(k))
	}
	vcek, vlek := slices.Contains(r.Keys, snp.VCEK), slices.Contains(r.Keys, snp.VLEK)
	switch {
	case len(r.MinTCB) == 0: // A3
		return nil, endorsement.Invalid("%s.minTcb is empty, so no report could be accepted: list the lowest TCB of each line of processors", field)
	case !vcek && !vlek: // A3
		return nil, endorsement.Invalid("%s.keys is empty, so no report could be accepted: list vcek, vlek or both", field)
	case vlek != (len(r.Providers) > 0) || len(r.Providers) > maxProviders:
		return nil, endorsement.Invalid("%s.providers: list 1 to %d with the key vlek, and none without it", field, maxProviders)
	case vcek != (r.AnyChip || len(m.GetChips()) > 0) || r.AnyChip && len(m.GetChips()) > 0:
		return nil, endorsement.Invalid("%s: with the key vcek, and only then, want either chips or anyChip", field)
	case r.AnyMeasurement == (len(m.GetMeasurements())+len(m.GetIdKeys()) > 0):
		return nil, endorsement.Invalid("%s: want either anyMeasurement, or measurements, idKeys or both", field)
	case r.MaxVMPL > 3:
		return nil, endorsement.Invalid("%s.maxVmpl is %d: want 0 to 3", field, r.MaxVMPL)
	}
	var err error
	if r.Chips, err = chips(field, m.GetChips()); err != nil {
		return nil, err
	}
	if r.Measurements, err = digests(field+".measurements", m.GetMeasurements()); err != nil {
		return nil, err
	}
	if r.IDKeys, err = digests(field+".idKeys", m.GetIdKeys()); err != nil {
		return nil, err
	}
	if r.AllowPolicy, err = bits(field+".allowGuestPolicy", m.GetAllowGuestPolicy(), allowedGuestPolicy); err != nil {
		return nil, err
	}
	r.RequirePolicy, err = bits(field+".requireGuestPolicy", m.GetRequireGuestPolicy(), requiredGuestPolicy)
	return r, err
}

func chips(field string, list []string) (out [][]byte, err error) {
	if len(list) > maxValues {
		return nil, endorsement.Invalid("%s.chips has %d entries, more than %d", field, len(list), maxValues)
	}
	for _, s := range list {
		b, err := endorsement.ParseHex(s, 64)
		if len(s) == 16 { // Turin
			b, err = endorsement.ParseHex(s, 8)
		}
		if err != nil {
			return nil, endorsement.Invalid("%s.chips: %q: want 128 lower-case hexadecimal digits, or 16 for Turin", field, s)
		}
		out = append(out, b)
	}
	return out, nil
}

// digests reads values of SHA-384.
func digests(field string, list []string) (out [][48]byte, err error) {
	if len(list) > maxValues {
		return nil, endorsement.Invalid("%s has %d entries, more than %d", field, len(list), maxValues)
	}
	for _, s := range list {
		b, err := endorsement.ParseHex(s, 48)
		if err != nil {
			return nil, endorsement.Invalid("%s: %q: %w", field, s, err)
		}
		out = append(out, [48]byte(b))
	}
	return out, nil
}

// bits returns the sum of named bits.
func bits[T ~uint64](field string, list []string, names map[string]T) (sum T, err error) {
	for _, s := range list {
		bit, ok := names[s]
		if !ok {
			return 0, endorsement.Invalid("%s: %q: want %q", field, s, slices.Sorted(maps.Keys(names)))
		}
		sum |= bit
	}
	return sum, nil
}

var attributes = map[string]tdx.Attributes{"SEPT_VE_DISABLE": tdx.AttributeSEPTVEDisable, "PKS": tdx.AttributePKS, "PERFMON": tdx.AttributePerfmon}

func parseTDX(field string, m *attestv1.TdxRules) (*tdx.Rules, error) {
	if m == nil {
		return nil, nil
	}
	r := &tdx.Rules{MinModule: map[uint8]uint8{}, AnyMRTD: m.GetAnyMrtd(), MinEvaluation: m.GetMinEvaluationNumber()}
	for _, s := range m.GetStatuses() {
		if !slices.Contains(tdx.Statuses, tdx.Status(s)) {
			return nil, endorsement.Invalid("%s.statuses: %q: want %q", field, s, tdx.Statuses)
		}
		r.Statuses = append(r.Statuses, tdx.Status(s))
	}
	for _, v := range m.GetModules() {
		if v.GetMajor() > 255 || v.GetSvn() > 255 {
			return nil, endorsement.Invalid("%s.modules: %d.%d: want numbers of 0 to 255", field, v.GetMajor(), v.GetSvn())
		}
		if v.Svn == nil { // A10
			return nil, endorsement.Invalid("%s.modules: name the svn of version %d; 0 accepts every one", field, v.GetMajor())
		}
		if _, twice := r.MinModule[uint8(v.GetMajor())]; twice {
			return nil, endorsement.Invalid("%s.modules lists version %d twice", field, v.GetMajor())
		}
		r.MinModule[uint8(v.GetMajor())] = uint8(v.GetSvn())
	}
	switch {
	case len(r.Statuses) == 0: // A3
		return nil, endorsement.Invalid("%s.statuses is empty, so no quote could be accepted: list UpToDate", field)
	case len(r.MinModule) == 0: // A3
		return nil, endorsement.Invalid("%s.modules is empty, so no quote could be accepted: list the lowest version of each accepted TDX module", field)
	case r.AnyMRTD == (len(m.GetMrtds()) > 0):
		return nil, endorsement.Invalid("%s: want either mrtds or anyMrtd", field)
	}
	var err error
	if r.MRTDs, err = digests(field+".mrtds", m.GetMrtds()); err != nil {
		return nil, err
	}
	if r.RequireAttributes, err = bits(field+".requireAttributes", m.GetRequireAttributes(), attributes); err != nil {
		return nil, err
	}
	r.AllowAttributes, err = bits(field+".allowAttributes", m.GetAllowAttributes(), attributes)
	return r, err
}

// parseCollateral reads what the vendors have published. Whether it is valid is checked with each
// report: a policy does not become unreadable when a list ends.
func (r *Rules) parseCollateral(m *attestv1.Collateral, v Vendors) error {
	size := 0
	for _, b := range slices.Concat(m.GetAmdCrls(), m.GetTcbInfos(), m.GetIntelCrls(), [][]byte{m.GetTcbInfoChain(), m.GetQeIdentity(), m.GetQeIdentityChain()}) {
		size += len(b)
	}
	if size > maxCollateral || max(len(m.GetAmdCrls()), len(m.GetIntelCrls())) > maxLists || len(m.GetTcbInfos()) > maxTCBInfos {
		return endorsement.Invalid("hardware.collateral has %d bytes, %d and %d revocation lists and %d TCB infos; at most %d, %d each and %d are allowed",
			size, len(m.GetAmdCrls()), len(m.GetIntelCrls()), len(m.GetTcbInfos()), maxCollateral, maxLists, maxTCBInfos)
	}
	c := CollateralOf(m, v)
	var err error
	if r.ends, err = c.Ends(); err != nil {
		return endorsement.Invalid("hardware.collateral: %w", err)
	}
	if m := c.Intel.Repeated(); m != "" {
		return endorsement.Invalid("hardware.collateral has two TCB infos of the model %s: fetch with --fmspc %s once", m, m)
	}
	r.amd, r.intel, r.collateral = c.AMD, v.Intel, c.Intel
	return nil
}
