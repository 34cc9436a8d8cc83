package kubetest

import (
	"net"
	"strconv"
	"testing"
)

func TestAReservedPortIsGivenOnce(t *testing.T) {
	const most = 900 // of 10000, so that some of the next tries meet a reserved one
	ports, release, err := ReservePorts(t.Context(), most)
	if err != nil {
		t.Fatal(err)
	}
	more, releaseMore, err := ReservePorts(t.Context(), 100)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[int]bool{}
	for _, p := range append(more, ports...) {
		if seen[p] {
			t.Errorf("port %d was given twice", p)
		}
		seen[p] = true
	}
	if err := releaseMore(); err != nil {
		t.Error(err)
	}
	if err := release(); err != nil {
		t.Error(err)
	}
	again, err := net.Listen("tcp", net.JoinHostPort(reserving, strconv.Itoa(ports[0])))
	if err != nil {
		t.Fatalf("a released port is still reserved: %v", err)
	}
	_ = again.Close()
}
