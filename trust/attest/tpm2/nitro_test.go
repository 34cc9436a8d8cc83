package tpm2_test

import (
	"bytes"
	"context"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	gotpm "github.com/google/go-tpm/tpm2"
	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/tpm"
)

// nitro is a machine with a NitroTPM. change may be nil.
func nitro(change func(*attesttest.Nitro)) attesttest.Options {
	n := &attesttest.Nitro{}
	if change != nil {
		change(n)
	}
	return attesttest.Options{Nitro: n}
}

// nitroField changes a field of the document before it is signed; nil removes it.
func nitroField(name string, value any) attesttest.Options {
	return nitro(func(n *attesttest.Nitro) {
		n.Payload = func(fields map[string]any) {
			if fields[name] = value; value == nil {
				delete(fields, name)
			}
		}
	})
}

// nitroPCR changes the PCRs in the document before it is signed.
func nitroPCR(change func(map[uint64][]byte)) attesttest.Options {
	return nitro(func(n *attesttest.Nitro) {
		n.Payload = func(fields map[string]any) { change(fields["nitrotpm_pcrs"].(map[uint64][]byte)) }
	})
}

func nitroCertificate(change func(*x509.Certificate)) attesttest.Options {
	return nitro(func(n *attesttest.Nitro) { n.Certificate = change })
}

func nitroEvidence(change func(*attestv1.Tpm2Evidence)) attesttest.Options {
	o := nitro(nil)
	o.Tamper = evidence(change)
	return o
}

// nitroRoot returns a change of a policy that lists the authority of documents, and no other.
func nitroRoot(ca *attesttest.CA, machines ...string) func(*attestv1.Policy) {
	return func(p *attestv1.Policy) {
		p.Tpm2.EkRoots = nil
		p.Tpm2.NitroRoots = append(p.Tpm2.NitroRoots, &attestv1.NitroRoot{Pem: ca.PEM(), MachineIds: machines})
	}
}

