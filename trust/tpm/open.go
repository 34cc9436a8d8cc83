package tpm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"syscall"
	"time"

	"github.com/google/go-tpm/tpm2/transport"
	"github.com/google/go-tpm/tpm2/transport/linuxtpm"
)

// maxResponse bounds a response. TPM_PT_MAX_RESPONSE_SIZE is 4096 bytes on every TPM
// that follows the PC Client Profile.
const maxResponse = 8192

var managed = regexp.MustCompile(`^(.*/tpm)rm([0-9]+)$`)

// directPath returns the device without the kernel's resource manager, /dev/tpm0 for /dev/tpmrm0, and
// false if path is no device of the resource manager. The kernel lets one process at a time open it.
func directPath(path string) (string, bool) {
	m := managed.FindStringSubmatch(path)
	if m == nil {
		return "", false
	}
	return m[1] + m[2], true
}

func openPath(path string) (transport.TPMCloser, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	switch {
	case fi.Mode()&os.ModeSocket != 0:
		return &socketTPM{path: path}, nil
	case fi.Mode()&os.ModeCharDevice != 0:
		return linuxtpm.Open(path)
	}
	return nil, fmt.Errorf("%s is neither a character device nor a unix socket", path)
}

// socketTPM sends each command over a connection of its own, as emulators expect. Unlike go-tpm's
// linuxudstpm it reads a response up to its announced length, and times out if an emulator does not
// answer, so that the lock is not held forever.
type socketTPM struct{ path string }

// Send implements [transport.TPM].
func (s *socketTPM) Send(cmd []byte) ([]byte, error) {
	// Not the caller's context: a started sequence must run to its end, or its handles would stay
	// loaded.
	deadline := time.Now().Add(commandTimeout)
	c, err := dial(s.path, deadline)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if err := c.SetDeadline(deadline); err != nil {
		return nil, err
	}
	if _, err := c.Write(cmd); err != nil {
		return nil, fmt.Errorf("send command: %w", err)
	}
	// Part 1, 18.2: tag (2 bytes), size of the whole response (4), response code (4).
	rsp := make([]byte, 10, 512)
	if _, err := io.ReadFull(c, rsp); err != nil {
		return nil, fmt.Errorf("read response: %w", err)
	}
	size := binary.BigEndian.Uint32(rsp[2:6])
	if size < 10 || size > maxResponse {
		return nil, fmt.Errorf("response announces %d bytes", size)
	}
	rsp = append(rsp, make([]byte, size-10)...)
	if _, err := io.ReadFull(c, rsp[10:]); err != nil {
		return nil, fmt.Errorf("read response: %w", err)
	}
	return rsp, nil
}

// dial connects to a socket. An emulator serves one connection at a time and queues few: EAGAIN
// means that its queue is full at the moment.
func dial(path string, deadline time.Time) (net.Conn, error) {
	for {
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
		if err == nil {
			return c, nil
		}
		if !errors.Is(err, syscall.EAGAIN) || time.Now().After(deadline) {
			return nil, err
		}
		<-time.After(time.Millisecond)
	}
}

// Close implements [io.Closer]. No connection outlives its command.
func (s *socketTPM) Close() error { return nil }

// lockFile takes an exclusive flock(2) on path, and waits for it until ctx ends. The returned
// function releases it; so does the kernel if the process dies.
func lockFile(ctx context.Context, path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock file (its folder must exist): %w", err)
	}
	wait := time.Millisecond
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil // closing the only descriptor unlocks
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
			wait = min(2*wait, 20*time.Millisecond)
		case <-ctx.Done():
			timer.Stop()
			f.Close()
			return nil, fmt.Errorf("another process holds %s: %w", path, context.Cause(ctx))
		}
	}
}
