package tpm2_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"strings"
	"testing"
	"time"

	gotpm "github.com/google/go-tpm/tpm2"
	"go.uber.org/goleak"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/hardwaretest"
	"github.com/muster-k8s/muster/trust/attest/tpm2/eventlog"
	"github.com/muster-k8s/muster/trust/tpm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	malformed  = attestv1.Reason_REASON_EVIDENCE_MALFORMED
	badSig     = attestv1.Reason_REASON_SIGNATURE_INVALID
	badAK      = attestv1.Reason_REASON_AK_TEMPLATE
	badBinding = attestv1.Reason_REASON_BINDING_MISMATCH
	badEK      = attestv1.Reason_REASON_EK_UNTRUSTED
	notActive  = attestv1.Reason_REASON_ACTIVATION_FAILED
	badReplay  = attestv1.Reason_REASON_EVENTLOG_REPLAY
)

// refused is one wrong machine, or one wrong message of a genuine one.
type refused struct {
	tamper attesttest.Tamper
	want   attestv1.Reason
}

func evidence(change func(*attestv1.Tpm2Evidence)) attesttest.Tamper {
	return attesttest.Tamper{Evidence: func(ev *attestv1.Evidence) { change(ev.GetTpm2()) }}
}

func attested(change func(*gotpm.TPMSAttest)) attesttest.Tamper {
	return attesttest.Tamper{Attest: change}
}

func quoted(change func(*gotpm.TPMSQuoteInfo)) attesttest.Tamper {
	return attesttest.Tamper{Attest: func(a *gotpm.TPMSAttest) {
		info, err := a.Attested.Quote()
		if err != nil {
			panic(err)
		}
		change(info)
		a.Attested = gotpm.NewTPMUAttest(gotpm.TPMSTAttestQuote, info)
	}}
}

func ak(change func(*gotpm.TPMTPublic)) attesttest.Tamper { return attesttest.Tamper{AK: change} }

func attributes(change func(*gotpm.TPMAObject)) attesttest.Tamper {
	return ak(func(p *gotpm.TPMTPublic) { change(&p.ObjectAttributes) })
}

func certificate(change func(*x509.Certificate)) attesttest.Tamper {
	return attesttest.Tamper{Certificate: change}
}

func san(der []byte, critical bool) attesttest.Tamper {
	return certificate(func(c *x509.Certificate) {
		c.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Critical: critical, Value: der}}
	})
}

// resign signs with another key than the AK.
func resign(change func([]byte) []byte) attesttest.Tamper {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	return attesttest.Tamper{Signature: func(message []byte) []byte {
		sig, err := attesttest.Sign(key, message)
		if err != nil {
			panic(err)
		}
		return change(sig)
	}}
}

func selection(s ...gotpm.TPMSPCRSelection) attesttest.Tamper {
	return quoted(func(q *gotpm.TPMSQuoteInfo) { q.PCRSelect.PCRSelections = s })
}

func sel(bank gotpm.TPMIAlgHash, bits ...byte) gotpm.TPMSPCRSelection {
	return gotpm.TPMSPCRSelection{Hash: bank, PCRSelect: bits}
}

func eccParms(change func(*gotpm.TPMSECCParms)) attesttest.Tamper {
	return ak(func(p *gotpm.TPMTPublic) {
		parms, err := p.Parameters.ECCDetail()
		if err != nil {
			panic(err)
		}
		copied := *parms
		change(&copied)
		p.Parameters = gotpm.NewTPMUPublicParms(gotpm.TPMAlgECC, &copied)
	})
}

var sha256Alg, sha384Alg, sha1Alg gotpm.TPMIAlgHash = gotpm.TPMAlgSHA256, gotpm.TPMAlgSHA384, gotpm.TPMAlgSHA1

