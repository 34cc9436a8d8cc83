package floods

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

// slowTPM is a real TPM whose commands take longer.
type slowTPM struct {
	socket   string
	commands atomic.Int64
	delay    atomic.Int64 // time.Duration
}

// slow stands between the machine and its TPM.
func slow(t *testing.T, e *tpmtest.Emulator) *slowTPM {
	t.Helper()
	s := &slowTPM{socket: filepath.Join(filepath.Dir(e.Socket), "slow.sock")}
	l, err := new(net.ListenConfig).Listen(t.Context(), "unix", s.socket)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var open []net.Conn
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open = append(open, c)
			mu.Unlock()
			wg.Go(func() {
				defer func() { _ = c.Close() }()
				if err := s.relay(c, e.Socket); err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
					t.Logf("slow TPM: %v", err)
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		mu.Lock()
		for _, c := range open {
			_ = c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return s
}

// relay forwards one command after the other.
func (s *slowTPM) relay(c net.Conn, socket string) error {
	dev, err := net.Dial("unix", socket)
	if err != nil {
		return err
	}
	defer func() { _ = dev.Close() }()
	for {
		if err := message(dev, c); err != nil {
			return err
		}
		s.commands.Add(1)
		time.Sleep(time.Duration(s.delay.Load())) // the delay of such a TPM
		if err := message(c, dev); err != nil {
			return err
		}
	}
}

// message copies one command or response: a tag, its whole length, and the rest (TPM 2.0 Part 1, section 18).
func message(to io.Writer, from io.Reader) error {
	b := make([]byte, 6, 4096)
	if _, err := io.ReadFull(from, b); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(b[2:])
	if n < 6 || n > 4096 {
		return errors.New("no message of a TPM")
	}
	b = b[:n]
	if _, err := io.ReadFull(from, b[6:]); err != nil {
		return err
	}
	_, err := to.Write(b)
	return err
}
