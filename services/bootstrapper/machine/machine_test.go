package machine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestAChildSeesAFixedEnvironmentAndAllItsLinesArrive(t *testing.T) {
	t.Setenv("SECRET", "hunter2")
	var got []string
	err := run(t.Context(), func(l string) { got = append(got, l) }, "sh", "-c", `env; echo err >&2; head -c 300000 /dev/zero | tr '\0' x; echo; echo last; exit 3`)
	if err == nil || !strings.Contains(err.Error(), "exit status 3") {
		t.Fatal(err)
	}
	all := strings.Join(got, "\n")
	if strings.Contains(all, "hunter2") {
		t.Error("the environment was inherited")
	}
	if !strings.Contains(all, "HOME=/root") || !strings.Contains(all, "err") || got[len(got)-1] != "last" {
		t.Errorf("got %d lines, last %q", len(got), got[len(got)-1])
	}
}

func TestAnEndedContextKillsTheChild(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	start := time.Now()
	err := run(ctx, func(string) { cancel() }, "sh", "-c", "echo started; exec sleep 3600")
	if err == nil || ctx.Err() == nil || time.Since(start) > 5*time.Minute {
		t.Fatalf("%v after %s", err, time.Since(start))
	}
}

func TestAProgramThatIsNotInstalledIsNamed(t *testing.T) {
	if err := run(t.Context(), nil, "no-such-program"); err == nil || !strings.Contains(err.Error(), "no-such-program is not installed in /usr/sbin:/usr/bin:") {
		t.Fatal(err)
	}
}

// B8: a folder in front that can't be searched may have the program.
func TestNoProgramIsTakenAfterAnError(t *testing.T) {
	was := environment
	t.Cleanup(func() { environment = was })
	dir := t.TempDir()
	root, disk := filepath.Join(dir, "root"), filepath.Join(dir, "disk")
	environment = []string{"PATH=" + root + ":" + disk}
	if err := errors.Join(os.Mkdir(disk, 0o755), os.WriteFile(filepath.Join(disk, "runc"), nil, 0o755)); err != nil {
		t.Fatal(err)
	}
	if at, err := LookPath("runc"); err != nil || at != filepath.Join(disk, "runc") {
		t.Errorf("without the first folder: %q, %v", at, err)
	}
	if err := os.WriteFile(root, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if at, err := LookPath("runc"); err == nil {
		t.Errorf("the first folder can't be searched, and %s was found", at)
	}
}

func TestOnlyKnownVerbs(t *testing.T) {
	if err := (Real{}).Unit(t.Context(), "mask", UnitKubelet); err == nil {
		t.Fatal("mask was taken")
	}
}

func TestWriteFileReplacesALinkAndLeavesNothing(t *testing.T) {
	dir, victim := t.TempDir(), filepath.Join(t.TempDir(), "victim")
	if err := os.WriteFile(victim, []byte("untouched"), 0o600); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "sub", "file")
	if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Link(path, victim); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(path, []byte("new"), 0o640, 0o700); err != nil {
		t.Fatal(err)
	}
	st, err := os.Lstat(path)
	if err != nil || st.Mode() != 0o640 {
		t.Fatalf("%v %v", st.Mode(), err)
	}
	if b, _ := os.ReadFile(victim); string(b) != "untouched" {
		t.Error("the link was followed")
	}
	for range 2 { // a second link replaces the first
		if err := Link(filepath.Join(dir, "sub", "link"), path); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "sub", "dir"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(filepath.Join(dir, "sub", "dir"), nil, 0o600, 0o700); err == nil {
		t.Error("a folder was replaced")
	}
	if left, _ := os.ReadDir(filepath.Join(dir, "sub")); len(left) != 3 {
		t.Errorf("left %v", left)
	}
	if err := EmptyDir(filepath.Join(dir, "sub")); err != nil {
		t.Fatal(err)
	}
	if left, _ := os.ReadDir(filepath.Join(dir, "sub")); len(left) != 0 {
		t.Errorf("left %v", left)
	}
	if err := EmptyDir(filepath.Join(dir, "none")); err != nil {
		t.Error(err)
	}
	if err := Sync(filepath.Join(dir, "none"), dir); err != nil {
		t.Error(err)
	}
	if err := Sync("/proc/self/mem/none"); err == nil {
		t.Error("a path that can't be opened counts as written")
	}
}

// B3: the machine's own clean-up can't see a kubeadm that outlives its bootstrapper.
func TestAChildDiesWithItsBootstrapper(t *testing.T) {
	if os.Getenv("MUSTER_TEST_PARENT") != "" { // the bootstrapper, which is killed in the middle
		_ = run(t.Context(), func(l string) {
			_ = os.WriteFile(os.Getenv("MUSTER_TEST_PARENT"), []byte(l), 0o600)
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}, "sh", "-c", "echo $$; exec sleep 600")
		t.Fatal("it lives")
	}
	file := filepath.Join(t.TempDir(), "pid")
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), "MUSTER_TEST_PARENT="+file)
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Fatalf("%v\n%s", err, out)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	deadline := time.After(5 * time.Minute)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		// It has ended, or is a zombie that was not reaped yet and has no memory map.
		maps, err := os.ReadFile("/proc/" + string(b) + "/maps")
		if err != nil || len(maps) == 0 {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("process %s still runs", b)
		}
	}
}

func TestAVersionIsReadFromTheProgramInThePath(t *testing.T) {
	dir := t.TempDir()
	was := environment
	environment = []string{"PATH=" + dir + ":/usr/bin:/bin"}
	defer func() { environment = was }()
	for name, tt := range map[string]struct{ program, script, want string }{
		"kubeadm":           {"kubeadm", `[ "$*" = "version --output short" ] && echo v1.36.1`, "1.36.1"},
		"kubelet":           {"kubelet", `[ "$*" = --version ] && echo Kubernetes v1.36.1`, "1.36.1"},
		"it fails":          {"kubelet", "echo v1.36.1; exit 1", ""},
		"it says something": {"kubelet", "echo hello", ""},
	} {
		if err := os.WriteFile(filepath.Join(dir, tt.program), []byte("#!/bin/sh\n"+tt.script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		if got, err := Version(t.Context(), tt.program); got != tt.want || (err == nil) != (tt.want != "") {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

// A unit that runs to its end may take longer than systemctl may for the others.
func TestAOneshotUnitIsStarted(t *testing.T) {
	dir := t.TempDir()
	was := environment
	environment = []string{"PATH=" + dir + ":/usr/bin:/bin"}
	defer func() { environment = was }()
	if err := os.WriteFile(filepath.Join(dir, "systemctl"), []byte("#!/bin/sh\necho \"$*\"; exit 1\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Oneshot(t.Context(), UnitUpgrade); err == nil || !strings.Contains(err.Error(), "start muster-upgrade.service: exit status 1: start muster-upgrade.service") {
		t.Error(err)
	}
}

// The bootstrapper reads the file for each finding, and compares the disk more than once in a boot if it has to.
func TestNotMoreThanTheMaximumOfFindingsIsRecorded(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "run", "muster"), 0o755); err != nil {
		t.Fatal(err)
	}
	for n := range MaxFindings + 10 {
		if err := AddFinding(root, fmt.Sprint(n), "removed"); err != nil {
			t.Fatal(err)
		}
	}
	if n := Findings(root); n != MaxFindings {
		t.Errorf("%v findings", n)
	}
}
