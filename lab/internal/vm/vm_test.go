package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/lab/internal/vtpm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// spawner starts processes on one thread that stays until the test ends.
func spawner(t *testing.T) func(*exec.Cmd) error {
	type job struct {
		cmd *exec.Cmd
		err chan error
	}
	jobs := make(chan job)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for j := range jobs {
			j.err <- j.cmd.Start()
		}
	}()
	t.Cleanup(func() { close(jobs) })
	return func(c *exec.Cmd) error {
		j := job{c, make(chan error)}
		jobs <- j
		return <-j.err
	}
}

func TestQEMUsCommandLineSaysWhatTheMachineIs(t *testing.T) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 7}
	for name, tt := range map[string]struct {
		c    Config
		want []string
		not  []string
	}{
		"bare": {
			c:    Config{Image: "/i.raw"},
			want: []string{"-m 2048", "serial=muster-state", "file=/i.raw", "readonly=on,file=/i.raw", "tpm-crb,tpmdev=tpm0", "-no-reboot", "readonly=on,file=" + firmwareCode},
			not:  []string{"muster-meta", "-netdev", "user", "smm=on", SecureBootFirmware, "-rtc"},
		},
		"on a network": {
			c:    Config{Image: "/i.raw", Tap: "vnode7", MAC: mac, Memory: 1024},
			want: []string{"-m 1024", "ifname=vnode7", "mac=02:00:00:00:00:07", "script=no,downscript=no"},
		},
		"with a config medium":               {c: Config{Image: "/i.raw", Medium: map[string][]byte{}}, want: []string{"readonly=on,file=medium.img", "serial=muster-meta"}},
		"with Secure Boot":                   {c: Config{Image: "/i.raw", SecureBoot: true}, want: []string{"q35,smm=on", "file=" + SecureBootFirmware, "property=secure,value=on"}, not: []string{firmwareCode}},
		"whose clock is a year behind":       {c: Config{Image: "/i.raw", ClockOffset: -365 * 24 * time.Hour}, want: []string{"-rtc base=" + time.Now().UTC().AddDate(0, 0, -365).Format("2006-01-02T")}},
		"with a CD":                          {c: Config{Image: "/i.raw", Hardware: Hardware{CD: "/c,x.iso"}}, want: []string{"media=cdrom,readonly=on,file=/c,,x.iso -device scsi-cd,bus=scsi.0"}},
		"with another disk before its state": {c: Config{Image: "/i.raw", Hardware: Hardware{FirstDisk: "/d,x.raw"}}, want: []string{"file=/d,,x.raw -device virtio-blk-pci,drive=first,serial=first -drive if=none,id=state"}},
		"with a credential":                  {c: Config{Image: "/i.raw", Hardware: Hardware{MachineCredential: "/m,x.yaml"}}, want: []string{"-fw_cfg name=opt/io.systemd.credentials/muster.machine,file=/m,,x.yaml"}},
		"a comma in a name is not an option": {c: Config{Image: "/a,readonly=off"}, want: []string{"file=/a,,readonly=off"}},
	} {
		line := strings.Join(arguments(tt.c, "/x/console.3.log"), " ")
		for _, w := range append(tt.want, "path=console.3.log", "-qmp unix:qmp.sock") {
			if !strings.Contains(line, w) {
				t.Errorf("%s: no %q in %s", name, w, line)
			}
		}
		for _, w := range tt.not {
			if strings.Contains(line, w) {
				t.Errorf("%s: %q in %s", name, w, line)
			}
		}
	}
}

