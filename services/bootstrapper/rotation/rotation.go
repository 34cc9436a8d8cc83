// Package rotation replaces a key that the control planes share, as the owner has ordered: that of service accounts' tokens, that of Secrets in etcd, the
// front proxy's authority, etcd's, or the cluster's.
//
// The owner's program orders one phase of one control plane after another: get the new key and accept it beside the old one; use it; accept the old one
// no more. It begins a phase when all control planes have done the one before, so at any time each accepts what any other signs or encrypts. The first
// control plane makes the key. The others fetch it from one that has it, by attested sessions: an order is public, and contains only the key's ID.
//
// Each phase may be repeated after a crash at any time: all files are replaced by rename, and none is changed that is right.
package rotation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	kubeadmapi "k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/required"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

const (
	// Staged is the folder below /etc/kubernetes/pki with the new key, as KEY.ID. joinservice passes it on from there, and its pod mounts no other folder
	// of keys.
	Staged = "muster-rotation"
	// begun exists while the files may be newer than the versions that the static pods have read.
	begun = "/var/lib/muster/rotation/begun"
	// made has the digest of the order by which this control plane last made a key, and the key's ID.
	made = "/var/lib/muster/rotation/made"
)

// ControlPlane changes this control plane.
type ControlPlane interface {
	// Change runs do, which replaces files, while no other control plane joins, renews or restarts (J8), and then restarts the components that read
	// them, each when the one before is Ready. With resume, an earlier run has started do, so this control plane may be unhealthy.
	Change(ctx context.Context, resume bool, do func() error, components ...string) error
	// Reissue issues all certificates of an authority, whose path below pki is given without .crt, with the one on the disk, unless they are right. Those of the
	// cluster's authority are followed by the cross certificate.
	Reissue(authority string) error
	// PublishKeys writes the state of the keys to where the owner's program reads it.
	PublishKeys(ctx context.Context, s clusterinfo.KeyStates) error
}

// Config lists what a Rotator needs. All fields are required but Kubeadm.
type Config struct {
	// Root is the root of the file system: "/" on a machine.
	Root string
	// Kubeadm is the image's configuration of certificates.
	Kubeadm kubeadmapi.ClusterConfiguration
	// ControlPlane is this one.
	ControlPlane ControlPlane
	// Fetch returns a new key that another control plane has.
	Fetch func(ctx context.Context, key clusterinfo.RotatedKey, id string) ([]byte, error)
	// OldSecrets returns how many values of Secrets in etcd do not begin with a prefix; an error if it finds no Secret.
	OldSecrets func(ctx context.Context, prefix string) (int, error)
	// Count increments the TPM's counter, so that earlier copies of this control plane's disk are refused at its next boot (B7).
	Count func(ctx context.Context) error
	Now   func() time.Time
	Log   *slog.Logger
}

// Rotator executes the phases of rotations.
type Rotator struct{ Config }

// New returns a Rotator, or an error that names the missing field of cfg.
func New(cfg Config) (*Rotator, error) {
	if err := required.Fields("rotation.New", cfg, "Kubeadm"); err != nil {
		return nil, err
	}
	return &Rotator{cfg}, nil
}

// Result is the output of an order, in JSON. It is public.
type Result struct {
	// ID is the new key's ID, Public its public part in PEM; empty if it has none.
	ID     string `json:"id"`
	Public string `json:"public,omitempty"`
}

func (r *Rotator) on(path string) string { return filepath.Join(r.Root, path) }
func (r *Rotator) pki() string           { return r.on(machine.PKIFolder) }

// Read returns the state of the keys on a control plane's disk; nil while the static pods may not have read them all. Keys that the cluster does not have,
// or whose files have another form, are left out.
func Read(root string) (clusterinfo.KeyStates, error) {
	if _, err := os.Stat(filepath.Join(root, begun)); !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	pki := filepath.Join(root, machine.PKIFolder)
	out := clusterinfo.KeyStates{}
	for name, k := range kinds {
		s, err := k.state(pki)
		if err != nil {
			continue
		}
		if s.Staged, err = stagedIDs(pki, name); err != nil {
			return nil, err
		}
		out[name] = s
	}
	return out, nil
}

// stagedIDs returns the IDs of the staged keys of a kind, by the names of their files.
func stagedIDs(pki string, key clusterinfo.RotatedKey) (ids []string, err error) {
	list, err := os.ReadDir(filepath.Join(pki, Staged))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, f := range list {
		if name, id, _ := strings.Cut(f.Name(), "."); name == string(key) && clusterinfo.IsKeyID(id) {
			ids = append(ids, id)
		}
	}
	return ids, err
}

