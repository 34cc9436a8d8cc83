package clusterapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// compacting is an API server with Secrets. It has compacted the revision of a list when its second page is asked for.
type compacting struct {
	t                *testing.T
	secrets, padding int
	endless          bool // there is always another page
	forgets          bool // it does not say how to go on with a list whose revision is gone
	asked            []string
}

func (s *compacting) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var reply any
	w.Header().Set("Content-Type", "application/json")
	switch {
	case r.URL.Path == "/api":
		reply = metav1.APIVersions{Versions: []string{"v1"}}
	case r.URL.Path == "/apis":
		reply = metav1.APIGroupList{}
	case r.URL.Path == "/api/v1":
		reply = metav1.APIResourceList{GroupVersion: "v1", APIResources: []metav1.APIResource{{Name: "secrets", Kind: "Secret", Namespaced: true, Verbs: []string{"list", "get", "patch"}}}}
	case r.URL.Path != "/api/v1/secrets":
		s.asked = append(s.asked, r.Method+" "+r.URL.Path)
		if strings.HasSuffix(r.URL.Path, "/s1") { // deleted meanwhile
			w.WriteHeader(http.StatusNotFound)
			reply = metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Code: http.StatusNotFound, Reason: metav1.StatusReasonNotFound}
			break
		}
		reply = metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadata"}, ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "s"}}
	case r.URL.Query().Get("continue") == strconv.Itoa(secretsAtOnce) && !s.endless:
		s.asked = append(s.asked, "gone")
		w.WriteHeader(http.StatusGone)
		gone := metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Code: http.StatusGone, Reason: metav1.StatusReasonExpired}
		if !s.forgets {
			gone.Continue = "0" + r.URL.Query().Get("continue") // another token of the same place
		}
		reply = gone
	default:
		if !strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadataList") {
			s.t.Errorf("it asks for whole Secrets: %s", r.Header.Get("Accept"))
		}
		from, _ := strconv.Atoi(r.URL.Query().Get("continue"))
		limit, err := strconv.Atoi(r.URL.Query().Get("limit"))
		if err != nil {
			limit = s.secrets
		}
		s.asked = append(s.asked, fmt.Sprintf("list %d", from))
		list := metav1.PartialObjectMetadataList{TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadataList"}, ListMeta: metav1.ListMeta{ResourceVersion: "7"}}
		for i := from; i < min(from+limit, s.secrets); i++ {
			list.Items = append(list.Items, metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: fmt.Sprintf("s%d", i), Annotations: map[string]string{"of": strings.Repeat("x", s.padding)}}})
		}
		if s.endless || from+limit < s.secrets {
			list.Continue = strconv.Itoa(from + limit)
		}
		reply = list
	}
	if err := json.NewEncoder(w).Encode(reply); err != nil {
		s.t.Error(err)
	}
}

// client returns a client that reads so many bytes of an answer.
func (s *compacting) client(t *testing.T, most int64) *Client {
	t.Helper()
	server := httptest.NewServer(s)
	c, err := newClient(&rest.Config{Host: server.URL, QPS: -1}, nil, most)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		server.Close()
		hc, err := rest.HTTPClientFor(c.rest)
		if err != nil {
			t.Fatal(err)
		}
		hc.CloseIdleConnections()
	})
	return c
}

// The list outlives its revision, and has more bytes than one answer may have: tenants fill the annotations of their Secrets.
func TestSecretsAreWrittenAgainWhateverTenantsPutIntoThem(t *testing.T) {
	s := &compacting{t: t, secrets: 2*secretsAtOnce + 3, padding: 1000}
	n, err := s.client(t, int64(2*secretsAtOnce*s.padding)).RewriteSecrets(t.Context())
	if err != nil || n != s.secrets {
		t.Fatalf("%d Secrets, %v", n, err)
	}
	want := []string{"list 0", "gone", fmt.Sprintf("list %d", secretsAtOnce), fmt.Sprintf("list %d", 2*secretsAtOnce)}
	if len(s.asked) != len(want)+s.secrets || !slices.Equal(s.asked[:len(want)], want) {
		t.Fatalf("%d requests, first %q", len(s.asked), s.asked[:min(5, len(s.asked))])
	}
	for i, asked := range s.asked[len(want):] {
		if asked != fmt.Sprintf("PATCH /api/v1/namespaces/a/secrets/s%d", i) {
			t.Fatalf("Secret %d: %s", i, asked)
		}
	}
}

// Nothing is written if not all names are known: the old key must not be dropped.
func TestOfAListThatEndsTooSoonNoSecretIsWritten(t *testing.T) {
	for name, tt := range map[string]struct {
		server compacting
		says   string
	}{
		"a list that can't go on": {compacting{secrets: secretsAtOnce + 1, forgets: true}, "list all Secrets"},
		"a page above the bound":  {compacting{secrets: secretsAtOnce, padding: 10_000}, errTooLarge.Error()},
		"a list that has no end":  {compacting{endless: true}, "more than 5000 pages"},
	} {
		tt.server.t = t
		n, err := tt.server.client(t, 1<<19).RewriteSecrets(t.Context())
		if n != 0 || err == nil || !strings.Contains(err.Error(), tt.says) || slices.ContainsFunc(tt.server.asked, func(s string) bool { return strings.HasPrefix(s, "PATCH") }) {
			t.Errorf("%s: %d, %v", name, n, err)
		}
	}
}
