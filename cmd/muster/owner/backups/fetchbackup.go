package backups

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/internal/ownerorder"
)

// maxLatest bounds the file that names the newest backup, in bytes.
const maxLatest = 4 << 10

// nodeSilence is how long a node may pause while it sends a file.
const nodeSilence = 30 * time.Second

// fetcher reads backups of control planes.
type fetcher struct {
	dir     *ownerdir.Dir
	kube    *clusterapi.Client
	folder  string        // to which they are written
	silence time.Duration // [nodeSilence]
	report  func(string)
}

func newFetcher(d *ownerdir.Dir, folder string, report func(string)) (*fetcher, error) {
	kube, err := access.Connect(d)
	if err != nil {
		return nil, err
	}
	return &fetcher{d, kube, folder, nodeSilence, report}, nil
}

// storedOn is the newest backup of a control plane, as the control plane reports it.
type storedOn struct {
	node string
	backup.Stored
}

// FetchLatest is FetchBackup for the newest backup on control planes; with node "", on all of them. Control planes may be hostile: a refused backup
// is reported, and the next newest one is fetched. In this case it returns both that backup and an error with the reasons. An unreachable control
// plane is reported and left out.
func FetchLatest(ctx context.Context, d *ownerdir.Dir, node, folder string, report func(string)) (*BackupInfo, error) {
	f, err := newFetcher(d, folder, report)
	if err != nil {
		return nil, err
	}
	return f.latest(ctx, node)
}

func (f *fetcher) latest(ctx context.Context, node string) (*BackupInfo, error) {
	names := []string{node}
	if node == "" {
		list, err := f.kube.ControlPlanes(ctx)
		if err != nil {
			return nil, err
		}
		names = names[:0]
		for _, c := range list {
			names = append(names, c.Name)
		}
	}
	var refused []error
	refuse := func(err error) {
		f.report(err.Error())
		refused = append(refused, err)
	}
	var found []storedOn
	for _, name := range names {
		s, err := f.latestOn(ctx, name)
		switch {
		case clusterapi.Absent(err):
			f.report(name + ": has no backup")
		case err != nil && ctx.Err() == nil:
			f.report(fmt.Sprintf("%s: its backups can't be read: %v", name, err))
		case err != nil:
			return nil, err
		case time.Until(s.TakenAt) > ownerorder.MaxAge: // otherwise it would be the newest one until then
			refuse(fmt.Errorf("%s reports that it made its newest backup at %s, but this computer's clock is at %s: its clock is wrong, or the report was forged", name, s.TakenAt.UTC().Format(time.RFC3339), time.Now().UTC().Format(time.RFC3339)))
		default:
			found = append(found, storedOn{name, s})
		}
	}
	slices.SortStableFunc(found, func(a, b storedOn) int { return b.TakenAt.Compare(a.TakenAt) })
	for n, s := range found {
		f.report(fmt.Sprintf("%s: reading %s, %.1f MiB", s.node, s.Name, float64(s.Size)/(1<<20)))
		info, err := f.inTurn(ctx, s, len(found)-n)
		if err == nil {
			return info, passedOver(refused)
		}
		if ctx.Err() != nil {
			return nil, errors.Join(append(refused, err)...)
		}
		refuse(err)
	}
	if len(refused) > 0 {
		return nil, errors.Join(refused...)
	}
	return nil, problem.WithRemedy(errors.New("no control plane has a backup that can be read"), "muster backup makes one. With backup.every in image.yaml, control planes make backups periodically.")
}

// passedOver returns the reasons why newer backups than the fetched one were refused, as an error without a reason code,
// because the command has fetched a backup.
func passedOver(refused []error) error {
	if len(refused) == 0 {
		return nil
	}
	return problem.WithRemedy(fmt.Errorf("a newer backup was refused, and an older one fetched: %s", errors.Join(refused...)), cmp.Or(problem.Explain(refused[0]).Remedy, "Look at that control plane, also at its clock, before you trust it again.")) //nolint:errorlint // a refused copy's reason is not that of the command
}

// inTurn fetches a backup. It uses at most one of the given number of equal parts of the remaining time.
func (f *fetcher) inTurn(ctx context.Context, s storedOn, parts int) (*BackupInfo, error) {
	if end, ok := ctx.Deadline(); ok {
		part := time.Until(end) / time.Duration(parts)
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, part, fmt.Errorf("%s did not send it within %s", s.node, part.Round(time.Second)))
		defer cancel()
	}
	return f.fetch(ctx, s.node, s.Stored)
}

func (f *fetcher) latestOn(ctx context.Context, node string) (backup.Stored, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, f.silence, fmt.Errorf("no answer within %s", f.silence))
	defer cancel()
	r, err := f.kube.NodeLog(ctx, node, backup.LogFolder, backup.Latest)
	if err != nil {
		return backup.Stored{}, because(ctx, err)
	}
	defer r.Close()
	text, err := io.ReadAll(io.LimitReader(r, maxLatest))
	if err == nil {
		err = ctx.Err() // the answer may have ended because the request was canceled
	}
	if err != nil {
		return backup.Stored{}, because(ctx, err)
	}
	return parseStored(text)
}