// Invariant A6.
func TestANitroDocumentIsAppraisedByItsRule(t *testing.T) {
	ca, other := attesttest.NewCA(t), attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, nitro(nil))
	ours := m.ID().String()
	theirs := strings.Repeat("0c", 32)
	c := claimsOf(t, m, ca)
	if i := c.Instance(); c.Endorsement() != "nitro-tpm" || c.Machine() != m.ID() || i.Provider != "aws" || i.Name != "i-0123456789abcdef0" || !c.Root().Equal(ca.Root()) || c.EKKind() != attest.EKP256 || c.EKPublic() != nil {
		t.Errorf("%s, %s, %+v, %s", c.Endorsement(), c.Machine(), i, c.EKKind())
	}
	const accepted, unlisted = attestv1.Reason_REASON_ACCEPTED, attestv1.Reason_REASON_POLICY_REFUSED
	revoke := func(key [32]byte) func(*attestv1.Policy) {
		return func(p *attestv1.Policy) {
			p.Tpm2.Revoked = &attestv1.Revoked{Keys: []string{hex.EncodeToString(key[:])}}
		}
	}
	anyMachine := func(p *attestv1.Policy) { p.Insecure = &attestv1.InsecureSwitches{AnyMachine: true} }
	ekRoot := func(p *attestv1.Policy) {
		p.Tpm2.EkRoots = []*attestv1.EkRoot{{Pem: ca.PEM(), Operator: true, Key: "ecc-p256"}}
	}
	platform := func(p *attestv1.Policy) {
		p.Tpm2.EkRoots, p.Tpm2.PlatformRoots = nil, []*attestv1.PlatformRoot{{Pem: ca.PEM(), Provider: "gcp", Key: "ecc-p256", MachineIds: []string{ours}}}
	}
	appraisedAs(t, "NitroTPM, rules", ca, m, map[string]appraised{
		"listed":                          {c, []func(*attestv1.Policy){nitroRoot(ca, ours)}, accepted},
		"not listed":                      {c, []func(*attestv1.Policy){nitroRoot(ca, theirs)}, unlisted},
		"any machine":                     {c, []func(*attestv1.Policy){nitroRoot(ca), anyMachine}, accepted},
		"below another root":              {c, []func(*attestv1.Policy){nitroRoot(other, ours)}, badEK},
		"below another root, any machine": {c, []func(*attestv1.Policy){nitroRoot(other), anyMachine}, badEK},
		"listed for another root":         {c, []func(*attestv1.Policy){nitroRoot(ca, theirs), nitroRoot(other, ours)}, unlisted},
		"in the second of two certificates of one authority": {c, []func(*attestv1.Policy){nitroRoot(ca, theirs), nitroRoot(ca.Renewed(t), ours)}, accepted},
		"in the second rule of its root":                     {c, []func(*attestv1.Policy){nitroRoot(ca, theirs), nitroRoot(ca, ours)}, accepted},
		"without a rule":                                     {c, []func(*attestv1.Policy){ekRoot}, badEK},
		"as if with a platform key":                          {c, []func(*attestv1.Policy){platform}, badEK},
		"as if without a certificate":                        {c, []func(*attestv1.Policy){nitroRoot(ca, theirs), lists(m.ID())}, unlisted},
		"revoked by its ID":                                  {c, []func(*attestv1.Policy){nitroRoot(ca, theirs), revoke(m.ID())}, badEK},
		"whose document's key is revoked":                    {c, []func(*attestv1.Policy){nitroRoot(ca, ours), revoke(c.Chain()[0].Key)}, badEK},
		"whose authority is revoked":                         {c, []func(*attestv1.Policy){nitroRoot(ca, ours), revoke(sha256.Sum256(ca.Root().RawSubjectPublicKeyInfo))}, badEK},
		"of a policy for another bank":                       {c, []func(*attestv1.Policy){nitroRoot(ca, ours), bankSHA256}, unlisted},
	}, func(appraised) []func(*attestv1.Policy) { return []func(*attestv1.Policy){nitroRoot(ca, ours)} })
	t.Run("the rule accepts nothing else", func(t *testing.T) {
		for name, o := range map[string]attesttest.Options{"an EK certificate": {Bank: tpm.SHA384}, "a platform key": {Bank: tpm.SHA384, Platform: &attesttest.Platform{Project: "ours", Zone: "a"}}} {
			other := attesttest.NewMachine(t, ca, o)
			p := attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{m}, nitroRoot(ca, other.ID().String()))
			if _, err := p.Appraise(claimsOf(t, other, ca), attest.Unlocked()); attest.ReasonOf(err) != badEK {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}

// bankSHA256 makes a policy one for the bank SHA-256, of any values.
func bankSHA256(p *attestv1.Policy) {
	p.Tpm2.Bank = "sha256"
	for _, i := range p.GetTpm2().GetImages() {
		cut(i.GetPcrs())
	}
	for _, c := range p.GetTpm2().GetClasses() {
		cut(c.GetPcrs())
	}
}

func cut(pcrs []*attestv1.PcrValue) {
	for _, v := range pcrs {
		v.Value = v.GetValue()[:64]
	}
}

func TestNitroDocumentsThatAreRefused(t *testing.T) {
	ca := attesttest.NewCA(t)
	other := attesttest.NewMachine(t, ca, nitro(func(n *attesttest.Nitro) { n.Module = "i-0fedcba9876543210-tpm0000000000000000" }))
	b := attest.Binding{1}
	theirs := attestOf(t, other, b)
	ek, err := attesttest.NewMachine(t, ca, attesttest.Options{}).EndorsementKey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	point := func(fields map[string]any) {
		spki := fields["public_key"].([]byte)
		fields["public_key"] = spki[len(spki)-65:]
	}
	accepted := attestv1.Reason_REASON_ACCEPTED
	chained := func(change func(*x509.Certificate)) attesttest.Options {
		return nitro(func(n *attesttest.Nitro) { n.CA = ca.Intermediate(t, nil).Intermediate(t, nil).Intermediate(t, change) })
	}
	refusedAs(t, "NitroTPM", ca, b, map[string]verdict{
		"no change":                 {nitro(nil), accepted},
		"three issuers, as AWS has": {chained(nil), accepted},
		"four issuers": {nitro(func(n *attesttest.Nitro) {
			n.CA = ca.Intermediate(t, nil).Intermediate(t, nil).Intermediate(t, nil).Intermediate(t, nil)
		}), malformed},
		"an enclave's PCRs": {nitro(func(n *attesttest.Nitro) {
			n.Payload = func(f map[string]any) { f["pcrs"] = f["nitrotpm_pcrs"]; delete(f, "nitrotpm_pcrs") }
		}), badEK},
		"an enclave's PCRs, too":            {nitroField("pcrs", map[uint64][]byte{}), badEK},
		"an enclave's module":               {nitro(func(n *attesttest.Nitro) { n.Module = "i-0123456789abcdef0-enc0123456789abcdef" }), badEK},
		"no module":                         {nitroField("module_id", nil), badEK},
		"another module":                    {nitroField("module_id", "i-0fedcba9876543210-tpm0000000000000000"), badEK},
		"a certificate for another module":  {nitroCertificate(func(c *x509.Certificate) { c.Subject.CommonName = "i-0fedcba9876543210-tpm0000000000000000.region.aws" }), badEK},
		"a certificate for a longer module": {nitroCertificate(func(c *x509.Certificate) { c.Subject.CommonName = attesttest.NitroModule + "0.region.aws" }), badEK},
		"another session":                   {nitroField("nonce", make([]byte, 32)), badBinding},
		"no session":                        {nitroField("nonce", nil), badBinding},
		"an empty session":                  {nitroField("nonce", []byte{}), badBinding},
		"a session cut short": {nitro(func(n *attesttest.Nitro) {
			n.Payload = func(f map[string]any) { f["nonce"] = f["nonce"].([]byte)[:31] }
		}), badBinding},
		"another program's":                    {nitroField("user_data", []byte("another")), badBinding},
		"another program's, without user data": {nitroField("user_data", nil), badBinding},
		"no key":                               {nitroField("public_key", nil), badAK},
		"an empty key":                         {nitroField("public_key", []byte{}), badAK},
		"another key": {nitro(func(n *attesttest.Nitro) {
			n.Payload = func(f map[string]any) {
				f["public_key"] = bytes.ReplaceAll(f["public_key"].([]byte), []byte{4}, []byte{5})
			}
		}), badAK},
		"the key in another encoding":                      {nitro(func(n *attesttest.Nitro) { n.Payload = point }), badAK},
		"another machine's document, that of this session": {nitroEvidence(func(e *attestv1.Tpm2Evidence) { e.NitroDocument = theirs.GetNitroDocument() }), badAK},
		"another machine's quote": {nitroEvidence(func(e *attestv1.Tpm2Evidence) {
			d := e.GetNitroDocument()
			proto.Reset(e)
			proto.Merge(e, theirs)
			e.NitroDocument = d
		}), badAK},
		"another value of PCR 0":  {nitroPCR(func(p map[uint64][]byte) { p[0] = make([]byte, 48) }), badSig},
		"another value of PCR 15": {nitroPCR(func(p map[uint64][]byte) { p[15] = bytes.Repeat([]byte{1}, 48) }), badSig},
		"another value of PCR 16": {nitroPCR(func(p map[uint64][]byte) { p[16] = bytes.Repeat([]byte{1}, 48) }), accepted},
		"a longer value":          {nitroPCR(func(p map[uint64][]byte) { p[4] = append(bytes.Clone(p[4]), 0) }), badSig},
		"without PCR 12":          {nitroPCR(func(p map[uint64][]byte) { delete(p, 12) }), badSig},
		"without PCRs":            {nitroField("nitrotpm_pcrs", nil), badSig},
		"another digest":          {nitroField("digest", "SHA256"), malformed},
		"no digest":               {nitroField("digest", nil), malformed},
		"10 minutes old":          {nitroField("timestamp", uint64(time.Now().Add(-10*time.Minute).UnixMilli())), badEK},
		"of the future":           {nitroField("timestamp", uint64(time.Now().Add(10*time.Minute).UnixMilli())), badEK},
		"without a time":          {nitroField("timestamp", nil), badEK},
		"an expired certificate": {nitroCertificate(func(c *x509.Certificate) {
			c.NotBefore, c.NotAfter = time.Now().Add(-3*time.Hour), time.Now().Add(-time.Minute)
		}), badEK},
		"a certificate of tomorrow":       {nitroCertificate(func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Minute) }), badEK},
		"a certificate of an authority":   {nitroCertificate(func(c *x509.Certificate) { c.IsCA = true; c.KeyUsage |= x509.KeyUsageCertSign }), badEK},
		"a certificate that may not sign": {nitroCertificate(func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageKeyAgreement }), badEK},
		"a key on P-256": {nitro(func(n *attesttest.Nitro) {
			n.Curve = elliptic.P256()
			n.Sign1 = func(e []any) []any { e[3] = append(e[3].([]byte), make([]byte, 32)...); return e }
		}), badEK},
		"another root":                   {nitro(func(n *attesttest.Nitro) { n.CA = attesttest.NewCA(t) }), badEK},
		"an issuer that is no authority": {chained(func(c *x509.Certificate) { c.IsCA = false }), badEK},
		"an expired issuer": {chained(func(c *x509.Certificate) {
			c.NotBefore, c.NotAfter = time.Now().Add(-3*time.Hour), time.Now().Add(-time.Minute)
		}), badEK},
		"no certificate":             {nitroField("certificate", nil), malformed},
		"a certificate that is none": {nitroField("certificate", []byte("x")), malformed},
		"no issuers": {nitro(func(n *attesttest.Nitro) {
			n.CA = ca.Intermediate(t, nil)
			n.Payload = func(f map[string]any) { delete(f, "cabundle") }
		}), badEK},
		"a changed signature":   {nitro(func(n *attesttest.Nitro) { n.Sign1 = func(e []any) []any { e[3].([]byte)[95] ^= 1; return e } }), badSig},
		"a signature of zeros":  {nitro(func(n *attesttest.Nitro) { n.Sign1 = func(e []any) []any { e[3] = make([]byte, 96); return e } }), badSig},
		"another algorithm":     {nitro(func(n *attesttest.Nitro) { n.Sign1 = func(e []any) []any { e[0] = []byte{0xA1, 0x01, 0x26}; return e } }), malformed},
		"an unprotected header": {nitro(func(n *attesttest.Nitro) { n.Sign1 = func(e []any) []any { e[1] = map[int]any{1: -35}; return e } }), malformed},
		"a changed payload": {nitro(func(n *attesttest.Nitro) {
			n.Sign1 = func(e []any) []any {
				e[2] = bytes.Replace(e[2].([]byte), []byte("SHA384"), []byte("SHA256"), 1)
				return e
			}
		}), malformed},
		"a time changed after it was signed": {nitro(func(n *attesttest.Nitro) {
			n.Sign1 = func(e []any) []any {
				p := e[2].([]byte)
				p[bytes.Index(p, []byte("timestamp"))+len("timestamp")+8] ^= 1 // the last byte: less than a second
				return e
			}
		}), badSig},
		"a tag":                    {nitro(func(n *attesttest.Nitro) { n.Document = func(b []byte) []byte { return append([]byte{0xD2}, b...) } }), malformed},
		"bytes behind it":          {nitro(func(n *attesttest.Nitro) { n.Document = func(b []byte) []byte { return append(b, 0) } }), malformed},
		"bytes behind the payload": {nitro(func(n *attesttest.Nitro) { n.Encoded = func(b []byte) []byte { return append(b, 0) } }), malformed},
		"a payload of indefinite length, as AWS has": {nitro(func(n *attesttest.Nitro) { n.Encoded = func(b []byte) []byte { b[0] = 0xBF; return append(b, 0xFF) } }), accepted},
		"a field more, within 8 KiB":                 {nitroField("new", make([]byte, 4<<10)), accepted},
		"more than 8 KiB":                            {nitroField("new", make([]byte, 8<<10)), malformed},
		"an EK certificate beside it":                {nitroEvidence(func(e *attestv1.Tpm2Evidence) { e.EkCertificates = ek.Certificates }), malformed},
		"a bare EK beside it":                        {nitroEvidence(func(e *attestv1.Tpm2Evidence) { e.EkPublic = []byte{1} }), malformed},
		"a platform key beside it":                   {nitroEvidence(func(e *attestv1.Tpm2Evidence) { e.PlatformKey = &attestv1.PlatformKey{} }), malformed},
	}, nitro(nil), capturedDocuments(func(t testing.TB) error {
		ev := &attestv1.Evidence{Format: tpmFormat, Body: &attestv1.Evidence_Tpm2{Tpm2: proto.CloneOf(theirs)}}
		_, err := attesttest.Verifier(t, ca).Verify(t.Context(), ev, attest.NewStatement(attest.PurposeMachine, b), b)
		return err
	})...)
	t.Run("evidence of an old session", func(t *testing.T) {
		fresh := attest.Binding{2}
		v := attesttest.Verifier(t, ca)
		mixed := attestOf(t, other, fresh)
		ev := &attestv1.Evidence{Format: tpmFormat, Body: &attestv1.Evidence_Tpm2{Tpm2: mixed}}
		if _, err := v.Verify(t.Context(), ev, attest.NewStatement(attest.PurposeMachine, fresh), fresh); err != nil {
			t.Error(err)
		}
		mixed.NitroDocument = theirs.GetNitroDocument() // the quote is new, and the document old
		if _, err := v.Verify(t.Context(), ev, attest.NewStatement(attest.PurposeMachine, fresh), fresh); attest.ReasonOf(err) != badBinding {
			t.Error(err)
		}
	})
	t.Run("statements that share a quote", func(t *testing.T) {
		bindings := []attest.Binding{{3}, {4}, {5}}
		a := other.Attester(attest.PurposeMachine).(interface {
			AttestAll(ctx context.Context, f attestv1.Format, b []attest.Binding) ([]*attestv1.Evidence, error)
		})
		all, err := a.AttestAll(t.Context(), tpmFormat, bindings)
		if err != nil {
			t.Fatal(err)
		}
		for i, ev := range all {
			if _, err := attesttest.Verifier(t, ca).Verify(t.Context(), ev, attest.NewStatement(attest.PurposeMachine, bindings[i]), bindings[i]); err != nil {
				t.Error(err)
			}
		}
	})
}

