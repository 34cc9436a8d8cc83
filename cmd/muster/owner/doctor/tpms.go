package doctor

import (
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/checkup"
)

// tpms finds machines that are enrolled under several names, and TPMs that are enrolled as several machines, each by another endorsement key of the TPM (A8).
// joinservice enrolls none of them: an administrator, an older version or a policy whose roots allowed it did.
func (d *doctor) tpms(ctx context.Context) error {
	var all v1alpha1.AttestedNodeList
	if err := d.kube.Reader().List(ctx, &all); err != nil {
		return err
	}
	d.oneMachineEach(all.Items)
	return nil
}

func (d *doctor) oneMachineEach(all []v1alpha1.AttestedNode) {
	byAK, byMachine := map[string][]v1alpha1.AttestedNode{}, map[string][]string{}
	for _, n := range all {
		if !n.Leaving() {
			byMachine[n.Spec.MachineID] = append(byMachine[n.Spec.MachineID], n.Name)
		}
		if n.Status.AKName != "" {
			byAK[n.Status.AKName] = append(byAK[n.Status.AKName], n)
		}
	}
	for _, machine := range slices.Sorted(maps.Keys(byMachine)) {
		if names := slices.Sorted(slices.Values(byMachine[machine])); len(names) > 1 {
			d.Add(CheckTPMs, checkup.Fail, "The machine is refused under every name but one, and a ban of one bans it. Find out which is its own, and remove the others: muster forget NAME.",
				"%s are enrolled for the same machine, %s", strings.Join(names, ", "), machine)
		}
	}
	for _, ak := range slices.Sorted(maps.Keys(byAK)) {
		machines, names, banned := map[string]bool{}, []string(nil), false
		for _, n := range byAK[ak] {
			machines[n.Spec.MachineID] = true
			names = append(names, n.Name)
			banned = banned || n.Spec.Banned
		}
		if len(machines) < 2 {
			continue
		}
		remedy := "Find out which of these names is its machine's, and remove the others: muster forget NAME."
		if banned {
			remedy = "One of them is banned, so all of them are refused. Remove the others (muster forget NAME), or lift the ban."
		}
		slices.Sort(names)
		d.Add(CheckTPMs, checkup.Fail, remedy, "%s have the same TPM: %d machine IDs, one attestation key", strings.Join(names, ", "), len(machines))
	}
	if d.Clean(CheckTPMs) {
		d.OK(CheckTPMs, "%d that have attested, each of one machine", len(byAK))
	}
}
