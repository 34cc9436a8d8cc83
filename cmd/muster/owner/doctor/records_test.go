package doctor

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/trust/attest"
)

// records are differences between the control planes that the folder records and those of the cluster (A7).
func (p *patient) records() []harm {
	machine := p.dir.Cluster().ControlPlanes["node1"]
	record := func(planes map[string]attest.MachineID) func(*testing.T) func(*testing.T) {
		return p.file("cluster.json", func(path string, content []byte) error {
			var c ownerdir.Cluster
			if err := json.Unmarshal(content, &c); err != nil {
				return err
			}
			c.ControlPlanes = planes
			content, err := json.Marshal(c)
			if err != nil {
				return err
			}
			return os.WriteFile(path, content, 0o600)
		})
	}
	return []harm{
		{CheckJoinservice, checkup.Warn, "This folder records no name of that machine", "", record(nil)},
		{CheckJoinservice, checkup.Warn, "the control plane node8, machine 01", "", record(map[string]attest.MachineID{"node1": machine, "node8": {1}})},
		{CheckJoinservice, checkup.Fail, "this folder records a control plane with machine 01", "", record(map[string]attest.MachineID{"node1": {1}})},
		{CheckJoinservice, checkup.Warn, "the control plane node8, machine " + machine.String(), "", record(map[string]attest.MachineID{"node8": machine})},
	}
}
