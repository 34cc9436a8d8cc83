package component

import (
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

func parsed(t *testing.T, list ...*initv1.Component) []Component {
	t.Helper()
	out, err := Parse(list)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// What was staged is installed without the mirror, and nothing is in its place before.
func TestStagedComponentsNeedNoMirror(t *testing.T) {
	root, dir, content := t.TempDir(), filepath.Join(t.TempDir(), "staged"), []byte("kubelet 2")
	down := false
	url, asked := mirror(t, func(w http.ResponseWriter, r *http.Request) {
		if down {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		serve(content)(w, r)
	})
	list := parsed(t, file(url, content, "/usr/local/bin/kubelet"))
	in := New(root, limits(), slog.New(slog.NewTextHandler(t.Output(), nil)))
	defer in.Close()
	for range 2 { // it is fetched once
		if err := in.Stage(t.Context(), dir, list, func(string) {}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(filepath.Join(root, "usr/local/bin/kubelet")); err == nil || asked.Load() != 1 {
		t.Errorf("installed: %t, asked %d times", err == nil, asked.Load())
	}
	down = true
	if err := in.Install(t.Context(), list, func(string) {}); err != nil || !in.Installed(list[0]) {
		t.Fatalf("%v", err)
	}
	if err := in.Stage(t.Context(), filepath.Join(t.TempDir(), "empty"), list, func(string) {}); err != nil {
		t.Errorf("what is installed is fetched: %v", err)
	}
	noLeftovers(t, root)
	noLeftovers(t, dir)
}

// B8: root may have changed the staged files, which are on the state disk.
func TestAChangedStagedComponentIsNotInstalled(t *testing.T) {
	for name, change := range map[string]func(file string) error{
		"another content": func(f string) error { return os.WriteFile(f, []byte("#!evil"), 0o600) },
		"a link out":      func(f string) error { _ = os.Remove(f); return os.Symlink("/bin/sh", f) },
		"longer":          func(f string) error { return os.WriteFile(f, append([]byte("kubelet 2"), 0), 0o600) },
		"gone":            os.Remove,
	} {
		root, dir, content := t.TempDir(), t.TempDir(), []byte("kubelet 2")
		url, asked := mirror(t, serve(content))
		list := parsed(t, file(url, content, "/usr/local/bin/kubelet"))
		in := New(root, limits(), slog.New(slog.NewTextHandler(t.Output(), nil)))
		if err := in.Stage(t.Context(), dir, list, func(string) {}); err != nil {
			t.Fatal(err)
		}
		staged, _ := filepath.Glob(dir + "/*")
		if len(staged) != 1 {
			t.Fatalf("staged: %q", staged)
		}
		if err := change(staged[0]); err != nil {
			t.Fatal(err)
		}
		if err := in.Install(t.Context(), list, func(string) {}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got, _ := os.ReadFile(filepath.Join(root, "usr/local/bin/kubelet")); string(got) != string(content) || asked.Load() != 2 {
			t.Errorf("%s: installed is %q, asked %d times", name, got, asked.Load())
		}
		noLeftovers(t, root)
		in.Close()
	}
}

func TestStageRefusesAnotherContent(t *testing.T) {
	url, _ := mirror(t, serve([]byte("evil")))
	dir := t.TempDir()
	in := New(t.TempDir(), limits(), slog.New(slog.DiscardHandler))
	defer in.Close()
	if err := in.Stage(t.Context(), dir, parsed(t, file(url, []byte("kubelet"), "/usr/local/bin/kubelet")), func(string) {}); attest.ReasonOf(err) != hashWrong || !strings.Contains(err.Error(), "/usr/local/bin/kubelet") {
		t.Error(err)
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// Files of the old list that the new one does not have are removed; those that neither has are of somebody else, a network plugin's pod for instance.
func TestOnlyWhatTheOldListHadIsRemoved(t *testing.T) {
	root := t.TempDir()
	old := archive(t, false, entryOf{name: "bridge", body: "1"}, entryOf{name: "gone", body: "1"})
	next := archive(t, false, entryOf{name: "bridge", body: "2"})
	url, _ := mirror(t, func(w http.ResponseWriter, r *http.Request) {
		serve(map[string][]byte{"/old/x": old, "/new/x": next, "/a/x": []byte("a"), "/b/x": []byte("b")}[r.URL.Path])(w, r)
	})
	before := []*initv1.Component{extracted(file(url+"/old", old, "/opt/cni/bin")), file(url+"/a", []byte("a"), "/usr/local/bin/stays"), file(url+"/b", []byte("b"), "/usr/local/bin/goes")}
	after := []*initv1.Component{extracted(file(url+"/new", next, "/opt/cni/bin")), file(url+"/a", []byte("a"), "/usr/local/bin/stays")}
	if err := install(t, root, before...); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "opt/cni/bin/of-a-pod"), nil, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := install(t, root, after...); err != nil {
		t.Fatal(err)
	}
	in := New(root, limits(), slog.New(slog.DiscardHandler))
	defer in.Close()
	for i := range 2 {
		removed, err := in.Remove(parsed(t, before...), parsed(t, after...))
		if want := []string{"/opt/cni/bin/" + archiveName(parsed(t, before...)[0]), "/opt/cni/bin/gone", "/usr/local/bin/goes"}; err != nil || i == 0 && !slices.Equal(removed, want) || i == 1 && len(removed) > 0 {
			t.Errorf("removed %q, %v", removed, err)
		}
	}
	for _, f := range []string{"opt/cni/bin/bridge", "opt/cni/bin/of-a-pod", "usr/local/bin/stays"} {
		if _, err := os.Stat(filepath.Join(root, f)); err != nil {
			t.Error(err)
		}
	}
}

func extracted(c *initv1.Component) *initv1.Component {
	c.Extract, c.Mode = true, 0
	return c
}
