package disk

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/muster-k8s/muster/services/bootstrapper/disk/luks2"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/trust/keys"
)

// wrongKey is cryptsetup's exit status for "no permission (bad passphrase)".
const wrongKey = 2

// These are the descriptors of the header and the keys in a child: [exec.Cmd.ExtraFiles] begin at 3.
const (
	headerFD = "/proc/self/fd/3"
	keyFD    = "/proc/self/fd/4"
	newKeyFD = "/proc/self/fd/5"
)

var (
	pbkdf   = []string{"--hash", luks2.Hash, "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", strconv.Itoa(luks2.Iterations)}
	keySize = []string{"--keyfile-size", strconv.Itoa(keys.Size)}
)

// Format makes a new volume, opens it at [Mapped] with an empty file system, and leaves its first key in [FirstKeyFile]. The disk must be blank or new;
// a new one keeps its ID. With integrity each sector is written once, which may take long: progress receives the bytes done and in total.
//
// The header is written to the disk last: a machine that stops before that finds the disk unchanged.
func (l *LUKS) Format(ctx context.Context, progress func(done, total uint64)) error {
	b, err := l.read()
	if err != nil {
		return err
	}
	uuid := newUUID()
	if id, isNew := luks2.New(b); isNew {
		uuid = id.String()
	} else if !luks2.Blank(b) {
		return refuse("%s is not blank: erase its first MiB if nothing on it is needed (docs/state-disk.md)", l.device)
	}
	if m, err := l.mapped(); err != nil {
		return err
	} else if m != nil { // by an earlier attempt in this boot
		if err := l.Close(ctx); err != nil {
			return err
		}
	}
	first, err := newFirstKey()
	if err != nil {
		return err
	}
	f, err := inMemory(make([]byte, luks2.Size), false)
	if err != nil {
		return refuse("the state disk: %w", err)
	}
	defer f.Close()
	h, err := l.format(ctx, f, uuid, first, progress)
	if err != nil {
		return err
	}
	if err := l.open(ctx, f, first); err != nil {
		return err
	}
	if err := l.fill(ctx, h, first); err != nil {
		return errors.Join(refuse("format %s: %w", l.device, err), l.Close(context.WithoutCancel(ctx)))
	}
	return nil
}

// fill does the steps that follow once a new volume is open.
func (l *LUKS) fill(ctx context.Context, h *luks2.Header, first keys.Disk) error {
	if err := l.mkfs(ctx); err != nil {
		return err
	}
	if err := writeFirstKey(l.firstKey, first); err != nil {
		return err
	}
	return l.write(h)
}

// format writes a header to f and, with integrity, all sectors of the device's data.
func (l *LUKS) format(ctx context.Context, f *os.File, uuid string, first keys.Disk, progress func(done, total uint64)) (*luks2.Header, error) {
	args := []string{
		"luksFormat", "--batch-mode", "--type", "luks2", "--header", headerFD, "--disable-locks", "--offset", strconv.Itoa(luks2.Size / 512),
		"--luks2-metadata-size", strconv.Itoa(luks2.MetadataSize), "--luks2-keyslots-size", strconv.Itoa(luks2.KeyslotsSize),
		"--cipher", luks2.Cipher, "--key-size", "512", "--sector-size", strconv.Itoa(luks2.SectorSize),
		"--label", luks2.LabelNew, "--uuid", uuid, "--key-file", keyFD,
	}
	args = append(append(args, keySize...), pbkdf...)
	if l.integrity == luks2.HMACSHA256 {
		args = append(args, "--integrity", "hmac-sha256", "--progress-json", "--progress-frequency", "1")
	}
	line := func(s string) {
		if done, total, ok := parseProgress(s); ok && progress != nil {
			progress(done, total)
		}
	}
	if err := l.cryptsetup(ctx, f, []keys.Disk{first}, line, append(args, l.device)...); err != nil {
		return nil, refuse("format %s: %w", l.device, err)
	}
	return l.written(f, uuid, luks2.LabelNew)
}

// rekey returns the header of a new disk after the cluster's key has replaced its first key.
func (l *LUKS) rekey(ctx context.Context, h *luks2.Header, first, key keys.Disk) (*luks2.Header, error) {
	if len(key.Expose()) == 0 {
		return nil, refuse("no key was given for the state disk")
	}
	f, err := inMemory(h.Bytes(), false)
	if err != nil {
		return nil, refuse("the state disk: %w", err)
	}
	defer f.Close()
	args := append([]string{"luksChangeKey", "--batch-mode", "--type", "luks2", "--disable-locks", "--key-file", keyFD,
		"--new-keyfile-size", strconv.Itoa(keys.Size)}, keySize...)
	args = append(append(args, pbkdf...), headerFD, newKeyFD)
	if err := l.cryptsetup(ctx, f, []keys.Disk{first, key}, nil, args...); err != nil {
		return nil, refuse("change the key of %s: %w", l.device, err)
	}
	if err := l.cryptsetup(ctx, f, nil, nil, "config", "--batch-mode", "--disable-locks", "--label", luks2.LabelState, headerFD); err != nil {
		return nil, refuse("label %s: %w", l.device, err)
	}
	next, err := l.written(f, h.ID.String(), luks2.LabelState)
	if err != nil {
		return nil, err
	}
	// The header that is written to the disk opens only with the cluster's key: it has one slot.
	sealed, err := inMemory(next.Bytes(), true)
	if err != nil {
		return nil, refuse("the state disk: %w", err)
	}
	defer sealed.Close()
	return next, l.try(ctx, sealed, key)
}

