package bootstrapper

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/nodeaccess"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/bootsecret"
	"github.com/muster-k8s/muster/services/bootstrapper/console"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/pki"
	"github.com/muster-k8s/muster/services/bootstrapper/seek"
	"github.com/muster-k8s/muster/trust/attest"
)

// renewKubelet sees to it that the kubelet finds certificates that it can work with, before it is started: one whose client
// certificate has expired asks nobody for another one, and ends. The node lock is taken, and the state disk open, since the
// journal that says so lies on it.
//
// A control plane signs them itself, with the authority on its disk: while its kubelet does not run, nobody else in the
// cluster might. Any other node asks a joinservice, with fresh evidence, until it gets them; one whose certificates are still valid
// asks for [Timing.Renewal] at most, and leaves the rest to its kubelet.
func (b *Bootstrapper) renewKubelet(ctx context.Context) error {
	node := b.lock.record().NodeName
	if _, err := os.Stat(filepath.Join(b.on(pkiFolder), "ca.key")); err == nil {
		how, why := b.kubeletNeeds(node, controlPlaneShare)
		if how == needNone {
			return nil
		}
		if err = b.renewByAuthority(ctx, node, why); err == nil {
			return nil
		}
		b.log.ErrorContext(ctx, "this control plane can't sign its kubelet's certificates; asking a joinservice for them", "node", node, "err", err)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	how, why := b.kubeletNeeds(node, workerShare)
	if how == needNone {
		return nil
	}
	b.log.WarnContext(ctx, "this node's certificates have to be renewed before its kubelet starts", "node", node, "why", why, "by", "joinservice")
	// An image whose systemd starts the kubelet by itself has done so. While it renews the node's Lease, joinservice takes this boot for that of a copy (J11).
	if err := b.cfg.Machine.Unit(ctx, "stop", machine.UnitKubelet); err != nil {
		return fmt.Errorf("%s: %w", machine.UnitKubelet, err)
	}
	b.renewing.Store(true)
	defer b.renewing.Store(false)
	return b.renewByJoinservice(ctx, node)
}

// renewByAuthority signs the kubelet's certificates here.
func (b *Bootstrapper) renewByAuthority(ctx context.Context, node, why string) error {
	authority, err := pki.Load(b.on(pkiFolder))
	if err != nil {
		return err
	}
	meta, err := b.cfg.Metadata()
	if err != nil {
		return attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "machine metadata: %w", err)
	}
	client, serving, err := b.signKubelet(authority, node, meta.Addresses)
	if err != nil {
		return err
	}
	if err := b.replaceKubelet(ctx, client, serving); err != nil {
		return err
	}
	b.log.WarnContext(ctx, "this control plane has signed its kubelet's certificates", "node", node, "why", why, "hours", nodeaccess.CertificateLife.Hours())
	return nil
}

// signKubelet makes new keys, and certificates for them that are as those of a ticket: each with its key, in PEM.
func (b *Bootstrapper) signKubelet(authority *pki.Authority, node string, addrs []netip.Addr) (client, serving []byte, err error) {
	k, err := newNodeKeys()
	if err != nil {
		return nil, nil, err
	}
	askClient, askServing, err := k.requests(node, addrs)
	if err != nil {
		return nil, nil, err
	}
	now := b.cfg.Now()
	if client, err = authority.Sign(askClient, x509.ExtKeyUsageClientAuth, nodeaccess.CertificateLife, now); err != nil { // J7: as long as any node's
		return nil, nil, err
	}
	if serving, err = authority.Sign(askServing, x509.ExtKeyUsageServerAuth, nodeaccess.CertificateLife, now); err != nil {
		return nil, nil, err
	}
	if client, err = bundle(client, k.client); err != nil {
		return nil, nil, err
	}
	serving, err = bundle(serving, k.serving)
	return client, serving, err
}

// replaceKubelet gives the kubelet other certificates. It stops it first: a running one has its own in memory, and may be about to write
// the next.
func (b *Bootstrapper) replaceKubelet(ctx context.Context, client, serving []byte) error {
	if err := b.cfg.Machine.Unit(ctx, "stop", machine.UnitKubelet); err != nil {
		return fmt.Errorf("%s: %w", machine.UnitKubelet, err)
	}
	if err := b.placeKubelet(client, serving); err != nil {
		return namedDisk(err)
	}
	return b.pointKubeletConf()
}

