package tpm2_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/asn1"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"slices"
	"strconv"
	"testing"
	"time"

	gotpm "github.com/google/go-tpm/tpm2"
	"google.golang.org/protobuf/encoding/protowire"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/hardwaretest"
	"github.com/muster-k8s/muster/trust/attest/hcl"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/attest/tpm2/eventlog"
	"github.com/muster-k8s/muster/trust/internal/endorsement"
	"github.com/muster-k8s/muster/trust/internal/endorsement/nitrotpm"
	"github.com/muster-k8s/muster/trust/internal/endorsement/platformak"
	"github.com/muster-k8s/muster/trust/tpm"
)

// quoteOf is a captured quote and the key that should have signed it.
type quoteOf struct {
	key                crypto.PublicKey
	message, signature []byte // TPMS_ATTEST and TPMT_SIGNATURE
	nonce              []byte
	values             []byte // of the selected PCRs; nil: not captured
}

func (q quoteOf) signed() error { return tpm2.ParseSignature(q.key, q.message, q.signature) }

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// rawRSA returns the TPMT_SIGNATURE of an RSASSA signature with SHA-256 that was captured without its header.
func rawRSA(b []byte) []byte { return append([]byte{0x00, 0x14, 0x00, 0x0B, 0x01, 0x00}, b...) }

// fromDER returns the TPMT_SIGNATURE of an ECDSA signature with SHA-256.
func fromDER(t testing.TB, der []byte) []byte {
	t.Helper()
	var s struct{ R, S *big.Int }
	if _, err := asn1.Unmarshal(der, &s); err != nil {
		t.Fatal(err)
	}
	out := []byte{0x00, 0x18, 0x00, 0x0B}
	for _, n := range []*big.Int{s.R, s.S} {
		out = append(append(out, 0, 32), n.FillBytes(make([]byte, 32))...)
	}
	return out
}

// cos85 returns the quotes of a virtual machine of Google of 2021, of the banks SHA-1, SHA-256 and SHA-384.
func cos85(t testing.TB) (all []quoteOf) {
	t.Helper()
	const dir = "gcp/shielded-cos85/"
	var pcrs map[string]map[string]string
	if err := json.Unmarshal(file(t, dir+"pcrs.json"), &pcrs); err != nil {
		t.Fatal(err)
	}
	for _, bank := range []string{"sha1", "sha256", "sha384"} {
		q := quoteOf{parsed(t, dir+"ak-cert.der")[0].PublicKey, file(t, dir+"quote-"+bank+".msg"), file(t, dir+"quote-"+bank+".sig"), []byte{0x90, 0x09}, nil}
		for i := range 24 {
			q.values = append(q.values, unhex(t, pcrs[bank][strconv.Itoa(i)])...)
		}
		all = append(all, q)
	}
	return all
}

// noNonce returns the quotes of an attestation of go-tpm-tools: field 2 of the message, with the fields quote = 1 and raw_sig = 2.
func noNonce(t testing.TB) (all []quoteOf) {
	t.Helper()
	fields := func(b []byte) (out map[protowire.Number][][]byte) {
		out = map[protowire.Number][][]byte{}
		for len(b) > 0 {
			number, kind, n := protowire.ConsumeTag(b)
			if n < 0 {
				t.Fatal("no message")
			}
			b = b[n:]
			size := protowire.ConsumeFieldValue(number, kind, b)
			if kind == protowire.BytesType {
				v, _ := protowire.ConsumeBytes(b)
				out[number] = append(out[number], v)
			}
			b = b[size:]
		}
		return out
	}
	for _, raw := range fields(file(t, "gcp/shielded-cos85/gce-cos-85-no-nonce.pb"))[2] {
		q := fields(raw)
		all = append(all, quoteOf{parsed(t, "gcp/shielded-cos85/ak-cert.der")[0].PublicKey, q[1][0], q[2][0], nil, nil})
	}
	return all
}

