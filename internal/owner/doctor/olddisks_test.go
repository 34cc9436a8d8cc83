package doctor

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/owner/cluster"
)

// Disks outlive the enrollments of their machines. Which were destroyed only their owner knows, who is shown them.
func TestOldDisksThatNoEnrolledMachineHasAreNamed(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	text, err := os.ReadFile(shared.Kubeconfig)
	try(t, err)
	kube, err := cluster.Connect(text)
	try(t, err, shared.InstallCRDs(ctx))
	const used, unused = "5f0c95b6-2a3d-4c7e-9f10-0000000000d1", "5f0c95b6-2a3d-4c7e-9f10-0000000000d2"
	machine := strings.Repeat("cd", 32)
	remove := created(
		&v1alpha1.AttestedDisk{ObjectMeta: metav1.ObjectMeta{Name: used}, Spec: v1alpha1.AttestedDiskSpec{MachineID: machine}})(t)
	defer remove(t)
	removeOther := created(
		&v1alpha1.AttestedDisk{ObjectMeta: metav1.ObjectMeta{Name: unused}, Spec: v1alpha1.AttestedDiskSpec{MachineID: machine}})(t)
	defer removeOther(t)
	removeNode := created(
		&v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "disks"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: machine, Role: v1alpha1.RoleWorker, DiskID: used}})(t)
	defer removeNode(t)
	for age, named := range map[time.Duration]bool{0: false, oldDisk + time.Hour: true} {
		d := &doctor{Config: Config{Now: func() time.Time { return time.Now().Add(age) }}, kube: kube}
		try(t, d.disks(ctx))
		if len(d.Findings) != 1 || d.Findings[0].Level != checkup.OK {
			t.Fatalf("%+v", d.Findings)
		}
		f := d.Findings[0]
		if strings.Contains(f.Detail, unused) != named || strings.Contains(f.Detail, used) || (f.Remedy != "") != named {
			t.Errorf("after %s: %+v", age, f)
		}
	}
}
