package main

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
)

// silent is an address that drops what connects, as a firewall does: the queue of its listener is full.
func silent(t *testing.T) string {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Close(fd) })
	if err := errors.Join(syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), syscall.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	at, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	addr := (&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: at.(*syscall.SockaddrInet4).Port}).String()
	for {
		c, err := net.DialTimeout("tcp", addr, 200*time.Millisecond)
		if ne, timeout := errors.AsType[net.Error](err); timeout && ne.Timeout() {
			return addr
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
	}
}

// The operator must learn that nothing answered, and not be told to run the command for longer.
func TestAnAddressThatAnswersNothingIsUnreachable(t *testing.T) {
	addr := silent(t)
	policy := filepath.Join("..", "..", "internal", "policyfile", "testdata", "policy.yaml")
	if _, err := os.Stat(policy); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"verify", addr}, {"status", "--endpoint", addr}} {
		a := &app{stdout: io.Discard, stderr: io.Discard}
		err := a.run(t.Context(), append(args, "--policy", policy, "--timeout", "500ms"))
		if err == nil || exitCode(err) != exitUnreachable || !strings.Contains(problem.Explain(err).Remedy, "A timeout: the machine is off, or a firewall drops packets") {
			t.Errorf("%s: %v, exit code %d, %q", args[0], err, exitCode(err), problem.Explain(err).Remedy)
		}
	}
}