// renewByJoinservice asks until it has got certificates, or until they need not be renewed now.
func (b *Bootstrapper) renewByJoinservice(ctx context.Context, node string) error {
	pauses := seek.NewPauses(b.cfg.Timing.RetryMin, b.cfg.Timing.RetryMax)
	began := time.Now()
	t := &joinTry{}
	for {
		err := b.renewOnce(ctx, node, t)
		if err == nil || ctx.Err() != nil {
			return ctx.Err()
		}
		b.tries.Refused(err)
		b.log.WarnContext(ctx, "the kubelet's certificates are not renewed yet", "node", node, "reason", attest.ReasonName(seek.ReasonOf(err)), "err", err, "remedy", rpc.RemedyFrom(err))
		if how, _ := b.kubeletNeeds(node, workerShare); how == needNone || how == needSoon && time.Since(began) > b.cfg.Timing.Renewal {
			return nil // the kubelet has asked itself, or will
		}
		wait := pauses.Next(err)
		b.tries.Wait(wait)
		b.cfg.Console.Waits(console.Wait{For: "waiting for new certificates of the node " + node, Err: err, By: t.by, Asked: t.order, Next: wait})
		if err := retry.Wait(ctx, wait); err != nil {
			return err
		}
	}
}

// renewOnce makes one try, over a connection that is made for it: the evidence is of now.
func (b *Bootstrapper) renewOnce(ctx context.Context, node string, t *joinTry) error {
	t.by = ""
	meta, err := b.cfg.Metadata()
	if err != nil {
		return attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "machine metadata: %w", err)
	}
	t.order = seek.Merge(t.order, endpoints(meta))
	b.tries.Begin(t.order)
	if len(t.order) == 0 {
		return attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "machine metadata: %w", seek.ErrNobody)
	}
	endpoint, first, err := seek.Race(ctx, t.order, b.cfg.Timing.Stagger, b.cfg.Timing.Dial)
	if err != nil {
		return fmt.Errorf("%w: %w", seek.ErrUnreachable, err)
	}
	defer first.Close()
	t.by = endpoint
	client, err := b.open(ctx, endpoint, first)
	if err != nil {
		return err
	}
	defer client.Close()
	if err := b.renewAt(ctx, client, node, meta); err != nil {
		t.order = seek.Demote(t.order, endpoint)
		return fmt.Errorf("%s: %w", endpoint, err)
	}
	return nil
}

// renewAt asks one joinservice.
func (b *Bootstrapper) renewAt(ctx context.Context, s *seek.Session, node string, meta *metadata.Machine) error {
	k, err := newNodeKeys()
	if err != nil {
		return err
	}
	secret, err := bootsecret.Load(b.cfg.Root)
	if err != nil {
		return err
	}
	req := &joinv1.RenewNodeCertificatesRequest{BootSecret: secret.Expose()} // J11
	if req.KubeletClientCsr, req.KubeletServingCsr, err = k.requests(node, meta.Addresses); err != nil {
		return err
	}
	ask, cancel := context.WithTimeout(ctx, b.cfg.Timing.Ticket)
	defer cancel()
	resp, err := s.RenewNodeCertificates(ask, req)
	if err != nil {
		return err
	}
	roots, err := b.clusterRoots()
	if err != nil {
		return err
	}
	now := b.cfg.Now()
	if err := checkCertificate(resp.GetKubeletClientCertificate(), k.client, roots, node, nil, x509.ExtKeyUsageClientAuth, now); err != nil {
		return badCertificate("kubelet_client_certificate", err)
	}
	if err := checkCertificate(resp.GetKubeletServingCertificate(), k.serving, roots, node, meta.Addresses, x509.ExtKeyUsageServerAuth, now); err != nil {
		return badCertificate("kubelet_serving_certificate", err)
	}
	cert, err := bundle(resp.GetKubeletClientCertificate(), k.client)
	if err != nil {
		return err
	}
	serving, err := bundle(resp.GetKubeletServingCertificate(), k.serving)
	if err != nil {
		return err
	}
	if err := b.replaceKubelet(ctx, cert, serving); err != nil {
		return err
	}
	b.log.InfoContext(ctx, "the kubelet has new certificates", "node", node, "endpoint", s.Endpoint, "renewal", fmt.Sprintf("%x", resp.GetRenewalId()))
	b.cfg.Console.Say("the node " + node + " has new certificates")
	return nil
}

// clusterRoots returns the authority that the kubelet's kubeconfig names.
func (b *Bootstrapper) clusterRoots() (*x509.CertPool, error) {
	c, err := b.clusterOf(kubeadm.KubeletConf)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(c.CertificateAuthorityData) {
		return nil, fmt.Errorf("%s names no certificate authority", kubeadm.KubeletConf)
	}
	return roots, nil
}