// StagedFile returns the path of a staged key below /etc/kubernetes/pki.
func StagedFile(key clusterinfo.RotatedKey, id string) string {
	return Staged + "/" + string(key) + "." + id
}

// Run executes the order with this digest and these arguments, and returns its output.
func (r *Rotator) Run(ctx context.Context, order string, args map[string]string) (string, error) {
	key, phase, id := clusterinfo.RotatedKey(args[ownerorder.ArgKey]), clusterinfo.RotationPhase(args[ownerorder.ArgPhase]), args[ownerorder.ArgID]
	k, known := kinds[key]
	switch {
	case !known:
		return "", fmt.Errorf("this bootstrapper knows no key %q: upgrade the machine's image first", key)
	case id != "" && !clusterinfo.IsKeyID(id) || id == "" && phase != clusterinfo.RotationAccept:
		return "", fmt.Errorf("the order's ID %q is not that of a key", id)
	}
	state, err := k.state(r.pki())
	if err != nil {
		return "", fmt.Errorf("%s can't be rotated on this control plane: %w", key, err)
	}
	var out Result
	switch phase {
	case clusterinfo.RotationAccept:
		out, err = r.accept(ctx, order, key, k, state, id)
	case clusterinfo.RotationUse:
		out, err = r.use(ctx, key, k, state, id)
	case clusterinfo.RotationFinish:
		out, err = r.finish(ctx, key, k, state, id)
	case clusterinfo.RotationSettled:
		fallthrough
	default:
		err = fmt.Errorf("this bootstrapper knows no phase %q: upgrade the machine's image first", phase)
	}
	if err != nil {
		return "", err
	}
	states, err := Read(r.Root)
	if err != nil {
		return "", err
	}
	if err := r.ControlPlane.PublishKeys(ctx, states); err != nil {
		return "", fmt.Errorf("the state of the keys can't be written to this control plane's Node: %w", err)
	}
	text, err := json.Marshal(out)
	return string(text), err
}

// accept gets the new key, and accepts it.
func (r *Rotator) accept(ctx context.Context, order string, key clusterinfo.RotatedKey, k kind, state clusterinfo.KeyState, id string) (Result, error) {
	if key == clusterinfo.EncryptionKey { // before anything is changed: finish has to find them
		if _, err := r.OldSecrets(ctx, ""); err != nil {
			return Result{}, err
		}
	}
	if id == "" {
		var err error
		if id, err = r.make(order, key, k); err != nil {
			return Result{}, err
		}
	}
	staged, public, err := r.read(key, k, id)
	switch missing := errors.Is(err, fs.ErrNotExist); {
	case missing && id == state.Uses: // this control plane joined with it
		return Result{ID: id}, nil
	case missing:
		staged, public, err = r.fetch(ctx, key, k, id)
	}
	if err != nil {
		return Result{}, err
	}
	defer clear(staged)
	return Result{id, string(public)}, r.change(ctx, key, func() error { return k.accept(r.pki(), staged) })
}

// make returns the ID of a new key. After a crash, the same order gets the key that it has already made. Any other staged key is removed: an attacker
// who had root on this machine before the order was signed could have put it there, and would know the cluster's new key.
func (r *Rotator) make(order string, key clusterinfo.RotatedKey, k kind) (string, error) {
	if text, err := os.ReadFile(r.on(made)); err == nil {
		if id, ours := strings.CutPrefix(string(text), order+" "); ours && clusterinfo.IsKeyID(id) {
			if content, _, err := r.read(key, k, id); err == nil {
				clear(content)
				return id, nil
			}
		}
	}
	if err := r.unstage(key); err != nil {
		return "", err
	}
	content, err := k.create(r.Kubeadm, r.Now())
	if err != nil {
		return "", err
	}
	defer clear(content)
	id, _, err := k.identify(content)
	if err != nil {
		return "", err
	}
	if err := machine.WriteFile(r.on(made), []byte(order+" "+id), 0o600, 0o700); err != nil {
		return "", err
	}
	return id, r.stage(key, id, content)
}

func (r *Rotator) stage(key clusterinfo.RotatedKey, id string, content []byte) error {
	return machine.WriteFile(filepath.Join(r.pki(), StagedFile(key, id)), content, 0o600, 0o700)
}

// read returns a staged key with its public part.
func (r *Rotator) read(key clusterinfo.RotatedKey, k kind, id string) (content, public []byte, err error) {
	if content, err = os.ReadFile(filepath.Join(r.pki(), StagedFile(key, id))); err != nil {
		return nil, nil, err
	}
	public, err = checked(key, k, id, content)
	return content, public, err
}