// written checks the header that cryptsetup has written to f.
func (l *LUKS) written(f *os.File, uuid, label string) (*luks2.Header, error) {
	b := make([]byte, luks2.Size)
	if _, err := f.ReadAt(b, 0); err != nil {
		return nil, refuse("the state disk's new header: %w", err)
	}
	h, err := luks2.Parse(b, l.integrity)
	if err != nil {
		return nil, refuse("this cryptsetup writes another header than version 2.6.1: %w", err)
	}
	if h.ID.String() != uuid || h.Label != label {
		return nil, refuse("cryptsetup wrote a header with UUID %s and label %s, instead of %s and %s", h.ID, h.Label, uuid, label)
	}
	return h, nil
}

// try returns nil if the key opens the header in f, by the digest of the volume key that it yields.
func (l *LUKS) try(ctx context.Context, f *os.File, key keys.Disk) error {
	if len(key.Expose()) == 0 {
		return refuse("no key was given for the state disk")
	}
	err := l.cryptsetup(ctx, f, []keys.Disk{key}, nil,
		append([]string{"open", "--batch-mode", "--test-passphrase", "--type", "luks2", "--disable-locks", "--header", headerFD, "--key-file", keyFD, l.device}, keySize...)...)
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == wrongKey {
		return refuse("%s: %w", l.device, ErrWrongKey)
	}
	if err != nil {
		return refuse("try a key on %s: %w", l.device, err)
	}
	return nil
}

// open opens the volume at [Mapped] by the header in f.
func (l *LUKS) open(ctx context.Context, f *os.File, key keys.Disk) error {
	err := l.cryptsetup(ctx, f, []keys.Disk{key}, nil,
		append([]string{"open", "--batch-mode", "--type", "luks2", "--disable-locks", "--header", headerFD, "--key-file", keyFD, l.device, mappedName}, keySize...)...)
	if err != nil {
		return refuse("open %s: %w", l.device, err)
	}
	return nil
}

// Close closes the volume, which is then as before it was opened.
func (l *LUKS) Close(ctx context.Context) error {
	if err := l.cryptsetup(ctx, nil, nil, nil, "close", mappedName); err != nil {
		return refuse("close %s: %w", Mapped, err)
	}
	return nil
}

func (l *LUKS) mkfs(ctx context.Context) error {
	return l.run(ctx, nil, nil, "mkfs.ext4", "-q", "-F", "-L", mappedName, "-m", "1", "-E", "nodiscard", Mapped)
}

// cryptsetup runs cryptsetup with a header at [headerFD] and keys at [keyFD] and [newKeyFD]. Keys pass through pipes (K3).
func (l *LUKS) cryptsetup(ctx context.Context, header *os.File, secrets []keys.Disk, line func(string), args ...string) error {
	var files []*os.File
	if header != nil {
		files = append(files, header)
	}
	for _, k := range secrets {
		r, err := pipe(k)
		if err != nil {
			return err
		}
		defer r.Close()
		files = append(files, r)
	}
	return l.run(ctx, files, line, "cryptsetup", args...)
}

// pipe returns the read end of a pipe that holds the key, which fits into every pipe's buffer.
func pipe(k keys.Disk) (*os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	b := k.Expose()
	_, err = w.Write(b)
	clear(b)
	if err = errors.Join(err, w.Close()); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// grace is how long a program may take to end after a signal: cryptsetup removes its mappings meanwhile.
const grace = 10 * time.Second

// run runs a program with its own environment and passes each line of its output to line. The error has the last line.
func run(ctx context.Context, files []*os.File, line func(string), name string, args ...string) error {
	path, err := machine.LookPath(name)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, path, args...)
	// No udev runs in an initramfs, and no other program here maps a device.
	cmd.Env, cmd.Dir, cmd.ExtraFiles = append(machine.Environment(), "DM_DISABLE_UDEV=1"), "/", files
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = grace
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // the kernel sends the signal when the thread that started the child ends
	defer runtime.UnlockOSThread()
	r, w := io.Pipe()
	cmd.Stdout, cmd.Stderr = w, w
	var said []string
	read := make(chan struct{})
	go func() {
		defer close(read)
		lines := bufio.NewReader(r)
		for {
			s, err := lines.ReadString('\n')
			if s = strings.TrimSpace(s); s != "" {
				if line != nil {
					line(s)
				}
				said = append(said[max(0, len(said)-2):], s)
			}
			if err != nil {
				return
			}
		}
	}()
	err = cmd.Run()
	_ = w.Close()
	<-read
	if ctx.Err() != nil {
		return errors.Join(context.Cause(ctx), err)
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, args[0], err, strings.Join(said, "; "))
	}
	return nil
}

// parseProgress reads a line of cryptsetup's --progress-json, whose numbers are strings (cryptsetup-luksFormat(8)).
func parseProgress(line string) (done, total uint64, ok bool) {
	var p struct {
		Done  string `json:"device_bytes"`
		Total string `json:"device_size"`
	}
	if json.Unmarshal([]byte(line), &p) != nil {
		return 0, 0, false
	}
	done, err := strconv.ParseUint(p.Done, 10, 64)
	total, err2 := strconv.ParseUint(p.Total, 10, 64)
	return done, total, err == nil && err2 == nil && done <= total
}
