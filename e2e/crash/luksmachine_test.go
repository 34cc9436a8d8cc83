package crash

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	recoverv1 "github.com/muster-k8s/muster/gen/muster/recover/v1"
	"github.com/muster-k8s/muster/gen/muster/recover/v1/recoverv1connect"
	"github.com/muster-k8s/muster/internal/disktest"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/disk"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// encrypted is a machine whose state disk is encrypted, on a host without device-mapper. The disk's header is real,
// and only the real cryptsetup and the bootstrapper use it. This code replaces device-mapper and the kernel: the
// folders of the state disk exist while it is mounted, and otherwise are on the disk, encrypted with the header's
// volume key.
type encrypted struct {
	*host
	kind    journal.Kind
	header  string // the state disk's first 1 MiB, and room behind it
	data    string // the rest of the disk
	mounted bool
	markers []string // content of the disk when the power failed and it was the cluster's
	cuts    int

	req       *initv1.InitRequest // of an init, and of recovery
	id        [32]byte            // of the cluster
	recovered int                 // how often the owner has sent the key
}

// Folders of a machine on its state disk, as in the image: everything that survives a power cut.
var onState = []string{"var", "etc", "usr"}

func (b *bench) newEncrypted(t *testing.T, kind journal.Kind, id [32]byte, m meta, ownerKey []byte) *encrypted {
	t.Helper()
	memory := disktest.Small(t, 16<<20) // as /run; and what is not synced to a disk is not waited for
	h := b.newHostIn(t, memory, m, ownerKey, map[string]string{"mode": "luks", "path": "/dev/state", "integrity": "none"})
	platter := t.TempDir()
	e := &encrypted{host: h, kind: kind, header: filepath.Join(platter, "header"), data: filepath.Join(platter, "data"), id: id}
	e.req, _ = request(b.mirror)
	writePrograms(t, &h.plan, e.data)
	err := errors.Join(
		os.WriteFile(e.header, nil, 0o600), os.Truncate(e.header, 32<<20), os.WriteFile(e.data, nil, 0o600), os.WriteFile(h.plan.beside("console"), nil, 0o600),
		os.MkdirAll(filepath.Join(h.plan.Root, "dev"), 0o700), os.Symlink(e.header, filepath.Join(h.plan.Root, "dev/state")),
	)
	if err != nil {
		t.Fatal(err)
	}
	e.powerOn()
	return e
}

// powerOn creates the folder for the first key.
func (e *encrypted) powerOn() {
	e.t.Helper()
	if err := os.MkdirAll(filepath.Join(e.plan.Root, filepath.Dir(disk.FirstKeyFile)), 0o755); err != nil {
		e.t.Fatal(err)
	}
}

// state is the disk's state by its header alone, as the next boot finds it.
func (e *encrypted) state() string {
	l, err := disk.OpenLUKS(e.header, disk.WithRoot(e.t.TempDir()), disk.WithIntegrity("none"))
	if err != nil {
		e.t.Fatal(err)
	}
	s, err := l.State()
	if err != nil {
		return err.Error()
	}
	return s.String()
}

