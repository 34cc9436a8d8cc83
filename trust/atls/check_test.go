package atls

import (
	"crypto/tls"
	"errors"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// A4: also if the other end has a session cache and issues tickets.
func TestAResumedSessionIsRefused(t *testing.T) {
	fine := tls.ConnectionState{HandshakeComplete: true, NegotiatedProtocol: ALPN, Version: tls.VersionTLS13}
	if err := checkSession(fine); err != nil {
		t.Fatal(err)
	}
	fine.DidResume = true
	if r, ok := errors.AsType[*attest.Refusal](checkSession(fine)); !ok || r.Reason != attestv1.Reason_REASON_BINDING_MISMATCH {
		t.Errorf("%v, want BINDING_MISMATCH", r)
	}
}
