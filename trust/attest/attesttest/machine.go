package attesttest

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	gotpm "github.com/google/go-tpm/tpm2"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/tpm"
)

// Options describe a machine. The zero value is a machine that boots the image "image" with Secure
// Boot off and is unlocked.
type Options struct {
	// Image is the name of the booted image. Equal names give equal PCRs 4, 9 and 11.
	Image string
	// SecureBoot is the state that its firmware measures.
	SecureBoot bool
	// Drivers are loaded from outside the firmware volume: PCR 2.
	Drivers []string
	// Bank is the bank that is quoted; 0 stands for SHA-256. All machines also keep the
	// other two.
	Bank tpm.Bank
	// EK is the kind of its endorsement key: ECC P-256 or RSA 2048; empty stands for the former.
	EK attest.EKKind
	// Bare leaves the endorsement key without a certificate.
	Bare bool
	// Platform gives the machine a platform key; nil if it has none.
	Platform *Platform
	// Nitro makes its TPM a NitroTPM, whose quotes are of SHA-384 unless Bank is set; nil if it is none.
	Nitro *Nitro
	// TPM is a machine that has the same TPM, and so the same attestation key; nil if there is none. With
	// another endorsement key it is another machine.
	TPM *Machine
	// Hardware makes its hardware reports; nil if it has none.
	Hardware tpm2.Hardware
	// Tamper makes the machine's evidence differ from genuine evidence.
	Tamper Tamper
}

// Tamper changes a machine's evidence, for tests of refusals. Nil functions change nothing.
type Tamper struct {
	// Certificate changes the EK certificate before it is signed.
	Certificate func(*x509.Certificate)
	// AK changes the attestation key's public area before its name is computed.
	AK func(*gotpm.TPMTPublic)
	// Attest changes a quote before it is signed.
	Attest func(*gotpm.TPMSAttest)
	// Signature returns the TPMT_SIGNATURE of a quote, in place of the AK's.
	Signature func(attest []byte) []byte
	// Evidence changes finished evidence.
	Evidence func(*attestv1.Evidence)
	// MAC changes the answer to a challenge.
	MAC func([]byte) []byte
	// Name is the key name for which credentials are opened, in place of the AK's own name: the
	// machine's TPM does not have this AK.
	Name []byte
}

// Machine is a machine with a TPM in software. It implements [tpm.Device], and tpmtest.Contract
// checks that it behaves like a TPM. It is safe for concurrent use.
type Machine struct {
	t        testing.TB
	opts     Options
	ca       *CA
	ek       *ecdsa.PrivateKey // nil: it is RSA
	rsaEK    *rsa.PrivateKey
	ak       *ecdsa.PrivateKey
	akPub    gotpm.TPMTPublic
	chain    [][]byte
	platform *platformKey // nil: it has none
	nitro    *nitroTPM    // nil: it is none
	log      string       // path

	mu       sync.Mutex
	pcrs     map[tpm.Bank][][]byte
	resets   uint32
	restarts uint32
	clock    time.Duration // when it was switched on
	since    time.Time
	quotes   int
	counter  uint64 // 0: there is none
}

var _ tpm.Device = (*Machine)(nil)

var banks = []tpm.Bank{tpm.SHA256, tpm.SHA384, tpm.SHA512}

