package backups

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/internal/versions"
)

func TestAMirrorIsCheckedAsNodesDo(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/gone" {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write([]byte("content"))
	}))
	defer server.Close()
	sum := sha256.Sum256([]byte("content"))
	right := hex.EncodeToString(sum[:])
	list := WantedComponents([]versions.Component{
		{URL: server.URL + "/kubeadm", SHA256: right, Path: "/usr/local/bin/kubeadm", Mode: 0o755},
		{URL: server.URL + "/changed", SHA256: strings.Repeat("0", 64), Path: "/usr/local/bin/kubectl", Mode: 0o755},
		{URL: server.URL + "/gone", SHA256: right, Path: "/opt/cni/bin", Extract: true},
	})
	list = append(list, Wanted{Kind: "image", Source: "registry.invalid/kms", SHA256: right})
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	CheckComponents(ctx, list)
	for i, want := range []string{"", right, "404", ""} {
		if got := list[i].Problem; (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", list[i].Source, got, want)
		}
	}
	if list[0].Size != 7 {
		t.Errorf("%d bytes", list[0].Size)
	}
}
