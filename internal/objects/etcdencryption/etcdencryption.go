// Package etcdencryption writes the configuration by which API servers encrypt data in etcd (apiserver.config.k8s.io/v1,
// EncryptionConfiguration).
//
// The first machine writes it at init, further control planes get it in their tickets, and the owner's folder can generate
// it again when a cluster is restored: its key is derived from the root secret. After a rotation it has a random key instead.
package etcdencryption

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"

	"sigs.k8s.io/yaml"

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
	return Format([]Key{{Name: keyName, Secret: base64.StdEncoding.EncodeToString(key.Expose())}})
}

// keySize is the size of a key of secretbox in bytes.
const keySize = 32

// Key is a key in the file.
type Key struct {
	// Name precedes each value in clear: letters, digits, hyphens.
	Name string `json:"name"`
	// Secret is the key in base64, 32 bytes.
	Secret string `json:"secret"`
}

// NewKey returns a random key.
func NewKey() Key {
	b := make([]byte, keySize)
	_, _ = rand.Read(b) // never fails
	return Key{Name: "muster-" + idOf(b)[:16], Secret: base64.StdEncoding.EncodeToString(b)}
}

func idOf(key []byte) string {
	sum := sha256.Sum256(append([]byte("muster etcd encryption key v1\x00"), key...))
	return hex.EncodeToString(sum[:])
}

// ID returns the key's ID, 64 hexadecimal digits: SHA-256 of a label and the key, which reveals nothing about a random key. It returns an error for a
// key of another form.
func (k Key) ID() (string, error) {
	b, err := base64.StdEncoding.DecodeString(k.Secret)
	if err != nil || len(b) != keySize || !validName.MatchString(k.Name) {
		return "", errors.New("a key of the encryption configuration has no name, or is not 32 bytes in base64") // the cause could contain the key
	}
	return idOf(b), nil
}

var validName = regexp.MustCompile(`^[a-zA-Z0-9-]{1,63}$`)

// Format returns the file with several keys. API servers encrypt with the first, and decrypt with all of them.
func Format(list []Key) []byte {
	out := []byte(head)
	for _, k := range list {
		out = fmt.Appendf(out, "      - {name: %s, secret: %s}\n", k.Name, k.Secret)
	}
	return out
}

const head = `apiVersion: apiserver.config.k8s.io/v1
kind: EncryptionConfiguration
resources:
- resources: [secrets]
  providers:
  - secretbox:
      keys:
`

// Parse returns the keys of a file in the form of [Format], in any notation of YAML. It refuses all other files, such as those with further
// resources or providers, because only their author can change them.
func Parse(text []byte) ([]Key, error) {
	var c struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Resources  []struct {
			Resources []string `json:"resources"`
			Providers []struct {
				Secretbox *struct {
					Keys []Key `json:"keys"`
				} `json:"secretbox"`
			} `json:"providers"`
		} `json:"resources"`
	}
	other := errors.New(Name + " is not as Muster writes it: it has more, or something else, than one resource `secrets` with one provider `secretbox`")
	if err := yaml.UnmarshalStrict(text, &c); err != nil {
		return nil, other // the cause could contain the key
	}
	if c.APIVersion != "apiserver.config.k8s.io/v1" || c.Kind != "EncryptionConfiguration" || len(c.Resources) != 1 || len(c.Resources[0].Resources) != 1 || c.Resources[0].Resources[0] != "secrets" ||
		len(c.Resources[0].Providers) != 1 || c.Resources[0].Providers[0].Secretbox == nil || len(c.Resources[0].Providers[0].Secretbox.Keys) == 0 {
		return nil, other
	}
	list := c.Resources[0].Providers[0].Secretbox.Keys
	for _, k := range list {
		if _, err := k.ID(); err != nil {
			return nil, err
		}
	}
	return list, nil
}
