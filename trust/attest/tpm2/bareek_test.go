package tpm2_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/asn1"
	"encoding/hex"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

// lists returns a change of a policy that lists machines without EK certificates.
func lists(ids ...attest.MachineID) func(*attestv1.Policy) {
	return func(p *attestv1.Policy) {
		for _, id := range ids {
			p.Tpm2.BareMachineIds = append(p.Tpm2.BareMachineIds, id.String())
		}
	}
}

// Invariant A6.
func TestAMachineWithoutACertificateIsAcceptedOnlyIfListed(t *testing.T) {
	ca := attesttest.NewCA(t)
	m, other := attesttest.NewMachine(t, ca, attesttest.Options{Bare: true}), attesttest.NewMachine(t, ca, attesttest.Options{})
	claims := func(m *attesttest.Machine) attest.Claims {
		t.Helper()
		c, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeMachine), attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{1})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	c := claims(m)
	if c.Endorsement() != "bare-ek" || c.Machine() != m.ID() || c.Root() != nil || c.EKKind() != attest.EKP256 || len(c.Chain()) != 1 {
		t.Errorf("%s, machine %s, root %v, chain %v", c.Endorsement(), c.Machine(), c.Root(), c.Chain())
	}
	id := m.ID()
	appraisedAs(t, "Bare EK, rules", ca, m, map[string]appraised{
		"it is listed":                    {c, []func(*attestv1.Policy){lists(id)}, attestv1.Reason_REASON_ACCEPTED},
		"it is listed, and no root is":    {c, []func(*attestv1.Policy){lists(id), func(p *attestv1.Policy) { p.Tpm2.EkRoots = nil }}, attestv1.Reason_REASON_ACCEPTED},
		"there is no list":                {c, nil, badEK},
		"another machine is listed":       {c, []func(*attestv1.Policy){lists(other.ID())}, badEK},
		"it is among machineIds":          {c, []func(*attestv1.Policy){func(p *attestv1.Policy) { p.Tpm2.MachineIds = []string{id.String()} }}, badEK},
		"any machine with a root will do": {c, []func(*attestv1.Policy){func(p *attestv1.Policy) { p.Insecure = &attestv1.InsecureSwitches{AnyMachine: true} }}, badEK},
		"it is a control plane":           {c, []func(*attestv1.Policy){attesttest.ControlPlanes(m)}, badEK},
		"others are listed, and anyMachine": {c, []func(*attestv1.Policy){lists(other.ID()), func(p *attestv1.Policy) {
			p.Insecure = &attestv1.InsecureSwitches{AnyMachine: true, AllowSelfAsserted: true}
		}}, badEK},
	}, func(appraised) []func(*attestv1.Policy) { return []func(*attestv1.Policy){lists(id)} })
	t.Run("the list accepts no machine with a certificate", func(t *testing.T) {
		p := attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{m}, lists(other.ID()), func(p *attestv1.Policy) { p.Tpm2.EkRoots = nil })
		if _, err := p.Appraise(claims(other), attest.Unlocked()); attest.ReasonOf(err) != badEK {
			t.Error(err)
		}
	})
	t.Run("the same boot is not enough", func(t *testing.T) {
		own := map[int][]byte{}
		for i, v := range m.PCRs() {
			own[i] = v
		}
		same, err := attest.NewSameBoot(crypto.SHA256, own, ca.Roots())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := same.For(attest.Unlocked()).Appraise(t.Context(), c); attest.ReasonOf(err) != badEK {
			t.Error(err)
		}
		if _, err := same.For(attest.Unlocked()).Appraise(t.Context(), claims(other)); err != nil {
			t.Error(err)
		}
	})
	t.Run("it is refused once it is revoked", func(t *testing.T) {
		p := attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{m}, lists(other.ID()), func(p *attestv1.Policy) {
			p.Tpm2.Revoked = &attestv1.Revoked{Keys: []string{id.String()}}
		})
		if _, err := p.Appraise(c, attest.Unlocked()); attest.ReasonOf(err) != badEK {
			t.Error(err)
		}
	})
}

// bareEvidence changes the key in evidence of a machine without certificates.
func bareEvidence(change func(e *attestv1.Tpm2Evidence)) attesttest.Options {
	return attesttest.Options{Bare: true, Tamper: attesttest.Tamper{Evidence: func(ev *attestv1.Evidence) { change(ev.GetTpm2()) }}}
}

