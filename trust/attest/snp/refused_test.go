package snp_test

import (
	"crypto/elliptic"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/binary"
	"slices"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/hardwaretest"
	"github.com/muster-k8s/muster/trust/attest/snp"
)

type (
	pkixExtension = pkix.Extension
	reason        = attestv1.Reason
)

// input is all that a verdict on a report depends on.
type input struct {
	vendor   *hardwaretest.AMD
	chip     hardwaretest.Chip
	data     hardware.ReportData // in the report
	want     hardware.ReportData // expected
	evidence *snp.Evidence       // instead of a report of chip
	change   func(*snp.Evidence)
	auth     snp.Authorities
	now      time.Time
	rules    snp.Rules
}

func (in *input) verdict(t testing.TB) error {
	e := in.evidence
	if e == nil {
		made := in.vendor.Report(t, in.chip, in.data)
		e = &made
	}
	if in.change != nil {
		in.change(e)
	}
	r, err := snp.Verify(*e, in.want, in.auth, in.now)
	if err != nil {
		return err
	}
	return in.rules.Check(r)
}

var measured = slices.Repeat([]byte{0x4D}, 48)

// base returns an input that is accepted.
func base(v *hardwaretest.AMD, p snp.Product) *input {
	chip := make([]byte, 64)
	copy(chip, []byte{1, 2, 3, 4, 5, 6, 7, 8})
	if p == snp.Turin {
		chip = chip[:8]
	}
	tcb := snp.TCB{BootLoader: 4, TEE: 1, SNP: 24, Microcode: 200}
	if p == snp.Turin {
		tcb.FMC = 1
	}
	data := hardware.NewReportData([]byte("AK"), [32]byte{1})
	return &input{
		vendor: v, chip: hardwaretest.Chip{Product: p, TCB: tcb}, data: data, want: data, auth: v.Authorities(), now: hardwaretest.Now,
		rules: snp.Rules{MinTCB: map[snp.Product]snp.TCB{p: tcb}, Keys: []snp.Key{snp.VCEK}, Chips: [][]byte{chip}, Measurements: [][48]byte{[48]byte(measured)}},
	}
}

func withVLEK(in *input) {
	in.chip.Key = snp.VLEK
	in.rules.Keys, in.rules.Providers = []snp.Key{snp.VLEK}, []string{"CN=cc.test"}
}

// put returns a change of the report's bytes before they are signed.
func put(at int, b ...byte) func(*input) {
	return func(in *input) {
		in.chip.Report = func(r []byte) { copy(r[at:], b) }
	}
}

func policyBits(p snp.GuestPolicy) func(*input) {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], 0x20000|uint64(p))
	return put(0x08, b[:]...)
}

// extension replaces the extension with the last numbers n, or removes it if value is nil.
func extension(value []byte, n ...int) func(*input) {
	return func(in *input) {
		in.chip.Certificate = func(c *x509.Certificate) {
			id := hardwaretest.Extension(nil, n...).Id
			i := slices.IndexFunc(c.ExtraExtensions, func(e pkixExtension) bool { return e.Id.Equal(id) })
			if i >= 0 {
				c.ExtraExtensions = slices.Delete(c.ExtraExtensions, i, i+1)
			}
			if value != nil {
				c.ExtraExtensions = append(c.ExtraExtensions, hardwaretest.Extension(value, n...))
			}
		}
	}
}

func authority(change func(*snp.Authority)) func(*input) {
	return func(in *input) {
		for p, a := range in.auth {
			change(&a)
			in.auth[p] = a
		}
	}
}

