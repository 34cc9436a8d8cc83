package versions_test

import (
	"encoding/json"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/versions"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestResolve(t *testing.T) {
	for in, want := range map[string]string{
		"1.36": "1.36.1", "v1.36": "1.36.1", "1.36.0": "1.36.0", "v1.35.2": "1.35.2",
		"1.12": "", "1": "", "1.36.1.1": "", "1.36.x": "", "": "", "1.036": "", "1.36.1-rc.1": "", "-1.36": "",
	} {
		got, err := versions.Resolve(in)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", in, got, err)
		}
	}
}

const good = `
apiVersion: muster.dev/v1alpha1
kind: ComponentList
components:
- url: http://mirror.example/kubeadm
  sha256: 00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff
  path: /usr/local/bin/kubeadm
  mode: "0755"
- url: https://mirror.example/cni.tgz
  sha256: 00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff
  path: /opt/cni/bin
  extract: true
images:
- registry.example:5000/etcd:v1@sha256:0000000000000000000000000000000000000000000000000000000000000001
- registry.example:5000/kube-apiserver:v1@sha256:0000000000000000000000000000000000000000000000000000000000000002
- registry.example:5000/kube-controller-manager:v1@sha256:0000000000000000000000000000000000000000000000000000000000000003
- registry.example:5000/kube-scheduler:v1@sha256:0000000000000000000000000000000000000000000000000000000000000004
- registry.example:5000/kube-proxy:v1@sha256:0000000000000000000000000000000000000000000000000000000000000005
- registry.example:5000/coredns/coredns:v1@sha256:0000000000000000000000000000000000000000000000000000000000000006
- registry.example:5000/pause:v1@sha256:0000000000000000000000000000000000000000000000000000000000000007
`

func TestParse(t *testing.T) {
	l, err := versions.Parse([]byte(good))
	if err != nil {
		t.Fatal(err)
	}
	wire := l.Wire()
	if len(wire) != 2 || wire[0].GetMode() != 0o755 || len(wire[0].GetSha256()) != 32 || !wire[1].GetExtract() {
		t.Errorf("%v", wire)
	}
	unquoted, err := versions.Parse([]byte(strings.Replace(good, `"0755"`, "0755", 1)))
	if err != nil || unquoted.Components[0].Mode != 0o755 {
		t.Errorf("YAML's octal number: %v, %v", unquoted, err)
	}
	again, err := yaml.Marshal(l)
	if err != nil {
		t.Fatal(err)
	}
	if back, err := versions.Parse(again); err != nil || back.Components[0] != l.Components[0] {
		t.Errorf("what is written is not read back: %v, %v", back, err)
	}
}

// Invariant B9.
func TestParseRefuses(t *testing.T) {
	for name, change := range map[string][2]string{
		"another kind":                     {"ComponentList", "Components"},
		"an unknown field":                 {"extract: true", "unpack: true"},
		"a duplicate field":                {"extract: true", "extract: true\n  extract: true"},
		"no hash":                          {"  sha256: 00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff\n  path: /usr", "  path: /usr"},
		"an upper-case hash":               {"aabbccddeeff00112233445566778899aabbccddeeff\n  path: /usr", "AABBCCDDEEFF00112233445566778899aabbccddeeff\n  path: /usr"},
		"a relative path":                  {"path: /usr/local", "path: usr/local"},
		"a path that climbs":               {"path: /usr/local", "path: /usr/../local"},
		"a file without mode":              {"mode: \"0755\"", ""},
		"an archive with mode":             {"extract: true", "extract: true\n  mode: \"0755\""},
		"setuid":                           {`"0755"`, `"4755"`},
		"a local file":                     {"http://mirror.example/kubeadm", "file:///kubeadm"},
		"credentials":                      {"http://mirror.example/kubeadm", "http://user:word@mirror.example/kubeadm"},
		"an image without a digest":        {"v1@sha256:0000000000000000000000000000000000000000000000000000000000000001", "v1"},
		"an image without a tag":           {"etcd:v1@", "etcd@"},
		"an image without its registry":    {"registry.example:5000/etcd", "etcd"},
		"a digest of another kind":         {"v1@sha256:0000000000000000000000000000000000000000000000000000000000000001", "v1@sha512:00000000000000000000000000000000000000000000000000000000000000010000000000000000000000000000000000000000000000000000000000000001"},
		"an image that is listed twice":    {"/pause:", "/etcd:"},
		"an image that is not expected":    {"/pause:", "/tool:"},
		"an image that is not listed":      {"- registry.example:5000/pause:v1@sha256:0000000000000000000000000000000000000000000000000000000000000007\n", ""},
		"one more image than all":          {"images:\n", "images:\n- registry.example:5000/tool:v1@sha256:0000000000000000000000000000000000000000000000000000000000000009\n"},
		"all images, and one twice":        {"images:\n", "images:\n- registry.example:5000/etcd:v1@sha256:0000000000000000000000000000000000000000000000000000000000000009\n"},
		"an image with a second reference": {"/pause:v1", "/pause:v1@sha256:0000000000000000000000000000000000000000000000000000000000000009:v1"},
		"no images": {`images:
- registry.example:5000/etcd:v1@sha256:0000000000000000000000000000000000000000000000000000000000000001
- registry.example:5000/kube-apiserver:v1@sha256:0000000000000000000000000000000000000000000000000000000000000002
- registry.example:5000/kube-controller-manager:v1@sha256:0000000000000000000000000000000000000000000000000000000000000003
- registry.example:5000/kube-scheduler:v1@sha256:0000000000000000000000000000000000000000000000000000000000000004
- registry.example:5000/kube-proxy:v1@sha256:0000000000000000000000000000000000000000000000000000000000000005
- registry.example:5000/coredns/coredns:v1@sha256:0000000000000000000000000000000000000000000000000000000000000006
- registry.example:5000/pause:v1@sha256:0000000000000000000000000000000000000000000000000000000000000007`, ""},
		"a long URL": {"http://mirror.example/kubeadm", "http://mirror.example/" + strings.Repeat("x", 2048)},
	} {
		t.Run(name, func(t *testing.T) {
			text := strings.Replace(good, change[0], change[1], 1)
			if text == good {
				t.Fatal("nothing was changed")
			}
			if l, err := versions.Parse([]byte(text)); err == nil {
				t.Errorf("accepted: %v", l)
			} else if strings.Contains(err.Error(), "word@") {
				t.Errorf("the credentials are in the error: %v", err)
			}
		})
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(good))
	f.Fuzz(func(t *testing.T, data []byte) {
		l, err := versions.Parse(data)
		if err != nil {
			return
		}
		b, err := json.Marshal(l)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := versions.Parse(b); err != nil {
			t.Fatalf("accepted, but not when written again: %v", err)
		}
	})
}
