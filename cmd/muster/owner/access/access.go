// Package access is the owner's access to a running cluster: the administrator's kubeconfig in the owner's folder, the authorities that it trusts, and its
// renewal.
package access

import (
	"context"
	"crypto/ed25519"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// Connect returns a client for the cluster of an owner's folder.
func Connect(d *ownerdir.Dir) (*clusterapi.Client, error) {
	kubeconfig, err := d.Read(ownerdir.AdminConf)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, problem.WithRemedy(fmt.Errorf("%s has no admin.conf yet", d.Path()), "Complete muster init first.")
	}
	if err != nil {
		return nil, err
	}
	kube, err := clusterapi.Connect(kubeconfig)
	if err != nil {
		return nil, problem.WithRemedy(fmt.Errorf("%s: %w", d.File(ownerdir.AdminConf), err), "Restore the file from your copy of the folder, or copy /etc/kubernetes/admin.conf from a control plane to it, mode 0600.")
	}
	return kube, nil
}

// UnreachableError returns err, wrapped as API_UNAVAILABLE if nothing answered at the API server's address.
func UnreachableError(server string, err error) error {
	if _, network := errors.AsType[*net.OpError](err); !network && !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("request to the API server at %s: %w", server, err)
	}
	return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_API_UNAVAILABLE, "the cluster's API server does not answer at %s: %w", server, err),
		problem.ServerRemedy)
}

// PublicOf returns the public part of a key.
func PublicOf(key ed25519.PrivateKey) ed25519.PublicKey {
	return ed25519.PublicKey(key[ed25519.PrivateKeySize-ed25519.PublicKeySize:])
}

// FolderCluster returns the cluster's ID.
func FolderCluster(d *ownerdir.Dir) (keys.ClusterID, error) {
	id, err := hex.DecodeString(d.Cluster().ClusterID)
	if err != nil || len(id) != len(keys.ClusterID{}) {
		return keys.ClusterID{}, problem.WithRemedy(fmt.Errorf("%s does not have the cluster's ID yet", d.Path()), "Complete muster init or muster install first.")
	}
	return keys.ClusterID(id), nil
}

// ProbeTimeout is how long to wait for an answer of an API server before the cluster is treated as lost.
const ProbeTimeout = 20 * time.Second
