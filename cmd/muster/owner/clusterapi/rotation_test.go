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
	t       *testing.T
	secrets int
	asked   []string // of Secrets
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
	case r.URL.Query().Get("continue") != "":
		s.asked = append(s.asked, "page")
		w.WriteHeader(http.StatusGone)
		reply = metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Code: http.StatusGone, Reason: metav1.StatusReasonExpired}
	default:
		if !strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadataList") {
			s.t.Errorf("it asks for whole Secrets: %s", r.Header.Get("Accept"))
		}
		s.asked = append(s.asked, "list "+r.URL.Query().Get("limit"))
		list := metav1.PartialObjectMetadataList{TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadataList"}, ListMeta: metav1.ListMeta{ResourceVersion: "7"}}
		limit, err := strconv.Atoi(r.URL.Query().Get("limit"))
		if err == nil && limit < s.secrets {
			list.Continue = "more"
		} else {
			limit = s.secrets
		}
		for i := range limit {
			list.Items = append(list.Items, metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: fmt.Sprintf("s%d", i)}})
		}
		reply = list
	}
	if err := json.NewEncoder(w).Encode(reply); err != nil {
		s.t.Error(err)
	}
}

func TestSecretsAreWrittenAgainAlsoIfTheListOutlivesItsRevision(t *testing.T) {
	s := &compacting{t: t, secrets: pageSize + 3}
	server := httptest.NewServer(s)
	c, err := newClient(&rest.Config{Host: server.URL, QPS: -1}, nil, maxAnswer)
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
	n, err := c.RewriteSecrets(t.Context())
	if err != nil || n != s.secrets {
		t.Fatalf("%d Secrets, %v", n, err)
	}
	if want := []string{fmt.Sprintf("list %d", pageSize), "page", "list "}; len(s.asked) != len(want)+s.secrets || !slices.Equal(s.asked[:len(want)], want) {
		t.Fatalf("%d requests, first %q", len(s.asked), s.asked[:min(5, len(s.asked))])
	}
	for i, asked := range s.asked[3:] {
		if asked != fmt.Sprintf("PATCH /api/v1/namespaces/a/secrets/s%d", i) {
			t.Fatalf("Secret %d: %s", i, asked)
		}
	}
}
