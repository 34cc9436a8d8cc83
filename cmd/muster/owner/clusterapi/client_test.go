package clusterapi

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
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
