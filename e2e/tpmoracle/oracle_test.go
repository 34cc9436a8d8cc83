package tpmoracle

import (
	"bytes"
	"crypto"
	"crypto/sha256"
	"crypto/x509"
	"testing"
	"time"

	"github.com/google/go-tpm-tools/client"
	attestpb "github.com/google/go-tpm-tools/proto/attest"
	tpmpb "github.com/google/go-tpm-tools/proto/tpm"
	"github.com/google/go-tpm-tools/server"
	"github.com/google/go-tpm-tools/simulator"
	legacy "github.com/google/go-tpm/legacy/tpm2"
	gotpm "github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
	"github.com/google/go-tpm/tpmutil"
	"go.uber.org/goleak"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/tpm"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// simulated is the reference code with an ECC endorsement key that ca certified.
func simulated(t testing.TB, ca *attesttest.CA) (*simulator.Simulator, *tpm.TPM) {
	t.Helper()
	sim, err := simulator.Get()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sim.Close(); err != nil {
			t.Error(err)
		}
	})
	tpmtest.Provision(t, transport.FromReadWriter(sim), ca, 0x01C0000A, gotpm.ECCEKTemplate)
	return sim, tpm.New(func() (transport.TPMCloser, error) { return stays{transport.FromReadWriter(sim)}, nil })
}

// stays is a TPM that is not switched off when a sequence of commands ends.
type stays struct{ transport.TPM }

func (stays) Close() error { return nil }

func TestReferenceCodeKeepsTheContract(t *testing.T) {
	tpmtest.Contract(t, func(t testing.TB) tpm.Device {
		_, dev := simulated(t, attesttest.NewCA(t))
		return dev
	})
}

func TestSWTPMKeepsTheContract(t *testing.T) {
	tpmtest.Contract(t, func(t testing.TB) tpm.Device { return tpmtest.SWTPM(t).Open() })
}

