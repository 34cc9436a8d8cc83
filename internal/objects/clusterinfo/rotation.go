package clusterinfo

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// RotatedKey names a key that control planes share, and that `muster rotate` replaces.
type RotatedKey string

// The keys.
const (
	// ServiceAccountKey signs the tokens of service accounts: sa.key, sa.pub.
	ServiceAccountKey RotatedKey = "service-account-key"
	// EncryptionKey encrypts Secrets in etcd: encryption.yaml.
	EncryptionKey RotatedKey = "encryption-key"
	// FrontProxyCA signs the certificate with which API servers authenticate to aggregated ones: front-proxy-ca.crt, front-proxy-ca.key.
	FrontProxyCA RotatedKey = "front-proxy-ca"
	// EtcdCA signs the certificates of etcd's members, and of their clients: etcd/ca.crt, etcd/ca.key.
	EtcdCA RotatedKey = "etcd-ca"
	// ClusterCA signs the certificates of API servers, kubelets and administrators: ca.crt, ca.key. Every node trusts it.
	ClusterCA RotatedKey = "cluster-ca"
)

// RotatedKeys lists all of them.
func RotatedKeys() []RotatedKey {
	return []RotatedKey{ServiceAccountKey, EncryptionKey, FrontProxyCA, EtcdCA, ClusterCA}
}

// PublicFile returns the file below /etc/kubernetes/pki with the accepted keys' public parts, which a machine that reboots compares with the cluster's
// (B8); empty if the key has none.
func (k RotatedKey) PublicFile() string {
	switch k {
	case ServiceAccountKey:
		return "sa.pub"
	case FrontProxyCA:
		return "front-proxy-ca.crt"
	case EtcdCA:
		return "etcd/ca.crt"
	case ClusterCA:
		return "ca.crt"
	case EncryptionKey:
	}
	return ""
}

// CheckPublic returns an error unless public is the public part of the key with this ID, as one block of PEM. Otherwise an attacker who can write its
// source could make control planes accept another key.
func (k RotatedKey) CheckPublic(id, public string) error {
	block, rest := pem.Decode([]byte(public))
	if block == nil || strings.TrimSpace(string(rest)) != "" {
		return errors.New("the public part is not one block of PEM")
	}
	want := "CERTIFICATE"
	var err error
	switch k {
	case ServiceAccountKey:
		want = "PUBLIC KEY"
		_, err = x509.ParsePKIXPublicKey(block.Bytes)
	case FrontProxyCA, EtcdCA, ClusterCA:
		_, err = x509.ParseCertificate(block.Bytes)
	case EncryptionKey:
		fallthrough
	default:
		return fmt.Errorf("%s has no public part", k)
	}
	if block.Type != want {
		return fmt.Errorf("the public part of a new %s is %q, want %q", k, block.Type, want)
	}
	if err != nil {
		return fmt.Errorf("the public part of a new %s: %w", k, err)
	}
	if is := sha256.Sum256(block.Bytes); hex.EncodeToString(is[:]) != id { // [KeyState] defines the ID
		return fmt.Errorf("the public part of the new %s has the ID %x, and the key has %s", k, is, id)
	}
	return nil
}

// RotationPhase is how far a rotation is. Each phase but the third is done by one control plane after another, and the next begins when all have done it.
type RotationPhase string

// The phases.
const (
	// RotationAccept: the control planes get the new key, and accept it beside the old one.
	RotationAccept RotationPhase = "accept"
	// RotationUse: they sign or encrypt with the new key.
	RotationUse RotationPhase = "use"
	// RotationSettled: all do, and still accept the old key. Until the owner finishes, machines may join.
	RotationSettled RotationPhase = "settled"
	// RotationFinish: they accept the old key no more.
	RotationFinish RotationPhase = "finish"
)

// Rotation is the replacement of a key of the control planes that is in progress.
type Rotation struct {
	Key   RotatedKey    `json:"key"`
	Phase RotationPhase `json:"phase"`
	// ID identifies the new key; see [KeyState]. It is empty until a control plane has made the key.
	ID string `json:"id,omitempty"`
	// Public is the new key's public part in PEM, of a key with [RotatedKey.PublicFile]; its hash is ID.
	Public string `json:"public,omitempty"`
	// Since is when the phase began, by the clock of the owner's workstation.
	Since time.Time `json:"since"`
}

// Joins reports whether control planes may join: in the other phases a new one could get files that the others have had before.
func (r *Rotation) Joins() bool { return r == nil || r.Phase == RotationSettled }

// Command returns the owner's command that continues the rotation.
func (r *Rotation) Command() string {
	c := "muster rotate " + string(r.Key)
	if r.Phase == RotationSettled || r.Phase == RotationFinish {
		c += " --finish"
	}
	return c
}

func (r *Rotation) check() error {
	switch {
	case r == nil:
		return nil
	case !slices.Contains(RotatedKeys(), r.Key):
		return fmt.Errorf("key %q is not known", r.Key)
	case !slices.Contains([]RotationPhase{RotationAccept, RotationUse, RotationSettled, RotationFinish}, r.Phase):
		return fmt.Errorf("phase %q is not known", r.Phase)
	case r.ID == "" && r.Phase != RotationAccept:
		return fmt.Errorf("id is missing in phase %q", r.Phase)
	case r.ID != "" && !IsKeyID(r.ID):
		return errors.New("id: want 64 hexadecimal digits")
	case r.ID == "" && r.Public != "" || r.Key.PublicFile() == "" && r.Public != "":
		return fmt.Errorf("public: %s has no public part, or no id", r.Key)
	case r.ID != "" && r.Key.PublicFile() != "":
		return r.Key.CheckPublic(r.ID, r.Public)
	}
	return nil
}

// IsKeyID reports whether a text has the form of a key's ID.
func IsKeyID(id string) bool {
	b, err := hex.DecodeString(id)
	return err == nil && len(b) == 32 && hex.EncodeToString(b) == id
}

// KeysAnnotation is the annotation of a control plane's Node with the keys that it accepts and uses: [KeyStates] in JSON.
const KeysAnnotation = "muster.dev/control-plane-keys"

// KeyState is what a control plane does with one kind of key. Keys are named by their IDs: the SHA-256 of a public key (SubjectPublicKeyInfo) or of a
// certificate, each in DER, or of a secret key with a label before it; 64 hexadecimal digits.
type KeyState struct {
	// Accepts are its keys for verification or decryption.
	Accepts []string `json:"accepts"`
	// Uses is its key for signatures or encryption.
	Uses string `json:"uses"`
	// Staged are the new keys of a rotation that it has, and can pass to other control planes.
	Staged []string `json:"staged,omitempty"`
}

// KeyStates are a control plane's.
type KeyStates map[RotatedKey]KeyState

// ParseKeyStates reads the value of [KeysAnnotation]; nil if there is none, or it is damaged. Root on the machine can have written anything.
func ParseKeyStates(value string) KeyStates {
	var s KeyStates
	if err := json.Unmarshal([]byte(value), &s); err != nil {
		return nil
	}
	return s
}

// Reached reports whether a control plane has done a phase of the rotation.
func (r *Rotation) Reached(phase RotationPhase, s KeyState) bool {
	if r.ID == "" || !slices.Contains(s.Accepts, r.ID) {
		return false
	}
	switch phase {
	case RotationAccept:
		return s.Uses == r.ID || slices.Contains(s.Staged, r.ID)
	case RotationUse, RotationSettled:
		return s.Uses == r.ID
	case RotationFinish:
		return s.Uses == r.ID && len(s.Accepts) == 1 && len(s.Staged) == 0
	}
	return false
}
