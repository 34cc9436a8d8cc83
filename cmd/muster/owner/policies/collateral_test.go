package policies_test

import (
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/hardwaretest"
	"github.com/muster-k8s/muster/trust/attest/tdx"
)

var june = time.Date(2025, 6, 20, 0, 0, 0, 0, time.UTC)

const captured = "../../../../trust/attest/hardware/testdata/tdx/v4-uptodate-2025/"

type answer struct{ body, header, chain string }

// answers are those of Intel's Provisioning Certification Service, with data of June 2025.
func answers(t *testing.T) map[string]answer {
	t.Helper()
	read := func(name string) []byte {
		b, err := os.ReadFile(captured + name)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	var all map[string]string
	if err := json.Unmarshal(read("collateral.json"), &all); err != nil {
		t.Fatal(err)
	}
	der := func(name string) answer {
		b, err := hex.DecodeString(all[name])
		if err != nil {
			t.Fatal(err)
		}
		return answer{body: string(b)}
	}
	signed := func(name, as, header string) answer {
		return answer{`{"` + as + `":` + all[name] + `,"signature":"` + all[name+"_signature"] + `"}`, header, all[name+"_issuer_chain"]}
	}
	return map[string]answer{
		tcbInfo:      signed("tcb_info", "tcbInfo", "TCB-Info-Issuer-Chain"),
		qeIdentity:   signed("qe_identity", "enclaveIdentity", "SGX-Enclave-Identity-Issuer-Chain"),
		platformCRL:  der("pck_crl"),
		processorCRL: {body: string(read("pck_crl_processor.der"))},
		rootCRL:      der("root_ca_crl"),
	}
}

// The paths of Intel's answers.
const (
	tcbInfo      = "/tdx/certification/v4/tcb?fmspc=b0c06f000000"
	qeIdentity   = "/tdx/certification/v4/qe/identity"
	platformCRL  = "/sgx/certification/v4/pckcrl?ca=platform&encoding=der"
	processorCRL = "/sgx/certification/v4/pckcrl?ca=processor&encoding=der"
	rootCRL      = "/IntelSGXRootCA.der"
)

// vendor answers as Intel's service does. The answers at the paths of wrong are others.
func vendor(t *testing.T, wrong map[string]http.HandlerFunc) *httptest.Server {
	t.Helper()
	answers := answers(t)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f := wrong[r.URL.RequestURI()]; f != nil {
			f(w, r)
			return
		}
		a, ok := answers[r.URL.RequestURI()]
		if !ok {
			http.NotFound(w, r)
			return
		}
		if a.header != "" {
			w.Header().Set(a.header, url.PathEscape(a.chain))
		}
		_, _ = io.WriteString(w, a.body)
	}))
	t.Cleanup(func() { s.Close(); http.DefaultClient.CloseIdleConnections() })
	return s
}

func source(s *httptest.Server) policies.CollateralSource {
	return policies.CollateralSource{AMD: s.URL, Intel: s.URL, IntelRoot: s.URL + rootCRL, FMSPCs: []string{"b0c06f000000"}}
}

func TestCollateralIsFetchedAndChecked(t *testing.T) {
	s := vendor(t, nil)
	c, ends, err := policies.FetchCollateral(t.Context(), source(s), june)
	if err != nil || len(ends) != 5 {
		t.Fatalf("%v, %v", ends, err)
	}
	text, err := protojson.MarshalOptions{Multiline: true}.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	if _, again, err := policies.ReadCollateral(text, june); err != nil || len(again) != 5 {
		t.Errorf("from its file: %v, %v", again, err)
	}
	if _, _, err := policies.ReadCollateral(text, june.Add(60*24*time.Hour)); err == nil || !strings.Contains(err.Error(), "HARDWARE_COLLATERAL") {
		t.Errorf("two months later: %v", err)
	}
	if _, _, err := policies.ReadCollateral([]byte(strings.Replace(string(text), "tcbInfos", "tcbInfo", 1)), june); err == nil {
		t.Error("an unknown field was accepted")
	}
}

