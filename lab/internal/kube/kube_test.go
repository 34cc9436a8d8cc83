package kube

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestThePreviousReleaseIsTheOneThatToolsKubePreviousPins(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "..", "..", "tools", Previous.Module, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	staged := strings.Replace(Previous.Version, "v1.", "v0.", 1)
	for _, want := range []string{"k8s.io/kubernetes " + Previous.Version, "k8s.io/api => k8s.io/api " + staged, "k8s.io/kubelet => k8s.io/kubelet " + staged} {
		if !strings.Contains(string(b), want) {
			t.Errorf("tools/%s/go.mod doesn't have %s", Previous.Module, want)
		}
	}
	// An upgrade that leaves something as it was would not be seen.
	if Previous.EtcdTag >= Current.EtcdTag || Previous.CoreDNSTag == Current.CoreDNSTag || Previous.PauseTag == Current.PauseTag {
		t.Errorf("%+v and %+v have tags in common, or the older etcd is not older", Previous, Current)
	}
	// kubeadm upgrades by one minor version.
	if old, now := strings.Split(Previous.Version, "."), strings.Split(Current.Version, "."); old[0] != now[0] || len(old[1]) != len(now[1]) || old[1] >= now[1] {
		t.Errorf("%s is not before %s", Previous.Version, Current.Version)
	}
}

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
		id, err := Current.identify(dir, "go1.0")
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

// fill makes a build of files that hold their own names, and says in its list what they are.
func fill(t *testing.T, b *Build) {
	t.Helper()
	b.Sums = map[string]string{}
	for _, p := range Current.Programs {
		if err := os.WriteFile(b.Path(p), []byte(p), 0o755); err != nil {
			t.Fatal(err)
		}
		b.Sums[p] = fmt.Sprintf("%x", sha256.Sum256([]byte(p)))
	}
	writeList(t, b.Dir, b.Sums)
}