// unchecked is a machine whose attester quotes another bank than its document has, as only another
// program would.
type unchecked struct{ *attesttest.Machine }

func (u unchecked) Quote(ctx context.Context, extraData [32]byte, _ tpm.Bank) (tpm.Quote, error) {
	return u.Machine.Quote(ctx, extraData, tpm.SHA256)
}

func TestOnlyTheBankOfTheDocumentIsAccepted(t *testing.T) {
	ca := attesttest.NewCA(t)
	b := attest.Binding{1}
	for _, bank := range []tpm.Bank{tpm.SHA256, tpm.SHA384, tpm.SHA512} {
		o := nitro(nil)
		o.Bank = bank
		_, err := attesttest.NewMachine(t, ca, o).Attester(attest.PurposeMachine).Attest(t.Context(), tpmFormat, b)
		if (err == nil) != (bank == tpm.SHA384) || err != nil && !strings.Contains(err.Error(), "set tpm.bank of its image.yaml to sha384") {
			t.Errorf("%s: %v", bank, err)
		}
	}
	m := attesttest.NewMachine(t, ca, nitro(nil))
	for name, tt := range map[string]struct {
		tpm  tpm.Device
		want attestv1.Reason
	}{
		"SHA-256": {unchecked{m}, malformed},
		"SHA-384": {m, attestv1.Reason_REASON_ACCEPTED},
	} {
		a, err := tpm2.NewAttester(tpm2.Config{TPM: tt.tpm, Purpose: attest.PurposeMachine, Bank: tpm.SHA384})
		if err != nil {
			t.Fatal(err)
		}
		ev, err := a.Attest(t.Context(), tpmFormat, b)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := attesttest.Verifier(t, ca).Verify(t.Context(), ev, attest.NewStatement(attest.PurposeMachine, b), b); attest.ReasonOf(err) != tt.want {
			t.Errorf("%s: %v, want %s", name, err, attest.ReasonName(tt.want))
		}
	}
}