func spki(t testing.TB, key crypto.PublicKey) []byte {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func TestBareKeysThatAreRefused(t *testing.T) {
	ca := attesttest.NewCA(t)
	certified := attesttest.NewMachine(t, ca, attesttest.Options{})
	ek, err := certified.EndorsementKey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	p384 := curveKey(t, elliptic.P384())
	short, err := rsa.GenerateKey(rand.Reader, 1024)
	if err != nil {
		t.Fatal(err)
	}
	long, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	key := func(der []byte) attesttest.Options {
		return bareEvidence(func(e *attestv1.Tpm2Evidence) { e.EkPublic = der })
	}
	p256, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	good := spki(t, p256.Public())
	refusedAs(t, "Bare EK", ca, attest.Binding{1}, map[string]verdict{
		"no change":                        {attesttest.Options{Bare: true}, attestv1.Reason_REASON_ACCEPTED},
		"another key, before it is proven": {key(good), attestv1.Reason_REASON_ACCEPTED},
		"no key":                           {key(nil), malformed},
		"no structure":                     {key([]byte("key")), malformed},
		"bytes behind it":                  {key(append(spki(t, p256.Public()), 0)), malformed},
		"more than 256 bytes":              {key(make([]byte, 257)), malformed},
		"a certificate beside it":          {bareEvidence(func(e *attestv1.Tpm2Evidence) { e.EkCertificates = ek.Certificates }), malformed},
		"a key on P-384":                   {key(spki(t, p384.Public())), badEK},
		"an RSA key, which is too long":    {key(spki(t, long.Public())), malformed},
		"an element behind the key":        {key(extended(t, good)), badEK},
		"a short RSA key":                  {key(spki(t, short.Public())), badEK},
		"a compressed point":               {key(compressed(t, p256)), malformed},
		"a certificate in its place":       {key(ek.Certificates[0][:min(256, len(ek.Certificates[0]))]), malformed},
	}, attesttest.Options{Bare: true})
}

// extended returns a key with one more element in its outer sequence, which crypto/x509 ignores.
func extended(t testing.TB, der []byte) []byte {
	t.Helper()
	var all []asn1.RawValue
	if _, err := asn1.Unmarshal(der, &all); err != nil {
		t.Fatal(err)
	}
	out, err := asn1.Marshal(append(all, asn1.NullRawValue))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := x509.ParsePKIXPublicKey(out); err != nil {
		t.Fatalf("the test is about a key that is parsed: %v", err)
	}
	return out
}

// compressed returns a key with a compressed point, which is the same key in another encoding.
func compressed(t testing.TB, key *ecdsa.PrivateKey) []byte {
	t.Helper()
	point := elliptic.MarshalCompressed(key.Curve, key.X, key.Y)
	oid, curve := asn1.ObjectIdentifier{1, 2, 840, 10045, 2, 1}, asn1.ObjectIdentifier{1, 2, 840, 10045, 3, 1, 7}
	der, err := asn1.Marshal(struct {
		Algorithm struct{ OID, Curve asn1.ObjectIdentifier }
		Key       asn1.BitString
	}{struct{ OID, Curve asn1.ObjectIdentifier }{oid, curve}, asn1.BitString{Bytes: point, BitLength: 8 * len(point)}})
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func TestABareKeyIsProvenByActivation(t *testing.T) {
	ca := attesttest.NewCA(t)
	victim := attesttest.NewMachine(t, ca, attesttest.Options{Bare: true})
	key, err := victim.EndorsementKey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	der, err := key.SPKI()
	if err != nil {
		t.Fatal(err)
	}
	thief := attesttest.NewMachine(t, ca, bareEvidence(func(e *attestv1.Tpm2Evidence) { e.EkPublic = der }))
	_, err = attesttest.Claims(t.Context(), thief.Attester(attest.PurposeMachine), attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{1})
	if attest.ReasonOf(err) != notActive {
		t.Errorf("another machine's key: %v", err)
	}
	c, err := attesttest.Claims(t.Context(), victim.Attester(attest.PurposeMachine), attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{1})
	if err != nil || c.Machine() != victim.ID() {
		t.Errorf("%s, %v", c.Machine(), err)
	}
}

// Any peer can have a key without a certificate: such peers displace no others from what is known.
func TestBareKeysDisplaceNoCertifiedOnes(t *testing.T) {
	ca := attesttest.NewCA(t)
	v, err := tpm2.NewVerifier(tpm2.VerifierConfig{Roots: func() []*x509.Certificate { return ca.Roots() }, Now: time.Now, KnownPairs: 1})
	if err != nil {
		t.Fatal(err)
	}
	certified := attesttest.NewMachine(t, ca, attesttest.Options{})
	first, second := attesttest.NewMachine(t, ca, attesttest.Options{Bare: true}), attesttest.NewMachine(t, ca, attesttest.Options{Bare: true})
	known := func(m *attesttest.Machine) bool { return begin(t, m, v, attest.Binding{3}).Challenge() == nil }
	for _, m := range []*attesttest.Machine{certified, first, second} {
		if _, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeMachine), v, attest.PurposeMachine, attest.Binding{1}); err != nil {
			t.Fatal(err)
		}
	}
	if !known(certified) || known(first) || !known(second) {
		t.Errorf("known: the certified one %t, the first bare one %t, the second %t", known(certified), known(first), known(second))
	}
}