// checked returns the public part of a key if it has the ID.
func checked(key clusterinfo.RotatedKey, k kind, id string, content []byte) ([]byte, error) {
	is, public, err := k.identify(content)
	if err != nil {
		return nil, fmt.Errorf("the new %s: %w", key, err)
	}
	if is != id {
		return nil, fmt.Errorf("the new %s has the ID %s, and the order names %s", key, is, id)
	}
	return public, nil
}

func (r *Rotator) fetch(ctx context.Context, key clusterinfo.RotatedKey, k kind, id string) (content, public []byte, err error) {
	if content, err = r.Fetch(ctx, key, id); err != nil {
		return nil, nil, fmt.Errorf("the new %s could not be fetched from another control plane: %w", key, err)
	}
	if public, err = checked(key, k, id, content); err != nil {
		return nil, nil, err
	}
	return content, public, r.stage(key, id, content)
}

// use signs or encrypts with the new key.
func (r *Rotator) use(ctx context.Context, key clusterinfo.RotatedKey, k kind, state clusterinfo.KeyState, id string) (Result, error) {
	if !slices.Contains(state.Accepts, id) { // the other control planes accept it then, and this one would not
		return Result{}, fmt.Errorf("this control plane does not accept the %s %s yet, so it does not use it: repeat the owner's command", key, id)
	}
	staged, public, err := r.read(key, k, id)
	if errors.Is(err, fs.ErrNotExist) && state.Uses == id { // it joined with the key
		return Result{ID: id}, r.change(ctx, key, func() error { return nil })
	}
	if err != nil {
		return Result{}, err
	}
	defer clear(staged)
	return Result{id, string(public)}, r.change(ctx, key, func() error {
		if err := k.use(r.pki(), staged); err != nil {
			return err
		}
		if a, is := k.(interface{ path() string }); is {
			return r.ControlPlane.Reissue(a.path())
		}
		return nil
	})
}

// finish accepts the old key no more.
func (r *Rotator) finish(ctx context.Context, key clusterinfo.RotatedKey, k kind, state clusterinfo.KeyState, id string) (Result, error) {
	if state.Uses != id { // nothing would be accepted that this control plane signs, or can be read that it has encrypted
		return Result{}, fmt.Errorf("this control plane does not use the %s %s, so it keeps the others: repeat the owner's command", key, id)
	}
	if key == clusterinfo.EncryptionKey && len(state.Accepts) > 1 {
		list, err := encryption{}.list(r.pki())
		if err != nil {
			return Result{}, err
		}
		left, err := r.OldSecrets(ctx, "k8s:enc:secretbox:v1:"+list[0].Name+":")
		if err != nil {
			return Result{}, err
		}
		if left > 0 { // they would be lost
			return Result{}, fmt.Errorf("%d Secrets in etcd are encrypted with another key, and could not be read any more: repeat the owner's command, which writes them again", left)
		}
	}
	err := r.change(ctx, key, func() error {
		if err := k.only(r.pki()); err != nil {
			return err
		}
		if key == clusterinfo.ClusterCA {
			if err := r.ControlPlane.Reissue(clusterAuthority.file); err != nil { // without the cross certificate
				return err
			}
		}
		// At once: an earlier copy of this disk accepts the old key, which may be in wrong hands (B7). Until it is counted, [change] does not end.
		if err := r.Count(ctx); err != nil {
			return fmt.Errorf("the old %s is removed from the disk, but the TPM's counter was not incremented, so an earlier copy of the disk would not be noticed: %w", key, err)
		}
		return nil
	})
	if err != nil {
		return Result{}, err
	}
	return Result{ID: id}, r.unstage(key)
}

// unstage removes the staged keys of a kind.
func (r *Rotator) unstage(key clusterinfo.RotatedKey) error {
	ids, err := stagedIDs(r.pki(), key)
	for _, id := range ids {
		err = errors.Join(err, os.RemoveAll(filepath.Join(r.pki(), StagedFile(key, id))))
	}
	if err != nil || len(ids) == 0 {
		return err
	}
	return machine.Sync(filepath.Join(r.pki(), Staged))
}

// change replaces files and restarts what reads them. [Read] returns nothing until that is done, also after a crash.
func (r *Rotator) change(ctx context.Context, key clusterinfo.RotatedKey, do func() error) error {
	_, err := os.Stat(r.on(begun))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	err = r.ControlPlane.Change(ctx, err == nil, func() error {
		if err := machine.WriteFile(r.on(begun), nil, 0o600, 0o700); err != nil {
			return err
		}
		return do()
	}, components[key]...)
	if err != nil {
		return err
	}
	if err := os.Remove(r.on(begun)); err != nil {
		return err
	}
	return machine.Sync(filepath.Dir(r.on(begun)))
}