// NewMachine makes a machine whose endorsement key ca certifies, and boots it.
func NewMachine(t testing.TB, ca *CA, opts Options) *Machine {
	t.Helper()
	if opts.Image == "" {
		opts.Image = "image"
	}
	switch {
	case opts.Bank != 0:
	case opts.Nitro != nil:
		opts.Bank = tpm.SHA384
	default:
		opts.Bank = tpm.SHA256
	}
	m := &Machine{t: t, opts: opts, ca: ca, log: filepath.Join(t.TempDir(), "binary_bios_measurements")}
	m.ak = newKey(t)
	if opts.TPM != nil {
		m.ak = opts.TPM.ak
	}
	var endorsement crypto.PublicKey
	switch opts.EK {
	case "", attest.EKP256:
		m.ek = newKey(t)
		endorsement = m.ek.Public()
	case attest.EKRSA2048:
		var err error
		if m.rsaEK, err = rsa.GenerateKey(rand.Reader, 2048); err != nil {
			t.Fatal(err)
		}
		endorsement = m.rsaEK.Public()
	default:
		t.Fatalf("attesttest: no machine has an EK of kind %q", opts.EK)
	}
	m.chain = ca.Issue(t, endorsement, opts.Tamper.Certificate)
	m.platform = newPlatformKey(t, ca, opts.Platform)
	m.nitro = newNitroTPM(t, ca, opts.Nitro)
	m.akPub = tpm.AKTemplate(false)
	m.akPub.Unique = gotpm.NewTPMUPublicID(gotpm.TPMAlgECC, point(t, &m.ak.PublicKey))
	if opts.Tamper.AK != nil {
		opts.Tamper.AK(&m.akPub)
	}
	m.boot()
	return m
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func point(t testing.TB, k *ecdsa.PublicKey) *gotpm.TPMSECCPoint {
	t.Helper()
	b, err := k.Bytes() // 4 || x || y
	if err != nil {
		t.Fatal(err)
	}
	return &gotpm.TPMSECCPoint{
		X: gotpm.TPM2BECCParameter{Buffer: b[1:33]},
		Y: gotpm.TPM2BECCParameter{Buffer: b[33:]},
	}
}

// ID returns the machine's ID.
func (m *Machine) ID() attest.MachineID {
	id, _, err := tpm2.Identity(context.Background(), m)
	if err != nil {
		m.t.Fatal(err)
	}
	return id
}

// certificates returns what the TPM stores of the chain.
func (m *Machine) certificates() [][]byte {
	if m.opts.Bare {
		return nil
	}
	return cloneAll(m.chain)
}

// Roots returns the root for the machine's endorsement key.
func (m *Machine) Roots() []*x509.Certificate { return m.ca.Roots() }

// Bank returns the bank that the machine's evidence quotes.
func (m *Machine) Bank() tpm.Bank { return m.opts.Bank }

// EventLog returns the path of the firmware's event log.
func (m *Machine) EventLog() string { return m.log }

// Quotes returns how many quotes the TPM has made.
func (m *Machine) Quotes() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.quotes
}

// PCRs returns a copy of PCR 0 to 15 in the quoted bank.
func (m *Machine) PCRs() [][]byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return cloneAll(m.pcrs[m.opts.Bank])
}

// SetPCR sets a PCR of the quoted bank, which no real TPM would do.
func (m *Machine) SetPCR(pcr int, value []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pcrs[m.opts.Bank][pcr] = bytes.Clone(value)
}

// SetCounters sets the TPM's counters and clock, as if it had been reset or cleared.
func (m *Machine) SetCounters(resets, restarts uint32, clock time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.resets, m.restarts, m.clock, m.since = resets, restarts, clock, time.Now()
}

// LockTo measures the node lock of a cluster, as the bootstrapper does.
func (m *Machine) LockTo(clusterID [32]byte) {
	m.t.Helper()
	if err := m.Measure(m.t.Context(), attest.LockPCR, clusterID[:]); err != nil {
		m.t.Fatal(err)
	}
}

// Boots returns the TPM's resetCount: each boot of the machine has another one.
func (m *Machine) Boots() uint32 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.resets
}

// Reboot switches the machine off and on: PCRs start at zero and resetCount increases.
func (m *Machine) Reboot() { m.boot() }

// Copy returns the machine as it is after one more boot. It has the same TPM, and what happens to one does not happen to the other.
func (m *Machine) Copy(t testing.TB) *Machine {
	t.Helper()
	m.mu.Lock()
	c := &Machine{
		t: t, opts: m.opts, ca: m.ca, ek: m.ek, rsaEK: m.rsaEK, ak: m.ak, akPub: m.akPub, chain: m.chain, platform: m.platform, nitro: m.nitro,
		log:    filepath.Join(t.TempDir(), "binary_bios_measurements"),
		resets: m.resets, clock: m.clock + time.Since(m.since), quotes: m.quotes, counter: m.counter,
	}
	m.mu.Unlock()
	c.boot()
	return c
}

// BootImage switches the machine off and on, and boots another image from then on.
func (m *Machine) BootImage(image string) {
	m.opts.Image = image
	m.boot()
}

