package lan

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// answering accepts connections and sends back what comes, with its name in front.
func answering(t *testing.T, name string) net.Listener {
	t.Helper()
	l := listen(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			b, err := io.ReadAll(c) // ends when the client's half is closed
			if err == nil {
				_, err = io.WriteString(c, name+":"+string(b))
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			if err != nil {
				t.Error(err)
			}
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-done })
	return l
}

// forwarding runs a forwarder until the test ends and returns its address.
func forwarding(t *testing.T, backends ...string) string {
	t.Helper()
	l := listen(t)
	ctx, cancel := context.WithCancel(t.Context())
	f := Forwarder{Backends: func() []string { return backends }, Timeout: patience, Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	done := make(chan error)
	go func() { done <- f.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

func ask(t *testing.T, addr string) (string, error) {
	t.Helper()
	c, err := net.DialTimeout("tcp", addr, patience)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, "hello"); err != nil {
		return "", err
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		return "", err
	}
	b, err := io.ReadAll(c)
	return string(b), err
}

func TestTheForwarderUsesEachControlPlaneAndSkipsDeadOnes(t *testing.T) {
	a, b, dead := answering(t, "a"), answering(t, "b"), listen(t)
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	addr := forwarding(t, a.Addr().String(), dead.Addr().String(), b.Addr().String())
	seen := map[string]int{}
	for range 9 {
		got, err := ask(t, addr)
		if err != nil {
			t.Fatal(err)
		}
		seen[got]++
	}
	if seen["a:hello"] == 0 || seen["b:hello"] == 0 || len(seen) != 2 {
		t.Errorf("answers: %v", seen)
	}
}

func TestTheForwarderWithoutControlPlanesClosesTheConnection(t *testing.T) {
	if got, err := ask(t, forwarding(t)); got != "" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestTheForwarderEndsWithOpenConnections(t *testing.T) {
	backend := listen(t)
	defer backend.Close()
	l := listen(t)
	ctx, cancel := context.WithCancel(t.Context())
	f := Forwarder{Backends: func() []string { return []string{backend.Addr().String()} }, Timeout: patience, Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	done := make(chan error)
	go func() { done <- f.Serve(ctx, l) }()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	server, err := backend.Accept() // by now the connection is forwarded
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	cancel()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Fatal("a silent connection keeps the forwarder from ending")
	}
}

// A machine whose power was cut during a pull asks for the rest of a layer.
func TestADownloadFromTheRegistryIsResumed(t *testing.T) {
	h, err := NewRegistry(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(h)
	defer server.Close()
	layer := static.NewLayer([]byte("0123456789"), types.DockerLayer)
	repo, err := name.NewRepository(strings.TrimPrefix(server.URL, "http://")+"/r", name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.WriteLayer(repo, layer); err != nil {
		t.Fatal(err)
	}
	digest, err := layer.Digest()
	if err != nil {
		t.Fatal(err)
	}
	for ask, want := range map[string]string{"bytes=4-": "206 456789", "bytes=0-": "206 0123456789", "bytes=4-6": "206 456", "": "200 0123456789"} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/v2/r/blobs/"+digest.String(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if ask != "" {
			req.Header.Set("Range", ask)
		}
		resp, err := server.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		if err := errors.Join(err, resp.Body.Close()); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprintf("%d %s", resp.StatusCode, body); got != want {
			t.Errorf("%q: %s, want %s", ask, got, want)
		}
	}
}

func TestFilesServesByNameAndByHashAndNothingElse(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"kubelet", "secret"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	sum := strings.Repeat("ab", 32)
	f := Files{Dir: dir, Sums: map[string]string{"kubelet": sum}}
	if url := f.URL("kubelet"); url != "http://192.168.77.1/components/kubelet" {
		t.Errorf("URL %s", url)
	}
	for path, want := range map[string]int{
		"/components/kubelet":                http.StatusOK,
		"/sha256/" + sum:                     http.StatusOK,
		"/components/secret":                 http.StatusNotFound,
		"/sha256/" + strings.Repeat("0", 64): http.StatusNotFound,
		"/":                                  http.StatusNotFound,
	} {
		w := httptest.NewRecorder()
		f.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		if w.Code != want || want == http.StatusOK && w.Body.String() != "kubelet" {
			t.Errorf("%s: %d %q", path, w.Code, w.Body)
		}
	}
}