// vaportpm returns the quote in a file of that project, and the certificates of its key.
func vaportpm(t testing.TB, name, bank string) (quoteOf, [][]byte) {
	t.Helper()
	var doc struct {
		Nonce string
		PCRs  map[string]map[string]string
		Keys  struct {
			ECC struct{ X, Y string } `json:"ecc_p256"`
		} `json:"ak_pubkeys"`
		Attestation struct {
			TPM struct {
				ECC struct {
					Data      string `json:"attest_data"`
					Signature string
				} `json:"ecc_p256"`
			}
			GCP struct {
				Chain string `json:"ak_cert_chain"`
			}
		}
	}
	if err := json.Unmarshal(file(t, name), &doc); err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.ParseUncompressedPublicKey(elliptic.P256(), slices.Concat([]byte{4}, unhex(t, doc.Keys.ECC.X), unhex(t, doc.Keys.ECC.Y)))
	if err != nil {
		t.Fatal(err)
	}
	ecc := doc.Attestation.TPM.ECC
	q := quoteOf{key, unhex(t, ecc.Data), fromDER(t, unhex(t, ecc.Signature)), unhex(t, doc.Nonce), nil}
	for i := range 24 {
		q.values = append(q.values, unhex(t, doc.PCRs[bank][strconv.Itoa(i)])...)
	}
	var chain [][]byte
	for block, rest := pem.Decode([]byte(doc.Attestation.GCP.Chain)); block != nil; block, rest = pem.Decode(rest) {
		chain = append(chain, block.Bytes)
	}
	return q, chain
}

// trustedLaunch returns the quote of a virtual machine of Azure by the key that has signed it.
func trustedLaunch(t testing.TB, certified bool) quoteOf {
	t.Helper()
	const other = "azure/trustedlaunch-uncertified-ak/"
	if certified {
		const dir = "azure/trustedlaunch-certified-ak/"
		return quoteOf{azureChain(t, "azure-trustedlaunch")[0].PublicKey, file(t, dir+"quote.msg"), file(t, dir+"quote.sig"), unhex(t, string(bytes.TrimSpace(file(t, dir+"nonce.hex")))), nil}
	}
	block, _ := pem.Decode(file(t, other+"ak.pem"))
	key, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	q := quoteOf{key, file(t, other+"quote.msg"), rawRSA(file(t, other+"quote.sig")), unhex(t, string(bytes.TrimSpace(file(t, other+"nonce.hex")))), nil}
	for digests := file(t, other+"pcrs.bin")[140:]; len(q.values) < 8*32; digests = digests[66:] {
		q.values = append(q.values, digests[2:34]...)
	}
	return q
}

// confidential returns the quote of a confidential virtual machine of Azure, and the public area of its key: the name of the key with
// these attributes, in the hierarchy of endorsement, is in the quote.
func confidential(t testing.TB, name string) (q quoteOf, public []byte) {
	t.Helper()
	dir := "../../../hardware/testdata/azure/" + name + "/"
	var key *rsa.PublicKey
	if name == "tdx-2026-full" {
		q.message, q.signature = file(t, dir+"tpm-quote.msg"), file(t, dir+"tpm-quote.sig")
		key = parsed(t, dir+"ak-cert.der")[0].PublicKey.(*rsa.PublicKey)
	} else {
		var doc struct {
			Evidence struct {
				Report string                              `json:"hcl_report"`
				Quote  struct{ Message, Signature string } `json:"tpm_quote"`
			}
		}
		if err := json.Unmarshal(file(t, dir+"evidence.json"), &doc); err != nil {
			t.Fatal(err)
		}
		q.message, q.signature = unhex(t, doc.Evidence.Quote.Message), rawRSA(unhex(t, doc.Evidence.Quote.Signature))
		b, err := base64.RawURLEncoding.DecodeString(doc.Evidence.Report)
		if err != nil {
			t.Fatal(err)
		}
		_, _, runtime, err := hcl.Split(b)
		if err != nil {
			t.Fatal(err)
		}
		var text struct{ Keys []struct{ KID, N string } }
		if err := json.Unmarshal(runtime, &text); err != nil || text.Keys[0].KID != "HCLAkPub" {
			t.Fatalf("%+v, %v", text, err)
		}
		n, err := base64.RawURLEncoding.DecodeString(text.Keys[0].N)
		if err != nil {
			t.Fatal(err)
		}
		key = &rsa.PublicKey{N: new(big.Int).SetBytes(n), E: 65537}
	}
	q.key = key
	area := tpm.AKTemplate(true)
	area.AuthPolicy.Buffer = nil
	area.ObjectAttributes = gotpm.TPMAObject{FixedTPM: true, FixedParent: true, SensitiveDataOrigin: true, UserWithAuth: true, NoDA: true, Restricted: true, SignEncrypt: true}
	area.Unique = gotpm.NewTPMUPublicID(gotpm.TPMAlgRSA, &gotpm.TPM2BPublicKeyRSA{Buffer: key.N.Bytes()})
	return q, gotpm.Marshal(area)
}

