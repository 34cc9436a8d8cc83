package attest_test

import (
	"context"
	"reflect"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// The functions below could be in any module: they name no type of an internal package, but infer
// it.

// forge calls the constructor with an argument that change made from the zero argument.
func forge[In, Out any](constructor func(In) Out, change func(reflect.Value)) Out {
	var in In
	change(reflect.ValueOf(&in).Elem())
	return constructor(in)
}

// fill sets all fields that reflection can set, recursively, without package unsafe.
func fill(v reflect.Value) {
	if !v.CanSet() {
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i))
		}
	case reflect.Array:
		for i := range v.Len() {
			fill(v.Index(i))
		}
	case reflect.String:
		v.SetString("ecc-p256")
	case reflect.Int32:
		v.SetInt(int64(attestv1.Format_FORMAT_TPM2))
	default: // no field has another kind
	}
}

func TestClaimsAndPeersCannotBeForged(t *testing.T) {
	for name, change := range map[string]func(reflect.Value){"nothing": func(reflect.Value) {}, "all that can be set": fill} {
		t.Run(name, func(t *testing.T) {
			c := forge(attest.NewClaims, change)
			if c.Format() != attestv1.Format_FORMAT_UNSPECIFIED || c.EKKind() != "" || c.Machine() != (attest.MachineID{}) {
				t.Errorf("a generic function made claims of format %s (A2)", c.Format())
			}
			ca := attesttest.NewCA(t)
			m := attesttest.NewMachine(t, ca, attesttest.Options{})
			policy := attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{m})
			if _, err := policy.Appraise(c, attest.AnyLock()); attest.ReasonOf(err) != attestv1.Reason_REASON_FORMAT_NONE {
				t.Errorf("forged claims: %v", err)
			}

			// Genuine claims, with a purpose or a time that no session set.
			genuine, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeMachine), attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{1})
			if err != nil {
				t.Fatal(err)
			}
			peer := forgePeer(attest.NewPeer, genuine, change)
			if _, ok := attest.PeerFrom(attest.WithPeer(context.Background(), peer)); ok || peer.Purpose() != "" {
				t.Errorf("a generic function made a peer of purpose %q", peer.Purpose())
			}
			before := genuine.EvidenceDigest()
			if forged := forge(genuine.From, change).EvidenceDigest(); forged != before {
				t.Errorf("a generic function changed the digest of evidence to %x", forged)
			}
		})
	}
}

func forgePeer[S any](constructor func(attest.Claims, attest.Appraisal, S) attest.Peer, c attest.Claims, change func(reflect.Value)) attest.Peer {
	var s S
	change(reflect.ValueOf(&s).Elem())
	return constructor(c, attest.Appraisal{}, s)
}