func TestReportsThatAreRefused(t *testing.T) {
	v := hardwaretest.NewAMD(t)
	// issuer lets VCEKs be issued by another authority below the root.
	issuer := func(change func(*x509.Certificate)) func(*input) {
		return func(in *input) {
			other := *v
			other.VCEK = v.Issuer(t, change)
			in.vendor, in.auth = &other, other.Authorities()
		}
	}
	other := hardwaretest.NewAMD(t)
	hwid := make([]byte, 64)
	copy(hwid, []byte{1, 2, 3, 4, 5, 6, 7, 8})
	var all []hardwaretest.Vector
	add := func(name string, want reason, before func(*input), change func(*input)) {
		right := func() *input {
			in := base(v, snp.Milan)
			if before != nil {
				before(in)
			}
			return in
		}
		all = append(all, hardwaretest.Vector{Name: name, Want: want,
			Wrong: func(t testing.TB) error { in := right(); change(in); return in.verdict(t) },
			Right: func(t testing.TB) error { return right().verdict(t) },
		})
	}
	turin := func(in *input) { *in = *base(v, snp.Turin) }

	// Form.
	add("trailing byte", hardware.Malformed, nil, func(in *input) { in.change = func(e *snp.Evidence) { e.Report = append(e.Report, 0) } })
	add("cut off by a byte", hardware.Malformed, nil, func(in *input) {
		in.change = func(e *snp.Evidence) { e.Report = e.Report[:len(e.Report)-1] }
	})
	add("report of version 1", hardware.Malformed, nil, put(0x00, 1))
	add("report of version 6", hardware.Malformed, nil, put(0x00, 6))
	add("unknown signature algorithm", hardware.Malformed, nil, put(0x34, 2))
	add("reserved bytes", hardware.Malformed, nil, put(0x208, 1))
	add("reserved TCB byte", hardware.Malformed, nil, put(0x1F0+3, 1))
	add("signature with more than 48 bytes", hardware.Malformed, nil, func(in *input) { in.change = func(e *snp.Evidence) { e.Report[0x2A0+48] = 1 } })
	add("guest policy without its reserved bit", hardware.Malformed, nil, put(0x08, 0, 0, 1))
	add("guest policy with an unknown bit", hardware.Malformed, nil, put(0x08+3, 0x80))
	add("chip ID of 9 bytes on Turin", hardware.Malformed, turin, put(0x1A0+8, 1))
	add("certificate with a trailing byte", hardware.Malformed, nil, func(in *input) {
		in.change = func(e *snp.Evidence) { e.Certificate = append(e.Certificate, 0) }
	})
	add("no certificate", hardware.Malformed, nil, func(in *input) { in.change = func(e *snp.Evidence) { e.Certificate = nil } })
	add("certificate of 5 KiB", hardware.Malformed, nil, func(in *input) {
		in.chip.Certificate = func(c *x509.Certificate) {
			c.ExtraExtensions = append(c.ExtraExtensions, hardwaretest.Extension(make([]byte, 5<<10), 99))
		}
	})

	// Binding.
	add("report data of another session", hardware.Binding, nil, func(in *input) { in.want[63] ^= 1 })
	add("report data compared with nothing", hardware.Binding, nil, func(in *input) { in.data, in.want = hardware.ReportData{}, hardware.ReportData{} })
	add("empty report data", hardware.Binding, nil, func(in *input) { in.data = hardware.ReportData{} })
	add("VMPL 0xFFFFFFFF: asked for by the host", hardware.Binding, func(in *input) { in.rules.MaxVMPL = 1<<32 - 1 }, put(0x30, 0xFF, 0xFF, 0xFF, 0xFF))
	add("VMPL 4", hardware.Binding, func(in *input) { in.rules.MaxVMPL = 4 }, put(0x30, 4))

	// Signature.
	add("changed measurement", hardware.Signature, nil, func(in *input) { in.change = func(e *snp.Evidence) { e.Report[0x90] ^= 1 } })
	add("changed signature", hardware.Signature, nil, func(in *input) { in.change = func(e *snp.Evidence) { e.Report[0x2E8] ^= 1 } })
	add("no signature", hardware.Signature, nil, func(in *input) { in.change = func(e *snp.Evidence) { clear(e.Report[0x2A0:]) } })

	// Whose key it is.
	add("masked chip key", hardware.Untrusted, nil, put(0x48, 2))
	add("report signed by no key", hardware.Untrusted, withVLEK, put(0x48, 7<<2))
	add("masked chip ID with a VCEK", hardware.Untrusted, nil, func(in *input) {
		put(0x1A0, make([]byte, 64)...)(in)
		extension(make([]byte, 64), 4)(in)
	})
	add("VCEK of another chip", hardware.Untrusted, nil, put(0x1A0, 9))
	add("VCEK of another chip on Turin", hardware.Untrusted, turin, put(0x1A0, 9))
	add("Turin's chip ID with the 64 bytes of a Milan", hardware.Untrusted, turin, extension(hwid, 4))
	add("VCEK without HWID", hardware.Untrusted, nil, extension(nil, 4))
	add("HWID under a longer extension number", hardware.Untrusted, nil, func(in *input) {
		in.chip.Certificate = func(c *x509.Certificate) {
			for i, e := range c.ExtraExtensions {
				if e.Id.Equal(hardwaretest.Extension(nil, 4).Id) {
					c.ExtraExtensions[i] = hardwaretest.Extension(e.Value, 4, 1)
				}
			}
		}
	})
	add("TCB under a longer extension number", hardware.Untrusted, nil, func(in *input) {
		in.chip.Certificate = func(c *x509.Certificate) {
			for i, e := range c.ExtraExtensions {
				if e.Id.Equal(hardwaretest.Extension(nil, 3, 8).Id) {
					c.ExtraExtensions[i] = hardwaretest.Extension(e.Value, 3, 8, 0)
				}
			}
		}
	})
	add("VCEK of another TCB", hardware.Untrusted, nil, put(0x180, 5))
	add("VCEK with TCB 260", hardware.Untrusted, nil, extension([]byte{2, 2, 1, 4}, 3, 1))
	add("VCEK without FMC on Turin", hardware.Untrusted, turin, extension(nil, 3, 9))
	add("VCEK of another product than the processor", hardware.Untrusted, nil, put(0x188, 0x19, 0x11))
	add("unknown processor", hardware.Untrusted, nil, put(0x188, 0x1B, 0x01))
	add("VCEK of an unknown product", hardware.Untrusted, nil, extension(hardwaretest.IA5("Milano"), 2))
	add("VCEK of an unknown product that the caller has an authority of", hardware.Untrusted, nil, func(in *input) {
		in.auth["Milano"] = in.auth[snp.Milan]
		put(0x188, 0, 0, 0)(in)
		zeros := in.chip.Report
		in.chip.Report = func(b []byte) { zeros(b); b[0] = 2 }
		extension(hardwaretest.IA5("Milano"), 2)(in)
	})
	add("product name that is no IA5String", hardware.Untrusted, nil, extension([]byte{asn1.TagUTF8String, 5, 'M', 'i', 'l', 'a', 'n'}, 2))
	add("VLEK's certificate with a VCEK's report", hardware.Untrusted, withVLEK, put(0x48, 0))
	add("certificate with both HWID and CSP_ID", hardware.Untrusted, withVLEK, extension(hwid, 4))
	add("VCEK's certificate with a CSP_ID too", hardware.Untrusted, nil, extension(hardwaretest.IA5("CN=cc.test"), 5))
	add("VLEK issued by the issuer of VCEKs", hardware.Untrusted, withVLEK, func(in *input) {
		swapped := *v
		swapped.VLEK = v.VCEK
		in.vendor = &swapped
	})
	add("key on P-256", hardware.Untrusted, nil, func(in *input) { in.chip.Signer = hardwaretest.NewECDSA(t, elliptic.P256()) })
	add("key of an authority", hardware.Untrusted, nil, func(in *input) {
		in.chip.Certificate = func(c *x509.Certificate) { c.IsCA, c.BasicConstraintsValid = true, true }
	})
	add("critical extension that is unknown", hardware.Untrusted, nil, func(in *input) {
		in.chip.Certificate = func(c *x509.Certificate) {
			e := hardwaretest.Extension([]byte{5, 0}, 77)
			e.Critical = true
			c.ExtraExtensions = append(c.ExtraExtensions, e)
		}
	})

	// The chain.
	add("expired VCEK", hardware.Untrusted, nil, func(in *input) {
		in.chip.Certificate = func(c *x509.Certificate) {
			c.NotBefore, c.NotAfter = in.now.Add(-2*time.Hour), in.now.Add(-time.Hour)
		}
	})
	add("VCEK that is not valid yet", hardware.Untrusted, nil, func(in *input) {
		in.chip.Certificate = func(c *x509.Certificate) { c.NotBefore, c.NotAfter = in.now.Add(time.Hour), in.now.Add(2*time.Hour) }
	})
	add("expired root", hardware.Untrusted, nil, authority(func(a *snp.Authority) { a.Root = v.NewRoot(t, hardwaretest.Expired) }))
	add("expired issuer", hardware.Untrusted, nil, issuer(func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = hardwaretest.Now.Add(-2*time.Hour), hardwaretest.Now.Add(-time.Hour)
	}))
	add("issuer that is no authority", hardware.Untrusted, nil, issuer(func(c *x509.Certificate) { c.IsCA, c.KeyUsage = false, x509.KeyUsageDigitalSignature }))
	add("issuer of another vendor with the same names", hardware.Untrusted, nil, func(in *input) { in.vendor = other })
	add("issuer below another root with the same name", hardware.Untrusted, nil, func(in *input) {
		in.vendor = other
		authority(func(a *snp.Authority) { a.VCEK = other.VCEK.Cert })(in)
	})
	add("VCEK by the issuer's key under another name", hardware.Untrusted, nil, func(in *input) {
		renamed := *v
		renamed.VCEK = v.Renamed(t)
		in.vendor = &renamed
	})
	add("no authority of the product", hardware.Untrusted, nil, func(in *input) { delete(in.auth, snp.Milan) })
	add("no issuer of VLEKs", hardware.Untrusted, withVLEK, authority(func(a *snp.Authority) { a.VLEK = nil }))
	add("no root", hardware.Untrusted, nil, authority(func(a *snp.Authority) { a.Root = nil }))
	add("revoked issuer", hardware.Untrusted, nil, authority(func(a *snp.Authority) { a.RevocationLists = [][]byte{v.Root.CRL(t, nil, a.VCEK)} }))
	add("issuer that the first of two lists has revoked", hardware.Untrusted, nil, authority(func(a *snp.Authority) { a.RevocationLists = [][]byte{v.Root.CRL(t, nil, a.VCEK), v.List} }))
	add("issuer that the last of two lists has revoked", hardware.Untrusted, nil, authority(func(a *snp.Authority) { a.RevocationLists = [][]byte{v.List, v.Root.CRL(t, nil, a.VCEK)} }))

	// Collateral.
	add("no revocation list", hardware.Collateral, nil, authority(func(a *snp.Authority) { a.RevocationLists = nil }))
	add("revocation list that is none", hardware.Collateral, nil, authority(func(a *snp.Authority) { a.RevocationLists = [][]byte{{0x30, 0}} }))
	add("expired revocation list", hardware.Collateral, nil, authority(func(a *snp.Authority) {
		a.RevocationLists = [][]byte{v.Root.CRL(t, func(l *x509.RevocationList) { l.NextUpdate = hardwaretest.Now.Add(-time.Second) })}
	}))
	add("expired second revocation list", hardware.Collateral, nil, authority(func(a *snp.Authority) {
		a.RevocationLists = [][]byte{v.List, v.Root.CRL(t, func(l *x509.RevocationList) { l.NextUpdate = hardwaretest.Now.Add(-time.Second) })}
	}))
	add("revocation list of the future", hardware.Collateral, nil, authority(func(a *snp.Authority) {
		a.RevocationLists = [][]byte{v.Root.CRL(t, func(l *x509.RevocationList) { l.ThisUpdate = hardwaretest.Now.Add(time.Second) })}
	}))
	add("revocation list of another authority", hardware.Collateral, nil, authority(func(a *snp.Authority) { a.RevocationLists = [][]byte{v.VCEK.CRL(t, nil)} }))
	add("revocation list signed by another root with the same name", hardware.Collateral, nil, authority(func(a *snp.Authority) { a.RevocationLists = [][]byte{other.List} }))
	add("revocation list for some certificates only", hardware.Collateral, nil, authority(func(a *snp.Authority) {
		a.RevocationLists = [][]byte{v.Root.CRL(t, func(l *x509.RevocationList) {
			l.ExtraExtensions = []pkixExtension{{Id: asn1.ObjectIdentifier{2, 5, 29, 28}, Critical: true, Value: []byte{0x30, 0}}}
		})}
	}))

	// TCB, part by part.
	for i, part := range []string{"boot loader", "TEE", "SNP firmware", "microcode", "FMC"} {
		add(part+" below the minimum", hardware.TCB, func(in *input) {
			if part == "FMC" {
				turin(in)
			}
		}, func(in *input) {
			tcb := &in.chip.TCB
			*[]*uint8{&tcb.BootLoader, &tcb.TEE, &tcb.SNP, &tcb.Microcode, &tcb.FMC}[i] -= 1
			tcb.Microcode++ // does not make up for the other part, and is enough for itself
			if part == "microcode" {
				tcb.Microcode -= 1
				tcb.SNP++
			}
		})
	}
	add("current TCB below the minimum", hardware.TCB, nil, put(0x38, 3))
	add("committed TCB below the minimum", hardware.TCB, nil, put(0x1E0, 3))
	add("guest launched below the minimum TCB", hardware.TCB, nil, put(0x1F0, 3))

	// Rules.
	add("VLEK where a VCEK is wanted", hardware.Policy, withVLEK, func(in *input) { in.rules.Keys = []snp.Key{snp.VCEK} })
	add("VCEK where a VLEK is wanted", hardware.Policy, nil, func(in *input) { in.rules.Keys = []snp.Key{snp.VLEK} })
	add("VLEK of another provider", hardware.Policy, withVLEK, func(in *input) { in.rules.Providers = []string{"CN=cc.other"} })
	add("VMPL above what is required", hardware.Policy, nil, put(0x30, 1))
	add("guest policy that allows debugging", hardware.Policy, func(in *input) { in.rules.AllowPolicy = snp.PolicyDebug | snp.PolicySMT }, policyBits(snp.PolicyDebug))
	add("guest policy that allows a migration agent", hardware.Policy, nil, policyBits(snp.PolicyMigrationAgent))
	add("guest policy that allows SMT", hardware.Policy, nil, policyBits(snp.PolicySMT))
	add("guest policy that allows CXL", hardware.Policy, nil, policyBits(snp.PolicyCXL))
	add("guest policy without a required bit", hardware.Policy, func(in *input) {
		policyBits(snp.PolicySingleSocket)(in)
		in.rules.RequirePolicy = snp.PolicySingleSocket
	}, policyBits(0))
	add("guest SVN below the minimum", hardware.Policy, func(in *input) { put(0x04, 3)(in); in.rules.MinGuestSVN = 3 }, put(0x04, 2))
	add("platform without the check for aliased memory", hardware.Policy, func(in *input) { put(0x40, 0x20)(in); in.rules.RequirePlatform = 0x20 }, put(0x40, 0x01))
	add("valid platform that the policy does not name: product", hardware.Policy, nil, func(in *input) {
		in.rules.MinTCB = map[snp.Product]snp.TCB{snp.Genoa: {}, snp.Turin: {}}
	})
	add("valid platform that the policy does not name: chip", hardware.Policy, nil, func(in *input) { in.rules.Chips = [][]byte{{1}} })
	add("valid platform that the policy does not name: measurement", hardware.Policy, nil, func(in *input) { in.rules.Measurements = [][48]byte{{1}} })
	key := slices.Repeat([]byte{0x1D}, 48)
	byKey := func(in *input) {
		put(0xE0, key...)(in)
		in.rules.Measurements, in.rules.IDKeys = nil, [][48]byte{[48]byte(key)}
	}
	add("ID block of another key", hardware.Policy, byKey, put(0xE0, 0x1E))
	add("no ID block, where rules list an ID key of zeros", hardware.Policy, byKey, func(in *input) {
		put(0xE0)(in)
		in.rules.IDKeys = [][48]byte{{}}
	})
	add("rules that are empty", hardware.Policy, nil, func(in *input) { in.rules = snp.Rules{} })

	all = append(all, capturedVectors()...)
	hardwaretest.Refused(t, "SEV-SNP", all)
}

