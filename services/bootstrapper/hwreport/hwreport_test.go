package hwreport

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/hardwaretest"
	"github.com/muster-k8s/muster/trust/attest/hcl"
	"github.com/muster-k8s/muster/trust/attest/snp"
	"github.com/muster-k8s/muster/trust/attest/tdx"
	"github.com/muster-k8s/muster/trust/tpm"
	"github.com/muster-k8s/muster/trust/tsm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stored is a TPM with that HCL report; nil: it has none.
type stored struct {
	report []byte
	err    error
	reads  int
}

func (s *stored) HCLReport(context.Context) ([]byte, error) {
	s.reads++
	if s.report == nil && s.err == nil {
		return nil, fmt.Errorf("tpm: %w", tpm.ErrNoHCLReport)
	}
	return s.report, s.err
}

func hclReport(kind hcl.Kind) []byte {
	report := bytes.Repeat([]byte{7}, 1184)
	if kind == hcl.TDX {
		clear(report[1024:])
	}
	return hardwaretest.HCL(kind, report, []byte(`{"keys":[]}`))
}

// azure is a metadata service with the answers that Azure documents.
type azure struct {
	*httptest.Server
	mu    sync.Mutex
	calls int
	wrong http.HandlerFunc // in place of the answer; nil: none
}

// answerWrongly sets what is answered from now on; nil: the right answers.
func (a *azure) answerWrongly(h http.HandlerFunc) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.wrong = h
}

func (a *azure) asked() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.calls
}

var vcek, quote = []byte("certificate"), bytes.Repeat([]byte{0xFB, 0xFF}, 2503)

func newAzure(t testing.TB) *azure {
	a := &azure{}
	a.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a.mu.Lock()
		a.calls++
		wrong := a.wrong
		a.mu.Unlock()
		if r.Header.Get("Metadata") != "true" {
			http.Error(w, "no Metadata header", http.StatusBadRequest)
			return
		}
		if wrong != nil {
			wrong(w, r)
			return
		}
		switch r.Method + " " + r.URL.Path {
		case "GET /metadata/THIM/amd/certification":
			_ = json.NewEncoder(w).Encode(map[string]string{
				"vcekCert": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: vcek})), "tcbm": "DB18000000000004", "certificateChain": "",
			})
		case "POST /acc/tdquote":
			var in struct{ Report string }
			b, _ := io.ReadAll(r.Body)
			if json.Unmarshal(b, &in) != nil {
				http.Error(w, "no JSON", http.StatusBadRequest)
				return
			}
			if got, err := base64.RawURLEncoding.DecodeString(in.Report); err != nil || !bytes.Equal(got, bytes.Repeat([]byte{7}, 1024)) {
				http.Error(w, "no TDREPORT", http.StatusBadRequest)
				return
			}
			_ = json.NewEncoder(w).Encode(map[string]string{"quote": base64.RawURLEncoding.EncodeToString(quote)})
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(a.Close)
	return a
}

func reports(t testing.TB, s *stored, a *azure) *Reports {
	r := New(s, true)
	r.kernel = tsm.New(filepath.Join(t.TempDir(), "none"))
	r.metadata = a.URL
	// As hcl.CheckAdded does with genuine ones.
	r.check = func(_ hcl.Kind, _, _, added []byte, _ time.Time) error {
		if !bytes.Equal(added, vcek) && !bytes.Equal(added, quote) {
			return errors.New("of another machine")
		}
		return nil
	}
	return r
}

