package main

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTheCNIConfigurationIsForTheNodesOwnSubnet(t *testing.T) {
	dir := t.TempDir()
	a := agent{cni: dir, log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	for _, cidr := range []string{"10.244.0.0/24", "10.244.1.0/24"} {
		if err := a.writeCNI(netip.MustParsePrefix(cidr)); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(filepath.Join(dir, "10-podnet.conflist"))
	if err != nil {
		t.Fatal(err)
	}
	var conf struct {
		CNIVersion string `json:"cniVersion"`
		Plugins    []struct {
			Type string `json:"type"`
			IPAM struct {
				Ranges [][]struct {
					Subnet string `json:"subnet"`
				} `json:"ranges"`
			} `json:"ipam"`
		} `json:"plugins"`
	}
	if err := json.Unmarshal(b, &conf); err != nil {
		t.Fatal(err)
	}
	if len(conf.Plugins) != 2 || conf.Plugins[0].Type != "ptp" || conf.Plugins[0].IPAM.Ranges[0][0].Subnet != "10.244.1.0/24" {
		t.Errorf("%s", b)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*.tmp")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestARouteMessageIsWhatRtnetlinkWants(t *testing.T) {
	got := routeMessage(netip.MustParsePrefix("10.244.1.0/24"), netip.MustParseAddr("192.168.77.12"))
	want := "2c000000" + "1800" + "0505" + "00000000" + "00000000" + // nlmsghdr: 44 bytes, RTM_NEWROUTE, REQUEST|ACK|REPLACE|CREATE
		"02180000" + "fe040001" + "00000000" + // rtmsg: AF_INET /24, table main, static, universe, unicast
		"08000100" + "0af40100" + // RTA_DST
		"08000500" + "c0a84d0c" // RTA_GATEWAY
	if hex.EncodeToString(got) != want {
		t.Errorf("\n%x\n%s", got, want)
	}
	for _, bad := range []struct{ dst, via string }{{"fd00::/64", "192.168.77.12"}, {"10.244.1.0/24", "fd00::1"}} {
		if err := setRoute(netip.MustParsePrefix(bad.dst), netip.MustParseAddr(bad.via)); err == nil {
			t.Errorf("%v was set", bad)
		}
	}
}

func TestNodesAreListedWithTheServiceAccountsToken(t *testing.T) {
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("abc\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/api/v1/nodes" || r.Header.Get("Authorization") != "Bearer abc" {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		if _, err := w.Write([]byte(`{"items":[{"metadata":{"name":"node1"},"spec":{"podCIDR":"10.244.0.0/24"},"status":{"addresses":[{"type":"InternalIP","address":"192.168.77.11"}]}}]}`)); err != nil {
			t.Error(err)
		}
	}))
	defer srv.Close()
	a := agent{api: srv.URL, client: srv.Client(), token: token}
	l, err := a.list(t.Context())
	if err != nil || len(l.Items) != 1 || l.Items[0].Spec.PodCIDR != "10.244.0.0/24" {
		t.Errorf("%+v, %v", l, err)
	}
	if err := os.WriteFile(token, []byte("other"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := a.list(t.Context()); err == nil || bytes.Contains([]byte(err.Error()), []byte("other")) {
		t.Errorf("a refusal became %v", err)
	}
}
