package tpm2_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
)

// keysOf returns a machine's keys as a verifier has seen them.
func keysOf(t testing.TB, ca *attesttest.CA, m *attesttest.Machine) (ekPublic, akName []byte) {
	t.Helper()
	c, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeMachine), attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{9})
	if err != nil {
		t.Fatal(err)
	}
	return c.EKPublic(), c.AKName()
}

func activation(t testing.TB, ekPublic, akName []byte) *tpm2.Activation {
	t.Helper()
	a, err := tpm2.NewActivation(ekPublic, akName)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// A verifier that can send one message makes its challenge for keys that it was told. Lies about them prove nothing.
func TestAnActivationAheadOfTheEvidence(t *testing.T) {
	ca := attesttest.NewCA(t)
	m, other := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{})
	rsa := attesttest.NewMachine(t, ca, attesttest.Options{EK: attest.EKRSA2048})
	bare := attesttest.NewMachine(t, ca, attesttest.Options{Bare: true})
	b := attest.Binding{1}
	answer := func(t *testing.T, by *attesttest.Machine, a *tpm2.Activation, b attest.Binding) *attestv1.Response {
		t.Helper()
		mac, err := by.Attester(attest.PurposeOrder).Respond(t.Context(), a.Challenge(), b)
		if err != nil {
			t.Fatal(err)
		}
		return &attestv1.Response{Mac: mac}
	}
	// pending is what is left to prove of evidence that a machine makes.
	pending := func(t *testing.T, v *tpm2.Verifier, by *attesttest.Machine) attest.Pending {
		t.Helper()
		ev, err := by.Attester(attest.PurposeOrder).Attest(t.Context(), tpmFormat, b)
		if err != nil {
			t.Fatal(err)
		}
		p, err := v.Verify(t.Context(), ev, attest.NewStatement(attest.PurposeOrder, b), b)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	for name, m := range map[string]*attesttest.Machine{"an ECC key": m, "an RSA key": rsa, "a key without a certificate": bare} {
		t.Run("the right answer is enough, for "+name, func(t *testing.T) {
			v := attesttest.Verifier(t, ca)
			a := activation(t, first(keysOf(t, ca, m)), second(keysOf(t, ca, m)))
			if err := v.Activated(a, answer(t, m, a, b), b); err != nil {
				t.Fatal(err)
			}
			p := pending(t, v, m)
			if p.Challenge() != nil {
				t.Fatal("it is challenged again")
			}
			if c, err := p.Complete(nil); err != nil || c.Machine() != m.ID() || a.Machine() != m.ID() {
				t.Errorf("%v", err)
			}
		})
	}
	ek, ak := keysOf(t, ca, m)
	t.Run("it proves nothing about another machine", func(t *testing.T) {
		v := attesttest.Verifier(t, ca)
		a := activation(t, ek, ak)
		if err := v.Activated(a, answer(t, m, a, b), b); err != nil {
			t.Fatal(err)
		}
		p := pending(t, v, other)
		if p.Challenge() == nil {
			t.Fatal("it is not challenged")
		}
		if _, err := p.Complete(nil); attest.ReasonOf(err) != notActive {
			t.Errorf("%v", err)
		}
	})
	t.Run("a wrong answer is refused, and the right one after it", func(t *testing.T) {
		for name, r := range map[string]func(*tpm2.Activation) *attestv1.Response{
			"none":                   func(*tpm2.Activation) *attestv1.Response { return nil },
			"an empty one":           func(*tpm2.Activation) *attestv1.Response { return &attestv1.Response{} },
			"one for another order":  func(a *tpm2.Activation) *attestv1.Response { return answer(t, m, a, attest.Binding{2}) },
			"one to another message": func(*tpm2.Activation) *attestv1.Response { return answer(t, m, activation(t, ek, ak), b) },
		} {
			v := attesttest.Verifier(t, ca)
			a := activation(t, ek, ak)
			right := answer(t, m, a, b)
			if err := v.Activated(a, r(a), b); attest.ReasonOf(err) != notActive {
				t.Errorf("%s: %v", name, err)
			}
			if err := v.Activated(a, right, b); attest.ReasonOf(err) != notActive {
				t.Errorf("the right one after %s: %v", name, err)
			}
			if pending(t, v, m).Challenge() == nil {
				t.Errorf("%s counts as shown", name)
			}
			again := activation(t, ek, ak)
			if err := v.Activated(again, answer(t, m, again, b), b); err != nil {
				t.Errorf("after %s: %v", name, err)
			}
		}
	})
	t.Run("no TPM answers for keys that are not both its own", func(t *testing.T) {
		otherEK, otherAK := keysOf(t, ca, other)
		for name, a := range map[string]*tpm2.Activation{"another AK": activation(t, ek, otherAK), "another EK": activation(t, otherEK, ak)} {
			if _, err := m.Attester(attest.PurposeOrder).Respond(t.Context(), a.Challenge(), b); attest.ReasonOf(err) != notActive {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
	t.Run("keys that no TPM has are refused", func(t *testing.T) {
		curve, err := ecdsa.GenerateKey(elliptic.P521(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		p521, err := x509.MarshalPKIXPublicKey(curve.Public())
		if err != nil {
			t.Fatal(err)
		}
		for _, bad := range [][]byte{nil, ek[1:], p521} {
			if _, err := tpm2.NewActivation(bad, ak); attest.ReasonOf(err) != badEK {
				t.Errorf("%x: %v", bad, err)
			}
		}
		for _, bad := range [][]byte{nil, ak[1:], append(ak[:len(ak):len(ak)], 0)} {
			if _, err := tpm2.NewActivation(ek, bad); attest.ReasonOf(err) != badAK {
				t.Errorf("%x: %v", bad, err)
			}
		}
	})
	t.Run("the zero value is answered by nothing", func(t *testing.T) {
		if err := attesttest.Verifier(t, ca).Activated(&tpm2.Activation{}, &attestv1.Response{Mac: tpm2.ActivationMAC(nil, b)}, b); attest.ReasonOf(err) != notActive {
			t.Errorf("%v", err)
		}
	})
}

func first[A, B any](a A, _ B) A  { return a }
func second[A, B any](_ A, b B) B { return b }