func TestAzuresReportIsSentWithWhatBelongsToIt(t *testing.T) {
	a := newAzure(t)
	got, err := reports(t, &stored{report: hclReport(hcl.SNP)}, a).Report(t.Context(), hardware.ReportData{1})
	if m := got.GetAzure(); err != nil || !bytes.Equal(m.GetHclReport(), hclReport(hcl.SNP)) || !bytes.Equal(m.GetCertificate(), vcek) || m.GetQuote() != nil {
		t.Errorf("SEV-SNP: %v, %v", m, err)
	}
	got, err = reports(t, &stored{report: hclReport(hcl.TDX)}, a).Report(t.Context(), hardware.ReportData{1})
	if m := got.GetAzure(); err != nil || !bytes.Equal(m.GetHclReport(), hclReport(hcl.TDX)) || !bytes.Equal(m.GetQuote(), quote) || m.GetCertificate() != nil {
		t.Errorf("TDX: %v, %v", m, err)
	}
}

func TestTheMetadataServiceIsAskedOnceAnHour(t *testing.T) {
	a, s, now := newAzure(t), &stored{report: hclReport(hcl.SNP)}, time.Now()
	r := reports(t, s, a)
	r.now = func() time.Time { return now }
	for _, want := range []int{1, 1, 2} {
		if _, err := r.Report(t.Context(), hardware.ReportData{1}); err != nil || a.asked() != want {
			t.Errorf("%d calls, want %d, %v", a.asked(), want, err)
		}
		now = now.Add(40 * time.Minute)
	}
}

// Outside Azure, root of an earlier boot could have written the TPM's report, and a neighbor could answer for the service.
func TestOnlyInAzureTheTPMsReportIsRead(t *testing.T) {
	a, s := newAzure(t), &stored{report: hclReport(hcl.SNP)}
	r := reports(t, s, a)
	r.none = New(s, false).none
	if got, err := r.Report(t.Context(), hardware.ReportData{1}); got != nil || err != nil || s.reads != 0 || a.asked() != 0 {
		t.Errorf("%v, %v after %d reads and %d calls", got, err, s.reads, a.asked())
	}
}

func TestAMachineOfNoKindSendsNoReport(t *testing.T) {
	a, s := newAzure(t), &stored{}
	r := reports(t, s, a)
	for range 2 {
		if got, err := r.Report(t.Context(), hardware.ReportData{1}); got != nil || err != nil {
			t.Errorf("%v, %v", got, err)
		}
	}
	if a.asked() != 0 || s.reads != 1 {
		t.Errorf("%d calls of the metadata service, %d reads of the TPM", a.asked(), s.reads)
	}
}

// TestAnOutageOfTheMetadataServiceStopsNoMachine: the first answer of the boot is used on, and asked for again.
func TestAnOutageOfTheMetadataServiceStopsNoMachine(t *testing.T) {
	for _, kind := range []hcl.Kind{hcl.SNP, hcl.TDX} {
		a, s, now := newAzure(t), &stored{report: hclReport(kind)}, time.Now()
		r := reports(t, s, a)
		r.now = func() time.Time { return now }
		first, err := r.Report(t.Context(), hardware.ReportData{1})
		if err != nil {
			t.Fatal(err)
		}
		a.answerWrongly(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "", http.StatusServiceUnavailable) })
		for _, step := range []struct {
			after time.Duration
			calls int // of the service, so far
		}{{fresh, 2}, {30 * time.Second, 2}, {30 * time.Second, 3}} {
			now = now.Add(step.after)
			if got, err := r.Report(t.Context(), hardware.ReportData{1}); err != nil || !proto.Equal(got, first) || a.asked() != step.calls {
				t.Errorf("%v: %v after %d calls, want %d", kind, err, a.asked(), step.calls)
			}
		}
		s.report = bytes.Clone(s.report)
		s.report[0x20] ^= 1 // a report that binds another key is another one
		now = now.Add(fresh)
		if got, err := r.Report(t.Context(), hardware.ReportData{1}); got != nil || err == nil || !strings.Contains(err.Error(), "503") {
			t.Errorf("%v: an answer for another report of the TPM: %t, %v", kind, got != nil, err)
		}
		s.report[0x20] ^= 1
		a.answerWrongly(nil)
		if got, err := r.Report(t.Context(), hardware.ReportData{1}); err != nil || !proto.Equal(got, first) {
			t.Errorf("%v, repaired: %v", kind, err)
		}
	}
}

