// Package etcdencryption writes the configuration by which API servers encrypt data in etcd (apiserver.config.k8s.io/v1,
// EncryptionConfiguration).
//
// The first machine writes it at init, further control planes get it in their tickets, and the owner's folder can generate
// it again when a cluster is restored: its key is derived from the root secret.
package etcdencryption

import (
	"encoding/base64"
	"fmt"

	"github.com/muster-k8s/muster/trust/keys"
)

const (
	// Name is the file's path below /etc/kubernetes/pki. It is there because the API server's and joinservice's pods mount
	// that folder already, and not below its etcd/, which etcd's pod mounts.
	Name = "encryption.yaml"
	// File is its path on a control plane.
	File = "/etc/kubernetes/pki/" + Name
	// keyName precedes each value in clear, so that a reader knows which key decrypts it.
	keyName = "muster-v1"
)

// Config returns the file. It holds the key (K3): mode 0600, and never in a log.
//
// There is no provider "identity": Secrets are encrypted from the first one on, and one that was written into etcd in clear
// is refused. secretbox (XSalsa20 and Poly1305) uses a random nonce of 24 bytes for each value, so that one key is
// sufficient for all writes of a cluster.
func Config(key keys.EtcdEncryption) []byte {
	return fmt.Appendf(nil, `apiVersion: apiserver.config.k8s.io/v1
kind: EncryptionConfiguration
resources:
- resources: [secrets]
  providers:
  - secretbox:
      keys:
      - {name: %s, secret: %s}
`, keyName, base64.StdEncoding.EncodeToString(key.Expose()))
}
