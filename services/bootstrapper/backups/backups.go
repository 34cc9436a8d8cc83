// Package backups makes backups of the cluster on a control plane, encrypted for the owner ([backup]), when the owner orders one, and by a schedule.
//
// They stay on the state disk, in a folder of /var/log. An administrator reads them there through the API server and the kubelet, so no port is open for
// them.
package backups

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/etcdencryption"
	"github.com/muster-k8s/muster/internal/required"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterca"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/trust/keys"
)

// The folders below the machine's root.
const (
	// Folder has the backups.
	Folder = "/var/log/" + backup.LogFolder
	// workFolder has etcd's snapshot while it is packed.
	workFolder = "/var/lib/muster/backup"
)

const (
	// reserve is what a backup leaves free on the state disk, in bytes.
	reserve = 1 << 30
	// poll is how often the schedule is looked at, retryMax the longest pause after failures.
	poll, retryMax = time.Minute, 30 * time.Minute
)

// Config describes a control plane. All fields are required.
type Config struct {
	// Root is the machine's root.
	Root string
	// Cluster and Node are the cluster's ID and the node's name.
	Cluster keys.ClusterID
	Node    string
	// State returns the cluster's state, and the owner's key to which a backup is encrypted.
	State func(context.Context) (backup.State, ed25519.PublicKey, error)
	// Snapshot writes a snapshot of this machine's etcd. Before that, it checks that there is room for its size.
	Snapshot func(ctx context.Context, caCert, caKey []byte, room func(size int64) error, w io.Writer) error
	// Keep is how many backups stay.
	Keep int
	Now  func() time.Time
	Log  *slog.Logger
}

// Maker makes backups.
type Maker struct{ cfg Config }

// New returns a maker.
func New(cfg Config) (*Maker, error) {
	if err := required.Fields("backups.New", cfg); err != nil {
		return nil, err
	}
	return &Maker{cfg}, nil
}

func (m *Maker) on(path ...string) string {
	return filepath.Join(append([]string{m.cfg.Root}, path...)...)
}

// Make makes a backup, and removes the oldest ones. A backup that is not finished leaves nothing.
func (m *Maker) Make(ctx context.Context) (stored backup.Stored, err error) {
	for _, dir := range []string{Folder, workFolder} {
		if err := os.MkdirAll(m.on(dir), 0o700); err != nil {
			return stored, err
		}
	}
	unlock, err := m.lock()
	if err != nil {
		return stored, err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	at := m.cfg.Now().UTC().Truncate(time.Second)
	// The state comes first: the snapshot is at least as new, and a copy with a higher epoch was made after it.
	state, to, err := m.cfg.State(ctx)
	if err != nil {
		return stored, fmt.Errorf("the cluster's state: %w", err)
	}
	small, err := m.files()
	if err != nil {
		return stored, err
	}
	defer func() {
		for _, content := range small {
			clear(content) // K3
		}
	}()
	authority, err := clusterca.Load(m.on(machine.PKIFolder))
	if err != nil {
		return stored, err
	}
	snapshot, sum, err := m.snapshot(ctx, small["pki/etcd/ca.crt"], small["pki/etcd/ca.key"])
	if err != nil {
		return stored, err
	}
	defer func() { _ = snapshot.Close(); _ = os.Remove(snapshot.Name()) }()
	size, err := snapshot.Seek(0, io.SeekCurrent)
	if err == nil {
		_, err = snapshot.Seek(0, io.SeekStart)
	}
	if err != nil {
		return stored, err
	}
	stored = backup.Stored{Name: backup.Name(m.cfg.Node, at), TakenAt: at, OwnerKey: base64.StdEncoding.EncodeToString(to)}
	// K5: to an owner's key in the image, which can't be changed at run time.
	err = m.place(&stored, func(w io.Writer) error {
		manifest := backup.Manifest{ClusterID: m.cfg.Cluster.String(), Node: m.cfg.Node, TakenAt: at, State: state}
		return backup.Write(w, to, authority.Signer(), manifest, small, io.LimitReader(interruptible(ctx, snapshot), size), size, sum)
	})
	if err != nil {
		return backup.Stored{}, err
	}
	text, err := json.Marshal(stored)
	if err == nil {
		err = machine.WriteFile(m.on(Folder, backup.Latest), text, 0o600, 0o700)
	}
	return stored, errors.Join(err, m.prune(stored.Name))
}

// lock keeps a second process out, and removes what one that was killed has left.
func (m *Maker) lock() (unlock func() error, err error) {
	f, err := os.OpenFile(m.on(workFolder, "lock"), os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("another backup is being made on this machine: %w", err), f.Close())
	}
	for _, left := range []string{m.on(workFolder, backup.Snapshot), m.on(Folder, unfinished)} {
		if err := os.Remove(left); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, errors.Join(err, f.Close())
		}
	}
	return f.Close, nil
}

