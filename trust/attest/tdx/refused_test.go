package tdx_test

import (
	"bytes"
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
	"github.com/muster-k8s/muster/trust/attest/tdx"
)

type object = hardwaretest.Object

// input is all that a verdict on a quote depends on.
type input struct {
	t         testing.TB
	vendor    *hardwaretest.Intel
	td        hardwaretest.TD
	data      hardware.ReportData // in the quote
	want      hardware.ReportData // expected
	info, qe  object
	change    func([]byte) []byte // of the quote
	published func(*tdx.Collateral)
	roots     []*x509.Certificate
	now       time.Time
	rules     tdx.Rules
}

func (in *input) verdict(t testing.TB) error {
	b := in.vendor.Quote(t, in.td, in.data)
	if in.change != nil {
		b = in.change(b)
	}
	c := in.vendor.Collateral(t, in.info, in.qe)
	if in.published != nil {
		in.published(&c)
	}
	q, err := tdx.Verify(b, in.want, c, in.roots, in.now)
	if err != nil {
		return err
	}
	return in.rules.Check(q)
}

// base returns an input that is accepted.
func base(t testing.TB, v *hardwaretest.Intel) *input {
	data := hardware.NewReportData([]byte("AK"), [32]byte{1})
	return &input{
		t: t, vendor: v, data: data, want: data, info: hardwaretest.TCBInfo(), qe: hardwaretest.QEIdentity(),
		roots: []*x509.Certificate{v.Root.Cert}, now: hardwaretest.Now,
		rules: tdx.Rules{
			Statuses: []tdx.Status{tdx.UpToDate}, MinModule: map[uint8]uint8{1: 6}, MRTDs: [][48]byte{[48]byte(bytes.Repeat([]byte{0x4D}, 48))},
			RequireAttributes: tdx.AttributeSEPTVEDisable, MinEvaluation: 18,
		},
	}
}

// Changes of what is signed.
func header(at int, b ...byte) func(*input) {
	return func(in *input) { in.td.Header = func(h []byte) { copy(h[at:], b) } }
}

func body(at int, b ...byte) func(*input) {
	return func(in *input) { in.td.Body = func(h []byte) { copy(h[at:], b) } }
}

func qe(at int, b ...byte) func(*input) {
	return func(in *input) { in.td.QE = func(h []byte) { copy(h[at:], b) } }
}

func attributes(a tdx.Attributes) func(*input) {
	return body(0x078, binary.LittleEndian.AppendUint64(nil, uint64(a))...)
}

// svns changes TEE_TCB_SVN, and the loaded module's too.
func svns(b ...byte) func(*input) {
	return func(in *input) {
		in.td.Body = func(h []byte) { copy(h, b); copy(h[0x248:], b) }
	}
}

// Changes of Intel's answers, which are signed afterwards.
func info(name string, value any) func(*input) { return func(in *input) { in.info[name] = value } }
func identity(name string, value any) func(*input) {
	return func(in *input) { in.qe[name] = value }
}

// module10 makes the module one of TDX 1.0, which has no levels of its own.
func module10(in *input) {
	svns(3, 0, 3)(in)
	in.rules.MinModule = map[uint8]uint8{0: 2}
	l := hardwaretest.Level(5, 13, 3, tdx.UpToDate)
	l["tcb"].(object)["tdxtcbcomponents"].([]any)[1] = object{"svn": 0}
	levels(l)(in)
}

func levels(all ...object) func(*input) { return info("tcbLevels", all) }

func published(f func(*tdx.Collateral)) func(*input) { return func(in *input) { in.published = f } }

type reason = attestv1.Reason

