package tpm2_test

import (
	"context"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"math/big"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
)

const tpmFormat = attestv1.Format_FORMAT_TPM2

// begin verifies evidence up to the challenge.
func begin(t testing.TB, m *attesttest.Machine, v *tpm2.Verifier, b attest.Binding) attest.Pending {
	t.Helper()
	ev, err := m.Attester(attest.PurposeMachine).Attest(t.Context(), tpmFormat, b)
	if err != nil {
		t.Fatal(err)
	}
	p, err := v.Verify(t.Context(), ev, attest.NewStatement(attest.PurposeMachine, b), b)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func respond(t testing.TB, m *attesttest.Machine, p attest.Pending, b attest.Binding) *attestv1.Response {
	t.Helper()
	mac, err := m.Attester(attest.PurposeMachine).Respond(t.Context(), p.Challenge(), b)
	if err != nil {
		t.Fatal(err)
	}
	return &attestv1.Response{Mac: mac}
}

// Invariant A5.
func TestAQuoteIsForItsSessionAndPurposeAlone(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	v := attesttest.Verifier(t, ca)
	purposes := []attest.Purpose{attest.PurposeMachine, attest.PurposeJoinservice, attest.PurposeKMS, attest.PurposePublic, attest.PurposeOrder}
	for _, made := range purposes {
		ev, err := m.Attester(made).Attest(t.Context(), tpmFormat, attest.Binding{1})
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range purposes {
			for _, b := range []attest.Binding{{1}, {2}} {
				_, err := v.Verify(t.Context(), ev, attest.NewStatement(want, b), b)
				reason := badBinding
				if made == want && b == (attest.Binding{1}) {
					reason = attestv1.Reason_REASON_ACCEPTED
				}
				if attest.ReasonOf(err) != reason {
					t.Errorf("made for %s, verified as %s with binding %x: %v", made, want, b[0], err)
				}
			}
		}
	}
}

func TestActivation(t *testing.T) {
	ca := attesttest.NewCA(t)
	m, other := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{})
	here, there := attest.Binding{1}, attest.Binding{2}
	t.Run("an answer for another session is refused", func(t *testing.T) {
		v := attesttest.Verifier(t, ca)
		p := begin(t, m, v, here)
		if _, err := p.Complete(respond(t, m, p, there)); attest.ReasonOf(err) != notActive {
			t.Errorf("%v", err)
		}
		if begin(t, m, v, here).Challenge() == nil {
			t.Error("a refused answer counts as shown")
		}
	})
	t.Run("an answer to another challenge is refused", func(t *testing.T) {
		v := attesttest.Verifier(t, ca)
		p, q := begin(t, m, v, here), begin(t, m, v, here)
		if _, err := p.Complete(respond(t, m, q, here)); attest.ReasonOf(err) != notActive {
			t.Errorf("%v", err)
		}
	})
	t.Run("no answer is refused", func(t *testing.T) {
		for _, r := range []*attestv1.Response{nil, {}} {
			if _, err := begin(t, m, attesttest.Verifier(t, ca), here).Complete(r); attest.ReasonOf(err) != notActive {
				t.Errorf("%v", err)
			}
		}
	})
	t.Run("a second answer is refused, also the right one", func(t *testing.T) {
		p := begin(t, m, attesttest.Verifier(t, ca), here)
		right := respond(t, m, p, here)
		if _, err := p.Complete(&attestv1.Response{Mac: make([]byte, 32)}); attest.ReasonOf(err) != notActive {
			t.Errorf("%v", err)
		}
		if _, err := p.Complete(right); attest.ReasonOf(err) != notActive {
			t.Errorf("%v", err)
		}
	})
	t.Run("another machine cannot answer", func(t *testing.T) {
		p := begin(t, m, attesttest.Verifier(t, ca), here)
		_, err := other.Attester(attest.PurposeMachine).Respond(t.Context(), p.Challenge(), here)
		if attest.ReasonOf(err) != notActive {
			t.Errorf("%v", err)
		}
	})
	t.Run("an answer without a challenge is refused", func(t *testing.T) {
		v := attesttest.Verifier(t, ca)
		p := begin(t, m, v, here)
		if _, err := p.Complete(respond(t, m, p, here)); err != nil {
			t.Fatal(err)
		}
		_, err := begin(t, m, v, here).Complete(&attestv1.Response{Mac: make([]byte, 32)})
		if attest.ReasonOf(err) != attestv1.Reason_REASON_FRAME_INVALID {
			t.Errorf("%v", err)
		}
	})
	t.Run("an oversized challenge is not given to the TPM", func(t *testing.T) {
		a := m.Attester(attest.PurposeMachine)
		for _, c := range []*attestv1.Challenge{{CredentialBlob: make([]byte, 257)}, {EncryptedSecret: make([]byte, 513)}} {
			if _, err := a.Respond(t.Context(), c, here); attest.ReasonOf(err) != attestv1.Reason_REASON_FRAME_INVALID {
				t.Errorf("%v", err)
			}
		}
	})
}

