// Package ownerorder holds what the owner signs beside policies: the order to issue an administrator's certificate, for
// when none is valid any more, and the request that opens a control plane's state disk ([Recovery]).
//
// An order is complete by itself: it is for one cluster, one key and one moment, and valid for a few minutes. Its sender is
// not authenticated. So each program that acts on it verifies it first: joinservice before it files a request in the
// cluster, and again the control plane's machine before it signs (J9).
//
// The owner's key signs policies too. The signed data begin with their purpose, so one kind of signature cannot be used as
// the other.
package ownerorder

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// Administrator and Group are the only identity for which orders are accepted: that of kubeadm's admin.conf.
const (
	Administrator = "kubernetes-admin"
	Group         = "kubeadm:cluster-admins"
)

// Annotation holds an order's time and signature, beside the request in a CertificateSigningRequest. The other signed data
// are known there.
const Annotation = "muster.dev/administrator-order"

const (
	// MaxRequest bounds a PKCS#10 request, in bytes: one for a key on P-256 has about 250.
	MaxRequest = 1 << 10
	// MaxAge is the maximum age of an order. Kubernetes keeps a decided request for an hour, and so a used order until it
	// is too old to be used again.
	MaxAge = 10 * time.Minute
	// MaxAhead is how far the owner's clock may be ahead: as much as kubeadm backdates certificates.
	MaxAhead = 5 * time.Minute

	domain     = "muster administrator order v1\x00"
	namePrefix = "muster-admin-"
)

// Order is the data that the owner signs.
type Order struct {
	// Cluster is the cluster for which it is valid.
	Cluster keys.ClusterID
	// Request is a PKCS#10 request in DER.
	Request []byte
	// At is when it was signed, in whole seconds.
	At time.Time
}

// input returns the signed data: the purpose, then each part with its length before it.
func (o Order) input() []byte {
	return parts(domain, o.Cluster[:], o.Request, binary.BigEndian.AppendUint64(nil, uint64(o.At.Unix())))
}

// parts joins the parts so that two different lists never give the same bytes.
func parts(domain string, list ...[]byte) []byte {
	out := []byte(domain)
	for _, part := range list {
		out = append(binary.BigEndian.AppendUint32(out, uint32(len(part))), part...)
	}
	return out
}

// Sign returns the order with the owner's signature.
func (o Order) Sign(owner ed25519.PrivateKey) Signed {
	return Signed{o, ed25519.Sign(owner, o.input())}
}

// Signed is an order with a signature, which must not be trusted before [Signed.Verify].
type Signed struct {
	Order

	Signature []byte
}

// Verify returns nil if the owner has signed the order, for this cluster and recently (J9). It refuses with OWNER_SIGNATURE
// before it reads the order's contents, then with REQUEST_INVALID and CLOCK_SKEW.
func (s Signed) Verify(owner attest.OwnerKeys, cluster keys.ClusterID, now time.Time) error {
	if len(owner) == 0 {
		return attest.Refuse(attestv1.Reason_REASON_OWNER_SIGNATURE, "the owner's public key is not known here, so no order is accepted")
	}
	if !owner.Verify(s.input(), s.Signature) {
		return attest.Refuse(attestv1.Reason_REASON_OWNER_SIGNATURE, "the order is not signed with a key of the owner, or was changed since")
	}
	if s.Cluster != cluster {
		return attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "order: it is for cluster %s, and this is %s", s.Cluster, cluster)
	}
	if age := now.Sub(s.At); age > MaxAge || age < -MaxAhead {
		return attest.Refuse(attestv1.Reason_REASON_CLOCK_SKEW, "the order was signed at %s by the owner's clock, and here it is %s", text(s.At), text(now))
	}
	return nil
}

func text(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// Name returns the name of the CertificateSigningRequest for the order, by its digest; 45 characters, so that audit records
// have it whole. The API server has one object of a name, so one order gives one certificate, however often it is sent.
func (o Order) Name() string {
	digest := sha256.Sum256(o.input())
	return namePrefix + hex.EncodeToString(digest[:16])
}

// Wire returns the order in the form of a request.
func (s Signed) Wire() *joinv1.AdministratorOrder {
	return &joinv1.AdministratorOrder{ClusterId: s.Cluster[:], Csr: s.Request, SignedAt: timestamppb.New(s.At), Signature: s.Signature}
}

// Parse reads an order from a request; it does not verify the signature. It refuses with REQUEST_INVALID.
func Parse(w *joinv1.AdministratorOrder) (Signed, error) {
	invalid := func(format string, args ...any) (Signed, error) {
		return Signed{}, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "order."+format, args...)
	}
	var s Signed
	switch at := w.GetSignedAt(); {
	case len(w.GetClusterId()) != len(s.Cluster):
		return invalid("cluster_id: %d bytes, want %d", len(w.GetClusterId()), len(s.Cluster))
	case len(w.GetCsr()) == 0 || len(w.GetCsr()) > MaxRequest:
		return invalid("csr: %d bytes, want 1 to %d", len(w.GetCsr()), MaxRequest)
	case at.CheckValid() != nil || at.GetNanos() != 0: // nothing unsigned may be there
		return invalid("signed_at: want a time in whole seconds")
	case len(w.GetSignature()) != ed25519.SignatureSize:
		return invalid("signature: %d bytes, want %d", len(w.GetSignature()), ed25519.SignatureSize)
	}
	copy(s.Cluster[:], w.GetClusterId())
	s.Request, s.At, s.Signature = w.GetCsr(), w.GetSignedAt().AsTime(), w.GetSignature()
	return s, nil
}

// Note returns the value of [Annotation].
func (s Signed) Note() string {
	return text(s.At) + " " + base64.StdEncoding.EncodeToString(s.Signature)
}

// ParseNote reads the value of [Annotation] of a request for a cluster; it does not verify the signature.
func ParseNote(note string, cluster keys.ClusterID, request []byte) (Signed, error) {
	at, signature, _ := strings.Cut(note, " ")
	s := Signed{Order: Order{Cluster: cluster, Request: request}}
	var err error
	if s.At, err = time.Parse(time.RFC3339, at); err != nil {
		return Signed{}, fmt.Errorf("the annotation %s has no time", Annotation)
	}
	if s.Signature, err = base64.StdEncoding.DecodeString(signature); err != nil || len(s.Signature) != ed25519.SignatureSize || s.Note() != note {
		return Signed{}, fmt.Errorf("the annotation %s has no signature", Annotation)
	}
	return s, nil
}