// azureChain returns certificates that package platformak has captured.
func azureChain(t testing.TB, name string) []*x509.Certificate {
	return parsed(t, "../../../../internal/endorsement/platformak/testdata/"+name+".pem")
}

func simulated(t testing.TB, kind string) quoteOf {
	t.Helper()
	const dir = "tpm-quotes-simulator/"
	root, ak := parsed(t, dir+kind+"-root.pem"), parsed(t, dir+kind+"-ak-chain.pem")
	if _, err := (endorsement.Chain{What: "certificate"}).Path(ak[:1], root, y2026); err != nil {
		t.Fatal(err)
	}
	return quoteOf{ak[0].PublicKey, file(t, dir+kind+"-attest.bin"), file(t, dir+kind+"-tpmt-signature.bin"), unhex(t, string(bytes.TrimSpace(file(t, dir+"nonce.hex")))), nil}
}

func TestCapturedQuotesAreSigned(t *testing.T) {
	snp, _ := vaportpm(t, "gcp/snp-vtpm/evidence.json", "sha256")
	tdx, _ := vaportpm(t, "gcp/tdx-vtpm/evidence.json", "sha256")
	aws, _ := vaportpm(t, "aws/nitrotpm/evidence.json", "sha384")
	all := map[string]quoteOf{
		"GCP, SEV-SNP": snp, "GCP, TDX": tdx, "AWS NitroTPM": aws,
		"Azure Trusted Launch": trustedLaunch(t, true), "Azure Trusted Launch, by a key without a certificate": trustedLaunch(t, false),
		"simulator, RSASSA with SHA-256": simulated(t, "rsassa-sha256"),
	}
	for i, q := range append(cos85(t), noNonce(t)...) {
		all["GCP of 2021, "+strconv.Itoa(i)] = q
	}
	if len(all) != 12 {
		t.Errorf("%d quotes", len(all))
	}
	for name, q := range all {
		t.Run(name, func(t *testing.T) {
			if err := q.signed(); err != nil {
				t.Fatal(err)
			}
			a, err := gotpm.Unmarshal[gotpm.TPMSAttest](q.message)
			if err != nil {
				t.Fatal(err)
			}
			info, err := a.Attested.Quote()
			if err != nil || !bytes.Equal(a.ExtraData.Buffer, q.nonce) {
				t.Fatalf("nonce %x, %v", a.ExtraData.Buffer, err)
			}
			// The digest's hash is that of the signature for every bank, as VerifyQuote computes it.
			if sum := sha256.Sum256(q.values); q.values != nil && !bytes.Equal(sum[:], info.PCRDigest.Buffer) {
				t.Errorf("its values lead to %x, signed is %x", sum, info.PCRDigest.Buffer)
			}
			changed := q
			changed.message = bytes.Clone(q.message)
			changed.message[len(q.message)-1] ^= 1
			if err := changed.signed(); attest.ReasonOf(err) != badSig {
				t.Errorf("with a changed digest: %v", err)
			}
		})
	}
}

// The log of the machine of 2021 leads to what it quoted. PCR 10 is that of its running system, and PCR 17 to 22 start with ones.
func TestACapturedLogLeadsToTheQuotedValues(t *testing.T) {
	for i, bank := range []tpm.Bank{tpm.SHA256, tpm.SHA384} {
		log, err := eventlog.Parse(file(t, "gcp/shielded-cos85/eventlog.bin"), bank)
		if err != nil {
			t.Fatal(err)
		}
		values := cos85(t)[i+1].values
		for pcr, v := range log.PCRs() {
			quoted := values[pcr*bank.Size():][:bank.Size()]
			if v == nil {
				v = make([]byte, bank.Size())
			}
			if pcr != 10 && !bytes.Equal(v, quoted) {
				t.Errorf("%s, PCR %d: %x, quoted is %x", bank, pcr, v, quoted)
			}
		}
	}
}