// A neighbor that can answer in place of the service must not keep the machine from attesting for an hour.
func TestAFalseAnswerReplacesNoGoodOne(t *testing.T) {
	certificate := func(b []byte) string { return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: b})) }
	for name, tt := range map[string]struct {
		kind   hcl.Kind
		answer map[string]string
		sent   bool // without a good answer before
	}{
		"certificate of another chip": {hcl.SNP, map[string]string{"vcekCert": certificate([]byte("other"))}, true},
		"long certificate":            {hcl.SNP, map[string]string{"vcekCert": certificate(make([]byte, snp.MaxCertificate+1))}, false},
		"quote of another machine":    {hcl.TDX, map[string]string{"quote": "b3RoZXI"}, true},
		"long quote":                  {hcl.TDX, map[string]string{"quote": base64.RawURLEncoding.EncodeToString(make([]byte, tdx.MaxQuote+1))}, false},
	} {
		t.Run(name, func(t *testing.T) {
			a, s, now := newAzure(t), &stored{report: hclReport(tt.kind)}, time.Now()
			lie := func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(tt.answer) }
			r := reports(t, s, a)
			r.now = func() time.Time { return now }
			first, err := r.Report(t.Context(), hardware.ReportData{1})
			if err != nil {
				t.Fatal(err)
			}
			a.answerWrongly(lie)
			now = now.Add(fresh)
			if got, err := r.Report(t.Context(), hardware.ReportData{1}); err != nil || !proto.Equal(got, first) || a.asked() != 2 {
				t.Errorf("%v after %d calls, %v", got, a.asked(), err)
			}
			r = reports(t, s, a)
			r.now = func() time.Time { return now }
			if got, err := r.Report(t.Context(), hardware.ReportData{1}); (err == nil) != tt.sent || (got != nil) != tt.sent {
				t.Errorf("as the first answer: %v, %v", got, err)
			}
			a.answerWrongly(nil)
			now = now.Add(retry)
			if got, err := r.Report(t.Context(), hardware.ReportData{1}); err != nil || !proto.Equal(got, first) {
				t.Errorf("a minute later: %v, %v", got, err)
			}
		})
	}
}