// Attester returns the real attester of one purpose, on this machine.
func (m *Machine) Attester(p attest.Purpose) attest.Attester {
	m.t.Helper()
	a, err := tpm2.NewAttester(tpm2.Config{TPM: m, Purpose: p, Bank: m.opts.Bank, EventLog: m.log, Hardware: m.opts.Hardware})
	if err != nil {
		m.t.Fatal(err)
	}
	return attester{a, m, m.opts.Tamper}
}

// attester changes the evidence of the real attester.
type attester struct {
	*tpm2.Attester
	machine *Machine
	tamper  Tamper
}

// Boots is [Machine.Boots].
func (a attester) Boots() uint32 { return a.machine.Boots() }

func (a attester) Attest(ctx context.Context, f attestv1.Format, b attest.Binding) (*attestv1.Evidence, error) {
	ev, err := a.Attester.Attest(ctx, f, b)
	if err == nil && a.tamper.Evidence != nil {
		a.tamper.Evidence(ev)
	}
	return ev, err
}

func (a attester) Respond(ctx context.Context, c *attestv1.Challenge, b attest.Binding) ([]byte, error) {
	mac, err := a.Attester.Respond(ctx, c, b)
	if err == nil && a.tamper.MAC != nil {
		mac = a.tamper.MAC(mac)
	}
	return mac, err
}

// EndorsementKey implements [tpm.Device].
func (m *Machine) EndorsementKey(ctx context.Context) (tpm.EK, error) {
	if err := ctx.Err(); err != nil {
		return tpm.EK{}, err
	}
	if m.rsaEK != nil {
		public := gotpm.RSAEKTemplate
		public.Unique = gotpm.NewTPMUPublicID(gotpm.TPMAlgRSA, &gotpm.TPM2BPublicKeyRSA{Buffer: m.rsaEK.N.Bytes()})
		return tpm.EK{Certificates: m.certificates(), Public: gotpm.Marshal(public)}, nil
	}
	public := gotpm.ECCEKTemplate
	public.Unique = gotpm.NewTPMUPublicID(gotpm.TPMAlgECC, point(m.t, &m.ek.PublicKey))
	return tpm.EK{Certificates: m.certificates(), Public: gotpm.Marshal(public)}, nil
}

// AttestationKey implements [tpm.Device].
func (m *Machine) AttestationKey(ctx context.Context) ([]byte, error) {
	return gotpm.Marshal(m.akPub), ctx.Err()
}

func (m *Machine) akName() []byte {
	sum := sha256.Sum256(gotpm.Marshal(m.akPub))
	return append([]byte{0x00, 0x0B}, sum[:]...)
}

