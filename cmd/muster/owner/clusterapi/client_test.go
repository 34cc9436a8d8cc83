package clusterapi

import (
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/muster-k8s/muster/internal/apiserver"
)

// answers is a transport that gives one answer after another, and the last again and again.
type answers struct {
	codes []int
	asked int
}

func (a *answers) RoundTrip(*http.Request) (*http.Response, error) {
	code := a.codes[min(a.asked, len(a.codes)-1)]
	a.asked++
	w := httptest.NewRecorder()
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	if err := json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Code: int32(code), Reason: reasons[code]}); err != nil {
		return nil, err
	}
	return w.Result(), nil
}

var reasons = map[int]metav1.StatusReason{http.StatusForbidden: metav1.StatusReasonForbidden, http.StatusUnauthorized: metav1.StatusReasonUnauthorized, http.StatusServiceUnavailable: metav1.StatusReasonServiceUnavailable}

func TestAnAPIServerThatHasJustStartedIsWaitedFor(t *testing.T) {
	for name, c := range map[string]struct {
		codes []int
		fails func(error) bool
	}{
		"it has not read the RBAC objects yet": {codes: []int{503, 403, 403, 200}},
		"it does not know the owner":           {codes: []int{503, 401, 200}, fails: apierrors.IsUnauthorized},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := &answers{codes: c.codes}
				kube := &Client{rest: &rest.Config{Host: "https://api.example", Transport: a, QPS: -1}}
				err := kube.Reachable(t.Context())
				switch {
				case c.fails == nil && (err != nil || a.asked != len(c.codes)):
					t.Errorf("after %d answers: %v", a.asked, err)
				case c.fails != nil && !c.fails(err):
					t.Errorf("after %d answers: %v", a.asked, err)
				}
			})
		})
	}
}

// kubelet answers as one to which an attacker on the network has forwarded the connection.
type kubelet struct{}

func (kubelet) RoundTrip(*http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	http.NotFound(w, nil)
	resp := w.Result()
	resp.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{{Subject: pkix.Name{CommonName: "system:node:cp1", Organization: []string{"system:nodes"}}}}}
	return resp, nil
}

// K4: what a kubelet does not know counts neither as deleted nor as erased.
func TestAKubeletsAnswerIsNoObjectThatIsGone(t *testing.T) {
	c, err := newClient(&rest.Config{Host: "https://192.0.2.1:6443", Transport: kubelet{}, QPS: -1}, nil, maxAnswer)
	if err != nil {
		t.Fatal(err)
	}
	for name, do := range map[string]func() error{
		"erase": func() error { return c.EraseDisk(t.Context(), "5f0c95b6-2a3d-4c7e-9f10-000000000001") },
		"read":  func() error { _, err := c.Presence(t.Context(), "w1"); return err },
	} {
		if err := do(); Absent(err) || !errors.As(err, new(*apiserver.NodeError)) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
