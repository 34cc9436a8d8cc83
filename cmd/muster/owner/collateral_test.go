package owner_test

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/muster-k8s/muster/cmd/muster/owner"
)

var march = time.Date(2026, 3, 20, 0, 0, 0, 0, time.UTC)

// vendor answers as Intel's Provisioning Certification Service does, with data of March 2026.
func vendor(t *testing.T, wrong map[string]http.HandlerFunc) *httptest.Server {
	t.Helper()
	file := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join("..", "..", "..", "trust", "attest", "hardware", "testdata", "tdx", "collateral-2026-03", name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	answers := map[string]struct{ body, header, chain string }{
		"/tdx/certification/v4/tcb?fmspc=90c06f000000":           {"tcb_info_90c06f000000.json", "TCB-Info-Issuer-Chain", "tcb_signing_chain.pem"},
		"/tdx/certification/v4/qe/identity":                      {"td_qe_identity.json", "SGX-Enclave-Identity-Issuer-Chain", "qe_identity_signing_chain.pem"},
		"/sgx/certification/v4/pckcrl?ca=platform&encoding=der":  {body: "pck_crl_platform.der"},
		"/sgx/certification/v4/pckcrl?ca=processor&encoding=der": {body: "pck_crl_platform.der"},
		"/IntelSGXRootCA.der":                                    {body: "root_ca_crl.der"},
	}
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
			w.Header().Set(a.header, url.PathEscape(string(file(a.chain))))
		}
		_, _ = w.Write(file(a.body))
	}))
	t.Cleanup(func() { s.Close(); http.DefaultClient.CloseIdleConnections() })
	return s
}

func source(s *httptest.Server) owner.CollateralSource {
	return owner.CollateralSource{AMD: s.URL, Intel: s.URL, IntelRoot: s.URL + "/IntelSGXRootCA.der", FMSPCs: []string{"90c06f000000"}}
}

func TestCollateralIsFetchedAndChecked(t *testing.T) {
	s := vendor(t, nil)
	c, ends, err := owner.FetchCollateral(t.Context(), source(s), march)
	if err != nil || len(ends) != 4 {
		t.Fatalf("%v, %v", ends, err)
	}
	text, err := protojson.MarshalOptions{Multiline: true}.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	if _, again, err := owner.ReadCollateral(text, march); err != nil || len(again) != 4 {
		t.Errorf("from its file: %v, %v", again, err)
	}
	if _, _, err := owner.ReadCollateral(text, march.Add(60*24*time.Hour)); err == nil || !strings.Contains(err.Error(), "HARDWARE_COLLATERAL") {
		t.Errorf("two months later: %v", err)
	}
	if _, _, err := owner.ReadCollateral([]byte(strings.Replace(string(text), "tcbInfos", "tcbInfo", 1)), march); err == nil {
		t.Error("an unknown field was accepted")
	}
}

// TestCollateralThatIsNotTheVendorsIsNotFetched: each answer is repeated as it should be, and then accepted.
func TestCollateralThatIsNotTheVendorsIsNotFetched(t *testing.T) {
	const tcb, identity = "/tdx/certification/v4/tcb?fmspc=90c06f000000", "/tdx/certification/v4/qe/identity"
	text := func(s string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(s)) }
	}
	for name, tt := range map[string]struct {
		path  string
		wrong http.HandlerFunc
		want  string
	}{
		"a refusal":                {tcb, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "", http.StatusTooManyRequests) }, "429"},
		"no certificates":          {tcb, text("{}"), "no certificates in the header"},
		"an answer without an end": {identity, text(strings.Repeat(" ", 128<<10+1)), "131072"},
		"an empty answer":          {"/IntelSGXRootCA.der", text(""), "0 bytes"},
		"a list that is none":      {"/IntelSGXRootCA.der", text("list"), "revocation list 0"},
		"an identity that Intel has not signed": {identity, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("SGX-Enclave-Identity-Issuer-Chain", url.PathEscape("-----BEGIN CERTIFICATE-----"))
			_, _ = w.Write([]byte(`{"enclaveIdentity":{},"signature":"00"}`))
		}, "enclaveIdentity"},
	} {
		if _, _, err := owner.FetchCollateral(t.Context(), source(vendor(t, map[string]http.HandlerFunc{tt.path: tt.wrong})), march); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want an error about %q", name, err, tt.want)
		}
	}
	s := vendor(t, nil)
	for name, change := range map[string]func(*owner.CollateralSource){
		"a product that is a path":   func(c *owner.CollateralSource) { c.Products = []string{"../Milan"} },
		"a model that is a query":    func(c *owner.CollateralSource) { c.FMSPCs = []string{"90c06f000000&x"} },
		"nothing":                    func(c *owner.CollateralSource) { c.FMSPCs = nil },
		"a product without a list":   func(c *owner.CollateralSource) { c.Products = []string{"Milan"} },
		"a model that has no answer": func(c *owner.CollateralSource) { c.FMSPCs = []string{"000000000000"} },
	} {
		c := source(s)
		change(&c)
		if _, _, err := owner.FetchCollateral(t.Context(), c, march); err == nil {
			t.Errorf("%s was fetched", name)
		}
	}
	if _, _, err := owner.FetchCollateral(t.Context(), source(s), march); err != nil {
		t.Errorf("repaired: %v", err)
	}
}

// TestBothListsOfAMDAreFetched: one root signs that of VCEKs' issuers and that of VLEKs'. No list of AMD was captured, so these
// are Intel's, and the check of what was fetched refuses them.
func TestBothListsOfAMDAreFetched(t *testing.T) {
	for _, missing := range []string{"vcek", "vlek", ""} {
		answers := map[string]http.HandlerFunc{}
		for _, key := range []string{"vcek", "vlek"} {
			answers["/"+key+"/v1/Milan/crl"] = func(w http.ResponseWriter, r *http.Request) {
				if key == missing {
					http.NotFound(w, r)
					return
				}
				b, err := os.ReadFile(filepath.Join("..", "..", "..", "trust", "attest", "hardware", "testdata", "tdx", "collateral-2026-03", "root_ca_crl.der"))
				if err != nil {
					t.Error(err)
				}
				_, _ = w.Write(b)
			}
		}
		s := source(vendor(t, answers))
		s.Products = []string{"Milan"}
		want := "/" + missing + "/v1/Milan/crl: 404"
		if missing == "" {
			want = "none of its roots"
		}
		if _, _, err := owner.FetchCollateral(t.Context(), s, march); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("without the list of %q: %v, want an error about %q", missing, err, want)
		}
	}
}
