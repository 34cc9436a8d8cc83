package floods

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/muster-k8s/muster/internal/membertest"
)

// process is a program of Muster's that runs under a memory limit.
type process struct {
	name   string
	memory *memory
	log    *membertest.Buffer
	proc   *os.Process
	done   chan struct{}
	err    error // once done
	probes string
}

// limits are those of a service's deployment.
type limits struct {
	memory int64 // bytes
	env    []string
}

// chart reads a service's limit and environment from the rendered chart.
func chart(t *testing.T, name string) limits {
	t.Helper()
	b, err := os.ReadFile(rendered)
	if err != nil {
		t.Fatal(err)
	}
	dec := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(b)))
	for {
		doc, err := dec.Read()
		if err != nil {
			t.Fatalf("the chart has no DaemonSet muster-%s: %v", name, err)
		}
		d := &appsv1.DaemonSet{}
		if err := yaml.Unmarshal(doc, d); err != nil || d.Kind != "DaemonSet" || d.Name != "muster-"+name {
			continue
		}
		c := d.Spec.Template.Spec.Containers[0]
		l := limits{memory: c.Resources.Limits.Memory().Value()}
		for _, e := range c.Env {
			switch {
			case e.Value != "":
				l.env = append(l.env, e.Name+"="+e.Value)
			case e.ValueFrom != nil && e.ValueFrom.ResourceFieldRef != nil:
				l.env = append(l.env, fmt.Sprintf("%s=%d", e.Name, l.memory))
			}
		}
		return l
	}
}

var unitLine = regexp.MustCompile(`(?m)^(MemoryMax|Environment)=(.*)$`)

// unit reads them from a systemd unit. A unit without a limit, as in an initramfs, is run with that of joinservice.
func unit(t *testing.T, name string) limits {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("../../../deploy/systemd", name+".service"))
	if err != nil {
		t.Fatal(err)
	}
	l := limits{memory: chart(t, "joinservice").memory}
	for _, m := range unitLine.FindAllStringSubmatch(string(b), -1) {
		if m[1] == "Environment" {
			l.env = append(l.env, m[2])
			continue
		}
		q, err := resource.ParseQuantity(strings.NewReplacer("M", "Mi", "G", "Gi", "K", "Ki").Replace(m[2]))
		if err != nil {
			t.Fatal(err)
		}
		l.memory = q.Value()
	}
	return l
}

// start runs a program until the test ends, and waits until it is ready.
func start(t *testing.T, name string, l limits, probes string, args ...string) *process {
	t.Helper()
	p := &process{name: name, memory: newMemory(t, name, l.memory), log: &membertest.Buffer{}, done: make(chan struct{}), probes: probes}
	line := p.memory.command(args)
	cmd := exec.Command(line[0], line[1:]...) // not CommandContext: it ends by SIGTERM
	cmd.Env = append(os.Environ(), l.env...)
	cmd.Stdout, cmd.Stderr = p.log, p.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error, 1)
	go func() {
		// The signal is sent when the thread ends that started the program, so that thread stays.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(p.done)
		err := cmd.Start()
		started <- err
		if err == nil {
			p.err = cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	p.proc = cmd.Process
	t.Cleanup(func() { p.stop(t) })
	membertest.Eventually(t, func() error {
		if !p.alive() {
			t.Fatalf("%s ended: %v\n%s", name, p.err, p.log)
		}
		return p.ready()
	})
	return p
}

func (p *process) ready() error {
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 5 * time.Second}
	resp, err := c.Get("http://" + p.probes + "/readyz")
	if err != nil {
		return err
	}
	if err := resp.Body.Close(); err != nil || resp.StatusCode != http.StatusOK {
		return errors.Join(err, fmt.Errorf("%s: readyz says %s", p.name, resp.Status))
	}
	return nil
}

func (p *process) alive() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

func (p *process) stop(t *testing.T) {
	if p.alive() {
		_ = p.proc.Signal(syscall.SIGTERM)
	}
	select {
	case <-p.done:
	case <-time.After(5 * time.Minute):
		t.Errorf("%s does not stop", p.name)
		_ = p.proc.Kill()
		<-p.done
	}
	if t.Failed() {
		log := p.log.String()
		t.Logf("%s ended with %v; the end of its log:\n%s", p.name, p.err, log[max(0, len(log)-2000):])
	}
}

// peakRSS is the most resident memory of the process so far, in bytes; 0 if it is gone.
func (p *process) peakRSS() int64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.proc.Pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmHWM:" {
			kib, _ := strconv.ParseInt(f[1], 10, 64)
			return kib << 10
		}
	}
	return 0
}

// said is the output of the flooder.
type said struct{ Dialed, Opened, Most, Sent int64 }

// flood runs the flooder for a while, with lower priority than all other programs.
func flood(t *testing.T, name, target string, sources int, length time.Duration) said {
	t.Helper()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(t.Context(), "nice", "-n", "5", filepath.Join(*bin, "flooder"),
		"-flood="+name, "-target="+target, fmt.Sprint("-sources=", sources), "-for="+length.String())
	cmd.Env = append(os.Environ(), "GOMEMLIMIT=1GiB")
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var s said
	// Its thread stays for as long as the program runs, since this returns only then.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := errors.Join(cmd.Run(), json.Unmarshal(out.Bytes(), &s)); err != nil {
		t.Errorf("flooder %s: %v\n%s", name, err, &errs)
	}
	return s
}