// capturedVectors are captured reports with AMD's own roots.
func capturedVectors() (all []hardwaretest.Vector) {
	open := snp.Rules{
		MinTCB: map[snp.Product]snp.TCB{snp.Milan: {}}, Keys: []snp.Key{snp.VCEK, snp.VLEK}, Providers: []string{"CN=cc-us-east-2.amazonaws.com"},
		AnyChip: true, AnyMeasurement: true, AllowPolicy: snp.PolicySMT, MaxVMPL: 1,
	}
	verdict := func(report, certificate, at string, rules snp.Rules) func(testing.TB) error {
		return func(t testing.TB) error {
			e := captured(t, report, certificate)
			r, err := snp.Verify(e, hardware.ReportData(e.Report[0x50:]), amd(), day(at))
			if err != nil {
				return err
			}
			return rules.Check(r)
		}
	}
	add := func(name string, want reason, wrong, right func(testing.TB) error) {
		all = append(all, hardwaretest.Vector{Name: name, Want: want, Wrong: wrong, Right: right})
	}
	vmpl0 := open
	vmpl0.MaxVMPL = 0
	recent := open
	recent.MinTCB = map[snp.Product]snp.TCB{snp.Milan: {BootLoader: 4, SNP: 24, Microcode: 0xD9}}
	v2 := verdict("milan-v2-vcek/report.bin", "milan-v2-vcek/vcek.der", "2026-03-01", open)
	vlek := verdict("milan-v3-vlek/report.bin", "milan-v3-vlek/vlek.der", "2025-06-01", open)
	gcp1 := verdict("gcp-v5/report-reportdata.bin", "gcp-v5/vcek.pem", "2026-03-01", open)
	genuine := func(report, certificate string) func(testing.TB) error {
		return func(t testing.TB) error {
			_, err := snp.Genuine(captured(t, report, certificate), amd(), day("2026-03-01"))
			return err
		}
	}
	add("captured milan-v2-gosevguest: debug policy", hardware.Policy, verdict("milan-v2-gosevguest/report.bin", "milan-v2-gosevguest/vcek.der", "2026-03-01", open), v2)
	add("captured milan-v2-vcek with vcek-tampered-a: its signature, HWID and TCB", hardware.Untrusted, verdict("milan-v2-vcek/report.bin", "milan-v2-vcek/vcek-tampered-a.der", "2026-03-01", open), v2)
	add("captured milan-v2-vcek with vcek-tampered-b: HWID in an OCTET STRING", hardware.Untrusted, verdict("milan-v2-vcek/report.bin", "milan-v2-vcek/vcek-tampered-b.der", "2026-03-01", open), v2)
	add("captured milan-v2-vcek: TCB below the minimum", hardware.TCB, verdict("milan-v2-vcek/report.bin", "milan-v2-vcek/vcek.der", "2026-03-01", recent), v2)
	add("captured milan-v2-gosevguest: TCB below the minimum", hardware.TCB, verdict("milan-v2-gosevguest/report.bin", "milan-v2-gosevguest/vcek.der", "2026-03-01", recent), verdict("gcp-v5/report-reportdata.bin", "gcp-v5/vcek.pem", "2026-03-01", recent))
	add("captured milan-v3-vlek after the end of its VLEK", hardware.Untrusted, verdict("milan-v3-vlek/report.bin", "milan-v3-vlek/vlek.der", "2026-01-01", open), vlek)
	add("captured milan-v3-vlek where VMPL 0 is required", hardware.Policy, verdict("milan-v3-vlek/report.bin", "milan-v3-vlek/vlek.der", "2025-06-01", vmpl0), vlek)
	add("captured gcp-v5, report-reportdata: VMPL 1", hardware.Policy, verdict("gcp-v5/report-reportdata.bin", "gcp-v5/vcek.pem", "2026-03-01", vmpl0), gcp1)
	add("captured gcp-v5: report data of zeros", hardware.Binding, verdict("gcp-v5/report.bin", "gcp-v5/vcek.pem", "2026-03-01", open), genuine("gcp-v5/report.bin", "gcp-v5/vcek.pem"))
	add("captured milan-v3: report data of zeros", hardware.Binding, verdict("milan-v3/report.bin", "milan-v3/vcek.pem", "2026-03-01", open), genuine("milan-v3/report.bin", "milan-v3/vcek.pem"))
	add("captured genoa-v3: report data of zeros", hardware.Binding, verdict("genoa-v3/report.bin", "genoa-v3/vcek.pem", "2026-03-01", open), genuine("genoa-v3/report.bin", "genoa-v3/vcek.pem"))
	add("captured turin-v5: report data of zeros", hardware.Binding, verdict("turin-v5/report.bin", "turin-v5/vcek.pem", "2026-03-01", open), genuine("turin-v5/report.bin", "turin-v5/vcek.pem"))
	add("captured redacted: CHIP_ID set to zero", hardware.Untrusted, verdict("redacted/report.bin", "milan-v3/vcek.pem", "2026-03-01", open), genuine("milan-v3/report.bin", "milan-v3/vcek.pem"))
	add("captured turin-v5 with another Turin's VCEK", hardware.Untrusted, verdict("turin-v5/report.bin", "turin-vcek-only/vcek.der", "2026-03-01", open), genuine("turin-v5/report.bin", "turin-v5/vcek.pem"))
	return all
}