// TestOneBareTPMIsOneMachine presents a TPM without certificates in the ways that could make it
// another machine (A8).
func TestOneBareTPMIsOneMachine(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{Bare: true})
	again := attesttest.NewMachine(t, ca, attesttest.Options{Bare: true, TPM: m}) // its high-range key, for instance
	withCertificate := attesttest.NewMachine(t, ca, attesttest.Options{EK: attest.EKRSA2048, TPM: m})
	rsaRoot := func(p *attestv1.Policy) { p.Tpm2.EkRoots[0].Key = "rsa-2048" }
	policy := attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{m}, lists(m.ID()), rsaRoot)
	names := map[string]bool{}
	for name, tt := range map[string]struct {
		m    *attesttest.Machine
		want attestv1.Reason
	}{
		"as it is listed":                    {m, attestv1.Reason_REASON_ACCEPTED},
		"by another key without certificate": {again, badEK},
		"by a certified key of another kind": {withCertificate, attestv1.Reason_REASON_ACCEPTED}, // joinservice knows its AK: TPM_KNOWN
	} {
		c, err := attesttest.Claims(t.Context(), tt.m.Attester(attest.PurposeMachine), attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{1})
		if err != nil {
			t.Fatal(err)
		}
		names[hex.EncodeToString(c.AKName())] = true
		if _, err := policy.Appraise(c, attest.Unlocked()); attest.ReasonOf(err) != tt.want {
			t.Errorf("%s: %v, want %s", name, err, attest.ReasonName(tt.want))
		}
	}
	if len(names) != 1 {
		t.Errorf("one TPM has %d attestation keys", len(names))
	}
}

func TestSWTPMWithoutACertificateAttests(t *testing.T) {
	e := tpmtest.SWTPM(t, tpmtest.Bare())
	ca := attesttest.NewCA(t)
	var id attest.MachineID
	for range 2 {
		a, err := tpm2.NewAttester(tpm2.Config{TPM: e.Open(), Purpose: attest.PurposeMachine, Bank: 0x000B})
		if err != nil {
			t.Fatal(err)
		}
		c, err := attesttest.Claims(t.Context(), a, attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{1})
		if err != nil {
			t.Fatal(err)
		}
		if c.Endorsement() != "bare-ek" || c.AKKind() != attest.AKECC || id != (attest.MachineID{}) && c.Machine() != id {
			t.Errorf("%s, machine %s after %s", c.Endorsement(), c.Machine(), id)
		}
		id = c.Machine()
		e.Restart()
	}
}

// FuzzBareKey passes arbitrary keys to the verifier.
func FuzzBareKey(f *testing.F) {
	ca := attesttest.NewCA(f)
	m := attesttest.NewMachine(f, ca, attesttest.Options{Bare: true})
	b := attest.Binding{1}
	ev, err := m.Attester(attest.PurposeMachine).Attest(f.Context(), tpmFormat, b)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(ev.GetTpm2().GetEkPublic())
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, der []byte) {
		ev.GetTpm2().EkPublic = der
		p, err := attesttest.Verifier(t, ca).Verify(t.Context(), ev, attest.NewStatement(attest.PurposeMachine, b), b)
		if r := attest.ReasonOf(err); err != nil && r != malformed && r != badEK || err == nil && p.Challenge() == nil {
			t.Fatal(err)
		}
	})
}
