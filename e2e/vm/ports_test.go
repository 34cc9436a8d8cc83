//go:build vm

package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
)

// scanned are the ports of a machine that can be reached from outside.
type scanned struct {
	TCP    []int `json:"tcp"`    // ports that took a connection
	UDP    []int `json:"udp"`    // ports that the machine does not report as closed
	Silent []int `json:"silent"` // TCP ports that neither took nor refused one
}

// udpPorts are those of services that images often have: DNS, DHCP, RPC, NTP, SNMP, syslog, IKE, chrony, mDNS, LLMNR, overlay networks.
var udpPorts = []int{53, 68, 111, 123, 161, 323, 500, 514, 546, 4789, 5353, 5355, 8472, 51820}

const (
	connectTimeout = 3 * time.Second
	connections    = 256 // at a time
	attempts       = 4   // a busy machine loses packets
)

// scan asks TCP ports of an address for a connection, and UDP ports for anything.
func scan(ctx context.Context, address string, tcp iter.Seq[int], udp []int) scanned {
	var (
		s    scanned
		mu   sync.Mutex
		wg   sync.WaitGroup
		next = make(chan int)
	)
	for range connections {
		wg.Go(func() {
			for port := range next {
				open, answered := connect(ctx, address, port)
				mu.Lock()
				switch {
				case open:
					s.TCP = append(s.TCP, port)
				case !answered:
					s.Silent = append(s.Silent, port)
				}
				mu.Unlock()
			}
		})
	}
	for port := range tcp {
		next <- port
	}
	close(next)
	wg.Wait()
	for _, port := range udp {
		if !closedUDP(ctx, address, port, 3*attempts) {
			s.UDP = append(s.UDP, port)
		}
	}
	slices.Sort(s.TCP)
	slices.Sort(s.Silent)
	return s
}

func connect(ctx context.Context, address string, port int) (open, answered bool) {
	d := net.Dialer{Timeout: connectTimeout}
	for range attempts {
		c, err := d.DialContext(ctx, "tcp", net.JoinHostPort(address, strconv.Itoa(port)))
		if err == nil {
			_ = c.(*net.TCPConn).SetLinger(0) // gone at once
			c.Close()
			return true, true
		}
		if errors.Is(err, syscall.ECONNREFUSED) {
			return false, true
		}
	}
	return false, false
}

// closedUDP reports whether the machine answers that a UDP port is closed (RFC 1122, section 4.1.3.1). Linux answers
// so about once a second at most.
func closedUDP(ctx context.Context, address string, port, rounds int) bool {
	var d net.Dialer
	c, err := d.DialContext(ctx, "udp", net.JoinHostPort(address, strconv.Itoa(port)))
	if err != nil {
		return false
	}
	defer c.Close()
	for range rounds {
		if _, err := c.Write([]byte("?")); errors.Is(err, syscall.ECONNREFUSED) {
			return true
		}
		_ = c.SetReadDeadline(time.Now().Add(time.Second))
		if _, err := c.Read(make([]byte, 1)); errors.Is(err, syscall.ECONNREFUSED) {
			return true
		}
	}
	return false
}

// every is all TCP ports.
func every(yield func(int) bool) {
	for port := 1; port <= 65535 && yield(port); port++ {
	}
}

// ask scans a machine from the owner's workstation: the named TCP ports, or, if there are none, all of them and some
// UDP ports.
func (w *fixture) ask(ctx context.Context, t *testing.T, address string, tcp ...int) (s scanned, err error) {
	t.Helper()
	args := onSeat(t, "scan", address)
	for _, port := range tcp {
		args = append(args, strconv.Itoa(port))
	}
	out, err := w.At(ctx, driver.Owner, "", args...)
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal([]byte(out), &s)
}

// reachable compares the open ports of a virtual machine with the list of docs/image.md, once all expected ones
// answer: kube-proxy's rules come seconds after a node is Ready.
func (w *fixture) reachable(t *testing.T, name, address, state string) {
	t.Helper()
	want := scanned{TCP: documented(t, w.Root, state, "open"), Silent: documented(t, w.Root, state, "silent")}
	until(t, joinTime, func(ctx context.Context) error {
		got, err := w.ask(ctx, t, address, slices.Concat(want.TCP, want.Silent)...)
		if err == nil && !reflect.DeepEqual(got, want) {
			err = fmt.Errorf("%s, as a %s: %+v, want %+v", name, state, got, want)
		}
		return err
	})
	start := time.Now()
	got, err := w.ask(t.Context(), t, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s, as a %s: all TCP ports asked in %.0f s; %v take connections, %v are silent", name, state, time.Since(start).Seconds(), got.TCP, got.Silent)
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s, as a %s: %+v; docs/image.md lists %+v", name, state, got, want)
	}
}

// documented returns the ports with that word in docs/image.md, in a state, which is a column of its table.
func documented(t *testing.T, root, state, word string) (ports []int) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, "docs", "image.md"))
	if err != nil {
		t.Fatal(err)
	}
	column, found := -1, false
	for line := range strings.Lines(string(b)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		switch {
		case cells[0] == "TCP port":
			column = slices.Index(cells, state)
			found = found || column > 0
		case column > 0 && len(cells) > column && cells[column] == word:
			port, err := strconv.Atoi(cells[0])
			if err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			ports = append(ports, port)
		case len(cells) == 1:
			column = -1
		}
	}
	if !found {
		t.Fatalf("docs/image.md has no table of ports with a column for a %s", state)
	}
	slices.Sort(ports)
	return ports
}

func TestAScanFindsWhatListens(t *testing.T) {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	packets, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = packets.Close() }()
	port := listener.Addr().(*net.TCPAddr).Port
	if open, answered := connect(t.Context(), "127.0.0.1", port); !open || !answered {
		t.Errorf("a port that listens: open %t, answered %t", open, answered)
	}
	listener.Close()
	if open, answered := connect(t.Context(), "127.0.0.1", port); open || !answered {
		t.Errorf("a closed port: open %t, answered %t", open, answered)
	}
	udp := packets.LocalAddr().(*net.UDPAddr).Port
	go func() { _, _ = io.Copy(io.Discard, packets.(*net.UDPConn)) }()
	if closedUDP(t.Context(), "127.0.0.1", udp, 1) {
		t.Error("a UDP port that takes packets counts as closed")
	}
	if err := packets.Close(); err != nil {
		t.Fatal(err)
	}
	if !closedUDP(t.Context(), "127.0.0.1", udp, 1) {
		t.Error("a closed UDP port counts as open")
	}
}
