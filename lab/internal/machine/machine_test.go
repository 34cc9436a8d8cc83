package machine

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/lab/internal/image"
)

func TestMain(m *testing.M) {
	// A supervised program of these tests: it reports that it is ready as sd_notify(3) does.
	if os.Getenv("NOTIFY_SOCKET") != "" && len(os.Args) > 1 && os.Args[1] == "ready" {
		os.Exit(notifyReady())
	}
	goleak.VerifyTestMain(m)
}

// supervised runs a supervisor whose units are the given files, for the test's time.
func supervised(t *testing.T, units map[string]string) *supervisor {
	t.Helper()
	dir := t.TempDir()
	at := folders{units: filepath.Join(dir, "units"), enabled: filepath.Join(dir, "enabled"), notify: filepath.Join(dir, "notify"), logs: filepath.Join(dir, "logs")}
	for _, d := range []string{at.units, at.enabled, at.logs} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range units {
		if err := os.WriteFile(filepath.Join(at.units, name+".service"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	sup, err := newSupervisor(at, os.Environ(), slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	sigchld := make(chan os.Signal, 64)
	signal.Notify(sigchld, syscall.SIGCHLD)
	reaped := make(chan struct{})
	go func() { sup.reap(sigchld); close(reaped) }()
	t.Cleanup(func() {
		for name := range units {
			if err := sup.stop(context.WithoutCancel(t.Context()), name); err != nil {
				t.Error(err)
			}
		}
		signal.Stop(sigchld)
		close(sigchld)
		<-reaped
		for _, s := range sup.services {
			if s.notify != nil {
				if err := s.notify.Close(); err != nil {
					t.Error(err)
				}
			}
		}
	})
	return sup
}

func (s *supervisor) ask(t *testing.T, args ...string) answer {
	t.Helper()
	return s.systemctl(t.Context(), args)
}

// becomes waits until a unit's state satisfies a condition.
func becomes(t *testing.T, s *supervisor, unit string, what string, cond func(*service) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	if err := s.wait(ctx, func() bool { return cond(s.services[unit]) }); err != nil {
		t.Fatalf("%s did not become %s: %+v", unit, what, s.services[unit])
	}
}

func TestSystemctlAnswersWhatKubeadmAsks(t *testing.T) {
	s := supervised(t, map[string]string{"kubelet": "[Unit]\nDescription=it\n[Service]\nExecStart=/bin/sleep 1000\n"})
	for _, step := range []struct {
		args []string
		want answer
	}{
		{[]string{"is-active", "kubelet"}, answer{Out: "inactive\n", Code: codeNotActive}},
		{[]string{"is-enabled", "kubelet"}, answer{Out: "disabled\n", Code: codeFailed}},
		{[]string{"daemon-reload"}, answer{}},
		{[]string{"restart", "kubelet.service"}, answer{}},
		{[]string{"is-active", "kubelet"}, answer{Out: "active\n"}},
		{[]string{"--quiet", "is-active", "kubelet"}, answer{}},
		{[]string{"enable", "kubelet"}, answer{}},
		{[]string{"is-enabled", "kubelet"}, answer{Out: "enabled\n"}},
		{[]string{"disable", "--now", "kubelet"}, answer{}},
		{[]string{"is-active", "kubelet"}, answer{Out: "inactive\n", Code: codeNotActive}},
		{[]string{"start", "docker"}, answer{Err: "Unit docker.service could not be found.\n", Code: codeNoUnit}},
		{[]string{"status", "docker"}, answer{Err: "Unit docker.service could not be found.\n", Code: codeNoUnit}},
		{[]string{"mask", "kubelet"}, answer{Err: "systemctl mask is not known to the lab\n", Code: codeFailed}},
		{[]string{"start"}, answer{Err: "systemctl start: name a unit\n", Code: codeFailed}},
	} {
		if got := s.ask(t, step.args...); got != step.want {
			t.Errorf("systemctl %v: %+v, want %+v", step.args, got, step.want)
		}
	}
}

func TestAServiceThatEndsIsStartedAgainOnlyIfItsUnitSaysSo(t *testing.T) {
	s := supervised(t, map[string]string{
		"always": "[Service]\nExecStart=/bin/sleep 1000\nRestart=always\nRestartSec=0.01\n",
		"never":  "[Service]\nExecStart=/bin/sleep 1000\n",
		"good":   "[Service]\nExecStart=/bin/true\nRestart=on-failure\n",
	})
	for _, u := range []string{"always", "never", "good"} {
		if a := s.ask(t, "start", u); a.Code != 0 {
			t.Fatalf("start %s: %+v", u, a)
		}
	}
	kill := func(u string) int {
		s.mu.Lock()
		defer s.mu.Unlock()
		pid := s.services[u].pid
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		return pid
	}
	pid := kill("always")
	becomes(t, s, "always", "another process", func(svc *service) bool { return svc.pid != 0 && svc.pid != pid })
	kill("never")
	becomes(t, s, "never", "failed", func(svc *service) bool { return svc.state == "failed" })
	becomes(t, s, "good", "inactive", func(svc *service) bool { return svc.state == "inactive" })
	if a := s.ask(t, "stop", "always"); a.Code != 0 {
		t.Errorf("stop: %+v", a)
	}
	becomes(t, s, "always", "inactive for good", func(svc *service) bool { return svc.pid == 0 && !svc.wanted })
}

func TestANotifyingServiceIsActiveWhenItSaysSo(t *testing.T) {
	s := supervised(t, map[string]string{"says": fmt.Sprintf("[Service]\nType=notify\nExecStart=%s ready\n", os.Args[0])})
	if a := s.ask(t, "start", "says"); a.Code != 0 {
		t.Fatalf("start: %+v", a)
	}
	if a := s.ask(t, "is-active", "says"); a.Out != "active\n" {
		t.Errorf("is-active: %+v", a)
	}
}

func TestAStartOfAOneshotServiceWaitsForItsEndAndSaysHowItEnded(t *testing.T) {
	dir := t.TempDir()
	s := supervised(t, map[string]string{
		"good": "[Service]\nType=oneshot\nExecStart=/bin/mkdir " + dir + "/made\n",
		"bad":  "[Service]\nType=oneshot\nExecStart=/bin/false\n",
		"long": "[Service]\nType=oneshot\nExecStart=/bin/sleep 1000\n",
	})
	if a := s.ask(t, "start", "good"); a.Code != 0 {
		t.Fatalf("start: %+v", a)
	}
	if _, err := os.Stat(filepath.Join(dir, "made")); err != nil {
		t.Errorf("start came back before the end: %v", err)
	}
	if a := s.ask(t, "start", "good"); a.Code != codeFailed || !strings.Contains(a.Err, "exit code 1") { // the folder is there: it runs again
		t.Errorf("start again: %+v", a)
	}
	if a := s.ask(t, "start", "bad"); a.Code != codeFailed || !strings.Contains(a.Err, "exit code 1") {
		t.Errorf("start of one that fails: %+v", a)
	}
	if a := s.ask(t, "is-failed", "bad"); a.Code != 0 {
		t.Errorf("is-failed: %+v", a)
	}
	started := make(chan answer, 1)
	go func() { started <- s.systemctl(t.Context(), []string{"start", "long"}) }()
	becomes(t, s, "long", "activating", func(svc *service) bool { return svc.pid != 0 })
	if a := s.ask(t, "is-active", "long"); a.Out != "activating\n" || a.Code != codeNotActive {
		t.Errorf("is-active: %+v", a)
	}
	if a := s.ask(t, "stop", "long"); a.Code != 0 {
		t.Errorf("stop: %+v", a)
	}
	if a := <-started; a.Code != codeFailed || !strings.Contains(a.Err, "signal terminated") {
		t.Errorf("start of one that is stopped: %+v", a)
	}
}

func TestAUnitWhoseConditionFailsIsNotStartedAndNoError(t *testing.T) {
	s := supervised(t, map[string]string{"needs": "[Unit]\nConditionPathExists=/nonexistent\n[Service]\nExecStart=/bin/sleep 1000\n"})
	if a := s.ask(t, "start", "needs"); a.Code != 0 {
		t.Errorf("start: %+v", a)
	}
	if a := s.ask(t, "is-active", "needs"); a.Out != "inactive\n" {
		t.Errorf("is-active: %+v", a)
	}
}

func TestADropInAddsACondition(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "x.service.d"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"x.service": "[Unit]\nConditionPathExists=/a\n[Service]\nExecStart=/bin/true", "x.service.d/muster.conf": "[Unit]\nConditionPathExists=/b\n",
		"y.service": "[Service]\nExecStart=/bin/true\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	units, err := loadUnits(dir)
	if err != nil || !slices.Equal(units["x"].Conditions, []string{"/a", "/b"}) || len(units["y"].Conditions) != 0 {
		t.Errorf("%+v, %v", units, err)
	}
}

func TestADropInTakesBackTheConditionsOfThoseThatSortBeforeIt(t *testing.T) {
	for name, want := range map[string][]string{"50-plain": {"/plain", "/muster"}, "zz-plain": {"/plain"}} {
		dir := t.TempDir()
		if err := os.Mkdir(filepath.Join(dir, "x.service.d"), 0o755); err != nil {
			t.Fatal(err)
		}
		for file, text := range map[string]string{
			"x.service": "[Unit]\nConditionPathExists=/unit\n[Service]\nExecStart=/bin/true\n", "x.service.d/muster.conf": "[Unit]\nConditionPathExists=/muster\n",
			"x.service.d/" + name + ".conf": "[Unit]\nConditionPathExists=\nConditionPathExists=/plain\n",
		} {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		units, err := loadUnits(dir)
		if err != nil || !slices.Equal(units["x"].Conditions, want) {
			t.Errorf("%s.conf: conditions %q, want %q; %v", name, units["x"].Conditions, want, err)
		}
	}
}

func TestAUnitThatIsDisabledDoesNotStartAtBoot(t *testing.T) {
	s := supervised(t, map[string]string{"wanted": "[Service]\nExecStart=/bin/sleep 1000\n[Install]\nWantedBy=multi-user.target\n"})
	for _, step := range []struct {
		verb string
		boot []string
	}{{"is-enabled", []string{"wanted"}}, {"disable", nil}, {"enable", []string{"wanted"}}} {
		if a := s.ask(t, step.verb, "wanted"); a.Code != 0 {
			t.Errorf("%s: %+v", step.verb, a)
		}
		if got := s.atBoot(); !slices.Equal(got, step.boot) {
			t.Errorf("after %s, %q start at boot, want %q", step.verb, got, step.boot)
		}
	}
}

func TestARestartOfTheMachineStopsItsUnitsAndEndsPID1(t *testing.T) {
	for _, args := range [][]string{{"--no-block", "--job-mode=replace-irreversibly", "start", "reboot.target"}, {"reboot"}} {
		t.Run(args[len(args)-1], func(t *testing.T) {
			s := supervised(t, map[string]string{
				"runs":  "[Service]\nExecStart=/bin/sleep 1000\nRestart=always\n",
				"waits": "[Service]\nType=oneshot\nExecStart=/bin/sleep 1000\n",
			})
			for _, u := range []string{"runs", "waits"} {
				if a := s.ask(t, "--no-block", "start", u); a.Code != 0 {
					t.Fatalf("start %s: %+v", u, a)
				}
				becomes(t, s, u, "running", func(svc *service) bool { return svc.pid != 0 })
			}
			if a := s.ask(t, args...); a != (answer{restarts: true}) {
				t.Fatalf("systemctl %v: %+v", args, a)
			}
			s.restart()
			s.restart() // a second request changes nothing
			if err := s.serveUntilRestart(t.Context()); Code(err) != CodeRestart {
				t.Errorf("PID 1 ends with %v", err)
			}
			for _, u := range []string{"runs", "waits"} {
				becomes(t, s, u, "stopped", func(svc *service) bool { return svc.pid == 0 && !svc.wanted })
			}
		})
	}
}

func TestUnitFilesOfTheImageAreUnderstood(t *testing.T) {
	units, err := loadUnits(filepath.Join("..", "image", "files", "units"))
	if err != nil {
		t.Fatal(err)
	}
	s := &supervisor{units: units, at: folders{enabled: t.TempDir()}}
	got := bootOrder(units, s.atBoot())
	if want := []string{"containerd", "kubelet", "muster-bootstrapper"}; !slices.Equal(got, want) {
		t.Errorf("units start in the order %v, want %v", got, want)
	}
	if !strings.HasPrefix(units["muster-bootstrapper"].Exec[0], image.Bootstrapper) {
		t.Errorf("the bootstrapper's unit runs %v", units["muster-bootstrapper"].Exec)
	}
}

func TestASettingThatTheLabDoesNotKnowIsAnError(t *testing.T) {
	for _, text := range []string{
		"[Service]\nExecStart=/bin/true\nProtectSystem=strict\n",
		"[Service]\nExecStart=/bin/true\nType=forking\n",
		"[Service]\nExecStart=/bin/true\nRestart=sometimes\n",
		"[Service]\nExecStart=/bin/true\nType=oneshot\nRestart=on-failure\n",
		"[Service]\nExecStart=/bin/true\nRestartSec=soon\n",
		"[Service]\nExecStart=/bin/true\nnonsense\n",
		"[Unit]\nConditionPathExists=!/run/x\n[Service]\nExecStart=/bin/true\n",
		"[Service]\nRestart=no\n",
	} {
		if u, err := parseUnit("x", text); err == nil {
			t.Errorf("%q became %+v", text, u)
		}
	}
}

func TestVariablesInExecStartAreReplacedAsSystemdDoes(t *testing.T) {
	env := filepath.Join(t.TempDir(), "flags.env")
	if err := os.WriteFile(env, []byte("# written by kubeadm\nARGS=\"--a=1 --b=2\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	u, err := parseUnit("x", "[Service]\nEnvironment=\"NAME=a b\"\nEnvironmentFile=-/nonexistent\nEnvironmentFile="+env+"\nExecStart=/bin/x $ARGS --name=${NAME} $NOTHING\n")
	if err != nil {
		t.Fatal(err)
	}
	argv, _, err := u.command(nil)
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"/bin/x", "--a=1", "--b=2", "--name=a b"}; !slices.Equal(argv, want) {
		t.Errorf("%q, want %q", argv, want)
	}
	u.EnvFiles = []string{"/nonexistent"}
	if _, _, err := u.command(nil); err == nil {
		t.Error("a missing EnvironmentFile without a dash is no error")
	}
}

func TestSystemctlOutsideAMachineSaysSo(t *testing.T) {
	if _, err := os.Stat(controlSocket); err == nil {
		t.Fatal("this test must not run where " + controlSocket + " answers")
	}
	var stderr bytes.Buffer
	if code := Systemctl([]string{"status"}, t.Output(), &stderr); code != codeFailed || !strings.Contains(stderr.String(), "not a machine of the lab") {
		t.Errorf("code %d, %q", code, stderr.String())
	}
}
