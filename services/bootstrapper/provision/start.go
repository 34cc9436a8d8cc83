package provision

import (
	"context"
	"fmt"
	"os"

	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
)

// RenewControlPlane renews a control plane's expired certificates. It is called after the node lock and the state disk: if that is encrypted,
// attestation or a recovery has opened it.
func (n *Node) RenewControlPlane(ctx context.Context) error {
	stop := func() error { return n.Machine.Unit(ctx, "stop", machine.UnitKubelet) }
	if err := renewal.AtBoot(n.Root, n.Kubeadm.Certificates(), n.Now(), n.Log, stop); err != nil {
		return fmt.Errorf("renew the certificates of this control plane: %w", err)
	}
	return nil
}

// StartNode starts the units of a node: attester, kubelet, renewal of certificates, and the owner's orders. The kubelet has usable certificates
// then.
func (n *Node) StartNode(ctx context.Context) error {
	if err := n.RenewControlPlane(ctx); err != nil {
		// Without them the kubelet may still run pods that do not need these certificates, and the renewal's unit tries again.
		n.Log.ErrorContext(ctx, "certificates of this control plane have expired and could not be renewed", "err", err)
	}
	// The attester starts first: pods that the kubelet starts use it.
	if err := n.startUnit(ctx, machine.UnitAttester); err != nil {
		return err
	}
	if err := n.renewKubelet(ctx); err != nil {
		return err
	}
	// The unit is not enabled: before the machine is a node, there is nothing to renew.
	if err := n.Machine.Unit(ctx, "start", machine.UnitRenewal); err != nil {
		return fmt.Errorf("%s: %w", machine.UnitRenewal, err)
	}
	// Nor is this one. Without it the machine is a node all the same.
	if err := n.Machine.Unit(ctx, "start", machine.UnitOrders); err != nil {
		n.Log.ErrorContext(ctx, "this machine takes no orders of its owner", "unit", machine.UnitOrders, "err", err)
	}
	if err := n.LetKubeletStart(); err != nil {
		return err
	}
	return n.startUnit(ctx, machine.UnitKubelet)
}

func (n *Node) startUnit(ctx context.Context, unit string) error {
	for _, verb := range []string{"enable", "start"} {
		if err := n.Machine.Unit(ctx, verb, unit); err != nil {
			return fmt.Errorf("%s: %w", unit, err)
		}
	}
	return nil
}

// ServeAgain starts the kubelet of a control plane whose journal is not at its last step, and with it the etcd and API server that kubeadm has made.
// After a power cut nothing else starts them (B8), and the remaining steps need them (B3). The disk has been compared before (B7, B8). If the
// certificates expired while the machine was off, it signs new ones itself, since no other signer may run; valid certificates are left to StartNode.
func (n *Node) ServeAgain(ctx context.Context) error {
	if err := n.RenewControlPlane(ctx); err != nil {
		n.Log.ErrorContext(ctx, "certificates of this control plane have expired and could not be renewed", "err", err)
	}
	node := n.Lock.Record().NodeName
	if how, why := kubelet.Needs(n.Root, node, kubelet.ControlPlaneShare, n.Now()); how == kubelet.NeedNow {
		if err := n.renewByAuthority(ctx, node, why); err != nil {
			n.Log.ErrorContext(ctx, "this control plane can't sign its kubelet's certificates", "node", node, "err", err)
		}
	}
	if err := n.LetKubeletStart(); err != nil {
		return err
	}
	if err := n.Machine.Unit(ctx, "start", machine.UnitKubelet); err != nil {
		return fmt.Errorf("%s: %w", machine.UnitKubelet, err)
	}
	return nil
}

// LetKubeletStart allows the kubelet's unit to start from now on, in this boot.
func (n *Node) LetKubeletStart() error {
	return machine.WriteFile(n.On(machine.KubeletMayStart), nil, 0o600, 0o755)
}

// KubeletMayStart reports whether the kubelet was allowed to start in this boot.
func (n *Node) KubeletMayStart() bool {
	_, err := os.Stat(n.On(machine.KubeletMayStart))
	return err == nil
}
