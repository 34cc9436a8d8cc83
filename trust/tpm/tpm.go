// Package tpm sends the few TPM 2.0 commands that Muster needs: the identity of the TPM (its
// endorsement key and certificate), the measurements of the booted software (a quote), the proof
// that an attestation key belongs to the TPM (activation), one PCR extension (the node lock), and
// one NV counter, which detects an older copy of the machine's disk.
//
// The TPM is not kept open. Each call is one sequence: take the machine-wide lock file, open the
// TPM, run the commands, flush what they loaded, close, release the lock. So several processes of
// Muster share one TPM without a daemon. A killed process leaves at most a transient handle, which
// the next sequence flushes when the TPM has no room left.
//
// Structures leave this package as the TPM marshals them (TPM 2.0 Library, Part 2). This package
// does not verify them: trust/attest/tpm2 does.
package tpm

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"sync"
	"time"

	gotpm "github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
)

// PCRCount is how many PCRs a quote covers: 0 to 15, those that a running system can
// extend but not reset (TCG PC Client Platform TPM Profile, section 4.6).
const PCRCount = 16

// DefaultLock is the file whose lock serializes all processes that use the TPM.
const DefaultLock = "/run/muster/tpm.lock"

// commandTimeout bounds one command. Making an RSA primary key is the slowest; on discrete TPMs it
// takes up to about a minute (PC Client Profile, duration "long").
const commandTimeout = 2 * time.Minute

// Device is the part of a TPM that the rest of Muster uses. [*TPM] implements it; tpmtest.Contract
// checks what an implementation must do.
type Device interface {
	// EndorsementKey returns the endorsement key that has a certificate, an ECC one
	// before an RSA one: one TPM must not be two machines. A TPM that stores no certificate
	// has the ECC P-256 key of the low range (L-2).
	EndorsementKey(ctx context.Context) (EK, error)
	// AttestationKey returns the TPMT_PUBLIC of the attestation key, the same after
	// each boot.
	AttestationKey(ctx context.Context) ([]byte, error)
	// Quote signs extraData and PCR 0 to 15 of one bank with the attestation key.
	Quote(ctx context.Context, extraData [32]byte, bank Bank) (Quote, error)
	// PlatformCertificates returns the certificate of the platform key, which a cloud has put
	// into a virtual machine's TPM, and issuers stored with it: X.509 in DER, 1 to 4. The error
	// wraps [ErrNoPlatformKey] if there is none.
	PlatformCertificates(ctx context.Context) ([][]byte, error)
	// Certify signs extraData and the name of the attestation key with the platform key. The
	// error wraps [ErrNoPlatformKey] if there is none.
	Certify(ctx context.Context, extraData [32]byte) (Certified, error)
	// NitroDocument returns AWS's attestation document about the attestation key, made for nonce:
	// a COSE_Sign1 structure of 1 byte to 8 KiB. The error wraps [ErrNoNitroTPM] if the TPM makes
	// none.
	NitroDocument(ctx context.Context, nonce [32]byte) ([]byte, error)
	// ActivateCredential opens a credential that was made for the endorsement key
	// and the name of the attestation key: TPMS_ID_OBJECT and the content of
	// TPM2B_ENCRYPTED_SECRET. The result is a secret.
	ActivateCredential(ctx context.Context, blob, encryptedSecret []byte) ([]byte, error)
	// Measure extends one PCR, 0 to 15, by the hash of data, 0 to 1024 bytes: in every
	// bank that the TPM keeps, by that bank's hash.
	Measure(ctx context.Context, pcr int, data []byte) error
	// ReadPCR reads one PCR, unsigned. It is for this machine's own use, never to appraise another
	// machine (A2).
	ReadPCR(ctx context.Context, bank Bank, pcr int) ([]byte, error)
	// Counter reads the counter at [CounterIndex], which only increases. Errors wrap [ErrNoCounter]
	// or [ErrForeignCounter] where they apply.
	Counter(ctx context.Context) (uint64, error)
	// IncrementCounter adds one to the counter and returns its value.
	IncrementCounter(ctx context.Context) (uint64, error)
	// DefineCounter makes the counter and returns its first value, which is larger than that of any
	// counter that this TPM has had. It deletes what is at its index.
	DefineCounter(ctx context.Context) (uint64, error)
}

// EK is an endorsement key.
type EK struct {
	// Certificates are X.509 in DER: the key's own first, then the issuers that the
	// TPM stores, in order and without a self-signed root. 1 to 4; none if the TPM stores
	// no certificate of an endorsement key.
	Certificates [][]byte
	// Public is the key's TPMT_PUBLIC. The TPM holds the private part: the key was made from the
	// template, and equals the certificate's key.
	Public []byte
}

