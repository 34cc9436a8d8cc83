package kubetest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strconv"
)

const (
	// Below the ports that Linux gives to sockets that name none (ip_local_port_range, 32768 and above).
	firstPort, portCount = 20000, 10000
	// A listener on a port of this address reserves the port of 127.0.0.1 among all test processes of the machine.
	reserving = "127.0.0.2"
)

// ReservePorts returns n TCP ports of 127.0.0.1 on which no process listens. No other caller on this machine gets them
// before release is called or the process ends, so a program can be started on one, and be started again.
func ReservePorts(ctx context.Context, n int) (ports []int, release func() error, err error) {
	var held []io.Closer
	release = func() error {
		var errs []error
		for _, c := range held {
			errs = append(errs, c.Close())
		}
		return errors.Join(errs...)
	}
	for tries := 0; len(ports) < n; tries++ {
		if tries == n+portCount {
			return nil, nil, errors.Join(fmt.Errorf("no free TCP port from %d to %d: %w", firstPort, firstPort+portCount-1, err), release())
		}
		port := firstPort + rand.IntN(portCount)
		var reservation, probe net.Listener
		if reservation, err = listen(ctx, reserving, port); err != nil {
			continue
		}
		held = append(held, reservation)
		if probe, err = listen(ctx, "127.0.0.1", port); err != nil {
			continue
		}
		if err = probe.Close(); err != nil {
			continue
		}
		ports = append(ports, port)
	}
	return ports, release, nil
}

func listen(ctx context.Context, address string, port int) (net.Listener, error) {
	return new(net.ListenConfig).Listen(ctx, "tcp", net.JoinHostPort(address, strconv.Itoa(port)))
}
