// Package checked holds the only way to make claims and peers.
//
// Only the module trust can import it. Other modules can still obtain its types, because a generic
// function infers them from the parameters of exported functions. Therefore those functions take a
// [Sealed], whose content only [Seal] can set; a zero Sealed has no content. So the values that a
// policy is compared with come from a verifier of this module (A2), unless a program uses package
// unsafe.
package checked

import (
	"crypto"
	"crypto/x509"
	"fmt"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
)

// Sealed holds a value that a package of this module has checked. The zero value holds nothing.
type Sealed[T any] struct{ content *T }

// Seal returns v, sealed.
func Seal[T any](v T) Sealed[T] { return Sealed[T]{content: &v} }

// Open returns the content, or nil for the zero value.
func Open[T any](s Sealed[T]) *T { return s.content }

// Facts holds the values that a verifier has checked. Every field is covered by the signature of a
// quote over this session's statement, by a certificate that chains to a trusted root, or by a
// computation over such values. Only SignedPolicy and Hardware are not checked.
type Facts struct {
	_ [0]func() // keeps an unnamed struct from being assignable

	Format attestv1.Format
	// Bank is the hash of the quoted PCR bank.
	Bank crypto.Hash
	// PCRs are the values of PCR 0 to 15 in that bank.
	PCRs [16][]byte
	// Endorsement is why the attestation key is believed to be in a genuine TPM.
	Endorsement
	// AKName is the attestation key's name (TPM 2.0 Library, Part 1, section 16).
	AKName []byte
	// AKKind is the kind of the attestation key, as in [attest.AKKind].
	AKKind string
	// ResetCount, RestartCount, Clock and Safe are TPMS_CLOCK_INFO of the quote.
	ResetCount, RestartCount uint32
	Clock                    time.Duration
	Safe                     bool
	// FirmwareVersion is TPMS_ATTEST.firmwareVersion.
	FirmwareVersion uint64
	// Events are the entries of the event log, if one was sent; they replay to PCRs.
	Events []Event
	// Firmware is the firmware's part of the log. It is nil without a log, or if FirmwareErr is
	// set: then no part of the log can be trusted.
	Firmware    *Firmware
	FirmwareErr error
	// Hardware is the hardware report that was sent; nil if none was. Its size is checked. The policy
	// that appraises it verifies it, at the time At, by HardwareData: the report data that follow from
	// the quote.
	Hardware     *attestv1.HardwareReport
	HardwareData [64]byte
	// At is when the evidence was verified.
	At time.Time
	// SignedPolicy is the policy that a joinservice presents; its signature is not checked here.
	SignedPolicy *attestv1.SignedPolicy
}

// Endorsement is what one of the endorsements has shown.
type Endorsement struct {
	// EndorsedBy is the name of the endorsement, as in the registry.
	EndorsedBy string
	// Machine is the machine's ID.
	Machine [32]byte
	// EKPublic is the endorsement key's SubjectPublicKeyInfo in DER, of which Machine is the SHA-256;
	// nil if the machine is known by another key.
	EKPublic []byte
	// KeyKind is the kind of the endorsed key, as in [attest.EKKind]: of the endorsement key, of the
	// platform's attestation key, or of the attestation key that a document names.
	KeyKind string
	// Root is the root certificate to which the endorsed key's certificate chains; nil if it has none.
	Root *x509.Certificate
	// Chain has the certificates from the endorsed key's to Root.
	Chain []Certificate
	// Instance is the virtual machine that the certificate or document names; zero if none is named.
	Instance Instance
}

// Instance is a virtual machine of a cloud.
type Instance struct {
	// Provider is the cloud: "gcp", "azure" or "aws"; empty for the zero value.
	Provider string
	// Project and ProjectNumber, Zone and ID are those of gcp.
	Project       string
	ProjectNumber uint64
	Zone          string
	ID            uint64
	// Name is its name in the certificate; for aws, the instance's ID.
	Name string
}

// String describes it for texts.
func (i Instance) String() string {
	switch {
	case i.Provider == "":
		return "no virtual machine of a cloud"
	case i.Project == "":
		return fmt.Sprintf("%s %q", i.Provider, i.Name)
	}
	return fmt.Sprintf("%s %q (instance %d, zone %q, project %q, number %d)", i.Provider, i.Name, i.ID, i.Zone, i.Project, i.ProjectNumber)
}

// Firmware is the part of a replayed event log that precedes the boot loader.
type Firmware struct {
	// Drivers and DriverConfig are the measurements into PCR 2 and 3, except the separators.
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
	// Digest is the extended value, in the quoted bank.
	Digest []byte
	// Text is the event's data in readable form, at most 256 printable characters. It need not be
	// the data that Digest covers.
	Text string
}

// Certificate identifies one certificate of a chain.
type Certificate struct {
	// Subject is its subject, for display (RFC 4514).
	Subject string
	// Key is SHA-256 of its SubjectPublicKeyInfo in DER.
	Key [32]byte
	// Serial is its serial number in lower-case hexadecimal digits, without leading zeros.
	Serial string
}

// Evidence is the data that the connection adds about evidence.
type Evidence struct {
	_ [0]func()

	// Digest is SHA-256 of the evidence's bytes as they were received: an encoded
	// muster.attest.v1.Evidence.
	Digest [32]byte
}

// Session is the data that the TLS session adds to the claims of its peer.
type Session struct {
	_ [0]func()

	// Purpose is the checked purpose of the peer's evidence.
	Purpose string
	// VerifiedAt is the time of the verdict.
	VerifiedAt time.Time
}
