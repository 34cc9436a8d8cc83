package policy_test

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"testing"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// The next policy is only shown: it accepts nobody and refuses nobody, and only the owner can write one.
func TestACandidateIsReadAndDecidesNothing(t *testing.T) {
	o := newOwner(t)
	s := o.store(t)
	appraiser, err := s.NewAppraiser(func(attest.Claims) bool { return false }, func() ([]attest.Lock, error) { return []attest.Lock{attest.Unlocked()}, nil })
	if err != nil {
		t.Fatal(err)
	}
	c := o.claims(t)
	p := o.object(t, 3, 5)
	s.Set(p)
	refusing := attesttest.Policy(t, o.ca, []*attesttest.Machine{attesttest.NewMachine(t, o.ca, attesttest.Options{Image: "other"})}, func(p *attestv1.Policy) { p.Serial = 6 })
	signed := attest.SignCandidate(o.private, refusing)
	_, foreign, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	note := func(signature []byte, text string) string {
		return base64.StdEncoding.EncodeToString(signature) + " " + text
	}
	set := func(note string) {
		next := p.DeepCopy()
		next.Annotations = map[string]string{v1alpha1.PolicyCandidate: note}
		s.Set(next)
	}
	sum := sha256.Sum256(refusing)
	for range 2 {
		set(note(signed.GetSignature(), string(refusing)))
		next := s.Candidate()
		if next == nil || next.Digest != hex.EncodeToString(sum[:]) {
			t.Fatalf("the candidate is %+v", next)
		}
		if _, err := next.Policy.Appraise(c, attest.AnyLock()); attest.ReasonOf(err) != attestv1.Reason_REASON_POLICY_REFUSED {
			t.Errorf("it says %v", err)
		}
		if a, err := appraiser.Appraise(t.Context(), c); err != nil || a.PolicySerial != 5 || s.Generation() != 3 {
			t.Errorf("in force is %+v, %v", a, err)
		}
	}
	for name, bad := range map[string]string{
		"nothing":             "",
		"no policy":           note(signed.GetSignature(), ""),
		"another text":        note(signed.GetSignature(), string(refusing)+" "),
		"another key":         note(attest.SignCandidate(foreign, refusing).GetSignature(), string(refusing)),
		"no base64":           "§ " + string(refusing),
		"a policy in force":   note(attest.SignPolicy(o.private, refusing).GetSignature(), string(refusing)),
		"a signature alone":   base64.StdEncoding.EncodeToString(signed.GetSignature()),
		"signed, but invalid": note(attest.SignCandidate(o.private, []byte("{}")).GetSignature(), "{}"),
	} {
		t.Run(name, func(t *testing.T) {
			set(note(signed.GetSignature(), string(refusing)))
			set(bad)
			if next := s.Candidate(); next != nil {
				t.Errorf("the candidate is %+v", next)
			}
			if _, err := appraiser.Appraise(t.Context(), c); err != nil {
				t.Error(err)
			}
		})
	}
	set(note(signed.GetSignature(), string(refusing)))
	s.Remove(p)
	if s.Candidate() != nil {
		t.Error("it outlives the AttestationPolicy")
	}
}