func TestQuotesThatAreRefused(t *testing.T) {
	v, other := hardwaretest.NewIntel(t), hardwaretest.NewIntel(t)
	var all []hardwaretest.Vector
	add := func(name string, want reason, before, change func(*input)) {
		right := func(t testing.TB) *input {
			in := base(t, v)
			if before != nil {
				before(in)
			}
			return in
		}
		all = append(all, hardwaretest.Vector{Name: name, Want: want,
			Wrong: func(t testing.TB) error { in := right(t); change(in); return in.verdict(t) },
			Right: func(t testing.TB) error { return right(t).verdict(t) },
		})
	}
	quoted := func(f func([]byte) []byte) func(*input) { return func(in *input) { in.change = f } }
	pck := func(change func(*x509.Certificate)) func(*input) {
		return func(in *input) { in.td.PCK = v.NewPCK(in.t, change) }
	}
	extension := func(value []byte) func(*input) {
		return pck(func(c *x509.Certificate) { c.ExtraExtensions[0].Value = value })
	}
	platform := func(change func(*x509.Certificate)) func(*input) {
		return func(in *input) {
			vendor := *v
			vendor.Platform = v.NewPlatform(in.t, change)
			in.td.Platform, in.td.PCK, in.vendor = vendor.Platform, vendor.NewPCK(in.t, nil), &vendor
		}
	}
	signing := func(change func(*x509.Certificate)) func(*input) {
		return func(in *input) {
			vendor := *v
			vendor.Signing = v.NewSigning(in.t, change)
			in.vendor = &vendor
		}
	}
	version4 := func(in *input) { in.td.Version = 4 }

	// Form.
	add("byte after the end", hardware.Malformed, nil, quoted(func(b []byte) []byte { return append(b, 1) }))
	add("byte after zeros after the end", hardware.Malformed, nil, quoted(func(b []byte) []byte { return append(b, 0, 0, 1) }))
	add("cut off by a byte", hardware.Malformed, nil, quoted(func(b []byte) []byte { return b[:len(b)-1] }))
	add("cut off in its header", hardware.Malformed, nil, quoted(func(b []byte) []byte { return b[:47] }))
	add("more than 16 KiB", hardware.Malformed, nil, quoted(func(b []byte) []byte { return append(b, make([]byte, 17<<10-len(b))...) }))
	add("quote of version 3", hardware.Malformed, version4, header(0, 3))
	add("quote of version 6", hardware.Malformed, version4, header(0, 6))
	add("version 4 with the header of 5", hardware.Malformed, version4, header(0, 5))
	add("wrong TEE type: SGX", hardware.Malformed, nil, header(4, 0))
	add("attestation key of another type", hardware.Malformed, nil, header(2, 3))
	add("quoting enclave of another vendor", hardware.Malformed, nil, header(12, 0))
	add("body of type 1: SGX, in version 5", hardware.Malformed, nil, quoted(func(b []byte) []byte { b[48] = 1; return b }))
	add("body of type 4 in version 5", hardware.Malformed, nil, quoted(func(b []byte) []byte { b[48] = 4; return b }))
	add("body of type 4 with no bytes", hardware.Malformed, nil, quoted(func(b []byte) []byte {
		return append(append(b[:48:48], 4, 0, 0, 0, 0, 0), b[54+648:]...)
	}))
	add("body of another length than its type's", hardware.Malformed, nil, quoted(func(b []byte) []byte { b[50]++; return b }))
	add("body of type 3 with the length of type 2", hardware.Malformed, func(in *input) { in.td.Body10 = true }, quoted(func(b []byte) []byte { b[48] = 3; return b }))
	add("other certification data", hardware.Malformed, nil, func(in *input) { in.td.SignatureData = func(b []byte) { b[128] = 5 } })
	add("platform's identifiers instead of certificates", hardware.Malformed, nil, func(in *input) { in.td.SignatureData = func(b []byte) { b[134+384+64+2+32] = 1 } })
	add("auth data longer than the rest", hardware.Malformed, nil, func(in *input) { in.td.SignatureData = func(b []byte) { b[134+384+64+1] = 0xFF } })
	add("bytes between certification data and end", hardware.Malformed, nil, quoted(func(b []byte) []byte {
		at := 48 + 6 + 648
		binary.LittleEndian.PutUint32(b[at:], binary.LittleEndian.Uint32(b[at:])+1)
		return append(b, 0)
	}))
	add("bytes after the certificates", hardware.Malformed, nil, quoted(func(b []byte) []byte {
		for _, at := range []int{48 + 6 + 648, 48 + 6 + 648 + 4 + 130} {
			binary.LittleEndian.PutUint32(b[at:], binary.LittleEndian.Uint32(b[at:])+1)
		}
		return append(b, 0)
	}))
	add("text between certificates", hardware.Malformed, nil, quoted(func(b []byte) []byte { return bytes.Replace(b, []byte("-----END"), []byte("----#END"), 1) }))

	// Binding.
	add("report data of another session", hardware.Binding, nil, func(in *input) { in.want[63] ^= 1 })
	add("report data compared with nothing", hardware.Binding, nil, func(in *input) { in.data, in.want = hardware.ReportData{}, hardware.ReportData{} })
	add("empty report data", hardware.Binding, nil, func(in *input) { in.data = hardware.ReportData{} })

	// Signatures.
	add("changed measurement", hardware.Signature, nil, quoted(func(b []byte) []byte { b[54+0x88] ^= 1; return b }))
	add("changed measurement in version 4", hardware.Signature, version4, quoted(func(b []byte) []byte { b[48+0x88] ^= 1; return b }))
	add("changed header", hardware.Signature, nil, quoted(func(b []byte) []byte { b[28] ^= 1; return b }))
	add("changed signature", hardware.Signature, nil, func(in *input) { in.td.SignatureData = func(b []byte) { b[0] ^= 1 } })
	add("quoting enclave's report changed", hardware.Signature, nil, func(in *input) { in.td.SignatureData = func(b []byte) { b[134] ^= 1 } })
	add("PCK of another processor", hardware.Signature, nil, func(in *input) {
		stranger := v.NewPCK(in.t, nil)
		in.change = func(b []byte) []byte {
			before, _, _ := bytes.Cut(b, []byte("-----BEGIN"))
			at, head := len(before), before
			mine := hardwaretest.PEM(stranger.Cert, v.Platform.Cert, v.Root.Cert)
			delta := len(mine) - (len(b) - at)
			for _, field := range []int{48 + 6 + 648, 48 + 6 + 648 + 4 + 130, at - 4} {
				binary.LittleEndian.PutUint32(head[field:], uint32(int(binary.LittleEndian.Uint32(head[field:]))+delta))
			}
			return append(head, mine...)
		}
	})

	// Whose keys they are.
	add("attestation key that the quoting enclave did not certify", hardware.Untrusted, nil, func(in *input) { in.td.Certified = func(b []byte) { b[0x140] ^= 1 } })
	add("quoting enclave's report with more than a hash", hardware.Untrusted, nil, func(in *input) { in.td.Certified = func(b []byte) { b[0x17F] = 1 } })
	add("auth data that the quoting enclave did not certify", hardware.Untrusted, nil, func(in *input) { in.td.SignatureData = func(b []byte) { b[134+384+64+2] ^= 1 } })
	add("another root with the same name", hardware.Untrusted, nil, func(in *input) { in.roots = []*x509.Certificate{other.Root.Cert} })
	add("expired root", hardware.Untrusted, nil, func(in *input) {
		vendor := *v
		vendor.Root = v.NewRoot(in.t, hardwaretest.Expired)
		in.vendor, in.roots = &vendor, []*x509.Certificate{vendor.Root.Cert}
	})
	add("no root", hardware.Untrusted, nil, func(in *input) { in.roots = nil })
	add("processor below another root", hardware.Untrusted, nil, func(in *input) {
		in.td.Platform = other.Platform
		in.td.PCK = other.NewPCK(in.t, nil)
	})
	add("expired PCK", hardware.Untrusted, nil, pck(hardwaretest.Expired))
	add("PCK that is not valid yet", hardware.Untrusted, nil, pck(hardwaretest.Early))
	add("PCK of an authority", hardware.Untrusted, nil, pck(func(c *x509.Certificate) { c.IsCA, c.KeyUsage = true, x509.KeyUsageCertSign }))
	add("expired platform authority", hardware.Untrusted, nil, platform(hardwaretest.Expired))
	add("platform authority that is none", hardware.Untrusted, nil, platform(func(c *x509.Certificate) { c.IsCA, c.SubjectKeyId = false, []byte{1} }))
	add("TCB signing key as a platform's authority", hardware.Untrusted, nil, func(in *input) {
		vendor := *v
		vendor.Platform = v.Signing
		in.td.Platform, in.td.PCK = v.Signing, vendor.NewPCK(in.t, nil)
	})
	add("revoked PCK", hardware.Untrusted, nil, func(in *input) {
		in.td.PCK = v.NewPCK(in.t, nil)
		in.published = func(c *tdx.Collateral) { c.CRLs[1] = v.Platform.CRL(in.t, nil, in.td.PCK.Cert) }
	})
	add("PCK on the last of two lists of its authority", hardware.Untrusted, nil, func(in *input) {
		in.td.PCK = v.NewPCK(in.t, nil)
		in.published = func(c *tdx.Collateral) { c.CRLs = append(c.CRLs, v.Platform.CRL(in.t, nil, in.td.PCK.Cert)) }
	})
	add("revoked platform authority", hardware.Untrusted, nil, func(in *input) {
		in.published = func(c *tdx.Collateral) { c.CRLs[0] = v.Root.CRL(in.t, nil, v.Platform.Cert) }
	})
	add("PCK without its extension", hardware.Untrusted, nil, pck(func(c *x509.Certificate) { c.ExtraExtensions = nil }))
	add("PCK's extension under a longer number", hardware.Untrusted, nil, pck(func(c *x509.Certificate) { c.ExtraExtensions[0].Id = hardwaretest.SGX(1) }))
	add("TCB component under a longer number", hardware.Untrusted, nil, extension(hardwaretest.PCKExtension(hardwaretest.FMSPC, "0000", 5, 13, 16)))
	add("FMSPC twice", hardware.Untrusted, nil, func(in *input) {
		var all []asn1.RawValue
		if _, err := asn1.Unmarshal(hardwaretest.PCKExtension(hardwaretest.FMSPC, "0000", 5, 13), &all); err != nil {
			in.t.Fatal(err)
		}
		twice, err := asn1.Marshal(append(all, all[3]))
		if err != nil {
			in.t.Fatal(err)
		}
		extension(twice)(in)
	})
	add("PCK's extension with a TCB component of 256", hardware.Untrusted, nil, extension(hardwaretest.PCKExtension(hardwaretest.FMSPC, "0000", 256, 13)))
	add("PCK's extension with an FMSPC of 5 bytes", hardware.Untrusted, nil, extension(hardwaretest.PCKExtension("90c06f0000", "0000", 5, 13)))

	// The quoting enclave's identity.
	add("enclave of another signer", hardware.Untrusted, nil, qe(0x80, 1))
	add("another enclave of that signer", hardware.Untrusted, nil, qe(0x100, 1))
	add("debug quoting enclave", hardware.Untrusted, nil, qe(0x30, 0x17))
	add("quoting enclave with another MISCSELECT", hardware.Untrusted, nil, qe(0x10, 1))
	add("identity whose mask has another length than the attributes", hardware.Untrusted, nil, identity("attributesMask", "FBFFFFFFFFFFFFFF000000000000000000"))
	add("quoting enclave's identity unverified: none published", hardware.Collateral, nil, published(func(c *tdx.Collateral) { c.QEIdentity = nil }))
	add("identity of Intel's SGX quoting enclave", hardware.Collateral, nil, identity("id", "QE"))
	add("identity without a product", hardware.Collateral, nil, identity("isvprodid", nil))
	add("TDX module of another signer", hardware.Untrusted, nil, body(0x040, 1))
	add("TDX module with other SEAM attributes", hardware.Untrusted, nil, body(0x070, 1))
	add("TDX 1.0 module of another signer", hardware.Untrusted, module10, func(in *input) {
		in.td.Body = func(b []byte) { copy(b, []byte{3, 0}); copy(b[0x248:], []byte{3, 0}); b[0x040] = 1 }
	})

	// Collateral.
	for _, which := range []string{"TCB info", "enclave identity"} {
		set := info
		if which == "enclave identity" {
			set = identity
		}
		answer := func(c *tdx.Collateral) *[]byte {
			if which == "TCB info" {
				return &c.TCBInfo[0]
			}
			return &c.QEIdentity
		}
		add("expired "+which, hardware.Collateral, nil, set("nextUpdate", hardwaretest.Now.Add(-time.Second)))
		add(which+" of the future", hardware.Collateral, nil, set("issueDate", hardwaretest.Now.Add(time.Second)))
		add(which+" without an end", hardware.Collateral, nil, func(in *input) { set("nextUpdate", nil)(in) })
		add(which+" of another version", hardware.Collateral, nil, set("version", 1))
		add(which+" changed after it was signed", hardware.Collateral, nil, published(func(c *tdx.Collateral) {
			a := answer(c)
			*a = bytes.Replace(*a, []byte("UpToDate"), []byte("UpToDatE"), 1)
		}))
		add(which+" without a signature", hardware.Collateral, nil, published(func(c *tdx.Collateral) {
			a := answer(c)
			*a = bytes.Replace(*a, []byte(`"signature"`), []byte(`"signaturE_"`), 1)
		}))
		add(which+" signed by the key of another vendor", hardware.Collateral, nil, func(in *input) {
			in.published = func(c *tdx.Collateral) {
				if which == "TCB info" {
					c.TCBInfo[0] = other.Signing.Answer(in.t, "tcbInfo", in.info)
				} else {
					c.QEIdentity = other.Signing.Answer(in.t, "enclaveIdentity", in.qe)
				}
			}
		})
	}
	chain := func(list ...*x509.Certificate) func(*input) {
		return published(func(c *tdx.Collateral) { c.TCBInfoChain = hardwaretest.PEM(list...) })
	}
	add("TCB info of another processor model only", hardware.Collateral, nil, info("fmspc", "50806f000000"))
	add("TCB info of another PCE", hardware.Collateral, nil, info("pceId", "0001"))
	add("TCB info of SGX", hardware.Collateral, nil, info("id", "SGX"))
	add("TCB info without a type", hardware.Collateral, nil, info("tcbType", nil))
	add("TCB info of an unknown type", hardware.Collateral, nil, info("tcbType", 1))
	add("no TCB info", hardware.Collateral, nil, published(func(c *tdx.Collateral) { c.TCBInfo = nil }))
	add("no certificates of the TCB info", hardware.Collateral, nil, published(func(c *tdx.Collateral) { c.TCBInfoChain = nil }))
	add("TCB info of another root", hardware.Collateral, nil, chain(other.Signing.Cert, other.Root.Cert))
	add("TCB signing key below another root with the same name", hardware.Collateral, nil, chain(other.Signing.Cert, v.Root.Cert))
	add("expired TCB signing key", hardware.Collateral, nil, signing(hardwaretest.Expired))
	add("TCB info signed by an authority", hardware.Collateral, nil, signing(func(c *x509.Certificate) { c.IsCA, c.KeyUsage = true, x509.KeyUsageCertSign }))
	add("TCB info signed by a processor's key", hardware.Collateral, nil, signing(func(c *x509.Certificate) {
		c.ExtraExtensions = []pkix.Extension{{Id: hardwaretest.SGX(), Value: hardwaretest.PCKExtension(hardwaretest.FMSPC, "0000", 5, 13)}}
	}))
	add("TCB info signed by a key for something else", hardware.Collateral, nil, signing(func(c *x509.Certificate) { c.Subject.CommonName = "Intel SGX Something" }))
	add("revoked TCB signing key", hardware.Untrusted, nil, func(in *input) {
		in.published = func(c *tdx.Collateral) { c.CRLs[0] = v.Root.CRL(in.t, nil, v.Signing.Cert) }
	})
	add("no revocation list of the root", hardware.Collateral, nil, published(func(c *tdx.Collateral) { c.CRLs = c.CRLs[1:] }))
	add("no revocation list of the platform authority", hardware.Collateral, nil, published(func(c *tdx.Collateral) { c.CRLs = c.CRLs[:1] }))
	for i, which := range []string{"root", "platform authority"} {
		who := func() *hardwaretest.Authority { return []*hardwaretest.Authority{v.Root, v.Platform}[i] }
		list := func(change func(*x509.RevocationList)) func(*input) {
			return func(in *input) { in.published = func(c *tdx.Collateral) { c.CRLs[i] = who().CRL(in.t, change) } }
		}
		add("expired revocation list of the "+which, hardware.Collateral, nil, list(func(l *x509.RevocationList) { l.NextUpdate = hardwaretest.Now.Add(-time.Second) }))
		add("revocation list of the "+which+" by another with its name", hardware.Collateral, nil, func(in *input) {
			in.published = func(c *tdx.Collateral) {
				c.CRLs[i] = []*hardwaretest.Authority{other.Root, other.Platform}[i].CRL(in.t, nil)
			}
		})
	}
	add("unknown TCB status", hardware.Collateral, nil, levels(hardwaretest.Level(5, 13, 3, "Splendid")))
	add("TCB data of an older evaluation", hardware.Collateral, nil, info("tcbEvaluationDataNumber", 17))

	// TCB.
	accept := func(s ...tdx.Status) func(*input) {
		return func(in *input) { in.rules.Statuses = append(in.rules.Statuses, s...) }
	}
	add("SGX component below all levels", hardware.TCB, nil, levels(sgxComponent(15, 6)))
	add("TDX component below all levels", hardware.TCB, nil, levels(hardwaretest.Level(5, 13, 4, tdx.UpToDate)))
	add("TDX component that is not the module's below all levels", hardware.TCB, nil, func(in *input) {
		l := hardwaretest.Level(5, 13, 3, tdx.UpToDate)
		l["tcb"].(object)["tdxtcbcomponents"].([]any)[2] = object{"svn": 4}
		levels(l)(in)
	})
	add("PCE SVN below all levels", hardware.TCB, nil, levels(hardwaretest.Level(5, 14, 3, tdx.UpToDate)))
	add("level with 15 components", hardware.TCB, nil, func(in *input) {
		l := hardwaretest.Level(5, 13, 3, tdx.UpToDate)
		tcb := l["tcb"].(object)
		tcb["sgxtcbcomponents"] = tcb["sgxtcbcomponents"].([]any)[:15]
		levels(l)(in)
	})
	add("level without PCE SVN", hardware.TCB, nil, func(in *input) {
		l := hardwaretest.Level(5, 13, 3, tdx.UpToDate)
		delete(l["tcb"].(object), "pcesvn")
		levels(l)(in)
	})
	add("level with a component without SVN", hardware.TCB, nil, func(in *input) {
		l := hardwaretest.Level(5, 13, 3, tdx.UpToDate)
		l["tcb"].(object)["tdxtcbcomponents"].([]any)[9] = object{}
		levels(l)(in)
	})
	add("module of TDX 1.0 below all levels", hardware.TCB, module10, svns(2, 0, 3))
	for _, s := range []tdx.Status{tdx.OutOfDate, tdx.SWHardeningNeeded, tdx.ConfigurationNeeded, tdx.ConfigurationAndSWHardeningNeeded, tdx.OutOfDateConfigurationNeeded} {
		add("platform "+string(s), hardware.TCB, nil, levels(hardwaretest.Level(5, 13, 3, s)))
	}
	add("revoked TCB, whatever the rules accept", hardware.TCB, accept(tdx.Revoked), levels(hardwaretest.Level(5, 13, 3, tdx.Revoked)))
	add("quoting enclave out of date", hardware.TCB, nil, qe(0x102, 3))
	add("quoting enclave below all levels", hardware.TCB, accept(tdx.OutOfDate), qe(0x102, 2))
	add("TDX module out of date", hardware.TCB, func(in *input) { in.rules.MinModule = map[uint8]uint8{1: 4} }, svns(5, 1))
	add("TDX module below all levels", hardware.TCB, func(in *input) {
		accept(tdx.OutOfDate)(in)
		in.rules.MinModule = map[uint8]uint8{1: 0}
	}, svns(3, 1))
	add("TDX module that Intel does not list", hardware.TCB, func(in *input) { in.rules.MinModule = map[uint8]uint8{1: 0, 2: 0} }, svns(6, 2))
	add("loaded TDX module out of date", hardware.TCB, func(in *input) { in.rules.MinModule = map[uint8]uint8{1: 4} }, body(0x248, 5, 1))
	add("TDX module below the rules' minimum", hardware.TCB, nil, func(in *input) { in.rules.MinModule = map[uint8]uint8{1: 7} })
	add("loaded TDX module below the rules' minimum", hardware.TCB, func(in *input) {
		svns(7, 1)(in)
		in.rules.MinModule = map[uint8]uint8{1: 7}
	}, func(in *input) { in.td.Body = func(b []byte) { b[0], b[0x248] = 7, 6 } })

	add("TD started under a module below the rules' minimum", hardware.TCB, func(in *input) {
		svns(7, 1)(in)
		in.rules.MinModule = map[uint8]uint8{1: 7}
	}, func(in *input) { in.td.Body = func(b []byte) { b[0], b[0x248] = 6, 7 } })

	// Rules.
	add("debug TD", hardware.Policy, func(in *input) { in.rules.AllowAttributes = tdx.AttributeDebug }, attributes(tdx.AttributeDebug|tdx.AttributeSEPTVEDisable))
	add("TD without SEPT_VE_DISABLE", hardware.Policy, nil, attributes(0))
	add("TD with an attribute that is not allowed", hardware.Policy, nil, attributes(tdx.AttributeSEPTVEDisable|tdx.AttributePKS))
	add("TDX module of a version that the policy does not name", hardware.Policy, nil, svns(3, 3))
	add("valid platform that the policy does not name: MRTD", hardware.Policy, nil, func(in *input) { in.rules.MRTDs = [][48]byte{{1}} })
	add("rules that are empty", hardware.TCB, nil, func(in *input) { in.rules = tdx.Rules{} })

	hardwaretest.Refused(t, "TDX", append(all, capturedVectors(t, v)...))
}

