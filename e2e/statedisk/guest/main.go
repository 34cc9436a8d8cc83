// Program guest is the first process of a virtual machine that has only a state disk. It executes the steps in
// muster.do= of the kernel's command line, with the same code as a machine, and reports on its console. Its key is no
// secret: the test outside has to know it.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/muster-k8s/muster/services/bootstrapper/disk"
	"github.com/muster-k8s/muster/trust/keys"
)

const (
	device = "/run/state" // a link to the first disk; a step may change it
	first  = "/dev/vda"
	second = "/dev/vdb"
	marker = "/mnt/marker"
	// Each complete line has this prefix, so that the test can distinguish it from the kernel's.
	prefix = "guest: "
)

func report(format string, args ...any) { fmt.Printf(prefix+format+"\n", args...) }

func main() {
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "guest: this is the first process of a virtual machine, and of nothing else")
		os.Exit(1)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	err := run(ctx)
	if err != nil {
		report("error: %v", err)
	}
	report("end")
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

func run(ctx context.Context) error {
	if err := system(ctx); err != nil {
		return err
	}
	key, err := keys.ParseDisk(bytes.Repeat([]byte{7}, keys.Size))
	if err != nil {
		return err
	}
	wrong, err := keys.ParseDisk(bytes.Repeat([]byte{8}, keys.Size))
	if err != nil {
		return err
	}
	l, err := disk.OpenLUKS(device)
	if err != nil {
		return err
	}
	state, err := l.State()
	if err != nil {
		return fmt.Errorf("state: %w", err)
	}
	report("state %s", state)
	do, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return err
	}
	for _, w := range strings.Fields(string(do)) {
		switch w {
		case "muster.do=format":
			return format(ctx, l)
		case "muster.do=join":
			if err := format(ctx, l); err != nil {
				return err
			}
			return setKey(ctx, l, key, wrong)
		case "muster.do=unlock":
			return unlock(ctx, l, key, wrong)
		}
	}
	return errors.New("the command line names no action")
}

// system sets up what a program expects of a system.
func system(ctx context.Context) error {
	for _, m := range []struct{ at, kind string }{{"/proc", "proc"}, {"/sys", "sysfs"}, {"/dev", "devtmpfs"}, {"/run", "tmpfs"}} {
		if err := unix.Mount(m.kind, m.at, m.kind, 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", m.at, err)
		}
	}
	order, err := os.ReadFile("/modules")
	if err != nil {
		return err
	}
	for _, m := range strings.Fields(string(order)) {
		f, err := os.Open(m)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		if err = errors.Join(err, f.Close()); err != nil && !errors.Is(err, unix.EEXIST) {
			report("module %s: %v", filepath.Base(m), err)
		}
	}
	for tick := time.NewTicker(10 * time.Millisecond); ; {
		_, err := os.Stat(first)
		_, err2 := os.Stat(second)
		if err == nil && err2 == nil {
			return os.Symlink(first, device)
		}
		select {
		case <-ctx.Done():
			return errors.New("the disks do not appear")
		case <-tick.C:
		}
	}
}

func format(ctx context.Context, l *disk.LUKS) error {
	begin, told := time.Now(), 0
	var last [2]uint64
	if err := l.Format(ctx, func(done, total uint64) {
		told++
		last = [2]uint64{done, total}
		report("progress %d of %d", done, total)
	}); err != nil {
		return err
	}
	report("formatted in %.1f s, told %d times, last %d of %d", time.Since(begin).Seconds(), told, last[0], last[1])
	id, err := l.ID()
	if err != nil {
		return err
	}
	state, err := l.State()
	if err != nil {
		return err
	}
	report("disk %s is %s", id, state)
	st, err := os.Stat(disk.FirstKeyFile)
	if err != nil {
		return err
	}
	report("first key: mode %v", st.Mode())
	if err := mount(); err != nil {
		return err
	}
	// The test looks for this text in the disk from outside.
	if err := os.WriteFile(marker, []byte(strings.Repeat("MUSTER-MARKER-ON-THE-STATE-DISK\n", 1000)), 0o600); err != nil {
		return err
	}
	unix.Sync()
	return nil
}

func mount() error {
	if err := os.MkdirAll("/mnt", 0o755); err != nil {
		return err
	}
	return unix.Mount(disk.Mapped, "/mnt", "ext4", 0, "")
}

func setKey(ctx context.Context, l *disk.LUKS, key, wrong keys.Disk) error {
	theirs, err := lure()
	if err != nil {
		return err
	}
	begin := time.Now()
	if err := l.SetKey(ctx, key); err != nil {
		return err
	}
	report("key set in %.1f s", time.Since(begin).Seconds())
	if _, err := os.Stat(disk.FirstKeyFile); err == nil {
		return errors.New("the first key is still there")
	}
	if err := l.SetKey(ctx, key); err != nil {
		return fmt.Errorf("again: %w", err)
	}
	report("another key: %v", l.SetKey(ctx, wrong))
	now, err := os.ReadFile(second)
	report("the second disk is as it was: %v, %v", bytes.Equal(now, theirs), err)
	return unix.Unmount("/mnt", 0)
}

// lure makes the second disk look like the first: it has the same header, and the link leads to it. It returns its
// content.
func lure() ([]byte, error) {
	b := make([]byte, 1<<20)
	from, err := os.Open(first)
	if err != nil {
		return nil, err
	}
	_, err = io.ReadFull(from, b)
	if err = errors.Join(err, from.Close()); err != nil {
		return nil, err
	}
	to, err := os.OpenFile(second, os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	_, err = to.Write(b)
	if err = errors.Join(err, to.Sync(), to.Close()); err != nil {
		return nil, err
	}
	if err := errors.Join(os.Remove(device), os.Symlink(second, device)); err != nil {
		return nil, err
	}
	return os.ReadFile(second)
}

func unlock(ctx context.Context, l *disk.LUKS, key, wrong keys.Disk) error {
	err := l.Unlock(ctx, wrong)
	report("wrong key: %v", err)
	if !errors.Is(err, disk.ErrWrongKey) {
		return errors.New("the wrong key was not refused as such")
	}
	if _, err := os.Stat(disk.Mapped); err == nil {
		return errors.New("a wrong key opened the disk")
	}
	begin := time.Now()
	if err := l.Unlock(ctx, key); err != nil {
		return err
	}
	report("unlocked in %.1f s", time.Since(begin).Seconds())
	if err := l.Unlock(ctx, key); err != nil {
		return fmt.Errorf("again: %w", err)
	}
	id, err := l.ID()
	if err != nil {
		return err
	}
	report("disk %s", id)
	bad, good, err := scan()
	if err != nil {
		return err
	}
	report("blocks: %d good, %d bad", good, bad)
	if err := mount(); err != nil {
		report("mount: %v", err)
		return nil
	}
	b, err := os.ReadFile(marker)
	report("marker: %d bytes, whole %v, %v", len(b), string(b) == strings.Repeat("MUSTER-MARKER-ON-THE-STATE-DISK\n", 1000), err)
	return unix.Unmount("/mnt", 0)
}

// scan reads each block of the open disk, and counts those that the kernel refuses because their MAC is wrong.
func scan() (bad, good int, err error) {
	f, err := os.Open(disk.Mapped)
	if err != nil {
		return 0, 0, err
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, 0, err
	}
	b := make([]byte, 4096)
	for i := range size / 4096 {
		if _, err := f.ReadAt(b, i*4096); errors.Is(err, unix.EIO) || errors.Is(err, unix.EILSEQ) {
			bad++
		} else if err != nil {
			return bad, good, err
		} else {
			good++
		}
	}
	return bad, good, nil
}
