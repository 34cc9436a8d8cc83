package component

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"io/fs"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	hashWrong   = attestv1.Reason_REASON_COMPONENT_HASH
	pathWrong   = attestv1.Reason_REASON_COMPONENT_PATH
	unavailable = attestv1.Reason_REASON_COMPONENT_UNAVAILABLE
	invalid     = attestv1.Reason_REASON_REQUEST_INVALID
)

func limits() Limits {
	return Limits{Download: 1 << 20, Unpacked: 1 << 20, Entries: 20, Attempts: 3, Pause: time.Millisecond, Try: 10 * time.Second}
}

// mirror serves content and counts the requests.
func mirror(t *testing.T, h http.HandlerFunc) (url string, asked *atomic.Int32) {
	t.Helper()
	asked = new(atomic.Int32)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { asked.Add(1); h(w, r) }))
	t.Cleanup(s.Close)
	return s.URL, asked
}

func serve(b []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(b) }
}

func file(url string, content []byte, path string) *initv1.Component {
	sum := sha256.Sum256(content)
	return &initv1.Component{Url: url + "/x", Sha256: sum[:], Path: path, Mode: 0o755}
}

func install(t *testing.T, root string, list ...*initv1.Component) error {
	t.Helper()
	parsed, err := Parse(list)
	if err != nil {
		return err
	}
	in := New(root, limits(), slog.New(slog.DiscardHandler))
	defer in.Close()
	return in.Install(t.Context(), parsed, func(string) {})
}

// noLeftovers fails if a temporary file was left.
func noLeftovers(t *testing.T, root string) {
	t.Helper()
	_ = filepath.WalkDir(root, func(p string, d fs.DirEntry, _ error) error {
		if d != nil && strings.HasPrefix(d.Name(), tempPrefix) {
			t.Errorf("left behind: %s", p)
		}
		return nil
	})
}

