// Package journal keeps a machine's progress to becoming a node in one small file, across crashes and reboots.
//
// It is the durable half of the node lock; the other half is PCR 15. A change is on the disk before the step that relies on it begins, and a reader gets
// the old record or the new one, never a mixture: a record is written to a temporary file, synced, renamed over the old one, and the folder is synced
// too. A checksum detects changes by a file system or by hand; a damaged journal is an error and never an empty one, since an empty one would unlock the
// machine (B1).
//
// It never has a secret (K3): keys, tickets and the init secret are only in memory.
package journal

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/muster-k8s/muster/trust/attest"
)

// These are the paths of the journal, and of two files of the same format that have only a policy. Each has one writer: the bootstrapper writes the
// journal; the attester writes the policies that it accepts while the machine is a node; and the program that opens the state disk in the initramfs,
// where there is no journal yet, writes the policy in force then.
const (
	DefaultPath    = "/var/lib/muster/journal"
	AttesterPolicy = "/var/lib/muster/attester/policy"
	UnlockPolicy   = "/run/muster/unlock-policy"
)

// magic begins every journal; the number is the version of [Record].
const magic = "muster-journal/1"

// maxSize bounds the file, in bytes. A record has less than 2 KiB.
const maxSize = 64 << 10

// ErrCorrupt means that the file exists but is not a journal of this version.
var ErrCorrupt = errors.New("the journal is damaged")

// Kind is the kind of the node lock's holder.
type Kind string

// These are the holders of the node lock.
const (
	KindNone Kind = ""
	KindInit Kind = "init"
	KindJoin Kind = "join"
	// KindAdopt is an owner's request on a machine that is already a control plane.
	KindAdopt Kind = "adopt"
)

// ByOwner reports whether the owner took the lock, with an idempotency key, and not a joinservice's ticket.
func (k Kind) ByOwner() bool { return k == KindInit || k == KindAdopt }

// Step is the machine's progress. Steps only go forward, with one exception: after an unfinished kubeadm run was cleaned up, the step goes back to
// Locked.
type Step int

// These are the steps, in order. Each is written after its work, except Locking and Kubeadm, which are written before, since their work can't be
// repeated.
const (
	StepWaiting    Step = iota // nothing has started
	StepLocking                // about to extend PCR 15 with the cluster ID
	StepLocked                 // PCR 15 holds the cluster ID
	StepDisk                   // the state disk has its key
	StepComponents             // components are installed
	StepConfigured             // files for kubeadm are in place
	StepKubeadm                // kubeadm is about to run, or ran and did not finish
	StepKubeadmRan             // kubeadm has finished
	StepDone                   // the machine is a node
)

var stepNames = [...]string{"waiting", "locking", "locked", "disk", "components", "configured", "kubeadm", "kubeadm-ran", "done"}

// String returns the step's name in the file.
func (s Step) String() string {
	if s < 0 || int(s) >= len(stepNames) {
		return fmt.Sprintf("step(%d)", int(s))
	}
	return stepNames[s]
}

// MarshalText implements [encoding.TextMarshaler].
func (s Step) MarshalText() ([]byte, error) {
	if s < 0 || int(s) >= len(stepNames) {
		return nil, fmt.Errorf("no such step: %d", int(s))
	}
	return []byte(stepNames[s]), nil
}

// UnmarshalText implements [encoding.TextUnmarshaler].
func (s *Step) UnmarshalText(b []byte) error {
	for i, n := range stepNames {
		if n == string(b) {
			*s = Step(i)
			return nil
		}
	}
	return fmt.Errorf("no such step: %q", b)
}

// Hex is a byte string that the file has as lower-case hexadecimal digits.
type Hex []byte

// MarshalText implements [encoding.TextMarshaler].
func (h Hex) MarshalText() ([]byte, error) { return []byte(hex.EncodeToString(h)), nil }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (h *Hex) UnmarshalText(b []byte) (err error) {
	*h, err = hex.DecodeString(string(b))
	return err
}

// Record is the stored state of a machine.
type Record struct {
	// Step is its progress.
	Step Step `json:"step"`
	// Kind is the holder of the node lock. Set exactly when Step is past StepWaiting.
	Kind Kind `json:"kind,omitempty"`
	// ClusterID is the cluster that the machine is locked to, 32 bytes. Set with Kind.
	ClusterID Hex `json:"clusterID,omitempty"`
	// MeasurementSalt is the salt from which the cluster ID of an init was derived, 32 bytes.
	MeasurementSalt Hex `json:"measurementSalt,omitempty"`
	// KeyDigest is the SHA-256 of an init's idempotency key.
	KeyDigest Hex `json:"keyDigest,omitempty"`
	// RequestDigest is the SHA-256 of an init's request.
	RequestDigest Hex `json:"requestDigest,omitempty"`
	// Ticket is the ID of the join ticket that is being used, 16 bytes.
	Ticket Hex `json:"ticket,omitempty"`
	// MachineID is the machine's ID, from its TPM, when the record was written. Set with Kind.
	MachineID string `json:"machineID,omitempty"`
	// NodeName and DiskID are the names under which the machine is enrolled.
	NodeName string `json:"nodeName,omitempty"`
	DiskID   string `json:"diskID,omitempty"`
	// OwnerKeys are the Ed25519 public keys of the image's owner at the last join, 32 bytes each.
	OwnerKeys []Hex `json:"ownerKeys,omitempty"`
	// Policy is the newest policy by which a joinservice was accepted; nil if there is none.
	Policy *Policy `json:"policy,omitempty"`
	// ResultSent means that an init's result was sent to a client.
	ResultSent bool `json:"resultSent,omitempty"`
	// Changed is the time of writing.
	Changed time.Time `json:"changed"`
}

