package etcd

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
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
		put("/registry/configmaps/default/a", "plain")
		put("/other/secrets/default/a", "k8s:enc:secretbox:v1:old:x")
		if n, err := OldSecrets(t.Context(), netip.MustParseAddr(host), r.cert, r.key, []byte("k8s:enc:secretbox:v1:new:")); err == nil || !strings.Contains(err.Error(), "--etcd-prefix") {
			t.Errorf("the Secrets are elsewhere: %d, %v", n, err)
		}
		count := func(want int) {
			t.Helper()
			n, err := OldSecrets(t.Context(), netip.MustParseAddr(host), r.cert, r.key, []byte("k8s:enc:secretbox:v1:new:"))
			if err != nil || n != want {
				t.Errorf("%d, %v; want %d", n, err, want)
			}
		}
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

// reads are the reads of etcd, and what the largest one had, in bytes.
type reads struct {
	clientv3.KV
	n, largest int
}

func (r *reads) Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	page, err := r.KV.Get(ctx, key, opts...)
	if err == nil {
		size := 0
		for _, kv := range page.Kvs {
			size += len(kv.Value)
		}
		r.n, r.largest = r.n+1, max(r.largest, size)
	}
	return page, err
}

// The process that reads them has the key of all of them, and must not end because of its memory.
func TestSecretsOfTheLargestSizeAreReadAFewAtATime(t *testing.T) {
	const secrets, size = 50, 1 << 20
	r := newProcess(t)
	r.run(t.TempDir(), "node1", func(c *clientv3.Client) {
		large := strings.Repeat("x", size)
		for i := range secrets {
			r.must(func(ctx context.Context) error {
				_, err := c.Put(ctx, fmt.Sprintf("/registry/secrets/default/%03d", i), large)
				return err
			})
		}
		counted := &reads{KV: c}
		if n, err := oldSecrets(t.Context(), counted, []byte("new")); err != nil || n != secrets {
			t.Errorf("%d, %v", n, err)
		}
		if counted.n < secrets/secretsAtOnce || counted.largest > 8<<20 {
			t.Errorf("%d reads, the largest of %d bytes", counted.n, counted.largest)
		}
	})
}
