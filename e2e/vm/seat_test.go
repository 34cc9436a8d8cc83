//go:build vm

package vm

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"iter"
	"net"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// seatVariable selects what this program does instead of running tests, when a test has started it on the owner's
// workstation.
const seatVariable = "MUSTER_E2E_VM_SEAT"

func TestMain(m *testing.M) {
	what := os.Getenv(seatVariable)
	if what == "" {
		goleak.VerifyTestMain(m)
		return
	}
	if err := seat(context.Background(), what, os.Args[1], os.Args[2:]...); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// onSeat is the command that runs a part of this program.
func onSeat(t *testing.T, what, address string) []string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return []string{"env", seatVariable + "=" + what, self, address}
}

// seat is this program on the owner's workstation.
func seat(ctx context.Context, what, address string, more ...string) error {
	switch what {
	case "scan":
		tcp, udp := iter.Seq[int](every), udpPorts
		if len(more) > 0 {
			ports := make([]int, len(more))
			for i, m := range more {
				var err error
				if ports[i], err = strconv.Atoi(m); err != nil {
					return err
				}
			}
			tcp, udp = slices.Values(ports), nil
		}
		return json.NewEncoder(os.Stdout).Encode(scan(ctx, address, tcp, udp))
	case "time":
		c, err := net.ListenPacket("udp4", net.JoinHostPort(address, "123"))
		if err != nil {
			return err
		}
		return serveTime(c)
	case "names":
		c, err := net.ListenPacket("udp4", net.JoinHostPort(address, "53"))
		if err != nil {
			return err
		}
		return serveNames(c)
	}
	return fmt.Errorf("%s=%q: want scan, time or names", seatVariable, what)
}

// serveTime answers requests for the time (RFC 5905, section 7.3) by this host's clock, and prints the clients.
func serveTime(c net.PacketConn) error {
	b := make([]byte, 512)
	for {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			return err
		}
		const packet, client = 48, 3
		if n < packet || b[0]&7 != client {
			continue
		}
		if _, err := c.WriteTo(answer([packet]byte(b)), from); err != nil {
			return err
		}
		fmt.Println(from)
	}
}

func answer(asked [48]byte) []byte {
	// Seconds since 1900 and their 2³²ths.
	const since1900 = 2208988800
	now := time.Now()
	stamp := uint64(now.Unix()+since1900)<<32 | uint64(now.Nanosecond())<<32/1e9
	said := make([]byte, len(asked))
	said[0] = 4<<3 | 4 // version 4, a server
	said[1] = 1        // with a clock of its own
	said[2], said[3] = asked[2], 0xec
	copy(said[12:], "LAB")
	copy(said[24:32], asked[40:]) // the client's time in its request
	for _, at := range []int{16, 32, 40} {
		binary.BigEndian.PutUint64(said[at:], stamp)
	}
	return said
}
