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
	// secretsAtOnce bounds how many of them are in memory, which muster-rotation.service limits: a Secret has at most 1 MiB, and mostly some KiB.
	secretsAtOnce = 5
)

// OldSecrets returns how many Secrets have a value that does not begin with a prefix. It returns an error if there is no Secret where it looks: every cluster
// has Muster's own. The certificate authority is etcd's, PEM. All reads are answered by a member that is up to date with the others.
func OldSecrets(ctx context.Context, at netip.Addr, caCert, caKey, prefix []byte) (int, error) {
	c, err := connect(ctx, []netip.Addr{at}, caCert, caKey)
	if err != nil {
		return 0, err
	}
	defer c.Close() //nolint:errcheck // an error has no consequence
	return oldSecrets(ctx, c, prefix)
}

func oldSecrets(ctx context.Context, c clientv3.KV, prefix []byte) (old int, err error) {
	seen := 0
	from, end := secretsPrefix, clientv3.GetPrefixRangeEnd(secretsPrefix)
	for {
		call, cancel := context.WithTimeout(ctx, callTimeout)
		page, err := c.Get(call, from, clientv3.WithRange(end), clientv3.WithLimit(secretsAtOnce))
		cancel()
		if err != nil {
			return 0, fmt.Errorf("etcd: Secrets: %w", err)
		}
		seen += len(page.Kvs)
		for _, kv := range page.Kvs {
			if !bytes.HasPrefix(kv.Value, prefix) {
				old++
			}
		}
		switch {
		case seen == 0: // they are stored elsewhere, so none of them was read
			return 0, fmt.Errorf("etcd: there is no Secret below %s, so it is not known with which key they are encrypted: the API servers have another --etcd-prefix than /registry, with which the encryption key can't be rotated", secretsPrefix)
		case !page.More || len(page.Kvs) == 0:
			return old, nil
		}
		from = string(page.Kvs[len(page.Kvs)-1].Key) + "\x00"
	}
}