// A machine that can check no answer, by its clock for instance, leaves them to the verifier: the first one is not kept.
func TestAnAnswerThatWasNeverGoodIsReplaced(t *testing.T) {
	a, now := newAzure(t), time.Now()
	r := reports(t, &stored{report: hclReport(hcl.TDX)}, a)
	r.now = func() time.Time { return now }
	r.check = func(hcl.Kind, []byte, []byte, []byte, time.Time) error { return errors.New("the clock is wrong") }
	a.answerWrongly(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{"quote":"b3RoZXI"}`) })
	if got, err := r.Report(t.Context(), hardware.ReportData{1}); err != nil || string(got.GetAzure().GetQuote()) != "other" {
		t.Fatalf("%v, %v", got, err)
	}
	a.answerWrongly(nil)
	now = now.Add(retry)
	if got, err := r.Report(t.Context(), hardware.ReportData{1}); err != nil || !bytes.Equal(got.GetAzure().GetQuote(), quote) {
		t.Errorf("%v, %v", got, err)
	}
}

// TestAReportOfAnotherKindIsNone: a virtual machine with VBS joins as one without a report. A malformed report is an error.
func TestAReportOfAnotherKindIsNone(t *testing.T) {
	a, s := newAzure(t), &stored{report: hclReport(hcl.Kind(1))}
	r := reports(t, s, a)
	for range 2 {
		if got, err := r.Report(t.Context(), hardware.ReportData{1}); got != nil || err != nil {
			t.Errorf("%v, %v", got, err)
		}
	}
	if a.asked() != 0 || s.reads != 1 {
		t.Errorf("%d calls of the metadata service, %d reads of the TPM", a.asked(), s.reads)
	}
	malformed := &stored{report: hclReport(hcl.Kind(1))}
	malformed.report[4] = 9 // version
	if got, err := reports(t, malformed, a).Report(t.Context(), hardware.ReportData{1}); got != nil || err == nil {
		t.Errorf("a malformed report of another kind: %v, %v", got, err)
	}
}

// processor is a kernel's interface.
type processor struct{ err error }

func (p processor) Report(context.Context, hardware.ReportData) (*attestv1.HardwareReport, error) {
	return &attestv1.HardwareReport{Report: &attestv1.HardwareReport_Tdx{Tdx: &attestv1.TdxQuote{}}}, p.err
}

func TestTheKernelsReportComesFirst(t *testing.T) {
	r := reports(t, &stored{report: hclReport(hcl.SNP)}, newAzure(t))
	r.kernel = processor{}
	if got, err := r.Report(t.Context(), hardware.ReportData{1}); err != nil || got.GetTdx() == nil {
		t.Errorf("%v, %v", got, err)
	}
	r.kernel = processor{errors.New("busy")}
	if _, err := r.Report(t.Context(), hardware.ReportData{1}); err == nil {
		t.Error("its error is not reported")
	}
}

// TestAzuresErrorsAreReported: each answer is repeated as Azure documents it, and then accepted.
func TestAzuresErrorsAreReported(t *testing.T) {
	text := func(s string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, s) }
	}
	for name, tt := range map[string]struct {
		kind  hcl.Kind
		wrong http.HandlerFunc
		want  string
	}{
		"refusal":         {hcl.SNP, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "", http.StatusTooManyRequests) }, "429"},
		"redirect":        {hcl.SNP, func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/other", http.StatusFound) }, "302"},
		"no JSON":         {hcl.SNP, text("<html>"), "invalid character"},
		"too long":        {hcl.SNP, text(strings.Repeat(" ", maxAnswer+1)), "more than 65536 bytes"},
		"no certificate":  {hcl.SNP, text(`{}`), "no certificate vcekCert"},
		"a key in PEM":    {hcl.SNP, text(`{"vcekCert":"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"}`), "no certificate vcekCert"},
		"number for text": {hcl.SNP, text(`{"vcekCert":1}`), "cannot unmarshal"},
		"no quote":        {hcl.TDX, text(`{}`), "no quote"},
		"quote in base64": {hcl.TDX, text(`{"quote":"+/=="}`), "no quote"},
		"17 KiB of headers": {hcl.SNP, func(w http.ResponseWriter, _ *http.Request) {
			for i := range 17 {
				w.Header().Set(fmt.Sprintf("X-%d", i), strings.Repeat("x", 1<<10))
			}
			_ = json.NewEncoder(w).Encode(map[string]string{"vcekCert": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: vcek}))})
		}, "headers exceeded"},
		"compressed": {hcl.SNP, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			_ = json.NewEncoder(z).Encode(map[string]string{"vcekCert": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: vcek}))})
			_ = z.Close()
		}, "invalid character"},
		"connection that ends": {hcl.TDX, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, "EOF"},
	} {
		a := newAzure(t)
		r := reports(t, &stored{report: hclReport(tt.kind)}, a)
		a.answerWrongly(tt.wrong)
		if got, err := r.Report(t.Context(), hardware.ReportData{1}); got != nil || err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
		a.answerWrongly(nil)
		if _, err := r.Report(t.Context(), hardware.ReportData{1}); err != nil {
			t.Errorf("%s, repaired: %v", name, err)
		}
	}
	for name, s := range map[string]*stored{"a TPM that fails": {err: errors.New("TPM_RC_FAILURE")}, "a report that is none": {report: []byte("HCLA")}} {
		if got, err := reports(t, s, newAzure(t)).Report(t.Context(), hardware.ReportData{1}); got != nil || err == nil {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}