// catalogue lists the negative tests of quotes, keys and event logs.
var catalogue = map[string]map[string]refused{
	"quote": {
		"without extraData":        {attested(func(a *gotpm.TPMSAttest) { a.ExtraData.Buffer = nil }), badBinding},
		"with other extraData":     {attested(func(a *gotpm.TPMSAttest) { a.ExtraData.Buffer = make([]byte, 32) }), badBinding},
		"with extraData cut short": {attested(func(a *gotpm.TPMSAttest) { a.ExtraData.Buffer = a.ExtraData.Buffer[:31] }), badBinding},
		"with longer extraData":    {attested(func(a *gotpm.TPMSAttest) { a.ExtraData.Buffer = append(bytes.Clone(a.ExtraData.Buffer), 0) }), badBinding},
		"with another magic":       {attested(func(a *gotpm.TPMSAttest) { a.Magic = 0xFF544348 }), malformed},
		"of another type": {attested(func(a *gotpm.TPMSAttest) {
			a.Type = gotpm.TPMSTAttestTime
			a.Attested = gotpm.NewTPMUAttest(gotpm.TPMSTAttestTime, &gotpm.TPMSTimeAttestInfo{})
		}), malformed},
		"by a key of another hierarchy":  {attested(func(a *gotpm.TPMSAttest) { a.QualifiedSigner.Buffer[5] ^= 1 }), badAK},
		"without a qualified signer":     {attested(func(a *gotpm.TPMSAttest) { a.QualifiedSigner.Buffer = nil }), badAK},
		"that selects no PCR":            {selection(sel(sha256Alg, 0, 0, 0)), malformed},
		"that masks PCR 4":               {selection(sel(sha256Alg, 0xEF, 0xFF, 0)), malformed},
		"that masks PCR 15":              {selection(sel(sha256Alg, 0xFF, 0x7F, 0)), malformed},
		"that selects PCR 16 too":        {selection(sel(sha256Alg, 0xFF, 0xFF, 1)), malformed},
		"with a selection of two bytes":  {selection(sel(sha256Alg, 0xFF, 0xFF)), malformed},
		"with a selection of four bytes": {selection(sel(sha256Alg, 0xFF, 0xFF, 0, 0)), malformed},
		"of another bank":                {selection(sel(sha384Alg, 0xFF, 0xFF, 0)), malformed},
		"of the SHA-1 bank":              {selection(sel(sha1Alg, 0xFF, 0xFF, 0)), malformed},
		"of no bank":                     {selection(), malformed},
		"of two banks":                   {selection(sel(sha256Alg, 0xFF, 0xFF, 0), sel(sha384Alg, 0xFF, 0xFF, 0)), malformed},
		"of the same bank twice":         {selection(sel(sha256Alg, 0xFF, 0xFF, 0), sel(sha256Alg, 0xFF, 0xFF, 0)), malformed},
		"of other values":                {quoted(func(q *gotpm.TPMSQuoteInfo) { q.PCRDigest.Buffer = make([]byte, 32) }), badSig},
		"without a digest":               {quoted(func(q *gotpm.TPMSQuoteInfo) { q.PCRDigest.Buffer = nil }), badSig},
		"with a longer digest":           {quoted(func(q *gotpm.TPMSQuoteInfo) { q.PCRDigest.Buffer = append(bytes.Clone(q.PCRDigest.Buffer), 0) }), badSig},
		"that is not there":              {evidence(func(e *attestv1.Tpm2Evidence) { e.Attest = nil }), badSig},
		"signed by another key":          {resign(func(b []byte) []byte { return b }), badSig},
		"changed after it was signed":    {evidence(func(e *attestv1.Tpm2Evidence) { e.Attest[50] ^= 1 }), badSig},
		"with bytes behind it":           {evidence(func(e *attestv1.Tpm2Evidence) { e.Attest = append(e.Attest, 0) }), badSig},
		"with a changed signature":       {evidence(func(e *attestv1.Tpm2Evidence) { e.Signature[10] ^= 1 }), badSig},
		"with a signature of zeros":      {evidence(func(e *attestv1.Tpm2Evidence) { clear(e.Signature[6:38]); clear(e.Signature[40:72]) }), badSig},
		"without a signature":            {evidence(func(e *attestv1.Tpm2Evidence) { e.Signature = nil }), malformed},
		"with the null scheme":           {evidence(func(e *attestv1.Tpm2Evidence) { e.Signature = []byte{0x00, 0x10, 0, 0} }), badSig},
		"with an HMAC for a signature": {evidence(func(e *attestv1.Tpm2Evidence) {
			e.Signature = append([]byte{0x00, 0x05, 0x00, 0x0B}, make([]byte, 32)...)
		}), badSig},
		"with an unknown scheme":          {evidence(func(e *attestv1.Tpm2Evidence) { e.Signature[1] = 0x77 }), badSig},
		"signed with SHA-1":               {evidence(func(e *attestv1.Tpm2Evidence) { e.Signature[3] = 0x04 }), badSig},
		"with bytes behind its signature": {evidence(func(e *attestv1.Tpm2Evidence) { e.Signature = append(e.Signature, 0) }), malformed},
		"with a signature cut short":      {evidence(func(e *attestv1.Tpm2Evidence) { e.Signature = e.Signature[:40] }), malformed},
	},
	"PCR values": {
		"of another boot":   {evidence(func(e *attestv1.Tpm2Evidence) { e.Pcrs[4] = make([]byte, 32) }), badSig},
		"in another order":  {evidence(func(e *attestv1.Tpm2Evidence) { e.Pcrs[0], e.Pcrs[4] = e.Pcrs[4], e.Pcrs[0] }), badSig},
		"fifteen of them":   {evidence(func(e *attestv1.Tpm2Evidence) { e.Pcrs = e.Pcrs[:15] }), malformed},
		"seventeen of them": {evidence(func(e *attestv1.Tpm2Evidence) { e.Pcrs = append(e.Pcrs, make([]byte, 32)) }), malformed},
		"none":              {evidence(func(e *attestv1.Tpm2Evidence) { e.Pcrs = nil }), malformed},
		"split elsewhere": {evidence(func(e *attestv1.Tpm2Evidence) {
			e.Pcrs[1] = append(bytes.Clone(e.Pcrs[1]), e.Pcrs[2][0])
			e.Pcrs[2] = e.Pcrs[2][1:]
		}), malformed},
		"one of them empty":           {evidence(func(e *attestv1.Tpm2Evidence) { e.Pcrs[3] = nil }), malformed},
		"said to be of another bank":  {evidence(func(e *attestv1.Tpm2Evidence) { e.Bank = 0x000C }), malformed},
		"of the SHA-1 bank":           {evidence(func(e *attestv1.Tpm2Evidence) { e.Bank = 0x0004 }), malformed},
		"of bank 0":                   {evidence(func(e *attestv1.Tpm2Evidence) { e.Bank = 0 }), malformed},
		"of a bank beyond 16 bits":    {evidence(func(e *attestv1.Tpm2Evidence) { e.Bank = 0x1000B }), malformed},
		"of an unsigned other bank":   {evidence(func(e *attestv1.Tpm2Evidence) { e.Bank = 0x000C; e.Pcrs = pcrsOf(48) }), malformed},
		"of an unknown bank":          {evidence(func(e *attestv1.Tpm2Evidence) { e.Bank = 0x0012 }), malformed},
		"of a bank that is signed of": {evidence(func(e *attestv1.Tpm2Evidence) { e.Pcrs = pcrsOf(32) }), badSig},
	},
	"tree": {
		"a path that leads elsewhere":  {evidence(func(e *attestv1.Tpm2Evidence) { e.Path = append(e.Path, make([]byte, 32)) }), badBinding},
		"an index without a path":      {evidence(func(e *attestv1.Tpm2Evidence) { e.LeafIndex = 1 }), malformed},
		"an index beyond the limit":    {evidence(func(e *attestv1.Tpm2Evidence) { e.LeafIndex = 1024 }), malformed},
		"the greatest index":           {evidence(func(e *attestv1.Tpm2Evidence) { e.LeafIndex = 0xFFFFFFFF }), malformed},
		"a path longer than the limit": {evidence(func(e *attestv1.Tpm2Evidence) { e.Path = pcrsOf(32)[:11] }), malformed},
		"a hash of another length":     {evidence(func(e *attestv1.Tpm2Evidence) { e.Path = [][]byte{make([]byte, 31)} }), malformed},
		"an empty hash":                {evidence(func(e *attestv1.Tpm2Evidence) { e.Path = [][]byte{nil} }), malformed},
	},
	"attestation key": {
		"that is not restricted":          {attributes(func(a *gotpm.TPMAObject) { a.Restricted = false }), badAK},
		"that may leave the TPM":          {attributes(func(a *gotpm.TPMAObject) { a.FixedTPM = false }), badAK},
		"whose parent may change":         {attributes(func(a *gotpm.TPMAObject) { a.FixedParent = false }), badAK},
		"that does not sign":              {attributes(func(a *gotpm.TPMAObject) { a.SignEncrypt = false }), badAK},
		"that decrypts too":               {attributes(func(a *gotpm.TPMAObject) { a.Decrypt = true }), badAK},
		"that was imported":               {attributes(func(a *gotpm.TPMAObject) { a.SensitiveDataOrigin = false }), badAK},
		"that needs no auth value":        {attributes(func(a *gotpm.TPMAObject) { a.UserWithAuth = false }), badAK},
		"under its policy for admins":     {attributes(func(a *gotpm.TPMAObject) { a.AdminWithPolicy = true }), badAK},
		"that can be duplicated":          {attributes(func(a *gotpm.TPMAObject) { a.EncryptedDuplication = true }), badAK},
		"that a TPM reset clears":         {attributes(func(a *gotpm.TPMAObject) { a.STClear = true }), badAK},
		"under dictionary attack defence": {attributes(func(a *gotpm.TPMAObject) { a.NoDA = false }), badAK},
		"without a policy":                {ak(func(p *gotpm.TPMTPublic) { p.AuthPolicy.Buffer = nil }), badAK},
		"of another agent":                {ak(func(p *gotpm.TPMTPublic) { p.AuthPolicy.Buffer = bytes.Repeat([]byte{1}, 32) }), badAK},
		"named with SHA-384":              {ak(func(p *gotpm.TPMTPublic) { p.NameAlg = gotpm.TPMAlgSHA384 }), badAK},
		"named with SHA-1":                {ak(func(p *gotpm.TPMTPublic) { p.NameAlg = gotpm.TPMAlgSHA1 }), badAK},
		"without a scheme":                {eccParms(func(p *gotpm.TPMSECCParms) { p.Scheme = gotpm.TPMTECCScheme{Scheme: gotpm.TPMAlgNull} }), badAK},
		"that signs with SHA-384": {eccParms(func(p *gotpm.TPMSECCParms) {
			p.Scheme.Details = gotpm.NewTPMUAsymScheme(gotpm.TPMAlgECDSA, &gotpm.TPMSSigSchemeECDSA{HashAlg: gotpm.TPMAlgSHA384})
		}), badAK},
		"on another curve":           {eccParms(func(p *gotpm.TPMSECCParms) { p.CurveID = gotpm.TPMECCNistP384 }), badAK},
		"that is a storage key":      {ak(func(p *gotpm.TPMTPublic) { u := p.Unique; *p = gotpm.ECCSRKTemplate; p.Unique = u }), badAK},
		"that is an endorsement key": {ak(func(p *gotpm.TPMTPublic) { u := p.Unique; *p = gotpm.ECCEKTemplate; p.Unique = u }), badAK},
		"that is not there":          {evidence(func(e *attestv1.Tpm2Evidence) { e.AkPublic = nil }), malformed},
		"with bytes behind it":       {evidence(func(e *attestv1.Tpm2Evidence) { e.AkPublic = append(e.AkPublic, 0) }), malformed},
		"cut short":                  {evidence(func(e *attestv1.Tpm2Evidence) { e.AkPublic = e.AkPublic[:len(e.AkPublic)-1] }), malformed},
		"beside its curve":           {evidence(func(e *attestv1.Tpm2Evidence) { e.AkPublic[len(e.AkPublic)-1] ^= 1 }), malformed},
		"with a coordinate of 33 bytes": {ak(func(p *gotpm.TPMTPublic) {
			pt, _ := p.Unique.ECC()
			p.Unique = gotpm.NewTPMUPublicID(gotpm.TPMAlgECC, &gotpm.TPMSECCPoint{X: gotpm.TPM2BECCParameter{Buffer: append([]byte{0}, pt.X.Buffer...)}, Y: pt.Y})
		}), malformed},
		"that is longer than 1 KiB":        {evidence(func(e *attestv1.Tpm2Evidence) { e.AkPublic = append(e.AkPublic, make([]byte, 1024)...) }), malformed},
		"in software, beside a real TPM":   {attesttest.Tamper{Name: append([]byte{0x00, 0x0B}, make([]byte, 32)...)}, notActive},
		"whose quote is longer than 1 KiB": {evidence(func(e *attestv1.Tpm2Evidence) { e.Attest = make([]byte, 1025) }), malformed},
		"whose signature is too":           {evidence(func(e *attestv1.Tpm2Evidence) { e.Signature = make([]byte, 1025) }), malformed},
	},
	"endorsement key certificate": {
		"that is not there":      {evidence(func(e *attestv1.Tpm2Evidence) { e.EkCertificates = nil }), malformed},
		"that is empty":          {evidence(func(e *attestv1.Tpm2Evidence) { e.EkCertificates[0] = nil }), malformed},
		"that is no certificate": {evidence(func(e *attestv1.Tpm2Evidence) { e.EkCertificates[0] = []byte{0x30, 0x03, 1, 2, 3} }), malformed},
		"with bytes behind it":   {evidence(func(e *attestv1.Tpm2Evidence) { e.EkCertificates[0] = append(e.EkCertificates[0], 0) }), malformed},
		"longer than 8 KiB":      {evidence(func(e *attestv1.Tpm2Evidence) { e.EkCertificates[0] = make([]byte, 8193) }), malformed},
		"in a chain of five": {evidence(func(e *attestv1.Tpm2Evidence) {
			for len(e.GetEkCertificates()) < 5 {
				e.EkCertificates = append(e.EkCertificates, e.GetEkCertificates()[0])
			}
		}), malformed},
		"with a changed signature": {evidence(func(e *attestv1.Tpm2Evidence) { c := e.EkCertificates[0]; c[len(c)-1] ^= 1 }), badEK},
		"that has expired": {certificate(func(c *x509.Certificate) {
			c.NotBefore = time.Now().Add(-2 * time.Hour)
			c.NotAfter = time.Now().Add(-time.Hour)
		}), badEK},
		"that is not valid yet":         {certificate(func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Hour) }), badEK},
		"without an extended key usage": {certificate(func(c *x509.Certificate) { c.UnknownExtKeyUsage = nil }), badEK},
		"for TLS servers": {certificate(func(c *x509.Certificate) {
			c.UnknownExtKeyUsage = nil
			c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
		}), badEK},
		"for any use": {certificate(func(c *x509.Certificate) {
			c.UnknownExtKeyUsage = nil
			c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageAny}
		}), badEK},
		"for attestation keys": {certificate(func(c *x509.Certificate) { c.UnknownExtKeyUsage = []asn1.ObjectIdentifier{{2, 23, 133, 8, 3}} }), badEK},
		"of an authority":      {certificate(func(c *x509.Certificate) { c.IsCA = true }), badEK},
		"with another critical extension": {certificate(func(c *x509.Certificate) {
			c.ExtraExtensions = append(c.ExtraExtensions, pkix.Extension{Id: asn1.ObjectIdentifier{1, 2, 3, 4}, Critical: true, Value: []byte{5, 0}})
		}), badEK},
		"whose name is empty":                 {san([]byte{0x30, 0x00}, true), badEK},
		"whose name lacks the version":        {san(attesttest.TPMName("id:1", "m", ""), true), badEK},
		"whose name is cut short":             {san(attesttest.TPMName("id:1", "m", "id:2")[:20], true), malformed},
		"whose name has bytes behind it":      {san(append(attesttest.TPMName("id:1", "m", "id:2"), 0), true), badEK},
		"whose name cannot be printed":        {san(attesttest.TPMName("id:1", "m\x00", "id:2"), true), badEK},
		"whose name is longer than it may be": {san(attesttest.TPMName("id:1", string(bytes.Repeat([]byte{'m'}, 65)), "id:2"), true), badEK},
	},
	"activation": {
		"with another secret's MAC": {attesttest.Tamper{MAC: func(b []byte) []byte { b[0] ^= 1; return b }}, notActive},
		"with an empty MAC":         {attesttest.Tamper{MAC: func([]byte) []byte { return nil }}, notActive},
		"with a MAC cut short":      {attesttest.Tamper{MAC: func(b []byte) []byte { return b[:31] }}, notActive},
		"with a longer MAC":         {attesttest.Tamper{MAC: func(b []byte) []byte { return append(b, 0) }}, notActive},
	},
	"event log": {
		"that is none":        {evidence(func(e *attestv1.Tpm2Evidence) { e.Events = []byte("no log") }), malformed},
		"longer than 256 KiB": {evidence(func(e *attestv1.Tpm2Evidence) { e.Events = make([]byte, 256<<10+1) }), malformed},
		"cut short":           {evidence(func(e *attestv1.Tpm2Evidence) { e.Events = e.Events[:len(e.Events)-1] }), malformed},
		"of another boot":     {evidence(func(e *attestv1.Tpm2Evidence) { e.Events = otherLog }), badReplay},
	},
}