// verifier trusts one root.
func verifier(t testing.TB, root *x509.Certificate) *tpm2.Verifier {
	t.Helper()
	v, err := tpm2.NewVerifier(tpm2.VerifierConfig{Roots: func() []*x509.Certificate { return []*x509.Certificate{root} }, Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func attester(t testing.TB, dev tpm.Device) *tpm2.Attester {
	t.Helper()
	a, err := tpm2.NewAttester(tpm2.Config{TPM: dev, Purpose: attest.PurposeMachine, Bank: tpm.SHA256})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestEvidenceOfEveryTPMPassesTheWholeExchange(t *testing.T) {
	ca := attesttest.NewCA(t).Intermediate(t, nil) // its certificate comes from NV
	sim, dev := simulated(t, ca)
	sw := tpmtest.SWTPM(t)
	for name, tt := range map[string]struct {
		dev    tpm.Device
		root   *x509.Certificate
		reboot func() error
	}{
		"the reference code": {dev, ca.Root(), sim.Reset},
		"swtpm":              {sw.Open(), sw.Root, func() error { sw.Restart(); return nil }},
	} {
		t.Run(name, func(t *testing.T) {
			v, a := verifier(t, tt.root), attester(t, tt.dev)
			before, err := attesttest.Claims(t.Context(), a, v, attest.PurposeMachine, attest.Binding{1})
			if err != nil {
				t.Fatal(err)
			}
			if err := tt.reboot(); err != nil {
				t.Fatal(err)
			}
			after, err := attesttest.Claims(t.Context(), a, v, attest.PurposeMachine, attest.Binding{2})
			if err != nil {
				t.Fatal(err)
			}
			if before.Machine() != after.Machine() || !bytes.Equal(before.AKName(), after.AKName()) {
				t.Error("after a reboot it is another machine")
			}
			if b, a := before.Clock(), after.Clock(); a.ResetCount != b.ResetCount+1 {
				t.Errorf("clock went from %+v to %+v over a reboot", b, a)
			}
			_, err = attesttest.Claims(t.Context(), a, verifier(t, attesttest.NewCA(t).Root()), attest.PurposeMachine, attest.Binding{3})
			if attest.ReasonOf(err) != attestv1.Reason_REASON_EK_UNTRUSTED {
				t.Errorf("another root: %v", err)
			}
		})
	}
}

// firstDigest is where the first event's digest stands in a log of one bank: behind the
// header (65 bytes), PCR, type, number of digests (4 each) and algorithm (2).
const firstDigest = 65 + 14

// TestOurEvidencePassesTheirServer passes our quote to go-tpm-tools' server package.
func TestOurEvidencePassesTheirServer(t *testing.T) {
	sim, dev := simulated(t, attesttest.NewCA(t))
	firmware := boot(t, sim)
	nonce := sha256.Sum256([]byte("nonce"))
	q, err := dev.Quote(t.Context(), nonce, tpm.SHA256)
	if err != nil {
		t.Fatal(err)
	}
	ak, err := tpm2.ParseAttestationKey(q.AKPublic)
	if err != nil {
		t.Fatal(err)
	}
	theirs := func() *attestpb.Attestation {
		pcrs := make(map[uint32][]byte)
		for i, v := range q.PCRs {
			pcrs[uint32(i)] = bytes.Clone(v)
		}
		return &attestpb.Attestation{
			AkPub: q.AKPublic,
			Quotes: []*tpmpb.Quote{{
				Quote:  bytes.Clone(q.Attest),
				RawSig: bytes.Clone(q.Signature),
				Pcrs:   &tpmpb.PCRs{Hash: tpmpb.HashAlgo_SHA256, Pcrs: pcrs},
			}},
			EventLog: bytes.Clone(firmware),
		}
	}
	opts := server.VerifyOpts{Nonce: nonce[:], TrustedAKs: []crypto.PublicKey{ak.Key}}
	state, err := server.VerifyAttestation(theirs(), opts)
	if err != nil {
		t.Fatalf("go-tpm-tools refuses our evidence: %v", err)
	}
	if state.GetSecureBoot().GetEnabled() {
		t.Error("go-tpm-tools reads another Secure Boot state from our log")
	}
	for name, change := range map[string]func(*attestpb.Attestation){
		"a changed PCR":               func(a *attestpb.Attestation) { a.GetQuotes()[0].GetPcrs().GetPcrs()[4][0] ^= 1 },
		"a changed quote":             func(a *attestpb.Attestation) { a.GetQuotes()[0].GetQuote()[60] ^= 1 },
		"a changed digest in the log": func(a *attestpb.Attestation) { a.EventLog[firstDigest] ^= 1 },
		"a changed signature":         func(a *attestpb.Attestation) { a.GetQuotes()[0].GetRawSig()[10] ^= 1 },
	} {
		a := theirs()
		change(a)
		if _, err := server.VerifyAttestation(a, opts); err == nil {
			t.Errorf("go-tpm-tools accepts %s", name)
		}
	}
	// Their own idea of the EK's public area must open for our TPM.
	ek, err := dev.EndorsementKey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(ek.Certificates[0])
	if err != nil {
		t.Fatal(err)
	}
	area, err := server.CreateEKPublicAreaFromKey(cert.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	encoded, err := area.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(encoded, ek.Public) {
		t.Errorf("their EK %x, ours %x", encoded, ek.Public)
	}
}

// boot measures what a firmware would, and returns its log.
func boot(t testing.TB, sim *simulator.Simulator) []byte {
	t.Helper()
	log, measured := attesttest.BootLog(t, attesttest.Options{}, tpm.SHA256)
	for _, m := range measured {
		tpmtest.Extend(t, transport.FromReadWriter(sim), tpm.SHA256, m.PCR, m.Digests[tpm.SHA256])
	}
	return log
}

// theirKey makes a primary key as client.NewKey does, which knows no template with a
// policy but that of an endorsement key.
func theirKey(t testing.TB, sim *simulator.Simulator, hierarchy tpmutil.Handle, template legacy.Public) *client.Key {
	t.Helper()
	handle, _, _, _, _, _, err := legacy.CreatePrimaryEx(sim, hierarchy, legacy.PCRSelection{}, "", "", template)
	if err != nil {
		t.Fatal(err)
	}
	key, err := client.LoadCachedKey(sim, handle, client.NullSession{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(key.Close)
	return key
}

// TestTheirEvidencePassesOurVerifier lets go-tpm-tools' client make the quote, with an
// attestation key of its own template and with one of ours.
func TestTheirEvidencePassesOurVerifier(t *testing.T) {
	sim, _ := simulated(t, attesttest.NewCA(t))
	boot(t, sim)
	nonce := sha256.Sum256([]byte("their nonce"))
	selection := legacy.PCRSelection{Hash: legacy.AlgSHA256}
	for i := range tpm.PCRCount {
		selection.PCRs = append(selection.PCRs, i)
	}
	ours, err := legacy.DecodePublic(gotpm.Marshal(tpm.AKTemplate(false)))
	if err != nil {
		t.Fatal(err)
	}
	oursRSA, err := legacy.DecodePublic(gotpm.Marshal(tpm.AKTemplate(true)))
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		template legacy.Public
		same     bool
	}{
		"their template, ECC": {client.AKTemplateECC(), false},
		"their template, RSA": {client.AKTemplateRSA(), false},
		"our template, ECC":   {ours, true},
		"our template, RSA":   {oursRSA, true},
	} {
		t.Run(name, func(t *testing.T) {
			key := theirKey(t, sim, legacy.HandleEndorsement, tt.template)
			quote, err := key.Quote(selection, nonce[:])
			if err != nil {
				t.Fatal(err)
			}
			public, err := key.PublicArea().Encode()
			if err != nil {
				t.Fatal(err)
			}
			sum := sha256.Sum256(public)
			ak := tpm2.AttestationKey{Key: key.PublicKey(), Name: append([]byte{0x00, 0x0B}, sum[:]...)}
			e := &attestv1.Tpm2Evidence{
				AkPublic: public, Attest: quote.GetQuote(), Signature: quote.GetRawSig(), Bank: uint32(tpm.SHA256),
			}
			for i := range uint32(tpm.PCRCount) {
				e.Pcrs = append(e.Pcrs, quote.GetPcrs().GetPcrs()[i])
			}
			if _, err := tpm2.VerifyQuote(ak, e, nonce); err != nil {
				t.Errorf("our verifier refuses their quote: %v", err)
			}
			if _, err := tpm2.VerifyQuote(ak, e, [32]byte{}); attest.ReasonOf(err) != attestv1.Reason_REASON_BINDING_MISMATCH {
				t.Errorf("another nonce: %v", err)
			}
			parsed, err := tpm2.ParseAttestationKey(public)
			if tt.same && err != nil {
				t.Errorf("their key of our template: %v", err)
			}
			if tt.same && !bytes.Equal(parsed.Name, ak.Name) {
				t.Errorf("name %x, want %x", parsed.Name, ak.Name)
			}
			if !tt.same && attest.ReasonOf(err) != attestv1.Reason_REASON_AK_TEMPLATE {
				t.Errorf("their template: %v, want AK_TEMPLATE", err)
			}
			e.Pcrs[9] = bytes.Repeat([]byte{1}, 32)
			if _, err := tpm2.VerifyQuote(ak, e, nonce); attest.ReasonOf(err) != attestv1.Reason_REASON_SIGNATURE_INVALID {
				t.Errorf("another PCR value: %v", err)
			}
		})
	}
}

func TestAKeyOfTheOwnerHierarchyIsRefused(t *testing.T) {
	sim, _ := simulated(t, attesttest.NewCA(t))
	template, err := legacy.DecodePublic(gotpm.Marshal(tpm.AKTemplate(false)))
	if err != nil {
		t.Fatal(err)
	}
	key := theirKey(t, sim, legacy.HandleOwner, template)
	public, err := key.PublicArea().Encode()
	if err != nil {
		t.Fatal(err)
	}
	ak, err := tpm2.ParseAttestationKey(public)
	if err != nil {
		t.Fatal(err)
	}
	selection := legacy.PCRSelection{Hash: legacy.AlgSHA256}
	for i := range tpm.PCRCount {
		selection.PCRs = append(selection.PCRs, i)
	}
	quote, err := key.Quote(selection, make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	e := &attestv1.Tpm2Evidence{Attest: quote.GetQuote(), Signature: quote.GetRawSig(), Bank: uint32(tpm.SHA256)}
	for i := range uint32(tpm.PCRCount) {
		e.Pcrs = append(e.Pcrs, quote.GetPcrs().GetPcrs()[i])
	}
	if _, err := tpm2.VerifyQuote(ak, e, [32]byte{}); attest.ReasonOf(err) != attestv1.Reason_REASON_AK_TEMPLATE {
		t.Errorf("%v, want AK_TEMPLATE", err)
	}
}
