package main

import (
	"strings"
	"testing"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

// With --endpoint, nothing is signed for another machine than the one that answers there (A7). A new control plane is in no cluster: whoever answers at
// its address as root on a forgotten node is locked to this one.
func TestTheMachineAtTheEndpointIsTheOneThatIsNamed(t *testing.T) {
	const noCluster = "has no admin.conf yet" // what follows the verification: this folder has no kubeconfig
	enroll := func(id, at string) []string {
		return []string{"enroll", "cp2", "--role", "control-plane", "--machine-id", id, "--endpoint", at}
	}
	replace := func(id, at string) []string {
		return []string{"replace", "cp2", "--tpm", id, "--endpoint", at, "--yes"}
	}
	ca := attesttest.NewCA(t)
	for name, tt := range map[string]struct {
		command func(id, at string) []string
		lock    string // "", "this" or "other": the cluster that the machine is locked to
		another bool   // the ID is another machine's
		refused bool   // by the policy
		want    string
	}{
		"enroll: the machine":                    {enroll, "", false, false, noCluster},
		"enroll: another machine":                {enroll, "", true, false, "is expected at this address"},
		"enroll: one that is locked to us":       {enroll, "this", false, false, "LOCK_FOREIGN"},
		"enroll: one that is locked to others":   {enroll, "other", false, false, "LOCK_FOREIGN"},
		"enroll: one that the policy refuses":    {enroll, "", false, true, "EK_UNTRUSTED"},
		"replace: the machine":                   {replace, "", false, false, noCluster},
		"replace: the machine, after its reboot": {replace, "this", false, false, noCluster},
		"replace: another machine":               {replace, "this", true, false, "is expected at this address"},
		"replace: one that is locked to others":  {replace, "other", false, false, "LOCK_FOREIGN"},
		"replace: one that the policy refuses":   {replace, "", false, true, "EK_UNTRUSTED"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWaitingMachine(t, ca)
			listed := ca
			if tt.refused {
				listed = attesttest.NewCA(t)
			}
			folder, secrets := w.folder(t, listed, w.tpm)
			id := keys.NewRoot(secrets.Root, secrets.Salt).ClusterID(secrets.MeasurementSalt)
			d, err := ownerdir.Open(folder)
			if err != nil {
				t.Fatal(err)
			}
			c := d.Cluster()
			c.ClusterID = id.String()
			if err := d.Save(c); err != nil {
				t.Fatal(err)
			}
			if err := d.Close(); err != nil {
				t.Fatal(err)
			}
			switch tt.lock {
			case "this":
				w.tpm.LockTo(id)
			case "other":
				w.tpm.LockTo(keys.ClusterID{1})
			}
			machine := w.tpm.ID().String()
			if tt.another {
				machine = strings.Repeat("ab", 32)
			}
			_, stderr, err := muster(t, append(tt.command(machine, w.addr), "--directory", folder)...)
			if err == nil || !strings.Contains(stderr, tt.want) {
				t.Errorf("%v\n%s\nwant %q", err, stderr, tt.want)
			}
		})
	}
}
