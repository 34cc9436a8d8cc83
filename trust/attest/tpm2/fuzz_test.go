package tpm2_test

import (
	"testing"

	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/tpm"
)

// refusals are the reasons that a verifier may return.
var refusals = map[attestv1.Reason]bool{malformed: true, badSig: true, badAK: true, badBinding: true, badEK: true, badReplay: true}

func FuzzEvidence(f *testing.F) {
	ca := attesttest.NewCA(f)
	v := attesttest.Verifier(f, ca)
	m := attesttest.NewMachine(f, ca, attesttest.Options{})
	b := attest.Binding{1}
	ev, err := m.Attester(attest.PurposeMachine).Attest(f.Context(), tpmFormat, b)
	if err != nil {
		f.Fatal(err)
	}
	raw, err := proto.Marshal(ev)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	ev.GetTpm2().Events = nil
	if raw, err = proto.Marshal(ev); err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	f.Add([]byte{})
	other := attest.Binding{2}
	f.Fuzz(func(t *testing.T, raw []byte) {
		ev := &attestv1.Evidence{}
		if proto.Unmarshal(raw, ev) != nil {
			return
		}
		if p, err := v.Verify(t.Context(), ev, attest.NewStatement(attest.PurposeMachine, b), b); err == nil {
			if p.Challenge() == nil {
				t.Fatal("accepted without a challenge")
			}
		} else if !refusals[attest.ReasonOf(err)] {
			t.Fatal(err)
		}
		if _, err := v.Verify(t.Context(), ev, attest.NewStatement(attest.PurposeMachine, other), other); err == nil {
			t.Fatal("accepted for another session")
		}
	})
}

func FuzzQuote(f *testing.F) {
	ca := attesttest.NewCA(f)
	m := attesttest.NewMachine(f, ca, attesttest.Options{})
	q, err := m.Quote(f.Context(), [32]byte{1}, tpm.SHA256)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(q.AKPublic, q.Attest, q.Signature)
	f.Fuzz(func(t *testing.T, public, attested, signature []byte) {
		ak, err := tpm2.ParseAttestationKey(public)
		if err != nil {
			if r := attest.ReasonOf(err); r != badAK && r != malformed {
				t.Fatal(err)
			}
			return
		}
		e := &attestv1.Tpm2Evidence{Attest: attested, Signature: signature, Bank: uint32(tpm.SHA256), Pcrs: q.PCRs}
		if _, err := tpm2.VerifyQuote(ak, e, [32]byte{2}); err == nil {
			t.Fatal("a quote over something else was accepted")
		} else if !refusals[attest.ReasonOf(err)] {
			t.Fatal(err)
		}
		if err := tpm2.ParseSignature(ak.Key, attested, signature); err != nil && !refusals[attest.ReasonOf(err)] {
			t.Fatal(err)
		}
	})
}

// FuzzCertificate passes arbitrary EK certificates to the verifier.
func FuzzCertificate(f *testing.F) {
	ca := attesttest.NewCA(f).Intermediate(f, nil)
	v := attesttest.Verifier(f, ca)
	m := attesttest.NewMachine(f, ca, attesttest.Options{})
	b := attest.Binding{1}
	ev, err := m.Attester(attest.PurposeMachine).Attest(f.Context(), tpmFormat, b)
	if err != nil {
		f.Fatal(err)
	}
	good := ev.GetTpm2().GetEkCertificates()
	f.Add(good[0], good[1])
	f.Add(good[1], good[0])
	f.Fuzz(func(t *testing.T, leaf, issuer []byte) {
		changed := proto.CloneOf(ev)
		changed.GetTpm2().EkCertificates = [][]byte{leaf, issuer}
		_, err := v.Verify(t.Context(), changed, attest.NewStatement(attest.PurposeMachine, b), b)
		if r := attest.ReasonOf(err); err != nil && r != malformed && r != badEK {
			t.Fatal(err)
		}
	})
}

func FuzzTPMName(f *testing.F) {
	f.Add(attesttest.TPMName("id:00001014", "swtpm", "id:20191023"))
	f.Add([]byte{0x30, 0x00})
	f.Add([]byte{0x30, 0x84, 0xFF, 0xFF, 0xFF, 0xFF})
	f.Fuzz(func(t *testing.T, der []byte) {
		n, err := tpm2.ParseTPMName(der)
		if err != nil {
			return
		}
		for _, s := range []string{n.Manufacturer, n.Model, n.Version} {
			if s == "" || len(s) > 64 {
				t.Fatalf("%+v", n)
			}
		}
	})
}
