package component

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/internal/tree"
	"github.com/muster-k8s/muster/trust/attest"
)

// tempPrefix marks files that are not installed yet.
const tempPrefix = ".muster-incoming-"

// Limits bound the resources for one component.
type Limits struct {
	// Download is the largest content, in bytes.
	Download int64
	// Unpacked is the largest sum of an archive's files, in bytes.
	Unpacked int64
	// Entries is the largest number of an archive's entries.
	Entries int
	// Attempts is how often a fetch is attempted, and Pause the first pause between two attempts.
	Attempts int
	Pause    time.Duration
	// Try bounds one attempt, from dial to last byte.
	Try time.Duration
}

// DefaultLimits are the limits in production.
var DefaultLimits = Limits{Download: 1 << 30, Unpacked: 4 << 30, Entries: 50_000, Attempts: 6, Pause: 500 * time.Millisecond, Try: 15 * time.Minute}

// An attempt ends when leastBytes of content (64 KiB) take longer than leastTime (30 s), about 2 KiB a second: at that rate a whole attempt brings 2
// MiB, and kubeadm alone has 70. A stalling mirror, or a network attacker, would delay the machine for the time of all attempts. A control plane
// holds the join lease meanwhile, so others wait (J8).
const (
	leastBytes = 64 << 10
	leastTime  = 30 * time.Second
)

// Installer installs components below a root folder.
type Installer struct {
	root   string
	client *http.Client
	limits Limits
	log    *slog.Logger
	staged string // the folder of [Installer.Stage]; empty if there is none

	leastTime time.Duration // the constant, or less in tests
}

// New returns an Installer for the file system below root, "/" on a machine.
func New(root string, limits Limits, log *slog.Logger) *Installer {
	t := http.DefaultTransport.(*http.Transport).Clone() //nolint:forcetypeassert // documented type
	t.ResponseHeaderTimeout = 30 * time.Second
	t.DisableCompression = true // the hash covers the bytes that the mirror stores
	return &Installer{root: root, limits: limits, log: log, leastTime: leastTime, client: &http.Client{Transport: t, CheckRedirect: checkRedirect}}
}

// Close frees idle connections.
func (in *Installer) Close() { in.client.CloseIdleConnections() }

func checkRedirect(r *http.Request, via []*http.Request) error {
	if len(via) > 5 || (r.URL.Scheme != "http" && r.URL.Scheme != "https") {
		return errors.New("refused redirect")
	}
	return nil
}

// Install installs all of list, in order, and reports each to progress. It does not download a component that is installed with the right content. It
// refuses with COMPONENT_HASH, COMPONENT_PATH or COMPONENT_UNAVAILABLE.
func (in *Installer) Install(ctx context.Context, list []Component, progress func(string)) error {
	for i, c := range list {
		if err := in.one(ctx, c, func(what string) { progress(fmt.Sprintf("%s %s (%d of %d)", what, c.Name(), i+1, len(list))) }); err != nil {
			return attest.Refuse(attest.ReasonOf(err), "%s: %w", c.Name(), err)
		}
	}
	return nil
}

func (in *Installer) one(ctx context.Context, c Component, progress func(string)) error {
	folder := filepath.Join(in.root, c.folder)
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	// B4: every name is resolved inside this folder; a link that leads out is an error.
	root, err := os.OpenRoot(folder)
	if err != nil {
		return err
	}
	defer root.Close() //nolint:errcheck // nothing is written through it
	if err := sweep(root); err != nil {
		return err
	}
	parent := path.Dir(c.rel)
	if c.extract {
		parent = c.rel
	}
	if err := clearWay(root, parent); err != nil {
		return err
	}
	present, err := in.present(root, c)
	if err != nil {
		return err
	}
	if present {
		progress("have")
		return nil
	}
	progress("fetching")
	tmp, err := in.fetch(ctx, root, c)
	if err != nil {
		return err
	}
	defer func() { _ = root.Remove(tmp) }()
	if c.extract {
		return in.unpack(root, c, tmp)
	}
	return settle(root, tmp, c.rel, c.mode)
}

// present reports whether the content is installed.
func (in *Installer) present(root *os.Root, c Component) (bool, error) {
	if c.extract {
		return in.unpacked(root, c)
	}
	sum, mode, err := digest(root, c.rel)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, refusePath(err)
	}
	return sum == c.sha256 && mode == c.mode, nil
}

// digest returns the SHA-256 and permission bits of a regular file. A link counts as missing. So does a file that another user owns, or that has a
// second name, in a pod's volume for instance: it could be changed later (B8).
func digest(root *os.Root, name string) (sum [32]byte, mode fs.FileMode, err error) {
	st, err := root.Lstat(name)
	if err != nil {
		return sum, 0, err
	}
	if own, ok := st.Sys().(*syscall.Stat_t); !st.Mode().IsRegular() || !ok || own.Nlink != 1 || int(own.Uid) != os.Geteuid() {
		return sum, 0, fs.ErrNotExist
	}
	f, err := root.Open(name)
	if err != nil {
		return sum, 0, err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return sum, 0, err
	}
	return [32]byte(h.Sum(nil)), st.Mode().Perm(), nil
}

