//go:build scale

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sync/errgroup"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/provision"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// replica is a joinservice in a process of its own.
type replica struct {
	addr string
	cmd  *exec.Cmd
	log  *membertest.Buffer
	stop func()
}

func (s *fixture) replica(t *testing.T) *replica {
	t.Helper()
	if *program == "" {
		t.Fatal("-program names the joinservice to measure: make bench-scale")
	}
	free := func() net.Addr {
		l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = l.Close() }()
		return l.Addr()
	}
	rpcs, probes := free(), free()
	r := &replica{addr: rpcs.String(), log: &membertest.Buffer{}}
	r.cmd = exec.CommandContext(context.WithoutCancel(t.Context()), *program, s.joinFlags(t, rpcs, probes)...)
	r.cmd.Stderr = r.log
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r.stop = sync.OnceFunc(func() {
		_ = r.cmd.Process.Signal(syscall.SIGTERM)
		_ = r.cmd.Wait()
	})
	t.Cleanup(func() {
		r.stop()
		if t.Failed() {
			log := r.log.String()
			t.Logf("the end of the log of %s:\n%s", r.addr, log[max(0, len(log)-4000):])
		}
	})
	membertest.Eventually(t, func() error {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+probes.String()+"/readyz", nil)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		defer func() { _ = resp.Body.Close() }()
		return membertest.Want(resp.StatusCode == http.StatusOK, "%s", resp.Status)
	})
	http.DefaultClient.CloseIdleConnections()
	return r
}

// newcomer is a machine with its request, and an address of its own to ask from.
type newcomer struct {
	*attesttest.Machine
	name, disk, address string
	from                net.IP
	joinRequest         *joinRequest
}

type crowd struct{ all []*newcomer }

func (c *crowd) take(n int) []*newcomer {
	out := c.all[:n]
	c.all = c.all[n:]
	return out
}

// crowd makes machines; a thousand take a few seconds.
func (s *fixture) crowd(t *testing.T, n int) *crowd {
	t.Helper()
	c := &crowd{all: make([]*newcomer, n)}
	var all errgroup.Group
	all.SetLimit(runtime.NumCPU())
	for i := range n {
		all.Go(func() error {
			m := &newcomer{
				Machine: s.machine(t), name: fmt.Sprintf("n%05d", i), disk: fmt.Sprintf("5f0c95b6-2a3d-4c7e-9f10-%012d", i+1000),
				address: fmt.Sprintf("10.%d.%d.%d", 100+i/62500, i/250%250, i%250+2), from: net.IPv4(127, byte(1+i/62500), byte(i/250%250), byte(i%250+2)),
			}
			m.joinRequest = worker(t, named(m.name, m.disk, m.address))
			c.all[i] = m
			return nil
		})
	}
	_ = all.Wait()
	return c
}

// ask opens a separate connection of the machine to a joinservice for one call.
func (s *fixture) ask(t *testing.T, m *newcomer, addr string, call func(joinv1connect.JoinServiceClient) error) error {
	transport, err := atls.NewTransport(atls.ClientConfig{
		Attester: m.Attester(attest.PurposeMachine), Verifier: attesttest.Verifier(t, s.ca), PeerPurpose: attest.PurposeJoinservice, Appraiser: presented{s},
		DialContext: (&net.Dialer{LocalAddr: &net.TCPAddr{IP: m.from}}).DialContext,
	})
	if err != nil {
		return err
	}
	defer func() { _ = transport.Close() }()
	return call(joinv1connect.NewJoinServiceClient(rpc.HTTPClient(transport), "https://"+addr, rpc.ClientOptions()...))
}

// again asks one joinservice after another until one of them answers without an error, with the pauses of a machine. It
// gives up after five refusals because another machine has something that it asks for.
func (s *fixture) again(t *testing.T, m *newcomer, services []*replica, pauses *discovery.Pauses, call func(joinv1connect.JoinServiceClient) error) error {
	for i, taken := rand.N(len(services)), 0; ; i++ {
		err := s.ask(t, m, services[i%len(services)].addr, call)
		if err == nil {
			return nil
		}
		if reason := rpc.ReasonFrom(err); reason == attestv1.Reason_REASON_DISK_MISMATCH || reason == attestv1.Reason_REASON_ADDRESS_REFUSED {
			if taken++; taken == 5 {
				return err
			}
		}
		if end := retry.Wait(t.Context(), pauses.Next(err)); end != nil {
			return errors.Join(err, end)
		}
	}
}

func (s *fixture) joinOne(t *testing.T, m *newcomer, services []*replica) error {
	return s.again(t, m, services, discovery.NewPauses(provision.DefaultTiming.RetryMin, provision.DefaultTiming.RetryMax), func(c joinv1connect.JoinServiceClient) error {
		_, err := c.IssueJoinTicket(t.Context(), m.joinRequest.IssueJoinTicketRequest)
		return err
	})
}

// cpu returns the processor time in seconds of the programs of that name that this process has started.
func cpu(t *testing.T, name string) float64 {
	t.Helper()
	total := 0.0
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range stats {
		b, err := os.ReadFile(filepath.Clean(path))
		if err != nil {
			continue // it has ended
		}
		comm, rest, _ := strings.Cut(string(b), ") ")
		f := strings.Fields(rest)
		if !strings.HasPrefix(name, comm[strings.IndexByte(comm, '(')+1:]) || f[1] != strconv.Itoa(os.Getpid()) {
			continue
		}
		for _, ticks := range f[11:13] { // utime, stime: proc_pid_stat(5)
			n, err := strconv.ParseFloat(ticks, 64)
			if err != nil {
				t.Fatal(err)
			}
			total += n / 100
		}
	}
	return total
}

// memory returns the maximum memory of a process, in MiB.
func memory(t *testing.T, pid int) float64 {
	t.Helper()
	for line := range strings.Lines(read(t, fmt.Sprintf("/proc/%d/status", pid))) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmHWM:" {
			n, err := strconv.ParseFloat(f[1], 64)
			if err != nil {
				t.Fatal(err)
			}
			return n / 1024
		}
	}
	t.Fatalf("process %d has no VmHWM", pid)
	return 0
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Clean(path))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
