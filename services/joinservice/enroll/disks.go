package enroll

import (
	"context"
	"errors"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/state"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// disks maps disks to machines, from the informer. It may be out of date, so it only shows when to read the API, and
// decides nothing.
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

// ownerHint returns the machine that has the disk; empty if none is known.
func (d *disks) ownerHint(disk string) string {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.owner[disk]
}

// Salt is the input of a disk key beside the disk's ID: the disk's salt, and the version of the root secret.
type Salt struct {
	Salt keys.DiskSalt
	Root keys.Version
}

// readDisk reads from the API whether the machine has the disk already, and the disk's salt. It returns DISK_MISMATCH if
// another machine has it, DISK_ERASED if it was erased.
func (es *Enrollments) readDisk(ctx context.Context, c Claim) (salt Salt, held bool, err error) {
	d := &v1alpha1.AttestedDisk{}
	err = es.state.Cluster.Client.Get(ctx, client.ObjectKey{Name: c.Disk}, d)
	switch {
	case apierrors.IsNotFound(err):
		return Salt{}, false, nil
	case err != nil:
		return Salt{}, false, clusterview.Unavailable("read AttestedDisk "+c.Disk, err)
	}
	if err := enrollment.CheckDisk(d, "enrolled or not; `muster replace NODE --tpm` gives it to another machine", c.Machine.String()); err != nil { // J2, K4
		return Salt{}, false, err
	}
	salt.Root = keys.Version(d.Spec.RootVersion)
	if salt.Salt, err = keys.ParseDiskSalt(d.Spec.Salt); err != nil {
		return Salt{}, false, attest.Refuse(attestv1.Reason_REASON_INTERNAL, "AttestedDisk %s: %w", c.Disk, err)
	}
	return salt, true, nil
}

// SaltOrNew returns the salt of the machine's disk, or a new one if no machine has the disk yet; [Enrollments.AssignDisk] records
// that. Errors are refusals: DISK_MISMATCH, DISK_ERASED, API_UNAVAILABLE.
func (es *Enrollments) SaltOrNew(ctx context.Context, c Claim) (Salt, error) {
	if es.disks.ownerHint(c.Disk) == "" { // AssignDisk detects an outdated view
		return Salt{Salt: keys.NewDiskSalt(), Root: keys.FirstVersion}, nil
	}
	salt, held, err := es.readDisk(ctx, c)
	if held || err != nil {
		return salt, err
	}
	return Salt{Salt: keys.NewDiskSalt(), Root: keys.FirstVersion}, nil
}

// AssignDisk assigns the disk with this salt to the machine, or finds that it is assigned. If several machines ask at
// several replicas, one gets it, since the API server creates an object once. The assignment is permanent: a disk of one
// machine is never given to another, even if the enrollment ends (J2). Errors are refusals: DISK_MISMATCH, DISK_ERASED,
// API_UNAVAILABLE.
func (es *Enrollments) AssignDisk(ctx context.Context, c Claim, salt Salt) error {
	for range state.WriteAttempts {
		err := es.state.Cluster.Client.Create(ctx, enrollment.NewDisk(c.Disk, c.Machine.String(), salt.Salt, salt.Root))
		if err == nil {
			return nil
		}
		if !apierrors.IsAlreadyExists(err) {
			return clusterview.Unavailable("create AttestedDisk "+c.Disk, err)
		}
		have, held, err := es.readDisk(ctx, c)
		switch {
		case err != nil:
			return err
		case held && have != salt: // K4: the derived key is not the disk's
			return clusterview.Unavailable("create AttestedDisk "+c.Disk, errors.New("another ticket of the machine did so meanwhile, with another salt"))
		case held:
			return nil
		}
	}
	return clusterview.Unavailable("create AttestedDisk "+c.Disk, errors.New("it comes and goes"))
}

// RecheckDisk checks that the disk still has its salt and belongs to the machine. It is the last check before the key is sent,
// so that none is sent for a disk that was erased while the key was being derived (K4). Errors are refusals: DISK_ERASED,
// DISK_MISMATCH, API_UNAVAILABLE.
func (es *Enrollments) RecheckDisk(ctx context.Context, c Claim, salt Salt) error {
	have, held, err := es.readDisk(ctx, c)
	if err != nil {
		return err
	}
	if !held || have != salt {
		return attest.Refuse(attestv1.Reason_REASON_DISK_ERASED, "the salt of disk %s was deleted meanwhile", c.Disk)
	}
	return nil
}