// fetch downloads c to a temporary file and returns its name once its hash is right.
func (in *Installer) fetch(ctx context.Context, root *os.Root, c Component) (string, error) {
	pause := retry.Backoff{Min: in.limits.Pause, Max: 30 * time.Second}
	for try := 1; ; try++ {
		name, err := in.try(ctx, root, c)
		if err == nil {
			return name, nil
		}
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		if _, final := errors.AsType[*attest.Refusal](err); final {
			return "", err
		}
		if try >= in.limits.Attempts {
			return "", attest.Refuse(attestv1.Reason_REASON_COMPONENT_UNAVAILABLE, "%s can't be fetched from %s after %d attempts: %w", c.Name(), c.where(), try, err)
		}
		in.log.WarnContext(ctx, "component not fetched, trying again", "component", c.Name(), "from", c.where(), "try", try, "err", err)
		if err := retry.Wait(ctx, pause.Next(0)); err != nil {
			return "", err
		}
	}
}

// try makes one attempt. An [attest.Refusal] is final; other errors may be temporary.
func (in *Installer) try(ctx context.Context, root *os.Root, c Component) (name string, err error) {
	if name, err := in.fromStage(root, c); err == nil {
		return name, nil
	}
	ctx, cancel := context.WithTimeout(ctx, in.limits.Try)
	defer cancel()
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url, nil)
	if err != nil {
		return "", err
	}
	resp, err := in.client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("the mirror answers %s", resp.Status)
	}
	if resp.ContentLength > in.limits.Download {
		return "", tooLarge(in.limits.Download)
	}
	body := &paced{from: resp.Body, least: in.leastTime}
	slow := fmt.Errorf("the mirror sent less than %d KiB in %s", leastBytes>>10, in.leastTime)
	body.timer = time.AfterFunc(body.least, func() { giveUp(slow) })
	defer body.timer.Stop()
	h := sha256.New()
	name, err = spool(root, io.TeeReader(io.LimitReader(body, in.limits.Download+1), h), in.limits.Download)
	if err != nil {
		if context.Cause(ctx) == slow { //nolint:errorlint // this error itself
			return "", slow
		}
		return "", err
	}
	if got := h.Sum(nil); !bytes.Equal(got, c.sha256[:]) {
		_ = root.Remove(name)
		return "", attest.Refuse(attestv1.Reason_REASON_COMPONENT_HASH, "%s has SHA-256 %x, want %x", c.where(), got, c.sha256)
	}
	return name, nil
}

// paced reads, and restarts the timer each time that enough bytes have come.
type paced struct {
	from  io.Reader
	timer *time.Timer
	least time.Duration // for leastBytes
	got   int           // since the timer was restarted
}

// Read implements [io.Reader].
func (p *paced) Read(b []byte) (int, error) {
	n, err := p.from.Read(b)
	if p.got += n; p.got >= leastBytes {
		p.got = 0
		p.timer.Reset(p.least)
	}
	return n, err
}

func tooLarge(limit int64) error {
	return attest.Refuse(attestv1.Reason_REASON_COMPONENT_HASH, "the content is larger than %d bytes", limit)
}

// spool copies at most limit bytes to a new temporary file that other users can't read.
func spool(root *os.Root, from io.Reader, limit int64) (name string, err error) {
	f, name, err := create(root)
	if err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			_ = root.Remove(name)
		}
	}()
	n, err := io.Copy(f, from)
	if err == nil && n > limit {
		err = tooLarge(limit)
	}
	return name, errors.Join(err, f.Sync(), f.Close())
}

// clearWay removes a file from the place of a folder: of dir, or of one that it is in. Root can have left it, and the folder could not be made.
func clearWay(root *os.Root, dir string) error {
	at := ""
	for part := range strings.SplitSeq(dir, "/") {
		at = path.Join(at, part)
		if info, err := root.Lstat(at); err == nil && info.Mode().IsRegular() {
			return root.Remove(at)
		}
	}
	return nil
}

// settle gives a temporary file its mode and renames it to its place, so that its place has the old content or the new. A folder there is removed: root
// can have left it, and it would refuse the file at each boot.
func settle(root *os.Root, tmp, name string, mode fs.FileMode) error {
	if dir := filepath.Dir(name); dir != "." {
		if err := clearWay(root, dir); err != nil {
			return err
		}
		if err := root.MkdirAll(dir, 0o755); err != nil {
			return refusePath(err)
		}
	}
	if info, err := root.Lstat(name); err == nil && info.IsDir() { // by a path inside of root (B4)
		if err := tree.RemoveAll(filepath.Join(root.Name(), name)); err != nil {
			return err
		}
	}
	if err := root.Chmod(tmp, mode); err != nil {
		return err
	}
	if err := root.Rename(tmp, name); err != nil {
		return refusePath(err)
	}
	return nil
}

// refusePath gives a reason to the errors of os.Root.
func refusePath(err error) error {
	return attest.Refuse(attestv1.Reason_REASON_COMPONENT_PATH, "%w", err)
}

func create(root *os.Root) (*os.File, string, error) {
	for i := 0; ; i++ {
		name := fmt.Sprintf("%s%d-%d", tempPrefix, os.Getpid(), i)
		f, err := root.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if errors.Is(err, fs.ErrExist) && i < 1000 {
			continue
		}
		return f, name, err
	}
}

// sweep removes the files of an interrupted installation.
func sweep(root *os.Root) error {
	return tree.Each(root.Name(), func(at string, d fs.DirEntry) error {
		if !strings.HasPrefix(d.Name(), tempPrefix) {
			return nil
		}
		return tree.RemoveAll(at)
	})
}
