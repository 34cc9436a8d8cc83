package provision

import (
	"context"
	"crypto/x509"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/bootsecret"
	"github.com/muster-k8s/muster/services/bootstrapper/catrust"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterca"
	"github.com/muster-k8s/muster/services/bootstrapper/console"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
	"github.com/muster-k8s/muster/trust/attest"
)

// renewKubelet ensures that the kubelet has usable certificates before it is started: a kubelet with an expired client certificate can't request another
// one, and ends. The node lock is taken, and the state disk is open.
//
// A control plane signs the certificates itself, with the authority on its disk: while its kubelet does not run, the cluster may have no other signer.
// All other nodes request them from a joinservice, with fresh evidence, until they get them. A node whose certificates are still valid asks for at most
// [Timing.Renewal], and leaves the rest to its kubelet.
func (n *Node) renewKubelet(ctx context.Context) error {
	node := n.Lock.Record().NodeName
	controlPlane, err := renewal.IsControlPlane(n.Root)
	if err != nil {
		return err
	}
	if controlPlane {
		how, why := kubelet.Needs(n.Root, node, kubelet.ControlPlaneShare, n.Now())
		if how == kubelet.NeedNone {
			return nil
		}
		if err = n.renewByAuthority(ctx, node, why); err == nil {
			return nil
		}
		n.Log.ErrorContext(ctx, "this control plane can't sign its kubelet's certificates; asking a joinservice for them", "node", node, "err", err)
	}
	how, why := n.needs(node)
	if how == kubelet.NeedNone {
		return nil
	}
	n.Log.WarnContext(ctx, "this node's certificates have to be renewed before its kubelet starts", "node", node, "why", why, "by", "joinservice")
	// On an image whose systemd starts the kubelet by itself, the kubelet already runs. While it renews the node's Lease, joinservice takes this boot
	// for that of a copy (J11).
	if err := n.Machine.Unit(ctx, "stop", machine.UnitKubelet); err != nil {
		return fmt.Errorf("%s: %w", machine.UnitKubelet, err)
	}
	n.renewing.Store(true)
	defer n.renewing.Store(false)
	return n.renewByJoinservice(ctx, node)
}

// needs is [kubelet.Needs] for a node that asks a joinservice. With the certificates it also gets the cluster's authority, for which none stands that it trusts.
func (n *Node) needs(node string) (kubelet.Need, string) {
	how, why := kubelet.Needs(n.Root, node, kubelet.WorkerShare, n.Now())
	if how == kubelet.NeedNone && catrust.Foreign(n.Root) {
		return kubelet.NeedSoon, "the cluster has another authority, which this node does not trust"
	}
	return how, why
}

// renewByAuthority signs the kubelet's certificates on this machine.
func (n *Node) renewByAuthority(ctx context.Context, node, why string) error {
	authority, err := clusterca.Load(n.On(machine.PKIFolder))
	if err != nil {
		return err
	}
	meta, err := n.Metadata()
	if err != nil {
		return attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "machine metadata: %w", err)
	}
	addrs, refused := certified(n.Root, meta.Addresses)
	client, serving, err := n.SignKubelet(authority, node, addrs)
	if err != nil {
		return err
	}
	if len(refused) > 0 {
		n.Log.WarnContext(ctx, "this control plane does not sign its kubelet's certificate for new addresses of its metadata: the kubelet requests one with them, which joinservice checks", "node", node, "addresses", refused)
	}
	if err := n.replaceKubelet(ctx, client, serving); err != nil {
		return err
	}
	n.Log.WarnContext(ctx, "this control plane has signed its kubelet's certificates", "node", node, "why", why, "hours", nodeaccess.CertificateLife.Hours())
	return nil
}

