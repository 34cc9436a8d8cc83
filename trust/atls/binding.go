package atls

import (
	"crypto/sha256"
	"crypto/tls"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// role is the side that attests. It is part of the binding because the exporter is the same at both
// ends: without the role, a peer's own evidence could be sent back to it (reflection).
type role byte

const (
	roleClient role = 0x01
	roleServer role = 0x02
)

func (r role) peer() role {
	if r == roleClient {
		return roleServer
	}
	return roleClient
}

func (r role) String() string {
	if r == roleClient {
		return "client"
	}
	return "server"
}

const (
	exporterLabel = "EXPERIMENTAL-muster-atls/1"
	bindingLabel  = "muster-atls/1 binding\x00"
)

// exportKey returns the session's exported keying material (RFC 8446, section 7.5), 32 bytes. Two
// honest ends have the same value only if they share one handshake, key shares included. An error
// ends the connection (A1).
func exportKey(cs tls.ConnectionState) ([32]byte, error) {
	ekm, err := cs.ExportKeyingMaterial(exporterLabel, nil, 32)
	if err != nil || len(ekm) != 32 {
		return [32]byte{}, attest.Refuse(attestv1.Reason_REASON_BINDING_MISMATCH, "the TLS session exports no key: %w", err)
	}
	return [32]byte(ekm), nil
}

// hashOffers hashes both Offer frames as sent, length prefixes included, so an offer that was
// changed in transit invalidates all evidence.
func hashOffers(client, server []byte) [32]byte {
	h := sha256.New()
	h.Write(client)
	h.Write(server)
	return [32]byte(h.Sum(nil))
}

// newBinding is the only place that computes the value that evidence is bound to (A1). All parts
// have a fixed length.
func newBinding(attester role, ekm, offers [32]byte) attest.Binding {
	h := sha256.New()
	h.Write([]byte(bindingLabel))
	h.Write([]byte{byte(attester)})
	h.Write(ekm[:])
	h.Write(offers[:])
	return attest.Binding(h.Sum(nil))
}