// volume is the cipher of the disk's data while the disk is open; nil: it is not.
func (e *encrypted) volume() (c cipher.AEAD, mark string) {
	e.t.Helper()
	key, err := os.ReadFile(e.plan.beside("kernel/key"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, ""
	}
	sum := sha256.Sum256(key)
	block, err2 := aes.NewCipher(sum[:])
	if err = errors.Join(err, err2); err != nil {
		e.t.Fatal(err)
	}
	if c, err = cipher.NewGCM(block); err != nil {
		e.t.Fatal(err)
	}
	return c, hex.EncodeToString(sum[:]) + "\n"
}

// mount does what the initramfs does once the disk is open. Everything that was on the disk when it became the
// cluster's must be there again.
func (e *encrypted) mount() {
	e.t.Helper()
	c, mark := e.volume()
	if c == nil {
		e.t.Fatal("unlock has ended, and the disk is not open")
	}
	raw, err := os.ReadFile(e.data)
	if err != nil {
		e.t.Fatal(err)
	}
	e.mounted = true
	if string(raw) != mark { // or it is empty
		if len(raw) < c.NonceSize() {
			e.t.Fatal("the disk is open, and has no file system")
		}
		files, err := c.Open(nil, raw[:c.NonceSize()], raw[c.NonceSize():], nil)
		if err != nil {
			e.t.Fatalf("the disk is open by a key that is not its data's: %v", err)
		}
		e.tar(files, "-x", "-p")
	}
	for _, m := range e.markers {
		if _, err := os.Stat(filepath.Join(e.plan.Root, "var", m)); err != nil {
			e.t.Fatalf("lost from the disk: %v", err)
		}
	}
}

func (e *encrypted) tar(in []byte, args ...string) []byte {
	e.t.Helper()
	cmd := exec.Command("tar", append(args, "-C", e.plan.Root, "-f", "-")...)
	if len(args) > 0 && args[0] == "-c" {
		cmd.Args = append(cmd.Args, onState...)
	}
	cmd.Stdin, cmd.Stderr = bytes.NewReader(in), os.Stderr
	out, err := cmd.Output()
	if err != nil {
		e.t.Fatalf("tar: %v", err)
	}
	return out
}

// cut is a power cut: all processes end, memory is lost, the disk is closed and PCRs are zero.
func (e *encrypted) cut() {
	e.t.Helper()
	e.cuts++
	if c, _ := e.volume(); c != nil && e.mounted {
		if e.state() == disk.StateLocked.String() {
			e.mark()
		}
		for _, folder := range onState {
			if err := os.MkdirAll(filepath.Join(e.plan.Root, folder), 0o700); err != nil {
				e.t.Fatal(err)
			}
		}
		nonce := make([]byte, c.NonceSize())
		_, _ = rand.Read(nonce) // never fails
		if err := os.WriteFile(e.data, c.Seal(nonce, nonce, e.tar(nil, "-c"), nil), 0o600); err != nil {
			e.t.Fatal(err)
		}
	}
	e.mounted = false
	lost := []string{e.plan.beside("kernel")}
	for _, folder := range append([]string{"run", "sys"}, onState...) {
		lost = append(lost, filepath.Join(e.plan.Root, folder))
	}
	for _, folder := range lost {
		if err := os.RemoveAll(folder); err != nil {
			e.t.Fatal(err)
		}
	}
	e.tpm.Restart()
	e.powerOn()
	// Only the disk's own content is on the disk.
	for _, file := range []string{e.header, e.data} {
		raw, err := os.ReadFile(file)
		if err != nil {
			e.t.Fatal(err)
		}
		for _, m := range append([]string{"muster-journal"}, e.markers...) {
			if bytes.Contains(raw, []byte(m)) {
				e.t.Fatalf("%q can be read on the raw disk", m)
			}
		}
	}
}

// mark leaves a file on the disk that must exist from now on.
func (e *encrypted) mark() {
	e.t.Helper()
	m := "marker-" + rand.Text()
	if err := errors.Join(os.MkdirAll(filepath.Join(e.plan.Root, "var"), 0o700), os.WriteFile(filepath.Join(e.plan.Root, "var", m), nil, 0o600)); err != nil {
		e.t.Fatal(err)
	}
	e.markers = append(e.markers, m)
}

// boot configures where a machine dies.
type boot struct {
	killAt int // the effect of this boot, from 0; negative: none
	// inUnlock and inRun name the file at whose first change, in the initramfs or later, it dies; empty: none.
	inUnlock, inRun string
	// goesOn reports that the power does not fail when a process dies.
	goesOn bool
	// whileLocked is called, once, with the screen's content while the machine waits for its key, and reports whether
	// it is switched off then.
	whileLocked func(line string) (off bool)
}

// errCut is returned if the power failed.
var errCut = errors.New("the power has failed")

// boots is one boot, from the initramfs to a node: nil. For a machine that dies at the point of b it returns errCut;
// the machine is off then.
func (e *encrypted) boots(b boot) error {
	e.t.Helper()
	before := len(e.effects())
	initramfs := e.plan
	initramfs.Unlock = e.header
	l := e.startAs(initramfs, b.killAt, b.inUnlock)
	err := e.unlocks(l, b)
	if err == nil {
		e.mount()
		if b.killAt >= 0 {
			b.killAt -= len(e.effects()) - before
		}
		l = e.startAs(e.plan, b.killAt, b.inRun)
		err = e.runs(l)
	}
	if err != nil && l.killed() {
		err = errCut
	}
	if err != nil {
		l.kill()
		err = fmt.Errorf("%w\n%s", err, l.log)
	}
	if err != nil && !b.goesOn {
		e.cut()
	}
	return err
}

// startAs starts a process that dies at an effect, or at the first change of a file.
func (e *encrypted) startAs(p plan, killAt int, killOn string) *life {
	e.t.Helper()
	h := *e.host
	h.plan = p
	if killOn == "" {
		return h.start(killAt)
	}
	changed := e.watch(killOn)
	l := h.start(-1)
	go func() {
		select {
		case <-changed:
			l.kill()
		case <-l.over:
		}
	}()
	return l
}

// watch closes the channel when something in that folder, or that file, was written.
func (e *encrypted) watch(path string) <-chan struct{} {
	e.t.Helper()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		e.t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "inotify")
	if _, err := unix.InotifyAddWatch(fd, path, unix.IN_MODIFY); err != nil {
		e.t.Fatal(err)
	}
	changed, over := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(over)
		if _, err := f.Read(make([]byte, 4096)); err == nil {
			close(changed)
		}
	}()
	e.t.Cleanup(func() {
		_ = f.Close()
		<-over
	})
	return changed
}