// Quote implements [tpm.Device].
func (m *Machine) Quote(ctx context.Context, extraData [32]byte, bank tpm.Bank) (tpm.Quote, error) {
	if err := ctx.Err(); err != nil {
		return tpm.Quote{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	values := cloneAll(m.pcrs[bank])
	if len(values) == 0 {
		return tpm.Quote{}, fmt.Errorf("%w: %s", tpm.ErrBankInactive, bank)
	}
	m.quotes++
	digest := sha256.Sum256(bytes.Join(values, nil))
	qualified := sha256.Sum256(append([]byte{0x40, 0x00, 0x00, 0x0B}, m.akName()...))
	a := gotpm.TPMSAttest{
		Magic:           gotpm.TPMGeneratedValue,
		Type:            gotpm.TPMSTAttestQuote,
		QualifiedSigner: gotpm.TPM2BName{Buffer: append([]byte{0x00, 0x0B}, qualified[:]...)},
		ExtraData:       gotpm.TPM2BData{Buffer: extraData[:]},
		ClockInfo: gotpm.TPMSClockInfo{
			Clock:        uint64((m.clock + time.Since(m.since)).Milliseconds()),
			ResetCount:   m.resets,
			RestartCount: m.restarts,
			Safe:         true,
		},
		FirmwareVersion: 0x0001000000000000,
		Attested: gotpm.NewTPMUAttest(gotpm.TPMSTAttestQuote, &gotpm.TPMSQuoteInfo{
			PCRSelect: gotpm.TPMLPCRSelection{PCRSelections: []gotpm.TPMSPCRSelection{
				{Hash: gotpm.TPMIAlgHash(bank), PCRSelect: []byte{0xFF, 0xFF, 0x00}},
			}},
			PCRDigest: gotpm.TPM2BDigest{Buffer: digest[:]},
		}),
	}
	if m.opts.Tamper.Attest != nil {
		m.opts.Tamper.Attest(&a)
	}
	message := gotpm.Marshal(a)
	signature, err := Sign(m.ak, message)
	if err != nil {
		return tpm.Quote{}, err
	}
	if m.opts.Tamper.Signature != nil {
		signature = m.opts.Tamper.Signature(message)
	}
	return tpm.Quote{Attest: message, Signature: signature, AKPublic: gotpm.Marshal(m.akPub), Bank: bank, PCRs: values}, nil
}

// Sign returns a TPMT_SIGNATURE, ECDSA with SHA-256, over a message.
func Sign(key *ecdsa.PrivateKey, message []byte) ([]byte, error) {
	digest := sha256.Sum256(message)
	r, s, err := ecdsa.Sign(rand.Reader, key, digest[:])
	if err != nil {
		return nil, err
	}
	return gotpm.Marshal(gotpm.TPMTSignature{
		SigAlg: gotpm.TPMAlgECDSA,
		Signature: gotpm.NewTPMUSignature(gotpm.TPMAlgECDSA, &gotpm.TPMSSignatureECC{
			Hash:       gotpm.TPMAlgSHA256,
			SignatureR: gotpm.TPM2BECCParameter{Buffer: r.FillBytes(make([]byte, 32))},
			SignatureS: gotpm.TPM2BECCParameter{Buffer: s.FillBytes(make([]byte, 32))},
		}),
	}), nil
}

// Measure implements [tpm.Device].
func (m *Machine) Measure(ctx context.Context, pcr int, data []byte) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if pcr < 0 || pcr >= tpm.PCRCount || len(data) > 1024 {
		return fmt.Errorf("no PCR %d, or %d bytes are too many", pcr, len(data))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, b := range banks {
		m.pcrs[b][pcr] = b.Extended(m.pcrs[b][pcr], hash(b, data))
	}
	return nil
}

// ReadPCR implements [tpm.Device].
func (m *Machine) ReadPCR(ctx context.Context, bank tpm.Bank, pcr int) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	values := m.pcrs[bank]
	if pcr < 0 || pcr >= len(values) {
		return nil, fmt.Errorf("no PCR %d in %s", pcr, bank)
	}
	return bytes.Clone(values[pcr]), nil
}

func hash(b tpm.Bank, data []byte) []byte {
	h, _ := b.Hash()
	d := h.New()
	d.Write(data)
	return d.Sum(nil)
}

func cloneAll(in [][]byte) [][]byte {
	out := make([][]byte, len(in))
	for i, b := range in {
		out[i] = bytes.Clone(b)
	}
	return out
}

// Counter implements [tpm.Device].
func (m *Machine) Counter(ctx context.Context) (uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.counter == 0 {
		return 0, tpm.ErrNoCounter
	}
	return m.counter, ctx.Err()
}

// IncrementCounter implements [tpm.Device].
func (m *Machine) IncrementCounter(ctx context.Context) (uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.counter == 0 {
		return 0, tpm.ErrNoCounter
	}
	m.counter++
	return m.counter, ctx.Err()
}

// DefineCounter implements [tpm.Device].
func (m *Machine) DefineCounter(ctx context.Context) (uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.counter++
	return m.counter, ctx.Err()
}

// boot starts the TPM and measures as firmware does.
func (m *Machine) boot() {
	m.t.Helper()
	w, digests := BootLog(m.t, m.opts, banks...)
	if err := os.WriteFile(m.log, w, 0o600); err != nil {
		m.t.Fatal(err)
	}
	pcrs := make(map[tpm.Bank][][]byte)
	for _, b := range banks {
		for range tpm.PCRCount {
			pcrs[b] = append(pcrs[b], make([]byte, b.Size()))
		}
		for _, d := range digests {
			pcrs[b][d.PCR] = b.Extended(pcrs[b][d.PCR], d.Digests[b])
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.pcrs != nil {
		m.clock += time.Since(m.since)
	}
	m.pcrs = maps.Clone(pcrs)
	m.resets++
	m.restarts = 0
	m.since = time.Now()
}