// TestCollateralThatIsNotTheVendorsIsNotFetched: each answer is repeated as it should be, and then accepted.
func TestCollateralThatIsNotTheVendorsIsNotFetched(t *testing.T) {
	text := func(s string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(s)) }
	}
	own := hardwaretest.NewIntel(t).NewPlatform(t, func(c *x509.Certificate) { c.RawSubject = tdx.PCKAuthorities()[0].RawSubject })
	for name, tt := range map[string]struct {
		path  string
		wrong http.HandlerFunc
		want  string
	}{
		"a refusal":                                 {tcbInfo, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "", http.StatusTooManyRequests) }, "429"},
		"no certificates":                           {tcbInfo, text("{}"), "no certificates in the header"},
		"an answer without an end":                  {qeIdentity, text(strings.Repeat(" ", 128<<10+1)), "131072"},
		"an empty answer":                           {rootCRL, text(""), "0 bytes"},
		"a list that is none":                       {rootCRL, text("list"), "from Intel: revocation list 0"},
		"the platforms' list as that of processors": {processorCRL, text(answers(t)[platformCRL].body), "Processor CA,O=Intel Corporation,L=Santa Clara,ST=CA,C=US\" is missing"},
		"a list by another with the authority's name": {platformCRL, text(string(own.CRL(t, func(l *x509.RevocationList) {
			l.ThisUpdate, l.NextUpdate = june, time.Date(2099, 1, 1, 0, 0, 0, 0, time.UTC)
		}))), "not signed"},
		"an identity that Intel has not signed": {qeIdentity, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("SGX-Enclave-Identity-Issuer-Chain", url.PathEscape("-----BEGIN CERTIFICATE-----"))
			_, _ = w.Write([]byte(`{"enclaveIdentity":{},"signature":"00"}`))
		}, "enclaveIdentity"},
	} {
		if _, _, err := policies.FetchCollateral(t.Context(), source(vendor(t, map[string]http.HandlerFunc{tt.path: tt.wrong})), june); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want an error about %q", name, err, tt.want)
		}
	}
	// A mirror answers for another model than the requested one.
	info := answers(t)[tcbInfo]
	other := source(vendor(t, map[string]http.HandlerFunc{strings.Replace(tcbInfo, "b0c06f", "90c06f", 1): func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set(info.header, url.PathEscape(info.chain))
		_, _ = io.WriteString(w, info.body)
	}}))
	other.FMSPCs = append(other.FMSPCs, "90c06f000000")
	if _, _, err := policies.FetchCollateral(t.Context(), other, june); attest.ReasonOf(err) != attestv1.Reason_REASON_HARDWARE_COLLATERAL || !strings.Contains(err.Error(), "90c06f000000") {
		t.Errorf("TCB info of another model: %v", err)
	}
	s := vendor(t, nil)
	for name, change := range map[string]func(*policies.CollateralSource){
		"a product that is a path":   func(c *policies.CollateralSource) { c.Products = []string{"../Milan"} },
		"a model that is a query":    func(c *policies.CollateralSource) { c.FMSPCs = []string{"b0c06f000000&x"} },
		"nothing":                    func(c *policies.CollateralSource) { c.FMSPCs = nil },
		"a product without a list":   func(c *policies.CollateralSource) { c.Products = []string{"Milan"} },
		"a model that has no answer": func(c *policies.CollateralSource) { c.FMSPCs = []string{"000000000000"} },
	} {
		c := source(s)
		change(&c)
		if _, _, err := policies.FetchCollateral(t.Context(), c, june); err == nil {
			t.Errorf("%s was fetched", name)
		}
	}
	if _, _, err := policies.FetchCollateral(t.Context(), source(s), june); err != nil {
		t.Errorf("repaired: %v", err)
	}
}

// TestBothListsOfAMDAreFetched: one root signs that of VCEKs' issuers and that of VLEKs'. No list of AMD was captured, so these
// are Intel's, and the check of what was fetched refuses them.
func TestBothListsOfAMDAreFetched(t *testing.T) {
	list := answers(t)[rootCRL].body
	for _, missing := range []string{"vcek", "vlek", ""} {
		others := map[string]http.HandlerFunc{}
		for _, key := range []string{"vcek", "vlek"} {
			others["/"+key+"/v1/Milan/crl"] = func(w http.ResponseWriter, r *http.Request) {
				if key == missing {
					http.NotFound(w, r)
					return
				}
				_, _ = io.WriteString(w, list)
			}
		}
		s := source(vendor(t, others))
		s.Products = []string{"Milan"}
		want := "/" + missing + "/v1/Milan/crl: 404"
		if missing == "" {
			want = "0 are of its root"
		}
		if _, _, err := policies.FetchCollateral(t.Context(), s, june); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("without the list of %q: %v, want an error about %q", missing, err, want)
		}
	}
}

// TestCollateralThatIsWorseThanThePolicysIsNotApplied: a mirror repeats what is still valid, or has one vendor's data only.
func TestCollateralThatIsWorseThanThePolicysIsNotApplied(t *testing.T) {
	c, _, err := policies.FetchCollateral(t.Context(), source(vendor(t, nil)), june)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("../../../../internal/policyfile/testdata/policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	text = append(text, "hardware:\n  tdx: {statuses: [UpToDate], modules: [{major: 1, svn: 5}], anyMrtd: true}\n"...)
	policy, why, err := policies.WithCollateral(text, 2, c, false)
	if err != nil || len(why) != 0 {
		t.Fatalf("the first: %q, %v", why, err)
	}
	rules := func(change func(*attestv1.Collateral)) *attestv1.Collateral {
		next := proto.CloneOf(c)
		change(next)
		return next
	}
	for name, tt := range map[string]struct {
		next *attestv1.Collateral
		want string
	}{
		"AMD's alone":      {&attestv1.Collateral{AmdCrls: c.GetIntelCrls()[:1]}, "no TCB data of Intel: fetch with --fmspc"},
		"an older list":    {rules(func(c *attestv1.Collateral) { c.IntelCrls[1] = olderCRL(t) }), "PCK Platform CA is of 2023-06-08"},
		"without identity": {rules(func(c *attestv1.Collateral) { c.QeIdentity = nil }), "no TCB data"},
	} {
		if got, _, err := policies.WithCollateral(policy, 3, tt.next, false); err == nil || got != nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "--allow-worse") {
			t.Errorf("%s: %v, want an error about %q", name, err, tt.want)
		}
		if got, why, err := policies.WithCollateral(policy, 3, tt.next, true); err != nil || len(got) == 0 || len(why) != 1 || !strings.Contains(why[0], tt.want) {
			t.Errorf("%s, allowed: %q, %v", name, why, err)
		}
	}
	if got, why, err := policies.WithCollateral(policy, 3, c, false); err != nil || len(got) == 0 || len(why) != 0 {
		t.Errorf("the same again: %q, %v", why, err)
	}
}

// olderCRL is the list of the platforms' authority of 2023.
func olderCRL(t *testing.T) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(captured, "..", "v4-spr-2023", "pckcrl.der"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}