// certified divides addresses of the machine's metadata into those of the kubelet's present serving certificate, which it got at init, or a joinservice has checked, and
// the others. The metadata comes from the machine's host. With a certificate for the address of the API endpoint, or of another node, this kubelet could be
// taken for their servers (J7).
func certified(root string, addrs []netip.Addr) (is, not []netip.Addr) {
	leaf, err := kubelet.Certificate(root, kubelet.ServingFile)
	for _, a := range addrs {
		if err == nil && slices.ContainsFunc(leaf.IPAddresses, net.IP(a.AsSlice()).Equal) {
			is = append(is, a)
		} else {
			not = append(not, a)
		}
	}
	return is, not
}

// SignKubelet returns new keys with certificates like those of a ticket: each certificate with its key, in PEM.
func (n *Node) SignKubelet(authority *clusterca.Authority, node string, addrs []netip.Addr) (client, serving []byte, err error) {
	k, err := kubelet.NewKeys()
	if err != nil {
		return nil, nil, err
	}
	askClient, askServing, err := k.Requests(node, addrs)
	if err != nil {
		return nil, nil, err
	}
	now := n.Now()
	if client, err = authority.Sign(askClient, x509.ExtKeyUsageClientAuth, nodeaccess.CertificateLife, now); err != nil { // J7: valid as long as that of every node
		return nil, nil, err
	}
	if serving, err = authority.Sign(askServing, x509.ExtKeyUsageServerAuth, nodeaccess.CertificateLife, now); err != nil {
		return nil, nil, err
	}
	if client, err = kubelet.Bundle(client, k.Client); err != nil {
		return nil, nil, err
	}
	serving, err = kubelet.Bundle(serving, k.Serving)
	return client, serving, err
}

// replaceKubelet gives the kubelet other certificates. It stops the kubelet first: a running one has its own in memory, and may be about to write the
// next.
func (n *Node) replaceKubelet(ctx context.Context, client, serving []byte) error {
	if err := n.Machine.Unit(ctx, "stop", machine.UnitKubelet); err != nil {
		return fmt.Errorf("%s: %w", machine.UnitKubelet, err)
	}
	if err := kubelet.Place(n.Root, client, serving); err != nil {
		return DiskError(err)
	}
	return kubelet.PointKubeconfig(n.Root)
}

// asked is the state that one attempt leaves to the next, and to the console.
type asked struct {
	order discovery.Order
	by    string // the endpoint that answered; empty if none did
}

// renewByJoinservice asks until it has received certificates, or until they need no renewal now.
func (n *Node) renewByJoinservice(ctx context.Context, node string) error {
	pauses := discovery.NewPauses(n.Timing.RetryMin, n.Timing.RetryMax)
	began := time.Now()
	t := &asked{}
	for {
		err := n.renewOnce(ctx, node, t)
		if err == nil || ctx.Err() != nil {
			return ctx.Err()
		}
		n.Attempts.Refused(err)
		n.Log.WarnContext(ctx, "the kubelet's certificates are not renewed yet", "node", node, "reason", attest.ReasonName(discovery.ReasonOf(err)), "err", err, "remedy", rpc.RemedyFrom(err))
		if how, _ := n.needs(node); how == kubelet.NeedNone || how == kubelet.NeedSoon && time.Since(began) > n.Timing.Renewal {
			return nil // the kubelet has requested them itself, or will
		}
		wait := pauses.Next(err)
		n.Attempts.Wait(wait)
		n.Console.Waits(console.Wait{For: "waiting for new certificates of the node " + node, Err: err, By: t.by, Asked: t.order.List(), Was: true, Next: wait})
		if err := retry.Wait(ctx, wait); err != nil {
			return err
		}
	}
}

