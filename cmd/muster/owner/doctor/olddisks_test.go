package doctor

import (
	"context"
	"crypto/ed25519"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// Disks outlive the enrollments of their machines. Only their owner knows which were destroyed, so doctor lists them.
func TestOldDisksThatNoEnrolledMachineHasAreNamed(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	text, err := os.ReadFile(shared.Kubeconfig)
	try(t, err)
	kube, err := clusterapi.Connect(text)
	try(t, err, shared.InstallCRDs(ctx))
	const used, unused = "5f0c95b6-2a3d-4c7e-9f10-0000000000d1", "5f0c95b6-2a3d-4c7e-9f10-0000000000d2"
	machine, salt := strings.Repeat("cd", 32), strings.Repeat("ab", 32)
	dir := sampleFolder(t)
	remove := created(
		&v1alpha1.AttestedDisk{ObjectMeta: metav1.ObjectMeta{Name: used}, Spec: v1alpha1.AttestedDiskSpec{MachineID: machine, Salt: salt, RootVersion: 1}})(t)
	defer remove(t)
	removeOther := created(
		&v1alpha1.AttestedDisk{ObjectMeta: metav1.ObjectMeta{Name: unused}, Spec: v1alpha1.AttestedDiskSpec{MachineID: machine, Salt: salt, RootVersion: 1}})(t)
	defer removeOther(t)
	removeNode := created(
		&v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "disks"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: machine, Role: v1alpha1.RoleWorker, DiskID: used}})(t)
	defer removeNode(t)
	for age, named := range map[time.Duration]bool{0: false, oldDisk + time.Hour: true} {
		d := &doctor{Config: Config{Now: func() time.Time { return time.Now().Add(age) }}, kube: kube, dir: dir}
		try(t, d.disks(ctx))
		if len(d.Findings) != 1 || d.Findings[0].Level != checkup.OK {
			t.Fatalf("%+v", d.Findings)
		}
		f := d.Findings[0]
		if strings.Contains(f.Detail, unused) != named || strings.Contains(f.Detail, used) || (f.Remedy != "") != named {
			t.Errorf("after %s: %+v", age, f)
		}
	}

	// K4: an erased disk that has a salt again, since etcd was restored, is a failure; so is an enrolled one without
	// a salt.
	lost := created(
		&v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "lost"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: strings.Repeat("ce", 32), Role: v1alpha1.RoleWorker, DiskID: "5f0c95b6-2a3d-4c7e-9f10-0000000000d3"}})(t)
	defer lost(t)
	try(t, dir.Remember(&ownerdir.Known{Erased: []string{unused}}))
	d := &doctor{Config: Config{Now: time.Now}, kube: kube, dir: dir}
	try(t, d.disks(ctx))
	if len(d.Findings) != 2 || !found(&d.Report, CheckDisks, checkup.Fail, "lost") || !found(&d.Report, CheckDisks, checkup.Fail, "disk "+unused+" was erased, and the cluster has a salt of it again") {
		t.Errorf("%+v", d.Findings)
	}
}

// sampleFolder creates an owner's folder without any record of a cluster.
func sampleFolder(t *testing.T) *ownerdir.Dir {
	t.Helper()
	ca := attesttest.NewCA(t)
	d, err := ownerdir.Create(filepath.Join(t.TempDir(), "muster-prod"), ownerdir.New{
		Cluster: ownerdir.Cluster{
			Name: "prod", Endpoint: "192.0.2.1:9000", KubernetesVersion: "1.36.1", ControlPlaneEndpoint: "192.0.2.1:6443",
			PodCIDRs: []string{"10.244.0.0/16"}, ServiceCIDRs: []string{"10.96.0.0/16"}, Stage: ownerdir.StagePrepared,
		},
		Secrets: ownerdir.NewSecrets([32]byte{7}), OwnerKey: ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize)), Policy: attesttest.Policy(t, ca, []*attesttest.Machine{attesttest.NewMachine(t, ca, attesttest.Options{})}),
	})
	try(t, err)
	t.Cleanup(func() { try(t, d.Close()) })
	return d
}