// withCertificatesOf puts the EK certificates of m into evidence.
func withCertificatesOf(t testing.TB, m *attesttest.Machine) attesttest.Tamper {
	t.Helper()
	ek, err := m.EndorsementKey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return attesttest.Tamper{Evidence: func(ev *attestv1.Evidence) { ev.GetTpm2().EkCertificates = ek.Certificates }}
}

func TestKnownPairs(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	now := time.Now()
	roots := ca.Roots()
	v, err := tpm2.NewVerifier(tpm2.VerifierConfig{
		Roots: func() []*x509.Certificate { return roots }, Now: func() time.Time { return now }, KnownPairs: 2,
	})
	if err != nil {
		t.Fatal(err)
	}
	show := func(m *attesttest.Machine) {
		t.Helper()
		p := begin(t, m, v, attest.Binding{1})
		if p.Challenge() == nil {
			t.Fatal("known before it was shown")
		}
		if _, err := p.Complete(respond(t, m, p, attest.Binding{1})); err != nil {
			t.Fatal(err)
		}
	}
	known := func(m *attesttest.Machine) bool { return begin(t, m, v, attest.Binding{3}).Challenge() == nil }

	show(m)
	if !known(m) {
		t.Error("shown, and asked again")
	}
	c, err := begin(t, m, v, attest.Binding{4}).Complete(nil)
	if err != nil || c.Machine() != m.ID() {
		t.Errorf("claims of a known pair: %v", err)
	}
	// An attacker who has captured m's EK certificate presents it with another AK.
	t.Run("another AK beside a known EK is challenged", func(t *testing.T) {
		thief := attesttest.NewMachine(t, ca, attesttest.Options{Tamper: withCertificatesOf(t, m)})
		if known(thief) {
			t.Error("the EK alone was taken for the pair")
		}
	})
	t.Run("another EK beside a known AK is challenged", func(t *testing.T) {
		other := attesttest.NewMachine(t, ca, attesttest.Options{})
		b := attest.Binding{7}
		ev, err := m.Attester(attest.PurposeMachine).Attest(t.Context(), tpmFormat, b)
		if err != nil {
			t.Fatal(err)
		}
		withCertificatesOf(t, other).Evidence(ev)
		p, err := v.Verify(t.Context(), ev, attest.NewStatement(attest.PurposeMachine, b), b)
		if err != nil {
			t.Fatal(err)
		}
		if p.Challenge() == nil {
			t.Error("the AK alone was taken for the pair")
		}
	})
	t.Run("a known pair is checked against the current roots", func(t *testing.T) {
		roots = attesttest.NewCA(t).Roots()
		defer func() { roots = ca.Roots() }()
		b := attest.Binding{5}
		ev, err := m.Attester(attest.PurposeMachine).Attest(t.Context(), tpmFormat, b)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := v.Verify(t.Context(), ev, attest.NewStatement(attest.PurposeMachine, b), b); attest.ReasonOf(err) != badEK {
			t.Errorf("%v", err)
		}
	})
	t.Run("the certificate of a known pair may not expire", func(t *testing.T) {
		defer func(n time.Time) { now = n }(now)
		now = now.Add(48 * time.Hour)
		b := attest.Binding{6}
		ev, err := m.Attester(attest.PurposeMachine).Attest(t.Context(), tpmFormat, b)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := v.Verify(t.Context(), ev, attest.NewStatement(attest.PurposeMachine, b), b); attest.ReasonOf(err) != badEK {
			t.Errorf("%v", err)
		}
	})
	t.Run("it is forgotten after a day", func(t *testing.T) {
		old := attesttest.NewCAValid(t, now.Add(-time.Hour), now.Add(100*time.Hour))
		roots = old.Roots()
		defer func(n time.Time) { now, roots = n, ca.Roots() }(now)
		m := attesttest.NewMachine(t, old, attesttest.Options{Tamper: attesttest.Tamper{
			Certificate: func(c *x509.Certificate) { c.NotAfter = now.Add(100 * time.Hour) },
		}})
		show(m)
		now = now.Add(24*time.Hour - time.Second)
		if !known(m) {
			t.Error("forgotten within a day")
		}
		now = now.Add(time.Second)
		if known(m) {
			t.Error("remembered for more than a day")
		}
	})
	t.Run("a clock that was set back does not prolong it", func(t *testing.T) {
		defer func(n time.Time) { now = n }(now)
		now = now.Add(-30 * time.Minute)
		if known(m) {
			t.Error("remembered from the future")
		}
		show(m)
	})
	t.Run("the oldest makes room", func(t *testing.T) {
		b, c := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{})
		show(b)
		show(c)
		if known(m) {
			t.Error("three pairs where there is room for two")
		}
		if !known(b) || !known(c) {
			t.Error("the newest had to go")
		}
	})
}