func pcrsOf(size int) [][]byte {
	out := make([][]byte, 16)
	for i := range out {
		out[i] = make([]byte, size)
	}
	return out
}

var otherLog []byte

func TestEvidenceThatIsRefused(t *testing.T) {
	raw, _ := attesttest.BootLog(t, attesttest.Options{Image: "another image"}, tpm.SHA256, tpm.SHA384, tpm.SHA512)
	log, err := eventlog.Parse(raw, tpm.SHA256)
	if err != nil {
		t.Fatal(err)
	}
	if otherLog, err = log.Marshal(); err != nil {
		t.Fatal(err)
	}
	ca := attesttest.NewCA(t)
	verifier := attesttest.Verifier(t, ca)
	table := map[string]map[string]refused{}
	for part, cases := range catalogue {
		platform := "TPM"
		if part == "endorsement key certificate" || part == "activation" {
			platform = "EK certificate"
		}
		if table[platform] == nil {
			table[platform] = map[string]refused{}
		}
		for name, tt := range cases {
			table[platform][strings.TrimPrefix(part, "endorsement key ")+" "+name] = tt
		}
	}
	judge := func(t testing.TB, tt refused) error {
		m := attesttest.NewMachine(t, ca, attesttest.Options{Tamper: tt.tamper})
		b := attest.Binding(sha256.Sum256([]byte(t.Name())))
		c, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeMachine), verifier, attest.PurposeMachine, b)
		if err != nil && c.Machine() != (attest.MachineID{}) {
			t.Error("refused evidence left claims behind (A2)")
		}
		return err
	}
	captured := map[string][]hardwaretest.Vector{"TPM": capturedQuotes(t), "EK certificate": capturedEKs(t)}
	for platform, cases := range table {
		hardwaretest.Refused(t, platform, append(vectors(cases, func(c refused) attestv1.Reason { return c.want }, judge, func(refused) refused { return refused{} }), captured[platform]...))
	}
}

// TestTheSameMachineUntampered shows that each case of the catalogue is refused only because of its
// change.
func TestTheSameMachineUntampered(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	c, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeMachine), attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{1})
	if err != nil {
		t.Fatal(err)
	}
	if c.Machine() != m.ID() || len(c.Events()) == 0 || c.Root() == nil || !c.Root().Equal(ca.Root()) {
		t.Errorf("claims of machine %s with %d events", c.Machine(), len(c.Events()))
	}
	for i, v := range m.PCRs() {
		if !bytes.Equal(c.PCR(i), v) {
			t.Errorf("PCR %d is %x, want %x", i, c.PCR(i), v)
		}
	}
}
