package etcd

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
)

func TestSecretsOfAnotherKeyAreCounted(t *testing.T) {
	r := newProcess(t)
	r.run(t.TempDir(), "node1", func(c *clientv3.Client) {
		put := func(key, value string) {
			t.Helper()
			r.must(func(ctx context.Context) error { _, err := c.Put(ctx, key, value); return err })
		}
		count := func(want int) {
			t.Helper()
			n, err := OldSecrets(t.Context(), netip.MustParseAddr(host), r.cert, r.key, []byte("k8s:enc:secretbox:v1:new:"))
			if err != nil || n != want {
				t.Errorf("%d, %v; want %d", n, err, want)
			}
		}
		put("/registry/configmaps/default/a", "plain")
		count(0)
		for i := range 2*secretsAtOnce + 1 { // more than two pages
			put(fmt.Sprintf("/registry/secrets/default/%03d", i), "k8s:enc:secretbox:v1:new:x")
		}
		count(0)
		put("/registry/secrets/default/000", "k8s:enc:secretbox:v1:old:x")
		put(fmt.Sprintf("/registry/secrets/default/%03d", secretsAtOnce-1), "plain")
		put(fmt.Sprintf("/registry/secrets/default/%03d", secretsAtOnce), "k8s:enc:secretbox:v1:newer:x")
		put("/registry/secrets/zone/last", "k8s:enc:secretbox:v1:ne")
		count(4)
	})
	if _, err := OldSecrets(t.Context(), netip.MustParseAddr(host), []byte("x"), r.key, nil); err == nil {
		t.Error("asked without an authority")
	}
}
