package owner

import (
	"context"
	"fmt"
	"slices"
	"strings"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	recoverv1 "github.com/muster-k8s/muster/gen/muster/recover/v1"
	"github.com/muster-k8s/muster/gen/muster/recover/v1/recoverv1connect"
	"github.com/muster-k8s/muster/internal/owner/peerdial"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
)

// Revival is what a control plane would go on with whose state disk is an older copy (B7).
type Revival struct {
	// Machine is the one that waits.
	Machine string `json:"machine"`
	// Epoch, PolicySerial and Bans are what its disk has. Epoch 0: it has no record.
	Epoch        uint64   `json:"epoch"`
	PolicySerial uint64   `json:"policySerial"`
	Bans         []string `json:"bans"`
	// DiskCounter is the value of the TPM's counter that the disk was written at, TPMCounter the one that it has; 0: none.
	DiskCounter uint64 `json:"diskCounter"`
	TPMCounter  uint64 `json:"tpmCounter"`
	// KnownSerial is the serial of the cluster's last policy that the owner's folder knows; 0: it knows none.
	KnownSerial uint64 `json:"knownSerial"`
	// Unbanned are the nodes that the folder knows as banned, and the disk does not.
	Unbanned []string `json:"unbanned"`
}

// Lines say it in words.
func (v Revival) Lines() []string {
	counter := func(n uint64, none string) string {
		if n == 0 {
			return none
		}
		return fmt.Sprint(n)
	}
	out := []string{
		fmt.Sprintf("The state disk of machine %s is not the newest: it was written at %s of its TPM's counter, which is at %s.", v.Machine, counter(v.DiskCounter, "no value"), counter(v.TPMCounter, "none: it was cleared, or deleted")),
		fmt.Sprintf("It would revive epoch %d of the cluster, with the policy of serial %d; the folder knows serial %d.", v.Epoch, v.PolicySerial, v.KnownSerial),
	}
	if v.Epoch == 0 {
		out[1] = fmt.Sprintf("What it would revive, it has no record of: an older copy than all that has one. The folder knows a policy of serial %d.", v.KnownSerial)
	}
	if len(v.Unbanned) > 0 {
		return append(out, "Banned by what the folder knows, and not on this disk: "+strings.Join(v.Unbanned, ", ")+".")
	}
	return append(out, "Every ban that the folder knows is on this disk.")
}

// look judges a machine that is locked to the cluster, and asks what its disk has.
func (r *recoverer) look(ctx context.Context) error {
	s, err := peerdial.Open(r.older)
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }()
	d, err := recoverv1connect.NewEpochServiceClient(s.Client(), s.URL(), rpc.ClientOptions()...).DescribeEpoch(ctx, &recoverv1.DescribeEpochRequest{})
	if err != nil {
		return err
	}
	r.revival, err = r.compare(d)
	return err
}

// compare puts what a disk has beside what the folder knows.
func (r *recoverer) compare(d *recoverv1.DescribeEpochResponse) (*Revival, error) {
	v := &Revival{
		Machine: r.Machine.String(), Epoch: d.GetEpoch(), PolicySerial: d.GetPolicySerial(), Bans: d.GetBans(), DiskCounter: d.GetDiskCounter(), TPMCounter: d.GetTpmCounter(),
		Unbanned: []string{},
	}
	for _, name := range v.Bans { // the machine's word, for a terminal
		if len(name) > 253 || strings.ContainsFunc(name, func(c rune) bool { return c < ' ' || c > '~' }) {
			return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "the machine's answer names a node %q", name)
		}
	}
	if r.known.Version != 0 {
		public, err := PublicKey(r.key)
		if err != nil {
			return nil, err
		}
		last, err := r.known.Policy.Open(public)
		if err != nil {
			return nil, fmt.Errorf("known.json: %w", err)
		}
		v.KnownSerial = last.Serial()
	}
	for name, n := range r.known.Nodes {
		if n.Banned && !slices.Contains(v.Bans, name) {
			v.Unbanned = append(v.Unbanned, name)
		}
	}
	slices.Sort(v.Unbanned)
	return v, nil
}

// revive lets the machine go on, if its owner accepts what it revives.
func (r *recoverer) revive(ctx context.Context) (string, error) {
	v := r.revival
	for _, l := range v.Lines() {
		r.Report.Say(l)
	}
	accepted := r.AcceptEpoch != nil && *r.AcceptEpoch == v.Epoch
	if !accepted && r.AcceptEpoch == nil && r.Ask != nil {
		var err error
		if accepted, err = r.Ask(*v); err != nil {
			return "", err
		}
	}
	if !accepted {
		return "", withRemedy(attest.Refuse(attestv1.Reason_REASON_CLUSTER_ROLLED_BACK, "machine %s waits with epoch %d of the cluster, an older copy of its disk, which was not accepted", v.Machine, v.Epoch),
			fmt.Sprintf("%s Restore the newest disk. If there is none, run the command again with --accept-epoch %d; then apply the policy and the bans again.", strings.Join(v.Lines(), " "), v.Epoch))
	}
	err := again(ctx, r.Report, func() error {
		s, err := peerdial.Open(r.older)
		if err != nil {
			return err
		}
		defer func() { _ = s.Close() }()
		order := ownerorder.Epoch{Cluster: r.cluster, Machine: *r.Machine, Epoch: v.Epoch, DiskCounter: v.DiskCounter, TPMCounter: v.TPMCounter}
		_, err = recoverv1connect.NewEpochServiceClient(s.Client(), s.URL(), rpc.ClientOptions()...).AcceptEpoch(ctx, order.Wire(r.key))
		return err
	})
	if err != nil {
		return "", r.explain(err)
	}
	return fmt.Sprintf("epoch %d is accepted: the machine goes on", v.Epoch), nil
}
