package ownertest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"math/big"
	"strings"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// OldKey is the ID of a key.
var OldKey = strings.Repeat("0", 64)

// MadeKey returns the ID and the public part of a new key.
func MadeKey(key clusterinfo.RotatedKey) (id, public string) {
	block := &pem.Block{Type: "PUBLIC KEY"}
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err == nil {
		block.Bytes, err = x509.MarshalPKIXPublicKey(private.Public())
	}
	if err == nil && key != clusterinfo.ServiceAccountKey {
		template := &x509.Certificate{SerialNumber: big.NewInt(1)}
		block.Type = "CERTIFICATE"
		block.Bytes, err = x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	}
	if err != nil {
		panic(err)
	}
	sum := sha256.Sum256(block.Bytes)
	return hex.EncodeToString(sum[:]), string(pem.EncodeToMemory(block))
}