func TestAFileIsInstalledOnce(t *testing.T) {
	root, content := t.TempDir(), []byte("#!/bin/sh\n")
	url, asked := mirror(t, serve(content))
	c := file(url, content, "/usr/local/bin/kubelet")
	for range 2 {
		if err := install(t, root, c); err != nil {
			t.Fatal(err)
		}
	}
	got := filepath.Join(root, "usr/local/bin/kubelet")
	b, err := os.ReadFile(got)
	st, _ := os.Stat(got)
	if err != nil || !bytes.Equal(b, content) || st.Mode().Perm() != 0o755 {
		t.Fatalf("%q, %v, %v", b, st.Mode(), err)
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("fetched %d times, want once", n)
	}
	if err := os.WriteFile(got, []byte("changed"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := install(t, root, c); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(got); !bytes.Equal(b, content) {
		t.Error("a changed file was taken for the component")
	}
	if err := os.Chmod(got, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := install(t, root, c); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(got); err != nil || st.Mode().Perm() != 0o755 {
		t.Errorf("mode %v, %v, want 0755", st.Mode(), err)
	}
	noLeftovers(t, root)
}

// Invariant B4.
func TestALinkAtTheComponentsPlaceIsReplacedAndNotFollowed(t *testing.T) {
	root, content := t.TempDir(), []byte("kubelet")
	victim := filepath.Join(t.TempDir(), "victim")
	if err := os.WriteFile(victim, []byte("untouched"), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(root, "usr/local/bin")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, filepath.Join(dir, "kubelet")); err != nil {
		t.Fatal(err)
	}
	url, _ := mirror(t, serve(content))
	if err := install(t, root, file(url, content, "/usr/local/bin/kubelet")); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(victim); string(b) != "untouched" {
		t.Error("the link was followed")
	}
	if st, _ := os.Lstat(filepath.Join(dir, "kubelet")); !st.Mode().IsRegular() {
		t.Error("the link is still there")
	}
}

// Invariant B4.
func TestAFolderThatIsALinkOutIsRefused(t *testing.T) {
	root, outside, content := t.TempDir(), t.TempDir(), []byte("x")
	dir := filepath.Join(root, "usr/local/lib/muster")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, filepath.Join(dir, "sub")); err != nil {
		t.Fatal(err)
	}
	url, _ := mirror(t, serve(content))
	if err := install(t, root, file(url, content, "/usr/local/lib/muster/sub/x")); attest.ReasonOf(err) != pathWrong {
		t.Fatal(err)
	}
	if left, _ := os.ReadDir(outside); len(left) != 0 {
		t.Error("something was written outside")
	}
	noLeftovers(t, root)
}

// Invariant B4.
func TestContentWithAnotherHashIsRefusedAtOnce(t *testing.T) {
	root := t.TempDir()
	url, asked := mirror(t, serve([]byte("evil")))
	err := install(t, root, file(url, []byte("good"), "/usr/local/bin/kubelet"))
	if attest.ReasonOf(err) != hashWrong || asked.Load() != 1 {
		t.Fatalf("%v after %d attempts", err, asked.Load())
	}
	if _, err := os.Stat(filepath.Join(root, "usr/local/bin/kubelet")); !os.IsNotExist(err) {
		t.Error("it was installed")
	}
	noLeftovers(t, root)
}

func TestATruncatedOrFailingMirrorIsTriedAgain(t *testing.T) {
	content := bytes.Repeat([]byte("abc"), 1000)
	attempts := 0
	url, asked := mirror(t, func(w http.ResponseWriter, _ *http.Request) {
		switch attempts++; attempts {
		case 1:
			http.Error(w, "busy", http.StatusServiceUnavailable)
		case 2:
			w.Header().Set("Content-Length", "3000")
			_, _ = w.Write(content[:100]) // the server cuts the connection
		default:
			_, _ = w.Write(content)
		}
	})
	root := t.TempDir()
	if err := install(t, root, file(url, content, "/opt/cni/bin/ptp")); err != nil {
		t.Fatal(err)
	}
	if asked.Load() != 3 {
		t.Errorf("%d attempts", asked.Load())
	}
	noLeftovers(t, root)
}

func TestAMirrorThatNeverServesIsUnavailable(t *testing.T) {
	url, asked := mirror(t, func(w http.ResponseWriter, _ *http.Request) { http.NotFound(w, nil) })
	err := install(t, t.TempDir(), file(url, nil, "/opt/cni/bin/ptp"))
	if attest.ReasonOf(err) != unavailable || asked.Load() != 3 {
		t.Fatalf("%v after %d attempts", err, asked.Load())
	}
}

func TestContentLargerThanTheLimitIsRefused(t *testing.T) {
	for name, h := range map[string]http.HandlerFunc{
		"announced": func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Content-Length", "2000000") },
		"streamed": func(w http.ResponseWriter, _ *http.Request) {
			for range 200 {
				_, _ = w.Write(make([]byte, 10_000))
				w.(http.Flusher).Flush()
			}
		},
	} {
		url, _ := mirror(t, h)
		root := t.TempDir()
		if err := install(t, root, file(url, nil, "/opt/cni/bin/ptp")); attest.ReasonOf(err) != hashWrong {
			t.Errorf("%s: %v", name, err)
		}
		noLeftovers(t, root)
	}
}

func TestAnEndedContextEndsTheFetch(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	url, _ := mirror(t, func(_ http.ResponseWriter, r *http.Request) { cancel(); <-r.Context().Done() })
	parsed, err := Parse([]*initv1.Component{file(url, nil, "/opt/cni/bin/ptp")})
	if err != nil {
		t.Fatal(err)
	}
	in := New(t.TempDir(), limits(), slog.New(slog.DiscardHandler))
	defer in.Close()
	if err := in.Install(ctx, parsed, func(string) {}); err == nil || ctx.Err() == nil {
		t.Fatal(err)
	}
}

func TestAListIsRefused(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*initv1.Component)
		want   attestv1.Reason
	}{
		"another scheme":      {func(c *initv1.Component) { c.Url = "file:///etc/shadow" }, invalid},
		"a secret in the URL": {func(c *initv1.Component) { c.Url = "https://u:p@h/x" }, invalid},
		"a long URL":          {func(c *initv1.Component) { c.Url = "https://h/" + strings.Repeat("x", 2048) }, invalid},
		"no hash":             {func(c *initv1.Component) { c.Sha256 = nil }, invalid},
		"a short hash":        {func(c *initv1.Component) { c.Sha256 = c.GetSha256()[:31] }, invalid},
		"setuid":              {func(c *initv1.Component) { c.Mode = 0o4755 }, invalid},
		"no mode":             {func(c *initv1.Component) { c.Mode = 0 }, invalid},
		"a relative path":     {func(c *initv1.Component) { c.Path = "usr/local/bin/x" }, pathWrong},
		"another folder":      {func(c *initv1.Component) { c.Path = "/etc/passwd" }, pathWrong},
		"the program itself":  {func(c *initv1.Component) { c.Path = "/usr/bin/bootstrapper" }, pathWrong},
		"a climbing path":     {func(c *initv1.Component) { c.Path = "/usr/local/bin/../../../etc/passwd" }, pathWrong},
		"a doubled slash":     {func(c *initv1.Component) { c.Path = "/usr/local/bin//x" }, pathWrong},
		"a sibling's prefix":  {func(c *initv1.Component) { c.Path = "/usr/local/binary/x" }, pathWrong},
		"the folder itself":   {func(c *initv1.Component) { c.Path = "/usr/local/bin" }, pathWrong},
		"a deep path":         {func(c *initv1.Component) { c.Path = "/usr/local/bin/" + strings.Repeat("x/", 10) + "x" }, pathWrong},
		"a zero byte":         {func(c *initv1.Component) { c.Path = "/usr/local/bin/x\x00" }, pathWrong},
	} {
		c := file("https://mirror.example", nil, "/usr/local/bin/x")
		if _, err := Parse([]*initv1.Component{c}); err != nil {
			t.Fatalf("the unchanged list: %v", err)
		}
		tt.change(c)
		if _, err := Parse([]*initv1.Component{c}); attest.ReasonOf(err) != tt.want {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	if _, err := Parse(make([]*initv1.Component, MaxComponents+1)); attest.ReasonOf(err) != invalid {
		t.Error(err)
	}
}

type entryOf struct {
	name, body, link string
	kind             byte
}

func archive(t *testing.T, compress bool, entries ...entryOf) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Mode: 0o755, Size: int64(len(e.body)), Typeflag: e.kind, Linkname: e.link}
		if e.kind == 0 {
			h.Typeflag = tar.TypeReg
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.body)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if !compress {
		return buf.Bytes()
	}
	var z bytes.Buffer
	zw := gzip.NewWriter(&z)
	if _, err := zw.Write(buf.Bytes()); err != nil {
		t.Fatal(err)
	}
	if err := zw.Close(); err != nil {
		t.Fatal(err)
	}
	return z.Bytes()
}

