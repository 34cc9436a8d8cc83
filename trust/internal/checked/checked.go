// Package checked holds the only way to make claims and peers.
//
// It can be imported inside the module trust alone. Its types can still be had elsewhere, since a generic function infers them
// from the arguments of those that take them; so those take a [Sealed], whose content only [Seal] sets, and a zero one says
// nothing. Values that a policy is compared with come from a verifier of this module, then (A2), as long as
// nobody uses package unsafe.
package checked

import (
	"crypto"
	"crypto/x509"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
)

// Sealed holds what a package of this module vouches for. The zero value holds nothing.
type Sealed[T any] struct{ content *T }

// Seal returns v, sealed.
func Seal[T any](v T) Sealed[T] { return Sealed[T]{content: &v} }

// Open returns the content; nil of the zero value.
func Open[T any](s Sealed[T]) *T { return s.content }

// Facts is what a verifier has checked: every field is covered by the signature
// of a quote over this session's statement, by a certificate that leads to a trusted
// root, or by a computation over such values. SignedPolicy alone is as presented.
type Facts struct {
	_ [0]func() // keeps an unnamed struct from being assignable

	Format attestv1.Format
	// Bank is the hash of the quoted PCR bank.
	Bank crypto.Hash
	// PCRs are the values of PCR 0 to 15 in that bank.
	PCRs [16][]byte
	// EKPublic is the endorsement key's SubjectPublicKeyInfo in DER.
	EKPublic []byte
	// EKKind is the kind of the endorsement key, as [attest.EKKind] has it.
	EKKind string
	// EKRoot is the root certificate that vouches for the EK.
	EKRoot *x509.Certificate
	// EKChain are the certificates from the endorsement key's to EKRoot.
	EKChain []Certificate
	// AKName is the attestation key's name (TPM 2.0 Library, Part 1, section 16).
	AKName []byte
	// AKKind is the kind of the attestation key, as [attest.AKKind] has it.
	AKKind string
	// ResetCount, RestartCount, Clock and Safe are TPMS_CLOCK_INFO of the quote.
	ResetCount, RestartCount uint32
	Clock                    time.Duration
	Safe                     bool
	// FirmwareVersion is TPMS_ATTEST.firmwareVersion.
	FirmwareVersion uint64
	// Events are the entries of the event log, if one was sent; they replay to PCRs.
	Events []Event
	// Firmware is what the log says of the firmware; nil without a log, or if FirmwareErr is not: then it says nothing that could
	// be believed.
	Firmware    *Firmware
	FirmwareErr error
	// SignedPolicy is what a joinservice presents; its signature is not checked here.
	SignedPolicy *attestv1.SignedPolicy
}

// Firmware is what a replayed event log says of the time before the boot loader.
type Firmware struct {
	// Drivers and DriverConfig are what was measured into PCR 2 and 3, but for the separators.
	Drivers, DriverConfig []Event
	// SecureBoot reports whether Secure Boot was on.
	SecureBoot bool
	// Keys has the digests of the UEFI variables PK, KEK, db and dbx, by these names.
	Keys map[string][]byte
}

// Event is one measurement of a replayed event log.
type Event struct {
	// PCR is the register that was extended.
	PCR int
	// Type is the event's type by its name in the TCG specification.
	Type string
	// Digest is what was extended, in the quoted bank.
	Digest []byte
	// Text is the event's data for people, at most 256 printable characters. What it
	// says need not be what Digest covers.
	Text string
}

// Certificate is what tells one certificate of a chain from others.
type Certificate struct {
	// Subject is its subject, for people (RFC 4514).
	Subject string
	// Key is SHA-256 of its SubjectPublicKeyInfo in DER.
	Key [32]byte
	// Serial is its serial number in lower-case hexadecimal digits, without leading zeros.
	Serial string
}

// Evidence is what the connection that evidence came over knows of it.
type Evidence struct {
	_ [0]func()

	// Digest is SHA-256 of the evidence's bytes as they were received: an encoded
	// muster.attest.v1.Evidence.
	Digest [32]byte
}

// Session is what the TLS session adds to the claims of its peer.
type Session struct {
	_ [0]func()

	// Purpose is the purpose that the peer's evidence was checked for.
	Purpose string
	// VerifiedAt is when the verdict fell.
	VerifiedAt time.Time
}
