// Package probe asks a service whether it is alive or ready, for the kubelet. The kubelet starts a process for each
// question. So the package imports little, and not net/http: such a process takes 8 ms of processor time and 3 MiB of
// memory, one of the service's own program 72 ms and 27 MiB.
package probe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"
)

const (
	// timeout bounds one answer, maxAnswer its size in bytes.
	timeout   = 5 * time.Second
	maxAnswer = 8 << 10
)

// Socket is the default of a service's flag --probes: a Unix socket in the abstract namespace (unix(7)), which only
// processes in the same network namespace reach, that of the pod. The kubelet asks there by a command in the container. On
// the port of metrics, which other pods reach, an attacker with many addresses could take all connections, and cause a
// restart of the service.
const Socket = "@muster-probes"

// Ask asks a service on its probe socket by HTTP/1.0 (RFC 1945). The arguments are those of the command probe: a path, as
// /healthz, and the socket if it is not [Socket]. The error has the service's answer. It takes at most 5 s.
func Ask(ctx context.Context, args []string) error {
	if len(args) < 1 || len(args) > 2 || args[0] != "/healthz" && args[0] != "/readyz" {
		return errors.New("usage: probe /healthz|/readyz [SOCKET]")
	}
	socket := Socket
	if len(args) == 2 {
		socket = args[1]
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	if err != nil {
		return fmt.Errorf("ask the service: %w", err)
	}
	defer func() { _ = conn.Close() }()
	end, _ := ctx.Deadline()
	err = conn.SetDeadline(end)
	if err == nil {
		_, err = io.WriteString(conn, "GET "+args[0]+" HTTP/1.0\r\n\r\n")
	}
	var answer []byte
	if err == nil {
		answer, err = io.ReadAll(io.LimitReader(conn, maxAnswer))
	}
	if err != nil {
		return fmt.Errorf("ask the service: %w", err)
	}
	head, text, _ := strings.Cut(string(answer), "\r\n\r\n")
	status, _, _ := strings.Cut(head, "\r\n")
	if _, code, _ := strings.Cut(status, " "); !strings.HasPrefix(status, "HTTP/1.") || !strings.HasPrefix(code, "200 ") {
		return fmt.Errorf("%s: the service answers %q: %s", args[0], status, strings.TrimSpace(text))
	}
	return nil
}
