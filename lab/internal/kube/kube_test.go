package kube

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTheVersionsAreThoseThatToolsKubePins(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "..", "..", "tools", "kube", "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	etcd, _, _ := strings.Cut(EtcdTag, "-")
	for module, version := range map[string]string{
		"k8s.io/kubernetes":                   Version,
		"github.com/containerd/containerd/v2": ContainerdVersion,
		"go.etcd.io/etcd/server/v3":           "v" + etcd,
		"github.com/coredns/coredns":          CoreDNSTag,
	} {
		if !strings.Contains(string(b), "\t"+module+" "+version) {
			t.Errorf("tools/kube/go.mod doesn't require %s %s", module, version)
		}
	}
	b, err = os.ReadFile(filepath.Join("..", "..", "..", "tools", "etcdctl", "go.mod"))
	if want := "\tgo.etcd.io/etcd/etcdctl/v3 v" + etcd; err != nil || !strings.Contains(string(b), want) {
		t.Errorf("tools/etcdctl/go.mod doesn't require %s: %v", want, err)
	}
}

func TestABuildIsNamedByWhatGoesIntoIt(t *testing.T) {
	id := func(mod, sum string) string {
		t.Helper()
		dir := t.TempDir()
		for name, content := range map[string]string{"go.mod": mod, "go.sum": sum} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		id, err := identify(dir)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	a := id("module a", "sum")
	if b := id("module a", "sum"); a != b {
		t.Error("the same content has two names")
	}
	for _, other := range [][2]string{{"module b", "sum"}, {"module a", "sun"}, {"module as", "um"}} {
		if id(other[0], other[1]) == a {
			t.Errorf("%q has the name of another content", other)
		}
	}
}

func TestAnIncompleteBuildIsNotUsed(t *testing.T) {
	b := Build{Dir: t.TempDir()}
	if b.load() == nil {
		t.Error("an empty folder passes for a build")
	}
	if err := os.WriteFile(filepath.Join(b.Dir, sumsFile), []byte(`{"kubelet":"ab"}`), 0o644); err != nil {
		t.Fatal(err)
	}
	if b.load() == nil {
		t.Error("one program passes for a build")
	}
}