func TestAMachineWithoutADiskOrAFolderIsRefused(t *testing.T) {
	whole := Config{Dir: t.TempDir(), Image: "i", Spawn: func(*exec.Cmd) error { return nil }, Log: slog.New(slog.DiscardHandler)}
	for name, spoil := range map[string]func(*Config){
		"no folder": func(c *Config) { c.Dir = "" }, "no image": func(c *Config) { c.Image = "" },
		"nothing to start it with": func(c *Config) { c.Spawn = nil }, "no log": func(c *Config) { c.Log = nil },
	} {
		c := whole
		spoil(&c)
		if _, err := Start(t.Context(), c); err == nil || !strings.Contains(err.Error(), "required") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAConfigMediumIsTheSameForTheSameFiles(t *testing.T) {
	dir := t.TempDir()
	files := map[string][]byte{"metadata.yaml": []byte("kind: MachineMetadata\n"), "network.yaml": bytes.Repeat([]byte("#"), 5000)}
	var made [][]byte
	for _, name := range []string{"a", "b"} {
		path := filepath.Join(dir, name)
		if err := WriteMedium(t.Context(), path, files); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		made = append(made, b)
	}
	if !bytes.Equal(made[0], made[1]) {
		t.Error("two media of the same files differ")
	}
	if !bytes.Contains(made[0], []byte(MediumLabel)) {
		t.Error("no label in it")
	}
	for name, want := range files {
		got, err := exec.Command("mtype", "-i", filepath.Join(dir, "a"), "::"+name).Output()
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	files["metadata.yaml"] = []byte("kind: Other\n")
	if err := WriteMedium(t.Context(), filepath.Join(dir, "b"), files); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "b")); err != nil || bytes.Equal(b, made[0]) {
		t.Errorf("other files made the same medium: %v", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 2 {
		t.Errorf("left beside the media: %v, %v", left, err)
	}
	for _, name := range []string{"../x", "a/b", "", "."} {
		if err := WriteMedium(t.Context(), filepath.Join(dir, "c"), map[string][]byte{name: nil}); err == nil {
			t.Errorf("%q was taken for a file name", name)
		}
	}
}

func TestAConsoleIsReadAsAPersonWould(t *testing.T) {
	for raw, want := range map[string]string{
		"\x1b[2J\x1b[01;01H\x1b[=3hBdsDxe: starting Boot0002\r": "BdsDxe: starting Boot0002",
		"muster: waiting\r": "muster: waiting", "": "", "\x1b[0m\x1b[37m\x1b[40m": "",
	} {
		if got := Clean(raw); got != want {
			t.Errorf("%q: %q, want %q", raw, got, want)
		}
	}
}

func TestWaitingForALine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "console.1.log")
	is := func(want string) func(string) bool { return func(s string) bool { return s == want } }
	on, off := func() bool { return true }, func() bool { return false }
	if err := os.WriteFile(path, []byte("one\r\ntwo\r\nlogin: "), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"one", "two", "login:"} {
		if got, err := WaitLine(t.Context(), path, off, is(line)); err != nil || got != line {
			t.Errorf("%q, %v", got, err)
		}
	}
	if _, err := WaitLine(t.Context(), path, off, is("three")); !errors.Is(err, errPowerOff) || !strings.Contains(err.Error(), "login:") {
		t.Errorf("a machine that is off is waited for, or its last words are not told: %v", err)
	}
	soon, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := WaitLine(soon, path, on, is("login:")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a line that may go on is taken for a whole one: %v", err)
	}
	if _, err := WaitLine(soon, path, on, is("three")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	if _, err := WaitLine(soon, filepath.Join(t.TempDir(), "none"), on, is("x")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a console that QEMU has not made yet: %v", err)
	}
}

func TestEachPowerOnHasItsConsole(t *testing.T) {
	dir := t.TempDir()
	if _, err := Console(dir); err == nil {
		t.Error("a machine that never had power has a console")
	}
	for i := 1; i <= 11; i++ {
		path, err := nextConsole(dir)
		if want := filepath.Join(dir, fmt.Sprintf("console.%d.log", i)); err != nil || path != want {
			t.Fatalf("%s, %v; want %s", path, err, want)
		}
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if now, err := Console(dir); err != nil || now != path {
			t.Errorf("%s, %v; want %s", now, err, path)
		}
	}
}

// A machine whose QEMU ends at once gets one more chance, and not a third.
func TestSilentFirmwareIsTriedTwiceAndTheLogSaysSo(t *testing.T) {
	dir, ca := shortDir(t), newCA(t)
	var log bytes.Buffer
	spawn := spawner(t)
	started := 0
	_, err := Start(t.Context(), Config{
		Dir: dir, Image: filepath.Join(dir, "there-is-none.raw"), CA: ca, Log: slog.New(slog.NewTextHandler(&log, nil)),
		Spawn: func(c *exec.Cmd) error {
			if strings.Contains(c.Path, "qemu") {
				started++
			}
			return spawn(c)
		},
	})
	if !errors.Is(err, ErrFirmware) || started != 2 || strings.Count(log.String(), "one more power cycle") != 1 {
		t.Errorf("%d power cycles, err %v, log %s", started, err, &log)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "qemu.log")); err != nil || !bytes.Contains(b, []byte("there-is-none.raw")) {
		t.Errorf("QEMU's last words are lost: %q, %v", b, err)
	}
}

// shortDir is for folders with sockets.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "vm")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func newCA(t *testing.T) vtpm.CA {
	t.Helper()
	ca, err := vtpm.NewCA(filepath.Join(t.TempDir(), "ca"), "VM test")
	if err != nil {
		t.Fatal(err)
	}
	return ca
}
