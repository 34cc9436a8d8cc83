package service

import (
	"bytes"
	"encoding/base64"
	"flag"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/muster-k8s/muster/internal/service/attester"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestMain(m *testing.M) {
	// klog starts its flusher with the process.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"))
}

func kubeconfig(t *testing.T) string {
	t.Helper()
	c := clientcmdapi.NewConfig()
	c.Clusters["c"] = &clientcmdapi.Cluster{Server: "https://192.0.2.1:6443"}
	c.Contexts["c"] = &clientcmdapi.Context{Cluster: "c"}
	c.CurrentContext = "c"
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*c, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// image returns an image's configuration.
func image(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image.yaml")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestAServicesFlagsOpenWhatTheyName(t *testing.T) {
	busy, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = busy.Close() }()
	good := map[string]string{
		"listen": "127.0.0.1:0", "metrics": "127.0.0.1:0", "owner-keys": base64.StdEncoding.EncodeToString(make([]byte, 32)),
		"node-name": "node1", "kubeconfig": kubeconfig(t), "image": image(t, "apiVersion: muster.dev/v1alpha1\nlowestPolicySerial: 7\nlisten: {}\n"), "attester": attester.Socket(t.TempDir(), attest.PurposeKMS),
	}
	for name, tt := range map[string]struct {
		flag, value, want string
	}{
		"all of them":                   {},
		"no owner's key":                {"owner-keys", "", "--owner-keys: "},
		"an owner's key that is none":   {"owner-keys", "AAAA", "--owner-keys: "},
		"no image's configuration":      {"image", "/nowhere", "--image: "},
		"an image's that is none":       {"image", image(t, "lowestPolicySerial: many\n"), "--image: "},
		"no pod and no kubeconfig":      {"kubeconfig", "", "--kubeconfig"},
		"metrics on a used port":        {"metrics", busy.Addr().String(), "--metrics: "},
		"RPCs on a used port":           {"listen", busy.Addr().String(), "--listen: "},
		"RPCs at an address of nowhere": {"listen", "192.0.2.77:0", "--listen: "},
	} {
		t.Run(name, func(t *testing.T) {
			set := flag.NewFlagSet("kms", flag.ContinueOnError)
			f := NewFlags(set, attest.PurposeKMS, ":9001")
			var args []string
			for k, v := range good {
				if k == tt.flag {
					v = tt.value
				}
				args = append(args, "--"+k+"="+v)
			}
			if err := set.Parse(args); err != nil {
				t.Fatal(err)
			}
			var log bytes.Buffer
			p, err := f.Open(t.Context(), &log)
			if tt.want != "" {
				if err == nil || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("got %v, want an error that names %s", err, tt.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			if len(p.Owner) != 1 || len(p.Owner[0]) != 32 || p.LowestSerial != 7 || p.API.Host != "https://192.0.2.1:6443" || !strings.HasPrefix(p.API.UserAgent, "muster-kms/") || p.Attester == nil {
				t.Errorf("%+v", p)
			}
			for _, want := range []string{`"service":"kms"`, `"node":"node1"`, p.Listener.Addr().String(), p.Metrics.Addr().String()} {
				if !strings.Contains(log.String(), want) {
					t.Errorf("the log does not say %s: %s", want, log.String())
				}
			}
		})
	}
}

func TestServicesAreWhereTheChartLooksForThem(t *testing.T) {
	for purpose, listen := range map[attest.Purpose]string{attest.PurposeKMS: ":9001", attest.PurposeJoinservice: ":9090"} {
		set := flag.NewFlagSet(string(purpose), flag.ContinueOnError)
		NewFlags(set, purpose, listen)
		for name, want := range map[string]string{
			"listen": listen, "metrics": ":9464", "attester": "/run/muster/attest/" + string(purpose) + "/attest.sock",
			"owner-keys": "", "image": "/etc/muster/image.yaml", "node-name": "", "kubeconfig": "",
		} {
			if f := set.Lookup(name); f == nil || f.DefValue != want {
				t.Errorf("%s: --%s is %+v, want %q", purpose, name, f, want)
			}
		}
	}
}