// Software on the instance chooses the key that a document names. It is no other machine with another
// key (A8).
func TestOneNitroTPMIsOneMachine(t *testing.T) {
	ca := attesttest.NewCA(t)
	one, two := attesttest.NewMachine(t, ca, nitro(nil)), attesttest.NewMachine(t, ca, nitro(nil))
	other := attesttest.NewMachine(t, ca, nitro(func(n *attesttest.Nitro) { n.Module = "i-0fedcba9876543210-tpm0000000000000000" }))
	a, b, c := claimsOf(t, one, ca), claimsOf(t, two, ca), claimsOf(t, other, ca)
	if a.Machine() != b.Machine() || bytes.Equal(a.AKName(), b.AKName()) {
		t.Errorf("one instance is %s and %s", a.Machine(), b.Machine())
	}
	if a.Machine() == c.Machine() {
		t.Error("two instances have one ID")
	}
	id, name, err := tpm2.Identity(t.Context(), one)
	if err != nil || id != a.Machine() || name != "nitro-tpm" {
		t.Errorf("%s, %q, %v", id, name, err)
	}
}

// broken is a NitroTPM that makes no document.
type broken struct{ *attesttest.Machine }

func (broken) NitroDocument(context.Context, [32]byte) ([]byte, error) {
	return nil, gotpm.TPMRCCommandCode
}

