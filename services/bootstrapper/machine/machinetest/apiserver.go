// Package machinetest has a scripted machine for tests of the bootstrapper: files are real, kubeadm and systemctl are simulated, and the API server of
// the administrator's kubeconfig keeps objects in memory.
package machinetest

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path"
	"strconv"
	"sync"
	"testing"
)

// APIServer stores objects as a Kubernetes API server does, for create, get and update of single objects. It does not validate them.
type APIServer struct {
	// Up, if set, reports whether it runs. It is set before the first request.
	Up func() bool

	server *httptest.Server

	mu      sync.Mutex
	objects map[string]map[string]any
	version int
	failing int
}

// NewAPIServer starts an API server; it stops with the test.
func NewAPIServer(t testing.TB) *APIServer {
	t.Helper()
	a := &APIServer{objects: map[string]map[string]any{}}
	a.server = httptest.NewServer(a)
	t.Cleanup(a.server.Close)
	return a
}

// Kubeconfig returns an administrator's kubeconfig for it.
func (a *APIServer) Kubeconfig() []byte {
	return fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
users: [{name: u, user: {}}]
`, a.server.URL)
}

// FailNext makes the next n requests answer 503.
func (a *APIServer) FailNext(n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.failing = n
}

// Object returns the object at an API path like /api/v1/namespaces/x; nil if there is none.
func (a *APIServer) Object(apiPath string) map[string]any {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.objects[apiPath]
}

// Forget removes the object at an API path.
func (a *APIServer) Forget(apiPath string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.objects, apiPath)
}

// ServeHTTP implements [http.Handler].
func (a *APIServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if a.Up != nil && !a.Up() {
		panic(http.ErrAbortHandler) // the connection is closed without an answer
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.failing > 0 {
		a.failing--
		status(w, http.StatusServiceUnavailable, "ServiceUnavailable")
		return
	}
	if r.Method == http.MethodGet {
		a.answer(w, http.StatusOK, a.objects[r.URL.Path])
		return
	}
	var o map[string]any
	body, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
	if err != nil || json.Unmarshal(body, &o) != nil {
		status(w, http.StatusBadRequest, "BadRequest")
		return
	}
	meta, _ := o["metadata"].(map[string]any)
	name, _ := meta["name"].(string)
	a.version++
	meta["resourceVersion"] = strconv.Itoa(a.version)
	switch r.Method {
	case http.MethodPost:
		at := path.Join(r.URL.Path, name)
		if a.objects[at] != nil {
			status(w, http.StatusConflict, "AlreadyExists")
			return
		}
		a.objects[at] = o
		a.answer(w, http.StatusCreated, o)
	case http.MethodPut:
		if a.objects[r.URL.Path] == nil {
			status(w, http.StatusNotFound, "NotFound")
			return
		}
		a.objects[r.URL.Path] = o
		a.answer(w, http.StatusOK, o)
	default:
		status(w, http.StatusMethodNotAllowed, "MethodNotAllowed")
	}
}

func (a *APIServer) answer(w http.ResponseWriter, code int, o map[string]any) {
	if o == nil {
		status(w, http.StatusNotFound, "NotFound")
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(o)
}

func status(w http.ResponseWriter, code int, reason string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": reason, "code": code})
}