// unlocks waits for the end of the initramfs. Where only the owner has the key, the owner sends it.
func (e *encrypted) unlocks(l *life, b boot) error {
	e.t.Helper()
	told := len(e.console())
	deadline := time.After(patience)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	recovering := false
	for {
		select {
		case <-l.over:
			return l.err
		case <-deadline:
			return errors.New("the machine does not end unlocking")
		case <-tick.C:
		}
		if a := l.attributes("waiting for a recovery by the owner; rejoin attempts continue"); a != nil && !recovering && e.kind == journal.KindInit {
			recovering = true
			addr, _ := a["recover"].(string)
			ctx, cancel := context.WithTimeout(e.t.Context(), patience)
			err := l.insists(ctx, func() error { return e.recover(ctx, addr) })
			cancel()
			if err == nil {
				e.recovered++
			} else if !dead(l) {
				return fmt.Errorf("recover: %w", err)
			}
		}
		if b.whileLocked != nil {
			if lines := e.console()[told:]; slices.ContainsFunc(lines, func(s string) bool { return strings.Contains(s, "waiting for the key of the state disk: ") }) {
				if b.whileLocked(lines[len(lines)-1]) {
					l.kill()
				}
				b.whileLocked = nil
			}
		}
	}
}

// runs waits until the running system is a node.
func (e *encrypted) runs(l *life) error {
	e.t.Helper()
	if e.kind == journal.KindInit {
		// An owner whose call has a result does not call again.
		if addr := l.addr(e.t); addr != "" && !e.record().ResultSent {
			ctx, cancel := context.WithTimeout(e.t.Context(), patience)
			result, err := l.callInit(ctx, addr, e.req, e.id)
			cancel()
			if err == nil && !bytes.Equal(result.GetClusterId(), e.id[:]) {
				return errors.New("a result of another cluster")
			}
			if err != nil && !dead(l) {
				return fmt.Errorf("init: %w", err)
			}
		}
	}
	return l.end()
}

// console returns what the machine's screen has shown so far.
func (e *encrypted) console() []string {
	e.t.Helper()
	text, err := os.ReadFile(e.plan.beside("console"))
	if err != nil {
		e.t.Fatal(err)
	}
	return strings.Split(strings.TrimSuffix(string(text), "\r\n"), "\r\n")
}

// recover is `muster recover` of the owner who has called init.
func (e *encrypted) recover(ctx context.Context, addr string) error {
	verifier, err := verifierOf([]*x509.Certificate{e.tpm.Root})
	if err != nil {
		return err
	}
	transport, err := atls.NewTransport(atls.ClientConfig{
		Attester: atls.NoAttester, Verifier: verifier, Appraiser: inState{attest.Unlocked()}, PeerPurpose: attest.PurposeMachine,
	})
	if err != nil {
		return err
	}
	defer func() { _ = transport.Close() }()
	root, err := keys.ParseRoot(keys.FirstVersion, e.req.GetRootSecret(), e.req.GetSalt())
	if err != nil {
		return err
	}
	client := recoverv1connect.NewRecoverServiceClient(rpc.HTTPClient(transport), "https://"+addr, rpc.ClientOptions()...)
	described, err := client.Describe(ctx, &recoverv1.DescribeRequest{})
	if err != nil {
		return err
	}
	request := ownerorder.Recovery{Cluster: root.ClusterID([32]byte(e.req.GetMeasurementSalt()))}
	if request.Disk, err = keys.ParseDiskID(described.GetDiskId()); err != nil {
		return err
	}
	if request.Nonce, err = ownerorder.ParseNonce(described.GetNonce()); err != nil {
		return err
	}
	if request.Key, err = root.Disk(request.Disk, keys.DiskSalt(e.req.GetDiskSalt())); err != nil {
		return err
	}
	stream, err := client.Recover(ctx, request.Wire(ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize)))) // the image has no owner's key to verify it with
	if err != nil {
		return err
	}
	defer func() { _ = stream.Close() }()
	var last recoverv1.State
	for stream.Receive() {
		last = stream.Msg().GetState()
	}
	if err := stream.Err(); err != nil {
		return err
	}
	if last != recoverv1.State_STATE_OPENED {
		return fmt.Errorf("recovery ended with %s", last)
	}
	return nil
}
