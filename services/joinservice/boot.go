package joinservice

import (
	"context"
	"net/netip"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/joinservice/kube"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// bootOf returns the machine's boot from the peer's evidence, with the secret of that boot. It returns REQUEST_INVALID if
// the secret is malformed.
func bootOf(ctx context.Context, p attest.Peer, secret []byte) (kube.Boot, error) {
	s, err := keys.ParseBootSecret(secret)
	if err != nil {
		return kube.Boot{}, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "boot_secret: %w", err)
	}
	clock := p.Claims().Clock() // J1: the peer's
	b := kube.Boot{Reset: clock.ResetCount, Restart: clock.RestartCount, Clock: clock.Clock, Secret: s, Verified: p.VerifiedAt()}
	if ip, err := netip.ParseAddr(caller(ctx)); err == nil {
		b.Address = ip.Unmap().WithZone("").String()
	}
	return b, nil
}