// garbled is one that makes another one.
type garbled struct{ *attesttest.Machine }

func (garbled) NitroDocument(context.Context, [32]byte) ([]byte, error) { return []byte{0x80}, nil }

// A machine with a NitroTPM never falls back to its endorsement key (A8).
func TestANitroTPMThatMakesNoDocumentAttestsByNothingElse(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	attester := func(d tpm.Device) attest.Attester {
		a, err := tpm2.NewAttester(tpm2.Config{TPM: d, Purpose: attest.PurposeMachine, Bank: tpm.SHA384})
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	if _, err := attester(m).Attest(t.Context(), tpmFormat, attest.Binding{1}); err != nil {
		t.Error(err)
	}
	if _, err := attester(broken{m}).Attest(t.Context(), tpmFormat, attest.Binding{1}); err == nil {
		t.Error("it attests by its endorsement key")
	}
	for _, d := range []tpm2.Endorser{broken{m}, garbled{m}} {
		if id, name, err := tpm2.Identity(t.Context(), d); err == nil {
			t.Errorf("it is %s by %s", id, name)
		}
	}
}

// counted counts the documents that are requested.
type counted struct {
	*attesttest.Machine
	err error // of each
	n   int
}

func (c *counted) NitroDocument(ctx context.Context, nonce [32]byte) ([]byte, error) {
	c.n++
	if c.err != nil {
		return nil, c.err
	}
	return c.Machine.NitroDocument(ctx, nonce)
}

// A session needs a document before its peer has proven anything.
func TestDocumentsAreRequestedOnceASecond(t *testing.T) {
	for name, tt := range map[string]struct {
		options attesttest.Options
		err     error
		want    time.Duration
	}{
		"documents": {nitro(nil), nil, 4 * time.Second}, "failures": {nitro(nil), gotpm.TPMRCCommandCode, 4 * time.Second}, "another TPM": {attesttest.Options{}, tpm.ErrNoNitroTPM, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			c := &counted{Machine: attesttest.NewMachine(t, attesttest.NewCA(t), tt.options), err: tt.err}
			a, err := tpm2.NewAttester(tpm2.Config{TPM: c, Purpose: attest.PurposeMachine, Bank: tpm.SHA384})
			if err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			for i := range 5 {
				if _, err := a.Attest(t.Context(), tpmFormat, attest.Binding{byte(i)}); (err != nil) != (tt.err != nil && tt.want > 0) {
					t.Errorf("%s: %v", name, err)
				}
			}
			if took := time.Since(begin); c.n != 5 || took != tt.want {
				t.Errorf("%s: %d documents in %s, want 5 in %s", name, c.n, took, tt.want)
			}
		})
	}
}

// FuzzNitroDocument passes arbitrary documents to the verifier.
func FuzzNitroDocument(f *testing.F) {
	ca := attesttest.NewCA(f)
	m := attesttest.NewMachine(f, ca, nitro(nil))
	b := attest.Binding{1}
	ev, err := m.Attester(attest.PurposeMachine).Attest(f.Context(), tpmFormat, b)
	if err != nil {
		f.Fatal(err)
	}
	good := bytes.Clone(ev.GetTpm2().GetNitroDocument())
	f.Add(good)
	f.Fuzz(func(t *testing.T, document []byte) {
		if len(document) == 0 {
			return
		}
		ev.GetTpm2().NitroDocument = document
		_, err := attesttest.Verifier(t, ca).Verify(t.Context(), ev, attest.NewStatement(attest.PurposeMachine, b), b)
		// The signature is over headers and payload, and ECDSA has two values of s.
		if err == nil && !bytes.Equal(document[:len(document)-48], good[:len(good)-48]) {
			t.Fatal("accepted")
		}
		if err != nil && !refusals[attest.ReasonOf(err)] {
			t.Fatal(err)
		}
	})
}