// capturedQuotes are quotes and keys that are refused as evidence. Their machines are not Muster's, so no input can be corrected:
// what is accepted is a quote of another machine without the named thing.
func capturedQuotes(testing.TB) (all []hardwaretest.Vector) {
	add := func(name string, want attestv1.Reason, wrong, right func(testing.TB) error) {
		all = append(all, hardwaretest.Vector{Name: "captured " + name, Want: want, Wrong: wrong, Right: right})
	}
	rsassa := func(t testing.TB) error { return simulated(t, "rsassa-sha256").signed() }
	for name, kind := range map[string]string{"rsassa-sha384": "RSASSA with SHA-384", "rsapss-sha256": "RSAPSS", "ecdsa-sha384": "ECDSA with SHA-384"} {
		add("tpm-quotes-simulator, "+name+": signed by "+kind, badSig, func(t testing.TB) error { return simulated(t, name).signed() }, rsassa)
	}
	slices.SortFunc(all, func(a, b hardwaretest.Vector) int { return bytes.Compare([]byte(a.Name), []byte(b.Name)) })
	var windows struct {
		AK    struct{ Public []byte }
		Quote struct{ Quote, Signature string }
	}
	read := func(t testing.TB) (q quoteOf) {
		if err := json.Unmarshal(file(t, "eventlogs/windows_gcp_shielded_vm.json"), &windows); err != nil {
			t.Fatal(err)
		}
		public, err := gotpm.Unmarshal[gotpm.TPMTPublic](windows.AK.Public)
		if err == nil {
			q.key, err = gotpm.Pub(*public)
		}
		if err == nil {
			q.message, err = base64.StdEncoding.DecodeString(windows.Quote.Quote)
		}
		if err == nil {
			q.signature, err = base64.StdEncoding.DecodeString(windows.Quote.Signature)
		}
		if err != nil {
			t.Fatal(err)
		}
		return q
	}
	add("windows_gcp_shielded_vm: signed with SHA-1", badSig, func(t testing.TB) error { return read(t).signed() }, rsassa)

	parse := func(b []byte) error { _, err := tpm2.ParseAttestationKey(b); return err }
	ours := func(t testing.TB) error {
		return parse(attestOf(t, attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{}), attest.Binding{1}).GetAkPublic())
	}
	add("windows_gcp_shielded_vm: an attestation key that is not Muster's", badAK, func(t testing.TB) error { read(t); return parse(windows.AK.Public) }, ours)
	add("shielded-cos85: an attestation key that is not Muster's", badAK, func(t testing.TB) error { return parse(file(t, "gcp/shielded-cos85/ak-pub.tpmt")) }, ours)

	quote := func(t testing.TB, q quoteOf, public []byte) error {
		name := sha256.Sum256(public)
		_, err := tpm2.VerifyQuote(tpm2.AttestationKey{Key: q.key, Name: append([]byte{0x00, 0x0B}, name[:]...)}, &attestv1.Tpm2Evidence{Attest: q.message, Signature: q.signature, Bank: uint32(tpm.SHA256)}, [32]byte{0x90, 0x09})
		return err
	}
	google := func(t testing.TB) []byte { return file(t, "gcp/shielded-cos85/ak-pub.tpmt") }
	add("shielded-cos85: a nonce of two bytes", badBinding, func(t testing.TB) error { return quote(t, cos85(t)[1], google(t)) }, func(t testing.TB) error { return cos85(t)[1].signed() })
	add("gce-cos-85-no-nonce: an empty nonce", badBinding, func(t testing.TB) error { return quote(t, noNonce(t)[1], google(t)) }, func(t testing.TB) error { return noNonce(t)[1].signed() })
	for _, v := range [][2]string{{"snp-milan-rv3-nononce", "an empty nonce"}, {"tdx-2026-full", "a nonce of zeros"}} {
		add("azure/"+v[0]+": "+v[1], badBinding, func(t testing.TB) error { q, public := confidential(t, v[0]); return quote(t, q, public) }, func(t testing.TB) error { q, _ := confidential(t, v[0]); return q.signed() })
	}
	return all
}