func writeList(t *testing.T, dir string, list any) {
	t.Helper()
	j, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, sumsFile), j, 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestAnIncompleteBuildIsNotUsed(t *testing.T) {
	b := Build{Release: Current, Dir: t.TempDir()}
	if b.load() == nil {
		t.Error("an empty folder passes for a build")
	}
	fill(t, &b)
	if err := b.load(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(b.Path("kubelet")); err != nil {
		t.Fatal(err)
	}
	if b.load() == nil {
		t.Error("a build without kubelet passes")
	}
}

func TestAChangedProgramOfTheCacheIsNotUsed(t *testing.T) {
	b := Build{Release: Current, Dir: t.TempDir(), pinned: true}
	fill(t, &b)
	if err := b.load(); err != nil {
		t.Fatal(err)
	}
	// An attacker who writes to the cache changes the list there, too.
	changed := maps.Clone(b.Sums)
	changed["kubelet"] = fmt.Sprintf("%x", sha256.Sum256([]byte("Kubelet")))
	writeList(t, b.Dir, changed)
	if err := os.WriteFile(b.Path("kubelet"), []byte("Kubelet"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := b.load(); err == nil || !strings.Contains(err.Error(), "kubelet") {
		t.Errorf("a changed kubelet is used: %v", err)
	}
	other := Build{Release: Current, Dir: b.Dir} // no pin: of another Go release
	if err := other.load(); err != nil {
		t.Errorf("what the cache's own list says: %v", err)
	}
	writeList(t, b.Dir, b.Sums)
	if err := other.load(); err == nil {
		t.Error("damage is not seen")
	}
}

func TestEachPinIsThatOfItsModule(t *testing.T) {
	source := filepath.Join("..", "..", "..")
	for _, r := range []Release{Current, Previous} {
		p, err := readPin(r.module(source))
		if err != nil {
			t.Fatal(err)
		}
		id, err := r.identify(r.module(source), p.Go)
		if err != nil || id != p.ID {
			t.Errorf("tools/%s/%s is of another go.mod, go.sum or flags (%v): write it with `go run ./lab kube-binaries --pin`, with --previous for the previous release", r.Module, sumsFile, err)
		}
		for _, name := range r.Programs {
			if len(p.Sums[name]) != 64 {
				t.Errorf("%s %s: %q is no SHA-256", r.Version, name, p.Sums[name])
			}
		}
		b, err := r.expected(source, t.TempDir())
		if err != nil || b.pinned != (p.Go == runtime.Version()) {
			t.Errorf("the pin of %s is not used by %s: %v", p.Go, runtime.Version(), err)
		}
	}
}

// unbuildable returns a checkout whose module can't be built, so that programs can only come from the cache.
func unbuildable(t *testing.T) (source, cache, module string) {
	t.Helper()
	source, cache = t.TempDir(), t.TempDir()
	module = filepath.Join(source, "tools", "kube")
	err := os.MkdirAll(module, 0o755)
	for name, text := range map[string]string{"go.mod": "module nothing\n", "go.sum": "", sumsFile: "{}"} {
		err = errors.Join(err, os.WriteFile(filepath.Join(module, name), []byte(text), 0o600))
	}
	if err != nil {
		t.Fatal(err)
	}
	return source, cache, module
}

// S1: the pin does not come from a cache.
func TestWhatIsPinnedIsBuiltAnew(t *testing.T) {
	source, cache, _ := unbuildable(t)
	b, err := Current.expected(source, cache)
	if err != nil {
		t.Fatal(err)
	}
	b.Sums = map[string]string{}
	if err := os.MkdirAll(b.Dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range Current.Programs {
		if err := os.WriteFile(b.Path(name), []byte("evil"), 0o600); err != nil {
			t.Fatal(err)
		}
		if b.Sums[name], err = Sum(b.Path(name)); err != nil {
			t.Fatal(err)
		}
	}
	writeList(t, b.Dir, b.Sums)
	if got, err := Current.Binaries(t.Context(), source, cache, io.Discard); err != nil || got.Pinned() {
		t.Fatalf("%v, pinned %t: want what the cache has", err, got.Pinned())
	}
	if got, err := Current.Rebuild(t.Context(), source, cache, io.Discard); err == nil {
		t.Errorf("the cache's programs would be pinned: %v", got.Sums)
	}
}

// S1: an attacker who can write to the cache while the programs are built, or copied there, cannot have other
// programs pinned.
func TestWhatIsPutIntoTheCacheDuringABuildIsNotPinned(t *testing.T) {
	source, cache, module := unbuildable(t)
	b, err := Current.expected(source, cache)
	if err != nil {
		t.Fatal(err)
	}
	// evil puts programs into each folder of the cache, and where the build will be.
	evil := func() {
		t.Helper()
		there, err := filepath.Glob(filepath.Join(cache, "kube", "[^.]*")) // not the lock
		if err != nil {
			t.Fatal(err)
		}
		for _, dir := range append(there, b.Dir) {
			e := Build{Release: Current, Dir: dir, Sums: map[string]string{}}
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			for _, name := range Current.Programs {
				if err := os.WriteFile(e.Path(name), []byte("evil"), 0o600); err != nil {
					t.Fatal(err)
				}
				e.Sums[name] = fmt.Sprintf("%x", sha256.Sum256([]byte("evil")))
			}
			writeList(t, dir, e.Sums)
		}
	}
	made := ""
	with := func(_ context.Context, from, into string) error {
		made = into
		info, err := os.Stat(into)
		if err != nil {
			return err
		}
		if from != module || info.Mode().Perm() != 0o700 || strings.HasPrefix(into, cache) {
			t.Errorf("%s is built in %s (%s): want a private folder outside of the cache", from, into, info.Mode())
		}
		for _, name := range Current.Programs {
			if err := os.WriteFile(filepath.Join(into, name), []byte(name), 0o755); err != nil {
				return err
			}
		}
		evil()
		return nil
	}
	evil()
	log := logged(func(line string) {
		if strings.HasPrefix(line, "copying ") || strings.HasPrefix(line, "built: ") { // they are hashed by now
			evil()
		}
	})
	got, err := Current.rebuild(t.Context(), source, cache, with, log)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range Current.Programs {
		if want := fmt.Sprintf("%x", sha256.Sum256([]byte(name))); got.Sums[name] != want || got.Pin().Sums[name] != want {
			t.Errorf("%s would be pinned with %s, and the compiler wrote %s", name, got.Sums[name], want)
		}
	}
	if _, err := os.Stat(made); !os.IsNotExist(err) {
		t.Errorf("%s stays: %v", made, err)
	}
	if left, err := filepath.Glob(filepath.Join(cache, "kube", "building-*")); err != nil || len(left) > 0 {
		t.Errorf("left in the cache: %q, %v", left, err)
	}
	// The copy is good if it is not replaced later, and compared when it is used.
	if again, err := Current.rebuild(t.Context(), source, cache, with, io.Discard); err != nil || !maps.Equal(again.Sums, got.Sums) {
		t.Fatalf("%+v, %v", again, err)
	}
	j, err := json.Marshal(got.Pin())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(module, sumsFile), j, 0o600); err != nil {
		t.Fatal(err)
	}
	if used, err := Current.Binaries(t.Context(), source, cache, io.Discard); err != nil || !used.Pinned() || used.Dir != got.Dir {
		t.Errorf("%+v, %v", used, err)
	}
	evil()
	if used, err := Current.Binaries(t.Context(), source, cache, io.Discard); err == nil {
		t.Errorf("%+v is used", used)
	}
	// A pin with another entry for the same build is not trusted, either.
	if err := os.WriteFile(filepath.Join(module, sumsFile), fmt.Appendf(nil, `{"id": %q, "sums": {"kubelet": "ee"}}`, b.ID), 0o600); err != nil {
		t.Fatal(err)
	}
	if again, err := Current.rebuild(t.Context(), source, cache, with, io.Discard); err != nil || again.Pinned() || !maps.Equal(again.Sums, got.Sums) {
		t.Errorf("%+v, %v", again, err)
	}
}

// logged receives each line of a log.
type logged func(line string)

func (l logged) Write(b []byte) (int, error) {
	l(string(b))
	return len(b), nil
}