func TestAnArchiveIsUnpackedOnceAndRepaired(t *testing.T) {
	for name, compress := range map[string]bool{"tar": false, "tar.gz": true} {
		root := t.TempDir()
		b := archive(t, compress, entryOf{name: "./", kind: tar.TypeDir}, entryOf{name: "./ptp", body: "ptp"}, entryOf{name: "sub/host-local", body: "hl"})
		url, asked := mirror(t, serve(b))
		c := file(url, b, "/opt/cni/bin")
		c.Extract, c.Mode = true, 0
		for range 2 {
			if err := install(t, root, c); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		if asked.Load() != 1 {
			t.Errorf("%s: fetched %d times", name, asked.Load())
		}
		inner := filepath.Join(root, "opt/cni/bin/sub/host-local")
		if err := os.WriteFile(inner, []byte("changed"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := install(t, root, c); err != nil {
			t.Fatal(err)
		}
		if got, _ := os.ReadFile(inner); string(got) != "hl" {
			t.Errorf("%s: %q", name, got)
		}
		// B8: another archive takes its place, with its own files.
		other := archive(t, compress, entryOf{name: "./", kind: tar.TypeDir}, entryOf{name: "./ptp", body: "ptp"}, entryOf{name: "sub/host-local", body: "evil"})
		kept := filepath.Join(root, "opt/cni/bin", archiveName(Component{sha256: sha256.Sum256(b)}))
		if err := errors.Join(os.WriteFile(inner, []byte("evil"), 0o755), os.WriteFile(kept, other, 0o600)); err != nil {
			t.Fatal(err)
		}
		if err := install(t, root, c); err != nil {
			t.Fatal(err)
		}
		if got, _ := os.ReadFile(inner); string(got) != "hl" {
			t.Errorf("%s: with another archive: %q", name, got)
		}
		if err := os.Chmod(inner, 0o777); err != nil { // a container with the folder could write to it
			t.Fatal(err)
		}
		if err := install(t, root, c); err != nil {
			t.Fatal(err)
		}
		if st, err := os.Stat(inner); err != nil || st.Mode().Perm() != 0o755 {
			t.Errorf("%s: mode %v, %v, want 0755", name, st.Mode(), err)
		}
		noLeftovers(t, root)
	}
}

// An archive that tries to leave its folder has no effect at all: its harmless first entries are not placed either (B4).
func TestAnEscapingArchiveHasNoEffect(t *testing.T) {
	harmless := entryOf{name: "harmless", body: "x"}
	for name, entries := range map[string][]entryOf{
		"climbing":             {harmless, {name: "../evil", body: "x"}},
		"climbing deep":        {harmless, {name: "a/../../evil", body: "x"}},
		"absolute":             {harmless, {name: "/etc/evil", body: "x"}},
		"too deep":             {harmless, {name: strings.Repeat("x/", 10) + "x", body: "x"}},
		"a link":               {harmless, {name: "l", kind: tar.TypeSymlink, link: "/etc"}},
		"a file behind a link": {harmless, {name: "l", kind: tar.TypeSymlink, link: ".."}, {name: "l/evil", body: "x"}},
		"a hard link":          {harmless, {name: "l", kind: tar.TypeLink, link: "/etc/shadow"}},
		"a device":             {harmless, {name: "d", kind: tar.TypeChar}},
		"a pipe":               {harmless, {name: "p", kind: tar.TypeFifo}},
		"a name twice":         {harmless, harmless},
		"nothing":              {},
		"too many":             make([]entryOf, 0),
	} {
		if name == "too many" {
			for i := range limits().Entries + 1 {
				entries = append(entries, entryOf{name: string(rune('a' + i)), body: "x"})
			}
		}
		root := t.TempDir()
		b := archive(t, true, entries...)
		url, _ := mirror(t, serve(b))
		c := file(url, b, "/opt/cni/bin")
		c.Extract = true
		if err := install(t, root, c); attest.ReasonOf(err) != pathWrong {
			t.Errorf("%s: %v", name, err)
		}
		left, _ := os.ReadDir(filepath.Join(root, "opt/cni/bin"))
		if len(left) != 0 {
			t.Errorf("%s: left %v", name, left)
		}
	}
}

func TestABombOrABrokenArchiveIsRefused(t *testing.T) {
	whole := archive(t, true, entryOf{name: "a", body: strings.Repeat("x", 5000)})
	for name, b := range map[string][]byte{
		"a bomb":       archive(t, true, entryOf{name: "a", body: strings.Repeat("\x00", 2<<20)}),
		"a cut stream": whole[:len(whole)-20],
		"no archive":   []byte("just a text, and certainly no tar archive"),
		"gzip of text": {0x1f, 0x8b, 8, 0, 0},
	} {
		root := t.TempDir()
		url, _ := mirror(t, serve(b))
		c := file(url, b, "/usr/local/lib/muster/cni")
		c.Extract = true
		if err := install(t, root, c); attest.ReasonOf(err) != pathWrong {
			t.Errorf("%s: %v", name, err)
		}
		noLeftovers(t, root)
	}
}

// trickle sends chunks with a pause before each, until the client hangs up.
func trickle(chunk []byte, chunks int, pause time.Duration) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", strconv.Itoa(len(chunk)*chunks))
		tick := time.NewTicker(pause)
		defer tick.Stop()
		for range chunks {
			select {
			case <-tick.C:
			case <-r.Context().Done():
				return
			}
			_, _ = w.Write(chunk)
			_ = http.NewResponseController(w).Flush()
		}
	}
}

// A mirror that stalls, or a network attacker, would otherwise delay a machine, and with it others that wait for the join lease, for the time of all
// attempts.
func TestAMirrorThatTricklesIsGivenUp(t *testing.T) {
	content := bytes.Repeat([]byte("x"), 8*leastBytes)
	slow, healthy := trickle(content[:1], len(content), time.Millisecond), trickle(content[:leastBytes], 8, 700*time.Millisecond)
	for name, tt := range map[string]struct {
		mirror   func(asked int32) http.HandlerFunc
		attempts int32
		least    time.Duration
		want     attestv1.Reason
	}{
		"each time": {func(int32) http.HandlerFunc { return slow }, 3, time.Second, attestv1.Reason_REASON_COMPONENT_UNAVAILABLE},
		"the first time": {func(n int32) http.HandlerFunc {
			return map[bool]http.HandlerFunc{true: slow, false: serve(content)}[n == 1]
		}, 2, 5 * time.Second, attestv1.Reason_REASON_ACCEPTED},
		"a slow one that is quick enough": {func(int32) http.HandlerFunc { return healthy }, 1, 5 * time.Second, attestv1.Reason_REASON_ACCEPTED}, // it takes longer than leastTime in total
	} {
		t.Run(name, func(t *testing.T) {
			var asked atomic.Int32
			url, _ := mirror(t, func(w http.ResponseWriter, r *http.Request) { tt.mirror(asked.Add(1))(w, r) })
			root := t.TempDir()
			bounds := limits()
			bounds.Try = 5 * time.Minute
			in := New(root, bounds, slog.New(slog.DiscardHandler))
			defer in.Close()
			in.leastTime = tt.least
			list, err := Parse([]*initv1.Component{file(url, content, "/usr/local/bin/kubelet")})
			if err != nil {
				t.Fatal(err)
			}
			err = in.Install(t.Context(), list, func(string) {})
			if attest.ReasonOf(err) != tt.want || asked.Load() != tt.attempts {
				t.Errorf("%v after %d attempts, want %s after %d", err, asked.Load(), tt.want, tt.attempts)
			}
			if tt.want != attestv1.Reason_REASON_ACCEPTED && !strings.Contains(err.Error(), "less than 64 KiB in 1s") {
				t.Errorf("%v does not say what was wrong", err)
			}
			noLeftovers(t, root)
		})
	}
}
