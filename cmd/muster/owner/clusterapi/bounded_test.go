package clusterapi

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// lister is an API server that has Nodes, each padded to a size.
type lister struct {
	nodes, padding int
	endless        bool // there is always another page
	pages          []int
}

func (s *lister) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var reply any
	switch r.URL.Path {
	case "/api":
		reply = metav1.APIVersions{Versions: []string{"v1"}}
	case "/apis":
		reply = metav1.APIGroupList{}
	case "/api/v1":
		reply = metav1.APIResourceList{GroupVersion: "v1", APIResources: []metav1.APIResource{{Name: "nodes", Kind: "Node", Verbs: []string{"list", "get"}}}}
	case "/api/v1/nodes/n":
		reply = s.node(0)
	case "/api/v1/nodes/n/proxy/logs/file":
		_, _ = io.WriteString(w, strings.Repeat("x", s.padding))
		return
	default:
		from, _ := strconv.Atoi(r.URL.Query().Get("continue"))
		limit, err := strconv.Atoi(r.URL.Query().Get("limit"))
		if err != nil {
			limit = s.nodes
		}
		s.pages = append(s.pages, limit)
		list := corev1.NodeList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}, ListMeta: metav1.ListMeta{ResourceVersion: "7"}}
		for i := from; i < min(from+limit, s.nodes); i++ {
			list.Items = append(list.Items, *s.node(i))
		}
		if s.endless || from+limit < s.nodes {
			list.Continue = strconv.Itoa(from + limit)
		}
		reply = list
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Encoding", "gzip") // as an API server sends large answers
	z := gzip.NewWriter(w)
	_ = json.NewEncoder(z).Encode(reply)
	_ = z.Close()
}

func (s *lister) node(i int) *corev1.Node {
	n := &corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("n%d", i)}}
	if s.padding > 0 {
		n.Annotations = map[string]string{"padding": strings.Repeat("x", s.padding)}
	}
	return n
}

// client returns a client that reads so many bytes of an answer.
func (s *lister) client(t *testing.T, most int64) *Client {
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

func TestAListOf5000NodesIsReadInPages(t *testing.T) {
	s := &lister{nodes: 5_000}
	c := s.client(t, maxAnswer)
	var all corev1.NodeList
	if err := c.Reader().List(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	if len(all.Items) != 5_000 || len(s.pages) != 10 || s.pages[0] != pageSize || all.Continue != "" || all.ResourceVersion != "7" {
		t.Errorf("%d nodes in the pages %v, %+v", len(all.Items), s.pages, all.ListMeta)
	}
	for i, n := range all.Items {
		if n.Name != fmt.Sprintf("n%d", i) {
			t.Fatalf("node %d is %s", i, n.Name)
		}
	}
	// A caller that reads pages itself gets those.
	s.pages = nil
	if err := c.Reader().List(t.Context(), &all, client.Limit(7)); err != nil || len(all.Items) != 7 || all.Continue == "" || len(s.pages) != 1 {
		t.Errorf("%d nodes in the pages %v, %v", len(all.Items), s.pages, err)
	}
}

func TestAHostileAPIServerFillsNoMemory(t *testing.T) {
	const most = 1 << 20
	list := func(ctx context.Context, c *Client) error { return c.Reader().List(ctx, &corev1.NodeList{}) }
	for name, tt := range map[string]struct {
		wrong, right lister
		do           func(context.Context, *Client) error
		says         string
	}{
		"one object": {lister{padding: most}, lister{padding: most - 1000}, func(ctx context.Context, c *Client) error {
			return c.Reader().Get(ctx, client.ObjectKey{Name: "n"}, &corev1.Node{})
		}, errTooLarge.Error()},
		"one page":       {lister{nodes: 100, padding: most / 90}, lister{nodes: 100, padding: most / 110}, list, errTooLarge.Error()},
		"pages together": {lister{nodes: 1200, padding: most / 1100}, lister{nodes: 1200}, list, errTooLarge.Error()},
		"a page that the caller reads": {lister{nodes: 100, padding: most / 90}, lister{nodes: 100, padding: most / 110}, func(ctx context.Context, c *Client) error {
			return c.Reader().List(ctx, &corev1.NodeList{}, client.Limit(100))
		}, errTooLarge.Error()},
		"pages without end": {lister{endless: true}, lister{}, list, "more than 1000 pages"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := tt.do(t.Context(), tt.wrong.client(t, most)); err == nil || !strings.Contains(err.Error(), tt.says) || passes(err) {
				t.Errorf("%v, want %q for good", err, tt.says)
			}
			if err := tt.do(t.Context(), tt.right.client(t, most)); err != nil {
				t.Error(err)
			}
		})
	}
}

// A backup is larger than any answer.
func TestAFileOfANodeIsNotBounded(t *testing.T) {
	s := lister{padding: 2 << 20}
	r, err := s.client(t, 1<<20).NodeLog(t.Context(), "n", "file")
	if err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, r); err != nil || n != 2<<20 {
		t.Errorf("%d bytes, %v", n, err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

// 5,000 Nodes fit, with as many images as a kubelet reports (nodeStatusMaxImages, 50, with five names each).
func TestTheLargestGenuineListFits(t *testing.T) {
	n := (&lister{padding: 4 << 10}).node(1)
	for range 50 {
		i := corev1.ContainerImage{SizeBytes: 1 << 40}
		for range 5 {
			i.Names = append(i.Names, "registry.example.com/organization/project/image@sha256:"+strings.Repeat("0", 64))
		}
		n.Status.Images = append(n.Status.Images, i)
	}
	text, err := json.Marshal(n)
	if err != nil {
		t.Fatal(err)
	}
	if all := 5_000 * len(text); all > maxAnswer || all < maxAnswer/2 {
		t.Errorf("5,000 Nodes of %d bytes have %d MiB, and %d are read", len(text), all>>20, maxAnswer>>20)
	}
}