func (m *Maker) files() (map[string][]byte, error) {
	out := map[string][]byte{}
	for _, name := range clusterinfo.ControlPlaneFiles() {
		content, err := os.ReadFile(m.on(machine.PKIFolder, name))
		switch {
		case errors.Is(err, fs.ErrNotExist) && name == etcdencryption.Name: // a cluster that Muster has adopted may not encrypt
		case errors.Is(err, fs.ErrNotExist):
			return nil, fmt.Errorf("%s is missing: only control planes with kubeadm's authorities and their own etcd make backups", filepath.Join(machine.PKIFolder, name))
		case err != nil:
			return nil, err
		default:
			out["pki/"+name] = content
		}
	}
	return out, nil
}

// snapshot returns etcd's snapshot in a file, at its end, and its SHA-256.
func (m *Maker) snapshot(ctx context.Context, caCert, caKey []byte) (_ *os.File, sum [sha256.Size]byte, err error) {
	f, err := os.OpenFile(m.on(workFolder, backup.Snapshot), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, sum, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close(), os.Remove(f.Name()))
		}
	}()
	room := func(size int64) error {
		var st unix.Statfs_t
		if err := unix.Statfs(m.on(workFolder), &st); err != nil {
			return err
		}
		// At worst the packed one is as large as the snapshot.
		if free, need := int64(st.Bavail)*st.Bsize, 2*size+reserve; free < need {
			return fmt.Errorf("the state disk has %d MiB free: a backup of %d MiB needs %d MiB while it is made", free>>20, size>>20, need>>20)
		}
		return nil
	}
	inner, outer := newTail(), sha256.New()
	if err := m.cfg.Snapshot(ctx, caCert, caKey, room, io.MultiWriter(f, inner, outer)); err != nil {
		return nil, sum, err
	}
	if err := inner.check(); err != nil {
		return nil, sum, err
	}
	return f, [sha256.Size]byte(outer.Sum(nil)), nil
}

// unfinished is a backup that is being written.
const unfinished = ".unfinished"

// place writes a file of [Folder] as a whole or not at all, and notes its size and its SHA-256.
func (m *Maker) place(s *backup.Stored, write func(io.Writer) error) error {
	f, err := os.OpenFile(m.on(Folder, unfinished), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	h := sha256.New()
	err = write(io.MultiWriter(f, h))
	if err == nil {
		s.Size, err = f.Seek(0, io.SeekCurrent)
	}
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), m.on(Folder, s.Name))
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	s.SHA256 = hex.EncodeToString(h.Sum(nil))
	return nil // the folder is synced with the file latest.json
}

// prune removes the oldest backups, never the one that was just made. Those of a later time were made before the clock was put back: they count as the
// oldest.
func (m *Maker) prune(made string) error {
	entries, err := os.ReadDir(m.on(Folder))
	if err != nil {
		return err
	}
	var names []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), backup.Suffix) && e.Name() != made {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	later, _ := slices.BinarySearch(names, made)
	names = slices.Concat(names[later:], names[:later])
	var failed error
	for _, name := range names[:max(0, len(names)-(m.cfg.Keep-1))] {
		failed = errors.Join(failed, os.Remove(m.on(Folder, name)))
	}
	return failed
}

// Run makes a backup whenever the latest is older than every, until ctx ends.
func (m *Maker) Run(ctx context.Context, every time.Duration) error {
	pause := retry.Backoff{Min: poll, Max: retryMax}
	for {
		wait := poll
		latest, err := Latest(m.cfg.Root)
		if err != nil { // the next backup writes it again
			m.cfg.Log.WarnContext(ctx, "which backup is the newest can't be read", "err", err)
			err = nil
		}
		// A backup from the future was made before the clock was set back.
		if age := m.cfg.Now().Sub(latest.TakenAt); age >= every || age < 0 {
			if latest, err = m.Make(ctx); err == nil {
				m.cfg.Log.InfoContext(ctx, "a backup of the cluster is made", "file", filepath.Join(Folder, latest.Name), "bytes", latest.Size)
			}
		}
		if err == nil {
			pause.Reset()
		} else {
			wait = pause.Next(0)
			m.cfg.Log.WarnContext(ctx, "no backup of the cluster was made", "err", err, "again_in", wait.String())
		}
		if retry.Wait(ctx, wait) != nil {
			return nil //nolint:nilerr // stopped by its caller
		}
	}
}

// Latest returns the newest backup on a machine; zero if there is none.
func Latest(root string) (backup.Stored, error) {
	var s backup.Stored
	path := filepath.Join(root, Folder, backup.Latest)
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(text, &s); err != nil {
		return backup.Stored{}, fmt.Errorf("%s: %w", path, err)
	}
	return s, nil
}

// reader is a function that reads.
type reader func([]byte) (int, error)

func (r reader) Read(p []byte) (int, error) { return r(p) }

// interruptible returns a reader that ends with its context.
func interruptible(ctx context.Context, r io.Reader) io.Reader {
	return reader(func(p []byte) (int, error) {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		return r.Read(p)
	})
}
