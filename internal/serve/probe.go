package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
)

// ProbeSocket is the default of a service's flag --probes: a Unix socket in the abstract namespace (unix(7)), which only
// processes in the same network namespace reach, that of the pod. The kubelet asks there by a command in the container. On
// the port of metrics, which other pods reach, an attacker with many addresses could take all connections, and cause a
// restart of the service.
const ProbeSocket = "@muster-probes"

// Probe asks a service on its probe socket, with the arguments of its command `probe`: a path, as /healthz, and the socket
// if it is not [ProbeSocket]. The error has the service's answer.
func Probe(ctx context.Context, args []string) error {
	if len(args) < 1 || len(args) > 2 || !strings.HasPrefix(args[0], "/") {
		return errors.New("usage: probe /healthz|/readyz [SOCKET]")
	}
	socket := ProbeSocket
	if len(args) == 2 {
		socket = args[1]
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://probe"+args[0], http.NoBody)
	if err != nil {
		return err
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return fmt.Errorf("probe: %w", err)
	}
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", args[0], resp.Status, strings.TrimSpace(string(text)))
	}
	return nil
}
