package apiserver

import (
	"crypto/x509/pkix"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"k8s.io/client-go/rest"

	"github.com/muster-k8s/muster/internal/kubetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The refusals of an API server that starts are not its answers, and those of one that runs are.
func TestARefusalOfAStartingAPIServerIsNone(t *testing.T) {
	const body = "the object"
	for name, tt := range map[string]struct {
		refuses int // requests that are refused
		readyz  int
		status  int
		starts  bool
	}{
		"runs":                               {readyz: http.StatusOK, status: http.StatusCreated},
		"starts":                             {refuses: 1, readyz: http.StatusForbidden, starts: true},
		"has read the roles, but not all":    {refuses: 1, readyz: http.StatusInternalServerError, starts: true},
		"is ready after it refused":          {refuses: 1, readyz: http.StatusOK, status: http.StatusCreated},
		"refuses, for the user has no right": {refuses: 2, readyz: http.StatusOK, status: http.StatusForbidden},
	} {
		asked := 0
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/readyz" {
				w.WriteHeader(tt.readyz)
				return
			}
			if b, err := io.ReadAll(r.Body); err != nil || string(b) != body || r.URL.RawQuery != "a=b" || r.Method != http.MethodPost {
				t.Errorf("%s: %s %s with %q, %v", name, r.Method, r.URL, b, err)
			}
			if asked++; asked <= tt.refuses {
				w.WriteHeader(http.StatusForbidden)
				_, _ = io.WriteString(w, "no")
				return
			}
			w.WriteHeader(http.StatusCreated)
		}))
		client := &http.Client{Transport: Started(&http.Transport{})}
		resp, err := client.Post(server.URL+"/api/v1/x?a=b", "text/plain", strings.NewReader(body))
		if err == nil {
			_ = resp.Body.Close()
		}
		if starts := errors.Is(err, ErrStarting); starts != tt.starts || !starts && (err != nil || resp.StatusCode != tt.status) {
			t.Errorf("%s: %v, %v", name, resp, err)
		}
		client.CloseIdleConnections()
		server.Close()
	}
}

func TestAKubeletIsNotTakenForTheAPIServer(t *testing.T) {
	for name, tt := range map[string]struct {
		subject pkix.Name
		node    bool
	}{
		"API server": {pkix.Name{CommonName: "kube-apiserver"}, false},
		"kubelet":    {pkix.Name{CommonName: "system:node:cp1", Organization: []string{"system:nodes"}}, true},
	} {
		config := kubetest.Forwarded(t, tt.subject)
		config.Wrap(Only)
		client, err := rest.HTTPClientFor(config)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Get(config.Host)
		if err == nil {
			_ = resp.Body.Close()
		}
		if e, node := errors.AsType[*NodeError](err); node != tt.node || node && e.Node != tt.subject.CommonName || !node && err != nil {
			t.Errorf("%s: %v", name, err)
		}
		client.CloseIdleConnections()
	}
}
