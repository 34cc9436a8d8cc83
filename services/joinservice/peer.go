package joinservice

import (
	"context"
	"net"
	"net/netip"
	"time"

	"connectrpc.com/connect"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// maxEvidenceAge is how old evidence may be to count as current.
const maxEvidenceAge = time.Minute

// fresh requires current evidence (J7): a connection can stay open long after the evidence was shown.
func fresh(verified, now time.Time) error {
	if age := now.Sub(verified); age > maxEvidenceAge {
		return attest.Refuse(attestv1.Reason_REASON_VERDICT_OLD, "the connection's evidence is %s old, and may be %s", age.Round(time.Second), maxEvidenceAge)
	}
	return nil
}

// bootOf returns the machine's boot from the peer's evidence, with the secret of that boot. It returns REQUEST_INVALID if
// the secret is malformed.
func bootOf(ctx context.Context, p attest.Peer, secret []byte) (enroll.Boot, error) {
	s, err := keys.ParseBootSecret(secret)
	if err != nil {
		return enroll.Boot{}, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "boot_secret: %w", err)
	}
	clock := p.Claims().Clock() // J1: the peer's
	b := enroll.Boot{Reset: clock.ResetCount, Restart: clock.RestartCount, Clock: clock.Clock, Secret: s, Verified: p.VerifiedAt()}
	if ip, err := netip.ParseAddr(caller(ctx)); err == nil {
		b.Address = ip.Unmap().WithZone("").String()
	}
	return b, nil
}

// caller returns the source address of a request; empty if it is not known.
func caller(ctx context.Context) string {
	call, ok := connect.CallInfoForHandlerContext(ctx)
	if !ok {
		return ""
	}
	return host(call.Peer().Addr)
}

func host(addr string) string {
	if h, _, err := net.SplitHostPort(addr); err == nil {
		return h
	}
	return addr
}
