package kube

import (
	"context"
	"errors"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// disks is the view of whose each disk is. It may be behind, so it says when to ask, and decides nothing.
type disks struct {
	mu    sync.RWMutex
	owner map[string]string // machine ID by disk ID
}

func newDisks() *disks { return &disks{owner: map[string]string{}} }

func (d *disks) set(o *v1alpha1.AttestedDisk) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.owner[o.Name] = o.Spec.MachineID
}

func (d *disks) remove(o *v1alpha1.AttestedDisk) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.owner, o.Name)
}

// of gives the machine that has the disk; empty: none, as far as is known.
func (d *disks) of(disk string) string {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.owner[disk]
}

// holdsDisk asks the API whether the disk is the machine's already; if it is another one's, DISK_MISMATCH.
func (k *Kube) holdsDisk(ctx context.Context, c Claim) (bool, error) {
	d := &v1alpha1.AttestedDisk{}
	err := k.cluster.Client.Get(ctx, client.ObjectKey{Name: c.Disk}, d)
	switch {
	case apierrors.IsNotFound(err):
		return false, nil
	case err != nil:
		return false, unavailable("read AttestedDisk "+c.Disk, err)
	case d.Spec.MachineID != c.Machine.String(): // J2
		return false, attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "disk %s is machine %s's, enrolled or not; `muster replace NODE --tpm` gives it to another machine, `kubectl delete attesteddisk %s` frees it for any", c.Disk, d.Spec.MachineID, c.Disk)
	}
	return true, nil
}

// ClaimDisk makes the disk the machine's, or finds that it is. Of any number of machines that ask at any
// number of replicas one gets it, since the API server creates an object once. It is never taken back: what
// was given to a machine once is given to no other, whatever becomes of its enrolment (J2). Its errors are
// refusals: DISK_MISMATCH, API_UNAVAILABLE.
func (k *Kube) ClaimDisk(ctx context.Context, c Claim) error {
	for range writeAttempts {
		d := &v1alpha1.AttestedDisk{ObjectMeta: metav1.ObjectMeta{Name: c.Disk}, Spec: v1alpha1.AttestedDiskSpec{MachineID: c.Machine.String()}}
		err := k.cluster.Client.Create(ctx, d)
		if err == nil {
			return nil
		}
		if !apierrors.IsAlreadyExists(err) {
			return unavailable("create AttestedDisk "+c.Disk, err)
		}
		if held, err := k.holdsDisk(ctx, c); held || err != nil {
			return err
		}
	}
	return unavailable("create AttestedDisk "+c.Disk, errors.New("it comes and goes"))
}