// AMD's certificates have the chip's ID as it is; some have it in an OCTET STRING.
func TestAWrappedHWIDIsRead(t *testing.T) {
	v := hardwaretest.NewAMD(t)
	for p, n := range map[snp.Product]int{snp.Milan: 64, snp.Turin: 8} {
		id := make([]byte, n)
		copy(id, []byte{1, 2, 3, 4, 5, 6, 7, 8})
		in := base(v, p)
		extension(append([]byte{4, byte(n)}, id...), 4)(in)
		if err := in.verdict(t); err != nil {
			t.Errorf("%s: %v", p, err)
		}
	}
}

func TestEveryProductAndKindOfKeyIsAccepted(t *testing.T) {
	v := hardwaretest.NewAMD(t)
	for _, p := range snp.Products {
		if err := base(v, p).verdict(t); err != nil {
			t.Errorf("%s: %v", p, err)
		}
		in := base(v, p)
		withVLEK(in)
		if err := in.verdict(t); err != nil {
			t.Errorf("%s with VLEK: %v", p, err)
		}
	}
}

func TestWithoutAuthoritiesNoReportIsGenuine(t *testing.T) {
	v := hardwaretest.NewAMD(t)
	in := base(v, snp.Milan)
	in.auth = nil
	if err := in.verdict(t); attest.ReasonOf(err) != hardware.Untrusted {
		t.Error(err)
	}
	if err := (snp.Rules{}).Check(nil); attest.ReasonOf(err) != hardware.Policy {
		t.Error(err)
	}
	if err := in.rules.Check(&snp.Report{}); attest.ReasonOf(err) != hardware.Policy {
		t.Error(err)
	}
	for p, a := range snp.AMD() {
		if a.RevocationLists != nil || a.InsecureNoRevocationLists {
			t.Errorf("%s comes without the need of a revocation list", p)
		}
	}
}

func TestEveryReservedByteIsZero(t *testing.T) {
	v := hardwaretest.NewAMD(t)
	for _, at := range []int{0x04C, 0x04F, 0x18B, 0x19F, 0x1EB, 0x1EF, 0x208, 0x29F, 0x2D0, 0x2E7, 0x318, 0x49F} {
		in := base(v, snp.Milan)
		in.change = func(e *snp.Evidence) { e.Report[at] = 1 } // before any signature is checked
		if err := in.verdict(t); attest.ReasonOf(err) != hardware.Malformed {
			t.Errorf("%#x: %v", at, err)
		}
	}
}