// SPKI returns the key's SubjectPublicKeyInfo in DER, of which a machine ID is the hash.
func (k EK) SPKI() ([]byte, error) {
	t, err := gotpm.Unmarshal[gotpm.TPMTPublic](k.Public)
	if err != nil {
		return nil, fmt.Errorf("tpm: endorsement key: %w", err)
	}
	public, err := gotpm.Pub(*t)
	if err != nil {
		return nil, fmt.Errorf("tpm: endorsement key: %w", err)
	}
	return x509.MarshalPKIXPublicKey(public)
}

// Quote is what TPM2_Quote returned, with the PCR values that it covers.
type Quote struct {
	// Attest is the TPMS_ATTEST that was signed.
	Attest []byte
	// Signature is the TPMT_SIGNATURE over Attest.
	Signature []byte
	// AKPublic is the TPMT_PUBLIC of the key that signed.
	AKPublic []byte
	// Bank is the quoted bank.
	Bank Bank
	// PCRs are the values of PCR 0 to 15. Their digest is the one in Attest.
	PCRs [][]byte
}

// Errors that callers distinguish.
var (
	// ErrNoCertificate means that the TPM stores no endorsement key certificate at the specified
	// index, although it needs one: its index is empty, or it has no key on P-256.
	ErrNoCertificate = errors.New("the TPM stores no endorsement key certificate")
	// ErrCertificateMismatch means that no key template of the TCG EK Credential Profile produces
	// the key in the stored certificate.
	ErrCertificateMismatch = errors.New("the endorsement key certificate is for another key")
	// ErrBankInactive means that the TPM does not keep PCRs in the requested bank.
	ErrBankInactive = errors.New("the TPM keeps no PCRs in this bank")
	// ErrPCRsMoved means that PCRs were extended during each of several attempts to read them
	// together with their quote.
	ErrPCRsMoved = errors.New("PCRs were extended while they were read")
)

// An Option changes how a TPM is used.
type Option func(*TPM)

// WithLock sets the lock file in place of [DefaultLock]. Its folder must exist. All
// processes that use the same TPM must name the same file.
func WithLock(path string) Option { return func(t *TPM) { t.lock = path } }

// TPM is a TPM that is opened for each sequence of commands. It is safe for concurrent use;
// sequences wait for each other.
type TPM struct {
	open func() (transport.TPMCloser, error)
	// direct opens the TPM for commands of its vendor, if that is done in another way.
	direct func() (transport.TPMCloser, error)
	lock   string        // empty: no other process can reach this TPM
	slot   chan struct{} // holds one token: the right to run a sequence in this process

	mu       sync.Mutex // guards the following fields; never held during commands
	ek       *knownEK
	platform *knownPlatform
	nitro    *bool // whether it is a NitroTPM; nil if not known yet
	keys     map[keyID]savedKey
}

var _ Device = (*TPM)(nil)

// Open returns the TPM at path: a character device (/dev/tpmrm0), or a unix socket (the data socket
// of the emulator swtpm). It opens nothing before the first call of a method.
func Open(path string, opts ...Option) *TPM {
	t := newTPM(func() (transport.TPMCloser, error) { return openPath(path) })
	if direct, ok := directPath(path); ok {
		t.direct = func() (transport.TPMCloser, error) { return openPath(direct) }
	}
	t.lock = DefaultLock
	for _, o := range opts {
		o(t)
	}
	return t
}

// New returns a TPM that opener opens, such as a simulator in this process. Unlike
// [Open] it takes no lock file unless [WithLock] names one.
func New(opener func() (transport.TPMCloser, error), opts ...Option) *TPM {
	t := newTPM(opener)
	for _, o := range opts {
		o(t)
	}
	return t
}

func newTPM(open func() (transport.TPMCloser, error)) *TPM {
	t := &TPM{open: open, slot: make(chan struct{}, 1), keys: make(map[keyID]savedKey)}
	t.slot <- struct{}{}
	return t
}

// sequence runs use with the TPM open and the machine-wide lock held. While it waits for its slot
// it returns when ctx ends. Started commands run to their end, so that what they loaded is flushed.
func (t *TPM) sequence(ctx context.Context, what string, use func(*conn) error) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("tpm: %s: %w", what, err)
		}
	}()
	select {
	case <-t.slot:
		defer func() { t.slot <- struct{}{} }()
	case <-ctx.Done():
		return fmt.Errorf("waiting for the TPM: %w", context.Cause(ctx))
	}
	if t.lock != "" {
		unlock, err := lockFile(ctx, t.lock)
		if err != nil {
			return err
		}
		defer unlock()
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	dev, err := t.open()
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	c := &conn{owner: t, tpm: patient{dev}}
	defer func() { err = errors.Join(err, c.flush(), dev.Close()) }()
	return use(c)
}