// sgxComponent returns a level whose SGX component i is svn, the others 5.
func sgxComponent(i, svn int) object {
	l := hardwaretest.Level(5, 13, 3, tdx.UpToDate)
	l["tcb"].(object)["sgxtcbcomponents"].([]any)[i] = object{"svn": svn}
	return l
}

// Each form that quotes may have is accepted: versions, bodies, statuses of the rules, padding.
func TestEveryFormIsAccepted(t *testing.T) {
	v := hardwaretest.NewIntel(t)
	for name, change := range map[string]func(*input){
		"version 5, TD of 1.5": func(*input) {},
		"version 5, TD of 1.0": func(in *input) { in.td.Body10 = true },
		"version 4":            func(in *input) { in.td.Version = 4 },
		"zeros after the end":  func(in *input) { in.change = func(b []byte) []byte { return append(b, make([]byte, 3065)...) } },
		"TDX 1.0 module":       module10,
		"newer module loaded":  body(0x248, 9, 1),
		"another module version": func(in *input) {
			svns(3, 3)(in)
			in.rules.MinModule = map[uint8]uint8{3: 3}
		},
	} {
		in := base(t, v)
		change(in)
		if err := in.verdict(t); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, s := range tdx.Statuses {
		in := base(t, v)
		levels(hardwaretest.Level(5, 13, 3, s))(in)
		in.rules.Statuses = append(in.rules.Statuses, s)
		if err := in.verdict(t); err != nil {
			t.Errorf("%s: %v", s, err)
		}
	}
}

// Levels are taken in Intel's order: the first that fits, part by part.
func TestALevelIsTheFirstThatFits(t *testing.T) {
	v := hardwaretest.NewIntel(t)
	for _, tt := range []struct {
		levels []object
		want   tdx.Status
	}{
		{[]object{sgxComponent(0, 6), hardwaretest.Level(5, 13, 3, tdx.OutOfDate)}, tdx.OutOfDate},
		{[]object{hardwaretest.Level(5, 13, 3, tdx.SWHardeningNeeded), hardwaretest.Level(0, 0, 0, tdx.OutOfDate)}, tdx.SWHardeningNeeded},
		{[]object{sgxComponent(15, 6), sgxComponent(7, 6), hardwaretest.Level(4, 0, 0, tdx.ConfigurationNeeded)}, tdx.ConfigurationNeeded},
	} {
		in := base(t, v)
		levels(tt.levels...)(in)
		in.info["tcbLevels"] = tt.levels
		q, err := tdx.Verify(v.Quote(t, in.td, in.data), in.want, v.Collateral(t, in.info, in.qe), in.roots, in.now)
		if err != nil {
			t.Fatal(err)
		}
		if q.Levels[0].Status != tt.want || q.Levels[0].Part != "platform" {
			t.Errorf("%+v, want %s", q.Levels, tt.want)
		}
	}
}

func TestEmptyRulesAndQuotesAcceptNothing(t *testing.T) {
	all := tdx.Rules{Statuses: tdx.Statuses, MinModule: map[uint8]uint8{0: 0}, AnyMRTD: true}
	for name, q := range map[string]*tdx.Quote{"none": nil, "zero": {}} {
		if err := all.Check(q); attest.ReasonOf(err) != hardware.Policy {
			t.Errorf("%s: %v", name, err)
		}
	}
	if slices.Contains(tdx.Statuses, tdx.Revoked) {
		t.Error("rules may accept a revoked TCB")
	}
}
