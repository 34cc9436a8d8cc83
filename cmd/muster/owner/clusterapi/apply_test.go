package clusterapi

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// roundTrip is a transport.
type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// clientOf returns a client of an API server that knows definitions and no other kind.
func clientOf(t *testing.T, answer roundTrip) *Client {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := apiextensionsv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(apiextensionsv1.SchemeGroupVersion.WithKind("CustomResourceDefinition"), meta.RESTScopeRoot)
	c, err := client.New(&rest.Config{Host: "https://api.example", QPS: -1, Transport: answer}, client.Options{Scheme: scheme, Mapper: mapper})
	if err != nil {
		t.Fatal(err)
	}
	return &Client{client: c}
}

func TestADefinitionIsAwaitedWhileTheAPIServerIsSlow(t *testing.T) {
	for name, tt := range map[string]struct {
		conditions []apiextensionsv1.CustomResourceDefinitionCondition
		want       string // of the error; empty: none
	}{
		"it is established after ten minutes": {[]apiextensionsv1.CustomResourceDefinitionCondition{
			{Type: apiextensionsv1.NamesAccepted, Status: apiextensionsv1.ConditionTrue}, {Type: apiextensionsv1.Established, Status: apiextensionsv1.ConditionTrue},
		}, ""},
		"its names are of another one": {[]apiextensionsv1.CustomResourceDefinitionCondition{
			{Type: apiextensionsv1.NamesAccepted, Status: apiextensionsv1.ConditionFalse, Message: `"things" is already in use`},
		}, `"things" is already in use`},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				c := clientOf(t, func(*http.Request) (*http.Response, error) {
					w := httptest.NewRecorder()
					w.Header().Set("Content-Type", "application/json")
					var out any = &apiextensionsv1.CustomResourceDefinition{
						TypeMeta: metav1.TypeMeta{APIVersion: "apiextensions.k8s.io/v1", Kind: "CustomResourceDefinition"},
						Status:   apiextensionsv1.CustomResourceDefinitionStatus{Conditions: tt.conditions},
					}
					if time.Since(start) < 10*time.Minute {
						w.WriteHeader(http.StatusServiceUnavailable)
						out = &metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Code: http.StatusServiceUnavailable, Reason: metav1.StatusReasonServiceUnavailable}
					}
					err := json.NewEncoder(w).Encode(out)
					return w.Result(), err
				})
				err := c.served(t.Context(), "things.example.org")
				if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
					t.Errorf("after %s: %v", time.Since(start), err)
				}
			})
		})
	}
}

func TestAKindThatStaysUnknownIsAnErrorAfterAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := clientOf(t, func(r *http.Request) (*http.Response, error) {
			t.Errorf("%s is asked for", r.URL)
			return nil, http.ErrServerClosed
		})
		start := time.Now()
		err := c.apply(t.Context(), object("example.org/v1", "Thing", "", "a", map[string]any{}))
		if err == nil || !strings.Contains(err.Error(), "CustomResourceDefinition") || time.Since(start) < unknownKind || time.Since(start) > 2*unknownKind {
			t.Errorf("after %s: %v", time.Since(start), err)
		}
	})
	var k kindAwaited
	unknown, now := &meta.NoKindMatchError{}, time.Unix(0, 0)
	for i, err := range []error{unknown, http.ErrServerClosed, unknown} { // an answer in between begins the minute anew
		if got := k.check(err, now.Add(time.Duration(i)*unknownKind)); got != err { //nolint:errorlint // the same
			t.Errorf("answer %d: %v", i, got)
		}
	}
}
