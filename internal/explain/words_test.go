package explain

import (
	"errors"
	"testing"

	"go.uber.org/goleak"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestARefusalIsOneSentence(t *testing.T) {
	value := []byte{1}
	differs := func(e attest.MismatchError) error {
		return &attest.Refusal{Reason: attestv1.Reason_REASON_POLICY_REFUSED, Err: &e}
	}
	for name, tt := range map[string]struct {
		err  error
		want string
	}{
		"no PCR is the cause": {errors.New("x"), "x"},
		"an empty policy":     {differs(attest.MismatchError{Kind: "class"}), "the policy has no class"},
		"one image": {differs(attest.MismatchError{Kind: "image", Name: "v1", Mismatches: []attest.Mismatch{{PCR: 11, Expected: value, Seen: value}, {PCR: 4, Expected: value}}}),
			"image v1: PCR 11 (unified kernel image and boot phases) differs; PCR 4 (boot loader and kernel image) differs"},
		"several classes": {differs(attest.MismatchError{Kind: "class", Name: "v1", Others: 2, Mismatches: []attest.Mismatch{{PCR: 7, Why: "Secure Boot is off"}}}),
			"none of 3 classes; the closest, v1: PCR 7: Secure Boot is off"},
		"no event log": {differs(attest.MismatchError{Kind: "class", Name: "v1", Mismatches: []attest.Mismatch{{PCR: -1, Why: "the machine sent no event log"}}}),
			"class v1: the machine sent no event log"},
	} {
		if got := Words(tt.err); got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}
