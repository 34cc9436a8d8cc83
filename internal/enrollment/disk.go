package enrollment

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// NewDisk returns the object that assigns a disk to a machine. Salt and root are the inputs of the disk's key.
func NewDisk(disk, machine string, salt keys.DiskSalt, root keys.Version) *v1alpha1.AttestedDisk {
	return &v1alpha1.AttestedDisk{ObjectMeta: metav1.ObjectMeta{Name: disk}, Spec: v1alpha1.AttestedDiskSpec{
		MachineID: machine, Salt: salt.String(), RootVersion: int32(root),
	}}
}

// CheckDisk refuses an erased disk with DISK_ERASED (K4), and one that belongs to none of the machines with DISK_MISMATCH
// (J2). about is the error's text about a disk of another machine.
func CheckDisk(d *v1alpha1.AttestedDisk, about string, machines ...string) error {
	if d.Spec.Erased { // K4
		return attest.Refuse(attestv1.Reason_REASON_DISK_ERASED, "disk %s was erased: its key is never given out again", d.Name)
	}
	if !slices.Contains(machines, d.Spec.MachineID) { // J2
		return attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "disk %s is machine %s's, %s; `muster forget --erase --disk %s` ends its key for good", d.Name, d.Spec.MachineID, about, d.Name)
	}
	return nil
}
