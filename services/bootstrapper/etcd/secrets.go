package etcd

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"

	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// secretsPrefix is of the Secrets' keys in etcd, if the API server has its usual --etcd-prefix.
	secretsPrefix = "/registry/secrets/"
	// secretsAtOnce bounds how many of them are in memory; a Secret has at most 1 MiB, mostly some KiB.
	secretsAtOnce = 50
)

// OldSecrets returns how many Secrets have a value that does not begin with a prefix. The certificate authority is etcd's, PEM. All reads are answered by a
// member that is up to date with the others.
func OldSecrets(ctx context.Context, at netip.Addr, caCert, caKey, prefix []byte) (int, error) {
	c, err := connect(ctx, []netip.Addr{at}, caCert, caKey)
	if err != nil {
		return 0, err
	}
	defer c.Close() //nolint:errcheck // an error has no consequence
	return oldSecrets(ctx, c, prefix)
}

func oldSecrets(ctx context.Context, c clientv3.KV, prefix []byte) (old int, err error) {
	from, end := secretsPrefix, clientv3.GetPrefixRangeEnd(secretsPrefix)
	for {
		call, cancel := context.WithTimeout(ctx, callTimeout)
		page, err := c.Get(call, from, clientv3.WithRange(end), clientv3.WithLimit(secretsAtOnce))
		cancel()
		if err != nil {
			return 0, fmt.Errorf("etcd: Secrets: %w", err)
		}
		for _, kv := range page.Kvs {
			if !bytes.HasPrefix(kv.Value, prefix) {
				old++
			}
		}
		if !page.More || len(page.Kvs) == 0 {
			return old, nil
		}
		from = string(page.Kvs[len(page.Kvs)-1].Key) + "\x00"
	}
}
