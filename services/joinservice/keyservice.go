package joinservice

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"connectrpc.com/connect"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	kmsv1 "github.com/muster-k8s/muster/gen/muster/kms/v1"
	"github.com/muster-k8s/muster/gen/muster/kms/v1/kmsv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

const (
	// keyTimeout bounds one call of the key service, the dial and both sides' quotes included.
	keyTimeout = 10 * time.Second
	// retryKey is what a machine is told to wait for a key service that gives no hint itself.
	retryKey = 5 * time.Second
	// maxToken is the limit of a projected token in bytes.
	maxToken = 16 << 10
)

// KeyService gives [Config.DiskKey] over client, which must be one of attested TLS that judges its
// server as a kms. The projected token is read anew for each call, since the kubelet replaces it.
func KeyService(client *http.Client, url, tokenFile string) func(context.Context, keys.DiskID) (keys.Disk, error) {
	kms := kmsv1connect.NewKeyServiceClient(client, url, connect.WithReadMaxBytes(64<<10))
	return func(ctx context.Context, id keys.DiskID) (keys.Disk, error) {
		ctx, cancel := context.WithTimeout(ctx, keyTimeout)
		defer cancel()
		token, err := readToken(tokenFile)
		if err != nil {
			return keys.Disk{}, attest.RefuseFor(retryKey, attestv1.Reason_REASON_KMS_UNAVAILABLE, "our own token: %w", err)
		}
		ctx, call := connect.NewClientContext(ctx)
		call.RequestHeader().Set("Authorization", "Bearer "+token)
		resp, err := kms.DeriveDiskKey(ctx, &kmsv1.DeriveDiskKeyRequest{DiskId: id.String()})
		if err != nil {
			return keys.Disk{}, keyRefused(err)
		}
		disk, err := keys.ParseDisk(resp.GetKey())
		if err != nil {
			return keys.Disk{}, attest.Refuse(attestv1.Reason_REASON_INTERNAL, "the key service's answer: %w", err)
		}
		return disk, nil
	}
}

// keyRefused lets through that the root secret is missing, which the machine's owner can mend. Any
// other refusal is about us and not about the machine that asks, so it learns only that the key
// service does not serve.
func keyRefused(err error) error {
	wait := rpc.RetryAfterFrom(err)
	if wait == 0 {
		wait = retryKey
	}
	reason := attestv1.Reason_REASON_KMS_UNAVAILABLE
	if rpc.ReasonFrom(err) == attestv1.Reason_REASON_ROOT_SEALED {
		reason = attestv1.Reason_REASON_ROOT_SEALED
	}
	return &attest.Refusal{Reason: reason, RetryAfter: wait, Err: fmt.Errorf("key service: %w", err)}
}

func readToken(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	b, err := io.ReadAll(io.LimitReader(f, maxToken+1))
	if err = errors.Join(err, f.Close()); err != nil {
		return "", err
	}
	b = bytes.TrimSpace(b)
	if len(b) == 0 || len(b) > maxToken {
		return "", fmt.Errorf("%s has %d bytes, want a service account's token", path, len(b))
	}
	return string(b), nil
}
