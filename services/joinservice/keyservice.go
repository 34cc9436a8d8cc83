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
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

const (
	// keyTimeout bounds one call of the key service, including the dial and both sides' quotes.
	keyTimeout = 10 * time.Second
	// retryKey is the pause that is sent to a machine if the key service gives none.
	retryKey = 5 * time.Second
	// maxToken is the limit of a projected token in bytes.
	maxToken = 16 << 10
)

// KeyService is a joinservice's client of the cluster's key service. Its errors are refusals.
type KeyService struct {
	kms       kmsv1connect.KeyServiceClient
	tokenFile string
	timeout   time.Duration // of a call
}

// NewKeyService returns a KeyService that uses client, which appraises its server as a kms over attested TLS. It reads the
// projected token for each call, since the kubelet replaces it.
func NewKeyService(client *http.Client, url, tokenFile string) *KeyService {
	return &KeyService{kms: kmsv1connect.NewKeyServiceClient(client, url, connect.WithReadMaxBytes(64<<10)), tokenFile: tokenFile, timeout: keyTimeout}
}

// Disk returns the key of a disk.
func (k *KeyService) Disk(ctx context.Context, id keys.DiskID, salt enroll.Salt) (keys.Disk, error) {
	ctx, done, err := k.call(ctx)
	if err != nil {
		return keys.Disk{}, err
	}
	defer done()
	resp, err := k.kms.DeriveDiskKey(ctx, &kmsv1.DeriveDiskKeyRequest{DiskId: id.String(), DiskSalt: salt.Salt[:], RootVersion: uint32(salt.Root)})
	if err != nil {
		return keys.Disk{}, keyRefused(err)
	}
	if resp.GetRootVersion() != uint32(salt.Root) { // K4: then it did not use the salt either
		return keys.Disk{}, attest.RefuseFor(retryKey, attestv1.Reason_REASON_KMS_UNAVAILABLE, "the key service's answer is of version %d of the root secret, not %d: it is of an older version of Muster", resp.GetRootVersion(), salt.Root)
	}
	disk, err := keys.ParseDisk(resp.GetKey())
	if err != nil {
		return keys.Disk{}, attest.Refuse(attestv1.Reason_REASON_INTERNAL, "the key service's answer: %w", err)
	}
	return disk, nil
}

// ClusterID returns the cluster ID that is derived from the cluster's root secret and the measurement salt.
func (k *KeyService) ClusterID(ctx context.Context, measurementSalt [32]byte) (keys.ClusterID, error) {
	ctx, done, err := k.call(ctx)
	if err != nil {
		return keys.ClusterID{}, err
	}
	defer done()
	resp, err := k.kms.DeriveClusterId(ctx, &kmsv1.DeriveClusterIdRequest{MeasurementSalt: measurementSalt[:], RootVersion: uint32(keys.FirstVersion)})
	if err != nil {
		return keys.ClusterID{}, keyRefused(err)
	}
	if len(resp.GetClusterId()) != len(keys.ClusterID{}) {
		return keys.ClusterID{}, attest.Refuse(attestv1.Reason_REASON_INTERNAL, "the key service's answer: a cluster ID of %d bytes", len(resp.GetClusterId()))
	}
	return keys.ClusterID(resp.GetClusterId()), nil
}

// call returns a context with the workload's identity and the deadline of one call (K2).
func (k *KeyService) call(ctx context.Context) (context.Context, context.CancelFunc, error) {
	token, err := readToken(k.tokenFile)
	if err != nil {
		return nil, nil, attest.RefuseFor(retryKey, attestv1.Reason_REASON_KMS_UNAVAILABLE, "our own token: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, k.timeout)
	ctx, call := connect.NewClientContext(ctx)
	call.RequestHeader().Set("Authorization", "Bearer "+token)
	return ctx, cancel, nil
}

// keyRefused passes on the refusal that the root secret is missing, which the owner can fix. Any other refusal is about
// joinservice and not about the machine that asks, so the machine learns only that the key service is not available.
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