func TestChain(t *testing.T) {
	root := attesttest.NewCA(t)
	change := func(f func(*x509.Certificate)) *attesttest.CA { return root.Intermediate(t, f) }
	foreign := attesttest.NewCA(t)
	unknown := []pkix.Extension{{Id: asn1.ObjectIdentifier{1, 2, 3, 4}, Critical: true, Value: []byte{5, 0}}}
	elsewhere, err := attesttest.NewMachine(t, root, attesttest.Options{}).EndorsementKey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	deep := root
	for range 3 {
		deep = deep.Intermediate(t, nil)
	}
	for name, tt := range map[string]struct {
		ca     *attesttest.CA
		tamper func(*attestv1.Tpm2Evidence)
		want   attestv1.Reason
	}{
		"issued by the root":               {ca: root, want: attestv1.Reason_REASON_ACCEPTED},
		"three issuers":                    {ca: deep, want: attestv1.Reason_REASON_ACCEPTED},
		"four issuers":                     {ca: deep.Intermediate(t, nil), want: malformed},
		"a certificate that is not needed": {ca: root, tamper: func(e *attestv1.Tpm2Evidence) { e.EkCertificates = append(e.EkCertificates, root.Root().Raw) }, want: attestv1.Reason_REASON_ACCEPTED},
		"another root":                     {ca: attesttest.NewCA(t), want: badEK},
		"another root that sends itself":   {ca: foreign, tamper: func(e *attestv1.Tpm2Evidence) { e.EkCertificates = append(e.EkCertificates, foreign.Root().Raw) }, want: badEK},
		"a missing issuer":                 {ca: change(nil), tamper: func(e *attestv1.Tpm2Evidence) { e.EkCertificates = e.EkCertificates[:1] }, want: badEK},
		"an issuer that is no certificate": {ca: change(nil), tamper: func(e *attestv1.Tpm2Evidence) { e.EkCertificates[1] = []byte("x") }, want: malformed},
		"an issuer that has expired": {ca: change(func(c *x509.Certificate) {
			c.NotBefore = time.Now().Add(-2 * time.Hour)
			c.NotAfter = time.Now().Add(-time.Hour)
		}), want: badEK},
		"an issuer that is no authority":       {ca: change(func(c *x509.Certificate) { c.IsCA = false }), want: badEK},
		"an issuer that may not sign":          {ca: change(func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageDigitalSignature }), want: badEK},
		"an issuer for TLS servers only":       {ca: change(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }), want: badEK},
		"an issuer for endorsement keys":       {ca: change(func(c *x509.Certificate) { c.UnknownExtKeyUsage = []asn1.ObjectIdentifier{{2, 23, 133, 8, 1}} }), want: attestv1.Reason_REASON_ACCEPTED},
		"a path longer than an issuer allows":  {ca: change(func(c *x509.Certificate) { c.MaxPathLenZero = true }).Intermediate(t, nil), want: badEK},
		"a path as long as an issuer allows":   {ca: change(func(c *x509.Certificate) { c.MaxPathLenZero = true }), want: attestv1.Reason_REASON_ACCEPTED},
		"an issuer with an unknown constraint": {ca: change(func(c *x509.Certificate) { c.ExtraExtensions = unknown }), want: badEK},
	} {
		t.Run(name, func(t *testing.T) {
			m := attesttest.NewMachine(t, tt.ca, attesttest.Options{Tamper: attesttest.Tamper{Evidence: func(ev *attestv1.Evidence) {
				if tt.tamper != nil {
					tt.tamper(ev.GetTpm2())
				}
			}}})
			b := attest.Binding{1}
			ev, err := m.Attester(attest.PurposeMachine).Attest(t.Context(), tpmFormat, b)
			if err != nil {
				t.Fatal(err)
			}
			_, err = attesttest.Verifier(t, root).Verify(t.Context(), ev, attest.NewStatement(attest.PurposeMachine, b), b)
			if attest.ReasonOf(err) != tt.want {
				t.Fatalf("%v, want %s", err, attest.ReasonName(tt.want))
			}
		})
	}
	t.Run("an RSA key that takes too long to check", func(t *testing.T) {
		for name, key := range map[string]*rsa.PublicKey{
			"1024 bits":      {N: new(big.Int).SetBit(big.NewInt(1), 1023, 1), E: 65537},
			"4097 bits":      {N: new(big.Int).SetBit(big.NewInt(1), 4096, 1), E: 65537},
			"5000 bits":      {N: new(big.Int).SetBit(big.NewInt(1), 4999, 1), E: 65537},
			"a big exponent": {N: new(big.Int).SetBit(big.NewInt(1), 2047, 1), E: 1<<31 - 1},
		} {
			chain := root.Issue(t, key, nil)
			m := attesttest.NewMachine(t, root, attesttest.Options{Tamper: attesttest.Tamper{Evidence: func(ev *attestv1.Evidence) {
				ev.GetTpm2().EkCertificates = append(ev.GetTpm2().EkCertificates, chain...)
			}}})
			_, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeMachine), attesttest.Verifier(t, root), attest.PurposeMachine, attest.Binding{1})
			if attest.ReasonOf(err) != badEK {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
	t.Run("another machine's", func(t *testing.T) {
		m := attesttest.NewMachine(t, root, attesttest.Options{Tamper: attesttest.Tamper{Evidence: func(ev *attestv1.Evidence) {
			ev.GetTpm2().EkCertificates = elsewhere.Certificates
		}}})
		// Genuine certificate, genuine quote, but not of one TPM: the challenge is for the
		// certificate's key, which this machine does not have.
		p := begin(t, m, attesttest.Verifier(t, root), attest.Binding{1})
		if _, err := m.Attester(attest.PurposeMachine).Respond(t.Context(), p.Challenge(), attest.Binding{1}); attest.ReasonOf(err) != notActive {
			t.Errorf("%v", err)
		}
	})
}

// Invariant A3.
func TestNothingConfiguredMeansNothingAccepted(t *testing.T) {
	now := time.Now
	none := func() []*x509.Certificate { return nil }
	for name, cfg := range map[string]tpm2.VerifierConfig{
		"no roots":        {Now: now},
		"no clock":        {Roots: none},
		"negative memory": {Roots: none, Now: now, KnownPairs: -1},
		"nothing":         {},
	} {
		if _, err := tpm2.NewVerifier(cfg); err == nil {
			t.Errorf("%s: a verifier was made", name)
		}
	}
	v, err := tpm2.NewVerifier(tpm2.VerifierConfig{Roots: none, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	m := attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})
	b := attest.Binding{1}
	ev, err := m.Attester(attest.PurposeMachine).Attest(t.Context(), tpmFormat, b)
	if err != nil {
		t.Fatal(err)
	}
	s := attest.NewStatement(attest.PurposeMachine, b)
	if _, err := v.Verify(t.Context(), ev, s, b); attest.ReasonOf(err) != badEK {
		t.Errorf("without roots: %v", err)
	}
	for name, ev := range map[string]*attestv1.Evidence{
		"nil":            nil,
		"empty":          {},
		"without a body": {Format: tpmFormat},
		"of no format":   {Body: ev.GetBody()},
		"of format 9":    {Format: 9, Body: ev.GetBody()},
	} {
		if _, err := v.Verify(t.Context(), ev, s, b); attest.ReasonOf(err) != malformed {
			t.Errorf("evidence %s: %v", name, err)
		}
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := v.Verify(gone, ev, s, b); attest.ReasonOf(err) != attestv1.Reason_REASON_DEADLINE {
		t.Errorf("a caller that gave up: %v", err)
	}
}

func TestAPresentedPolicyIsKept(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{Tamper: attesttest.Tamper{Evidence: func(ev *attestv1.Evidence) {
		ev.SignedPolicy = &attestv1.SignedPolicy{Policy: []byte("{}"), Signature: make([]byte, 64)}
	}}})
	c, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeMachine), attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{1})
	if err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(c.SignedPolicy(), &attestv1.SignedPolicy{Policy: []byte("{}"), Signature: make([]byte, 64)}) {
		t.Error("the policy that was presented is lost")
	}
}