// because adds the cause of ctx's end to an error.
func because(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

// FetchBackup reads a backup from a control plane into a folder, and verifies it. A file that is incomplete or not genuine is removed. An existing
// file with its name is never overwritten with other content.
func FetchBackup(ctx context.Context, d *ownerdir.Dir, node string, s backup.Stored, folder string) (*BackupInfo, error) {
	f, err := newFetcher(d, folder, nil)
	if err != nil {
		return nil, err
	}
	return f.fetch(ctx, node, s)
}

func (f *fetcher) fetch(ctx context.Context, node string, s backup.Stored) (_ *BackupInfo, err error) {
	if err := os.MkdirAll(f.folder, 0o700); err != nil {
		return nil, err
	}
	if err := readable(f.dir, s.OwnerKey); err != nil {
		return nil, fmt.Errorf("the backup of %s can't be read: %w", node, err)
	}
	path := filepath.Join(f.folder, s.Name)
	tmp, err := os.CreateTemp(f.folder, "."+s.Name+"-*") // 0600
	if err != nil {
		return nil, err
	}
	defer func() {
		_ = tmp.Close() // already closed after a success
		if rerr := os.Remove(tmp.Name()); !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
	}()
	n, err := f.download(ctx, node, s, tmp)
	if err != nil {
		return nil, problem.WithRemedy(fmt.Errorf("read %s on %s: %w", s.Name, node, err), "Run muster backup --latest --from "+node+" again: it reads the newest one that is there.")
	}
	info, _, _, err := ReadBackup(f.dir, tmp, path)
	switch {
	case err != nil:
		return nil, problem.WithRemedy(fmt.Errorf("the backup of %s is refused: %w", node, err), "Make one on another control plane: muster backup --from NODE. If that is also refused, do not trust "+node+".")
	case n != s.Size || info.SHA256 != s.SHA256:
		return nil, fmt.Errorf("the backup of %s has %d bytes with the SHA-256 %s, but the machine reported %d and %s", node, n, info.SHA256, s.Size, s.SHA256)
	case info.Node != node:
		return nil, fmt.Errorf("the backup of %s names %s as its maker", node, problem.Printable(info.Node))
	case !s.TakenAt.Equal(info.TakenAt) || s.Name != backup.Name(info.Node, info.TakenAt): // a genuine one, but from another time
		return nil, fmt.Errorf("the machine reports that %s was taken at %s, but the backup has the time %s", s.Name, s.TakenAt.UTC().Format(time.RFC3339), info.TakenAt.UTC().Format(time.RFC3339))
	}
	if err := errors.Join(tmp.Sync(), tmp.Close()); err != nil {
		return nil, err
	}
	if _, err := os.Lstat(path); err == nil {
		return info, sameFile(path, info.SHA256, node)
	}
	if err := os.Rename(tmp.Name(), path); err != nil { // the folder's filesystem may not support hard links
		return nil, err
	}
	return info, syncFolder(f.folder)
}

// download reads a backup, at most one byte more than its reported size. It stops when the node sends nothing for f.silence.
func (f *fetcher) download(ctx context.Context, node string, s backup.Stored, to io.Writer) (int64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silence := time.AfterFunc(f.silence, func() { cancel(fmt.Errorf("it has sent nothing for %s", f.silence)) })
	defer silence.Stop()
	r, err := f.kube.NodeLog(ctx, node, backup.LogFolder, s.Name)
	if err != nil {
		return 0, because(ctx, err)
	}
	n, err := io.Copy(to, io.LimitReader(heard{r, func() { silence.Reset(f.silence) }}, s.Size+1))
	if err == nil && n < s.Size {
		err = ctx.Err() // as in latestOn
	}
	if err != nil {
		err = because(ctx, err)
	}
	return n, errors.Join(err, r.Close())
}

// heard calls a function for each part that it reads.
type heard struct {
	io.Reader
	note func()
}

func (h heard) Read(b []byte) (int, error) {
	n, err := h.Reader.Read(b)
	h.note()
	return n, err
}

// sameFile returns an error if a file has other content than the fetched backup: an attacker with root on a control plane
// can sign a backup with any time.
func sameFile(path, sum, node string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return err
	}
	if want, err := hex.DecodeString(sum); err != nil || !bytes.Equal(h.Sum(nil), want) {
		return problem.WithRemedy(fmt.Errorf("%s sent another backup than the existing file %s, which was not changed: the file's SHA-256 is %x, that of the backup from %s is %s", node, path, h.Sum(nil), node, sum),
			"Do not trust "+node+": it has signed two backups with the same time. muster backup verify "+path+" verifies the one that you have. Make a new one on another control plane: muster backup --from NODE.")
	}
	return nil
}

func syncFolder(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