// Policy identifies a policy that was applied, so that an older one is refused.
type Policy struct {
	// OwnerKey is the Ed25519 public key of its signature, 32 bytes. Serials of the keys of one image are compared; those of other owners are independent.
	OwnerKey Hex `json:"ownerKey"`
	// Serial is the owner's serial of the policy, at least 1.
	Serial uint64 `json:"serial"`
	// Digest is the SHA-256 of its bytes, 32 bytes.
	Digest Hex `json:"digest"`
}

// OwnerKeys returns the keys as a record has them.
func OwnerKeys(keys attest.OwnerKeys) (out []Hex) {
	for _, k := range keys {
		out = append(out, Hex(k))
	}
	return out
}

// Locked reports whether the node lock was taken, or may have been (B1).
func (r Record) Locked() bool { return r.Step > StepWaiting }

// validate returns an error for a record that no version of this program writes.
func (r Record) validate() error {
	switch {
	case r.Locked() != (r.Kind.ByOwner() || r.Kind == KindJoin), !r.Locked() && r.Kind != KindNone:
		return fmt.Errorf("step %s with kind %q", r.Step, r.Kind)
	case r.Locked() && len(r.ClusterID) != 32:
		return fmt.Errorf("cluster ID of %d bytes", len(r.ClusterID))
	case r.Kind.ByOwner() && (len(r.MeasurementSalt) != 32 || len(r.KeyDigest) != 32 || len(r.RequestDigest) != 32):
		return errors.New("an init without its salt, key or request")
	case len(r.OwnerKeys) > attest.MaxOwnerKeys || slices.ContainsFunc(r.OwnerKeys, func(k Hex) bool { return len(k) != 32 }):
		return fmt.Errorf("%d owner's keys, or one that has not 32 bytes", len(r.OwnerKeys))
	case r.Policy != nil && (len(r.Policy.OwnerKey) != 32 || r.Policy.Serial == 0 || len(r.Policy.Digest) != 32):
		return errors.New("a policy without its owner, serial or digest")
	}
	return nil
}

// A File is a journal on disk. Its methods are not for concurrent use.
type File struct {
	path string
	now  func() time.Time
}

// Open returns the journal at path, an absolute path; the file need not exist.
func Open(path string) *File { return &File{path: path, now: time.Now} }

// Path returns the journal's path.
func (f *File) Path() string { return f.path }

// Load reads the record. A missing file is the zero record; any other file that is not a whole record is an error that wraps [ErrCorrupt] and has the
// remedy.
func (f *File) Load() (Record, error) {
	fd, err := os.Open(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return Record{}, nil
	}
	if err != nil {
		return Record{}, fmt.Errorf("open journal: %w", err)
	}
	defer fd.Close()
	b, err := io.ReadAll(io.LimitReader(fd, maxSize+1))
	if err != nil {
		return Record{}, fmt.Errorf("read journal: %w", err)
	}
	r, err := Decode(b)
	if err != nil {
		return Record{}, fmt.Errorf("%s: %w; if this machine is in no cluster, remove the file and restart the machine", f.path, err)
	}
	return r, nil
}

// Save replaces the record. When it returns nil, the record survives a power cut.
func (f *File) Save(r Record) error {
	r.Changed = f.now().UTC().Truncate(time.Second)
	b, err := Encode(r)
	if err != nil {
		return err
	}
	dir := filepath.Dir(f.path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make the journal's folder: %w", err)
	}
	if err := replace(f.path, b); err != nil {
		return fmt.Errorf("write journal: %w", err)
	}
	return nil
}

// replace writes b to path so that a crash leaves the old content or the new (B3).
func replace(path string, b []byte) (err error) {
	// The name is always the same, so that the next write replaces the rest of a crash, or a folder that root has left. A link there is not followed (B8).
	if err := os.RemoveAll(path + ".new"); err != nil {
		return err
	}
	tmp, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(tmp.Name())
		}
	}()
	_, err = tmp.Write(b)
	err = errors.Join(err, tmp.Sync(), tmp.Close())
	if err != nil {
		return err
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return err
	}
	d, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Encode returns the file's content for r: a line with the version and the SHA-256 of the rest, then the record as JSON.
func Encode(r Record) ([]byte, error) {
	if err := r.validate(); err != nil {
		return nil, fmt.Errorf("journal record: %w", err)
	}
	body, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("journal record: %w", err)
	}
	body = append(body, '\n')
	sum := sha256.Sum256(body)
	return append(fmt.Appendf(nil, "%s %x\n", magic, sum), body...), nil
}

// Decode is the inverse of [Encode]; its errors wrap [ErrCorrupt].
func Decode(b []byte) (Record, error) {
	if len(b) > maxSize {
		return Record{}, fmt.Errorf("%w: longer than %d bytes", ErrCorrupt, maxSize)
	}
	head, body, found := bytes.Cut(b, []byte("\n"))
	if !found {
		return Record{}, fmt.Errorf("%w: no first line", ErrCorrupt)
	}
	sum := sha256.Sum256(body)
	if string(head) != fmt.Sprintf("%s %x", magic, sum) {
		return Record{}, fmt.Errorf("%w: version or checksum differ", ErrCorrupt)
	}
	var r Record
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&r); err != nil {
		return Record{}, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return Record{}, fmt.Errorf("%w: content after the record", ErrCorrupt)
	}
	if err := r.validate(); err != nil {
		return Record{}, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return r, nil
}