// capturedDocuments are documents by AWS's authorities that endorse no machine of Muster. Enclaves have certificates of the same
// authorities, so nothing else would refuse their documents.
func capturedDocuments(ours func(testing.TB) error) (all []hardwaretest.Vector) {
	const dir = "../../../../internal/endorsement/nitrotpm/testdata/"
	for _, v := range []struct {
		name, file string
		now        time.Time
		want       attestv1.Reason
	}{
		{"enclave: a Nitro Enclave's", "enclave.cbor", time.Date(2025, 12, 25, 13, 15, 37, 0, time.UTC), badEK},
		{"enclave-debug: a debugged Nitro Enclave's", "enclave-debug.cbor", time.Date(2025, 12, 25, 8, 20, 46, 0, time.UTC), badEK},
		{"nitrotpm: another program's, without user data", "nitrotpm.cbor", time.Date(2026, 2, 3, 10, 12, 2, 0, time.UTC), badBinding},
	} {
		all = append(all, hardwaretest.Vector{Name: "captured " + v.name, Want: v.want, Right: ours, Wrong: func(t testing.TB) error {
			q, _ := vaportpm(t, "aws/nitrotpm/evidence.json", "sha384")
			e := &attestv1.Tpm2Evidence{NitroDocument: file(t, dir+v.file), Bank: uint32(tpm.SHA384)}
			for value := range slices.Chunk(q.values[:tpm.PCRCount*tpm.SHA384.Size()], tpm.SHA384.Size()) {
				e.Pcrs = append(e.Pcrs, value)
			}
			_, err := nitrotpm.Endorsement{}.Verify(endorsement.Input{Evidence: e, AK: q.key, Signed: [32]byte(q.nonce), Roots: parsed(t, dir+"root-g1.pem"), Now: v.now})
			return err
		}})
	}
	return all
}

// capturedPlatformKeys are what the keys of clouds have signed in place of TPM2_Certify, and a certificate of another key.
func capturedPlatformKeys(of string) (all []hardwaretest.Vector) {
	add := func(name string, want attestv1.Reason, q func(testing.TB) (quoteOf, [][]byte)) {
		all = append(all, hardwaretest.Vector{
			Name: "captured " + name, Want: want,
			Wrong: func(t testing.TB) error {
				quote, chain := q(t)
				_, err := platformak.Endorsement{}.Verify(endorsement.Input{
					Evidence: &attestv1.Tpm2Evidence{PlatformKey: &attestv1.PlatformKey{Certificates: chain, Attest: quote.message, Signature: quote.signature}},
					Roots:    []*x509.Certificate{}, Now: y2026,
				})
				return err
			},
			Right: func(t testing.TB) error { quote, _ := q(t); return quote.signed() },
		})
	}
	const instead = ": a quote in place of what certifies the AK"
	if of == "GCP" {
		for _, name := range []string{"snp-vtpm", "tdx-vtpm"} {
			add(name+instead, malformed, func(t testing.TB) (quoteOf, [][]byte) { return vaportpm(t, "gcp/"+name+"/evidence.json", "sha256") })
		}
		for i, bank := range []string{"SHA-1", "SHA-256", "SHA-384"} {
			certificate := func(t testing.TB) [][]byte { return ders(t, "gcp/shielded-cos85/ak-cert.der") }
			add("shielded-cos85, "+bank+instead, malformed, func(t testing.TB) (quoteOf, [][]byte) { return cos85(t)[i], certificate(t) })
			add("gce-cos-85-no-nonce, "+bank+instead, malformed, func(t testing.TB) (quoteOf, [][]byte) { return noNonce(t)[i], certificate(t) })
		}
		return all
	}
	chain := func(t testing.TB, name string) [][]byte { return [][]byte{azureChain(t, name)[0].Raw} }
	add("trustedlaunch-certified-ak"+instead, malformed, func(t testing.TB) (quoteOf, [][]byte) { return trustedLaunch(t, true), chain(t, "azure-trustedlaunch") })
	add("trustedlaunch-uncertified-ak: a certificate of another key than the quote's", badSig, func(t testing.TB) (quoteOf, [][]byte) {
		return trustedLaunch(t, false), chain(t, "azure-trustedlaunch-03")
	})
	return all
}
