package access

import (
	"cmp"
	"context"
	"slices"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/objects/signedpolicy"
)

// ReadState reads from the cluster the state that known.json records, except for the epoch.
func ReadState(ctx context.Context, kube *clusterapi.Client) (*ownerdir.Known, error) {
	policy, err := kube.Policy(ctx)
	if err != nil && !clusterapi.Absent(err) {
		return nil, err
	}
	k := &ownerdir.Known{Nodes: map[string]ownerdir.KnownNode{}, Bans: map[string]int64{}, BannedMachines: map[string]string{}}
	if err == nil {
		signed, err := signedpolicy.Decode(policy)
		if err != nil {
			return nil, err
		}
		k.Policy = ownerdir.KnownPolicy{JSON: policy.Spec.Policy, Signature: signed.GetSignature()}
	}
	var nodes v1alpha1.AttestedNodeList
	if err := kube.Reader().List(ctx, &nodes); err != nil && !clusterapi.Absent(err) {
		return nil, err
	}
	var disks v1alpha1.AttestedDiskList
	if err := kube.Reader().List(ctx, &disks); err != nil && !clusterapi.Absent(err) {
		return nil, err
	}
	known, enrolled := map[string]ownerdir.KnownDisk{}, map[string]bool{}
	for _, d := range disks.Items {
		known[d.Name] = ownerdir.KnownDisk{ID: d.Name, Salt: d.Spec.Salt, RootVersion: d.Spec.RootVersion}
		if d.Spec.Erased { // K4
			known[d.Name] = ownerdir.KnownDisk{ID: d.Name}
			k.Erased = append(k.Erased, d.Name)
		}
	}
	slices.Sort(k.Erased)
	for _, n := range nodes.Items {
		k.Nodes[n.Name] = ownerdir.KnownNode{
			UID: string(n.UID), Generation: n.Generation, MachineID: n.Spec.MachineID, Role: string(n.Spec.Role), Banned: n.Spec.Banned,
			Disk: cmp.Or(known[n.Spec.DiskID], ownerdir.KnownDisk{ID: n.Spec.DiskID}),
		}
		enrolled[n.Spec.DiskID] = true
		if n.Spec.Banned {
			k.Bans[string(n.UID)] = n.Generation
			k.BannedMachines[string(n.UID)] = n.Spec.MachineID
		}
	}
	for _, d := range disks.Items {
		if !enrolled[d.Name] && !d.Spec.Erased {
			k.Disks = append(k.Disks, ownerdir.KnownFormer{KnownDisk: known[d.Name], MachineID: d.Spec.MachineID})
		}
	}
	return k, nil
}
