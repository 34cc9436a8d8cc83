//go:build vm

package vm

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
)

// scanned is what of a machine can be reached from outside.
type scanned struct {
	TCP    []int `json:"tcp"`    // ports that took a connection
	UDP    []int `json:"udp"`    // ports that the machine doesn't say to be closed
	Silent []int `json:"silent"` // TCP ports that neither took nor refused one
}

// udpPorts are those of services that images often have: DNS, DHCP, RPC, NTP, SNMP, syslog, IKE, chrony, mDNS, LLMNR, overlay networks.
var udpPorts = []int{53, 68, 111, 123, 161, 323, 500, 514, 546, 4789, 5353, 5355, 8472, 51820}

const (
	connectTimeout = 3 * time.Second
	connections    = 256 // at a time
	tries          = 4   // a busy machine loses packets
)

// scan asks each TCP port of an address for a connection, and some UDP ports for anything.
func scan(ctx context.Context, address string) scanned {
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
	for port := 1; port <= 65535; port++ {
		next <- port
	}
	close(next)
	wg.Wait()
	for _, port := range udpPorts {
		if !closedUDP(ctx, address, port, 3*tries) {
			s.UDP = append(s.UDP, port)
		}
	}
	slices.Sort(s.TCP)
	slices.Sort(s.Silent)
	return s
}

func connect(ctx context.Context, address string, port int) (open, answered bool) {
	d := net.Dialer{Timeout: connectTimeout}
	for range tries {
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

// closedUDP says whether the machine says that nothing takes what comes to a port (RFC 1122, section 4.1.3.1). Linux says so
// about once a second at most.
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

// reachable compares what answers at a virtual machine with the list of docs/image.md.
func (w *world) reachable(t *testing.T, name, address, state string) {
	t.Helper()
	start := time.Now()
	out, err := w.At(t.Context(), driver.Owner, "", onSeat(t, "scan", address)...)
	if err != nil {
		t.Fatal(err)
	}
	var got scanned
	if err := json.Unmarshal([]byte(out), &got); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Logf("%s, as a %s: all TCP ports asked in %.0f s; %v take connections", name, state, time.Since(start).Seconds(), got.TCP)
	for word, ports := range map[string][]int{"open": got.TCP, "silent": got.Silent} {
		if want := documented(t, w.Root, state, word); !slices.Equal(ports, want) {
			t.Errorf("%s, as a %s: TCP ports %v are %s; docs/image.md lists %v", name, state, ports, word, want)
		}
	}
	if len(got.UDP) > 0 {
		t.Errorf("%s doesn't say that UDP ports %v are closed", name, got.UDP)
	}
}

// documented gives the ports that are what docs/image.md says by that word, in a state, which is a column of its table.
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
