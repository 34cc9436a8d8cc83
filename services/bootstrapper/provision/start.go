package provision

import (
	"context"
	"fmt"

	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
)

// mayStartFile lets systemd start the kubelet, whose unit has it as a condition: nothing of the state disk runs before it was compared.
const mayStartFile = "/run/muster/kubelet-may-start"

// RenewControlPlane renews what has expired of a control plane's certificates. It comes after the node lock and the state disk: where that is
// encrypted, attestation or a recovery has opened it.
func (n *Node) RenewControlPlane(ctx context.Context) error {
	stop := func() error { return n.Machine.Unit(ctx, "stop", machine.UnitKubelet) }
	if err := renewal.AtBoot(n.Root, n.Kubeadm.Certificates(), n.Now(), n.Log, stop); err != nil {
		return fmt.Errorf("renew the certificates of this control plane: %w", err)
	}
	return nil
}

// StartNode makes sure that what a node needs is running: attester and kubelet, and on a control plane what renews its certificates. The kubelet has
// usable certificates then.
func (n *Node) StartNode(ctx context.Context) error {
	if err := n.RenewControlPlane(ctx); err != nil {
		// Without it the kubelet may still run what needs no certificate of these, and its unit tries again.
		n.Log.ErrorContext(ctx, "certificates of this control plane have expired and could not be renewed", "err", err)
	}
	// The attester first: pods that the kubelet starts ask it.
	if err := n.startUnit(ctx, machine.UnitAttester); err != nil {
		return err
	}
	if err := n.renewKubelet(ctx); err != nil {
		return err
	}
	// Not enabled: before the machine is a node, there is nothing to renew.
	if err := n.Machine.Unit(ctx, "start", machine.UnitRenewal); err != nil {
		return fmt.Errorf("%s: %w", machine.UnitRenewal, err)
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

// ServeAgain starts the kubelet of a control plane that is not noted as a node yet, and with it what kubeadm has made of etcd and API server: after a power cut nobody else does (B8), and
// what is left to do needs them (B3). What is on the disk has been compared by then (B7, B8). If the machine was off for so long that its certificates have ended, it signs new ones itself, for
// there may be nobody else to do so; certificates that serve it for now are left to startNode.
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

// LetKubeletStart has the kubelet's unit start from now on, in this boot.
func (n *Node) LetKubeletStart() error {
	return machine.WriteFile(n.On(mayStartFile), nil, 0o600, 0o755)
}
