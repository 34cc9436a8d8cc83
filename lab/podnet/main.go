// Program podnet is the lab's pod network, run as a DaemonSet on the host's network:
// it writes a CNI configuration for its own node's podCIDR, and keeps a route to every
// other node's podCIDR by way of that node's internal address. That is all that a
// cluster on one bridge needs, and it starts in milliseconds.
//
// It talks to the API server by its service account, not through kube-proxy, and to
// the kernel by rtnetlink(7).
package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount/"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, slog.New(slog.NewJSONHandler(os.Stderr, nil)))
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "podnet:", err)
		os.Exit(1)
	}
}

type agent struct {
	node, api, cni string
	token          string // path
	client         *http.Client
	routes         map[netip.Prefix]netip.Addr
	log            *slog.Logger
}

func run(ctx context.Context, log *slog.Logger) error {
	a := agent{
		node: os.Getenv("NODE_NAME"), api: os.Getenv("API_SERVER"), cni: os.Getenv("CNI_DIR"),
		token: serviceAccount + "token", routes: map[netip.Prefix]netip.Addr{}, log: log,
	}
	if a.node == "" || a.api == "" || a.cni == "" {
		return errors.New("NODE_NAME, API_SERVER and CNI_DIR must be set")
	}
	ca, err := os.ReadFile(serviceAccount + "ca.crt")
	if err != nil {
		return err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return errors.New("no certificate in the service account's ca.crt")
	}
	a.client = &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13}}}
	tick := time.NewTicker(500 * time.Millisecond) // a new node's route is wanted at once, and a list of a few nodes costs nothing
	defer tick.Stop()
	for {
		if err := a.sync(ctx); err != nil && ctx.Err() == nil {
			log.Warn("sync", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

type nodeList struct {
	Items []struct {
		Metadata struct {
			Name string `json:"name"`
		} `json:"metadata"`
		Spec struct {
			PodCIDR string `json:"podCIDR"`
		} `json:"spec"`
		Status struct {
			Addresses []struct {
				Type    string `json:"type"`
				Address string `json:"address"`
			} `json:"addresses"`
		} `json:"status"`
	} `json:"items"`
}

func (a *agent) sync(ctx context.Context) error {
	nodes, err := a.list(ctx)
	if err != nil {
		return err
	}
	for _, n := range nodes.Items {
		cidr, err := netip.ParsePrefix(n.Spec.PodCIDR)
		if err != nil {
			continue // the controller manager hasn't given it one yet
		}
		if n.Metadata.Name == a.node {
			if err := a.writeCNI(cidr); err != nil {
				return err
			}
			continue
		}
		for _, addr := range n.Status.Addresses {
			via, err := netip.ParseAddr(addr.Address)
			if addr.Type != "InternalIP" || err != nil || a.routes[cidr] == via {
				continue
			}
			if err := setRoute(cidr, via); err != nil {
				return fmt.Errorf("route %s via %s: %w", cidr, via, err)
			}
			a.routes[cidr] = via
			a.log.Info("route set", "cidr", cidr, "via", via, "node", n.Metadata.Name)
		}
	}
	return nil
}

func (a *agent) list(ctx context.Context) (nodeList, error) {
	var l nodeList
	token, err := os.ReadFile(a.token) // the kubelet renews it
	if err != nil {
		return l, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, a.api+"/api/v1/nodes", nil)
	if err != nil {
		return l, err
	}
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	resp, err := a.client.Do(req)
	if err != nil {
		return l, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 16<<20))
	if err != nil {
		return l, err
	}
	if resp.StatusCode != http.StatusOK {
		return l, fmt.Errorf("list nodes: %s", resp.Status)
	}
	return l, json.Unmarshal(body, &l)
}

func (a *agent) writeCNI(cidr netip.Prefix) error {
	conf, err := json.MarshalIndent(map[string]any{
		"cniVersion": "0.4.0",
		"name":       "podnet",
		"plugins": []any{
			map[string]any{
				"type": "ptp", "ipMasq": false, "mtu": 1500,
				"ipam": map[string]any{
					"type": "host-local", "dataDir": "/run/cni-ipam",
					"ranges": [][]any{{map[string]any{"subnet": cidr.String()}}},
					"routes": []any{map[string]any{"dst": "0.0.0.0/0"}},
				},
			},
			map[string]any{"type": "portmap", "capabilities": map[string]bool{"portMappings": true}},
		},
	}, "", "  ")
	if err != nil {
		return err
	}
	at := filepath.Join(a.cni, "10-podnet.conflist")
	if old, err := os.ReadFile(at); err == nil && bytes.Equal(old, conf) {
		return nil
	}
	// By rename: containerd watches the folder and must not read half a file.
	if err := os.WriteFile(at+".tmp", conf, 0o644); err != nil {
		return err
	}
	a.log.Info("CNI configuration written", "cidr", cidr)
	return os.Rename(at+".tmp", at)
}