// renewOnce makes one attempt, over a new connection, with fresh evidence.
func (n *Node) renewOnce(ctx context.Context, node string, t *asked) error {
	t.by = ""
	meta, err := n.Metadata()
	if err != nil {
		return attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "machine metadata: %w", err)
	}
	if err := t.order.Update(ctx, meta, discovery.Own(meta), n.Log); err != nil {
		return err
	}
	n.Attempts.Begin(t.order.List())
	if len(t.order.List()) == 0 {
		return attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "machine metadata: %w", discovery.ErrNoJoinservice)
	}
	endpoint, first, err := discovery.Race(ctx, t.order.List(), n.Timing.Stagger, n.Timing.Dial)
	if err != nil {
		return fmt.Errorf("%w: %w", discovery.ErrUnreachable, err)
	}
	defer first.Close()
	t.by = endpoint
	client, err := n.OpenSession(ctx, endpoint, first)
	if err != nil {
		t.order.Failed(endpoint)
		return err
	}
	defer client.Close()
	if err := n.renewAt(ctx, client, node, meta); err != nil {
		t.order.Failed(endpoint)
		return fmt.Errorf("%s: %w", endpoint, err)
	}
	return nil
}

// renewAt requests the certificates from one joinservice.
func (n *Node) renewAt(ctx context.Context, s *discovery.Session, node string, meta *metadata.Machine) error {
	k, err := kubelet.NewKeys()
	if err != nil {
		return err
	}
	secret, err := bootsecret.Load(n.Root)
	if err != nil {
		return err
	}
	req := &joinv1.RenewNodeCertificatesRequest{BootSecret: secret.Expose()} // J11
	if req.KubeletClientCsr, req.KubeletServingCsr, err = k.Requests(node, meta.Addresses); err != nil {
		return err
	}
	ask, cancel := context.WithTimeout(ctx, n.Timing.Ticket)
	defer cancel()
	resp, err := s.RenewNodeCertificates(ask, req)
	if err != nil {
		return err
	}
	roots, err := n.clusterRoots()
	if err != nil {
		return err
	}
	ca := resp.GetCaCertificate()
	if len(ca) > 0 {
		list, err := catrust.Parse(ca)
		if err != nil {
			return kubelet.BadCertificate("ca_certificate", err)
		}
		for _, c := range list {
			roots.AddCert(c)
		}
	}
	now := n.Now()
	if err := kubelet.CheckCertificate(resp.GetKubeletClientCertificate(), k.Client, roots, node, nil, x509.ExtKeyUsageClientAuth, now); err != nil {
		return kubelet.BadCertificate("kubelet_client_certificate", err)
	}
	if err := kubelet.CheckCertificate(resp.GetKubeletServingCertificate(), k.Serving, roots, node, meta.Addresses, x509.ExtKeyUsageServerAuth, now); err != nil {
		return kubelet.BadCertificate("kubelet_serving_certificate", err)
	}
	cert, err := kubelet.Bundle(resp.GetKubeletClientCertificate(), k.Client)
	if err != nil {
		return err
	}
	serving, err := kubelet.Bundle(resp.GetKubeletServingCertificate(), k.Serving)
	if err != nil {
		return err
	}
	// The authority may have been rotated while the machine was off. The session's peer is a joinservice of this cluster (A7). The authorities come first: with
	// the certificates alone, the kubelet would not find that it lacks something. The kubelet does not run.
	if len(ca) > 0 {
		controlPlane, err := renewal.IsControlPlane(n.Root)
		if err == nil {
			err = catrust.Take(n.Root, ca, controlPlane)
		}
		if err != nil {
			return DiskError(err)
		}
	}
	if err := n.replaceKubelet(ctx, cert, serving); err != nil {
		return err
	}
	n.Log.InfoContext(ctx, "the kubelet has new certificates", "node", node, "endpoint", s.Endpoint, "renewal", fmt.Sprintf("%x", resp.GetRenewalId()))
	n.Console.Print("the node " + node + " has new certificates")
	return nil
}

// clusterRoots returns the authority in the kubelet's kubeconfig.
func (n *Node) clusterRoots() (*x509.CertPool, error) {
	c, err := kubelet.ClusterOf(n.Root, kubeadm.KubeletConf)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(c.CertificateAuthorityData) {
		return nil, fmt.Errorf("%s names no certificate authority", kubeadm.KubeletConf)
	}
	return roots, nil
}
