// Package hwreport makes the hardware reports of this machine, if it is a confidential virtual machine.
//
// The kernel's interface for reports comes first. In Azure it is missing: there the paravisor has stored a report in the
// TPM, and the cloud's metadata service, which has no authentication, adds what a verifier needs beside it. All of that is
// only data to send: the verifier checks it.
package hwreport

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/hcl"
	"github.com/muster-k8s/muster/trust/attest/snp"
	"github.com/muster-k8s/muster/trust/attest/tdx"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/tpm"
	"github.com/muster-k8s/muster/trust/tsm"
)

// AzureMetadata is the address of Azure's metadata service.
const AzureMetadata = "http://169.254.169.254"

const (
	timeout   = 5 * time.Second
	maxAnswer = 64 << 10 // bytes, of a body
	maxHeader = 16 << 10 // bytes
	// fresh is how long an answer of the metadata service is used. The report itself is made at boot.
	fresh = time.Hour
	// retry is how long the previous answer is used after the service has failed.
	retry = time.Minute
)

// TPM is the part of the machine's TPM that this package reads.
type TPM interface {
	// HCLReport returns the paravisor's report. The error wraps [tpm.ErrNoHCLReport] if there is none.
	HCLReport(ctx context.Context) ([]byte, error)
}

// Reports makes the machine's reports. It is safe for concurrent use.
type Reports struct {
	kernel   tpm2.Hardware
	tpm      TPM
	metadata string
	now      func() time.Time
	// check checks what the metadata service has added to a report: [hcl.CheckAdded].
	check func(kind hcl.Kind, report, runtime, added []byte, now time.Time) error

	mu    sync.Mutex // serializes the requests to the metadata service
	none  bool       // the TPM has no report that a policy knows, or this is not Azure; a boot does not change that
	azure *attestv1.AzureReport
	good  bool // azure has passed check
	since time.Time
}

// New returns the Reports of a machine with that TPM. azure reports that the firmware's tables name Azure. Elsewhere, root
// could have stored such a report in the TPM permanently, and another machine in the network could answer as the metadata
// service.
func New(t TPM, azure bool) *Reports {
	return &Reports{none: !azure, kernel: tsm.New(tsm.Dir), tpm: t, metadata: AzureMetadata, now: time.Now, check: func(kind hcl.Kind, report, runtime, added []byte, now time.Time) error {
		return hcl.CheckAdded(kind, report, runtime, added, snp.AMD(), tdx.Intel(), now)
	}}
}

// Report implements [tpm2.Hardware]. It returns nil if the machine is no confidential one.
func (r *Reports) Report(ctx context.Context, data hardware.ReportData) (*attestv1.HardwareReport, error) {
	if out, err := r.kernel.Report(ctx, data); out != nil || err != nil {
		return out, err
	}
	azure, err := r.azureReport(ctx)
	if azure == nil || err != nil {
		return nil, err
	}
	return &attestv1.HardwareReport{Report: &attestv1.HardwareReport_Azure{Azure: azure}}, nil
}

func (r *Reports) azureReport(ctx context.Context) (*attestv1.AzureReport, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.none || r.azure != nil && r.now().Sub(r.since) < fresh {
		return r.azure, nil
	}
	b, err := r.tpm.HCLReport(ctx)
	if errors.Is(err, tpm.ErrNoHCLReport) {
		r.none = true
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	kind, report, runtime, err := hcl.Split(b)
	if _, other := errors.AsType[*hcl.OtherKindError](err); other {
		r.none = true // as of a virtual machine with VBS: no rule of a policy is about it
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	out, now := &attestv1.AzureReport{HclReport: b}, r.now()
	var bad error
	if kind == hcl.SNP {
		if out.Certificate, err = r.certificate(ctx); err == nil {
			bad = r.check(kind, report, runtime, out.GetCertificate(), now)
		}
	} else {
		if out.Quote, err = r.quote(ctx, report); err == nil {
			bad = r.check(kind, report, runtime, out.GetQuote(), now)
		}
	}
	if err == nil && bad == nil {
		r.azure, r.good, r.since = out, true, now
		return out, nil
	}
	// What the service adds does not change during a boot either: neither an outage nor a false answer, which a neighbor can
	// give, stops a machine that has had an answer. The TPM's report binds the attestation key, so the answer must be one for
	// this report.
	if r.azure != nil && bytes.Equal(r.azure.GetHclReport(), b) && (err != nil || r.good) {
		r.since = now.Add(retry - fresh)
		return r.azure, nil
	}
	if err != nil {
		return nil, fmt.Errorf("the metadata service of Azure: %w", err)
	}
	// The machine may be wrong, as about a new line of processors, or by its clock. So the verifier decides.
	r.azure, r.good, r.since = out, false, now.Add(retry-fresh)
	return out, nil
}

// certificate returns that of the VCEK.
func (r *Reports) certificate(ctx context.Context) ([]byte, error) {
	var answer struct {
		Certificate string `json:"vcekCert"`
	}
	if err := r.call(ctx, http.MethodGet, "/metadata/THIM/amd/certification", nil, &answer); err != nil {
		return nil, err
	}
	p, _ := pem.Decode([]byte(answer.Certificate))
	if p == nil || p.Type != "CERTIFICATE" {
		return nil, errors.New("the answer has no certificate vcekCert in PEM")
	}
	if len(p.Bytes) > snp.MaxCertificate { // every verifier refuses such evidence
		return nil, fmt.Errorf("the certificate vcekCert has %d bytes, more than %d", len(p.Bytes), snp.MaxCertificate)
	}
	return p.Bytes, nil
}

// quote has the platform's quoting enclave sign a TDREPORT.
func (r *Reports) quote(ctx context.Context, report []byte) ([]byte, error) {
	body, err := json.Marshal(map[string]string{"report": base64.RawURLEncoding.EncodeToString(report)})
	if err != nil {
		return nil, err
	}
	var answer struct {
		Quote string `json:"quote"`
	}
	if err := r.call(ctx, http.MethodPost, "/acc/tdquote", body, &answer); err != nil {
		return nil, err
	}
	b, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(answer.Quote, "="))
	if err != nil || len(b) == 0 {
		return nil, errors.New("the answer has no quote in base64url")
	}
	if len(b) > tdx.MaxQuote { // every verifier refuses such evidence
		return nil, fmt.Errorf("the quote has %d bytes, more than %d", len(b), tdx.MaxQuote)
	}
	return b, nil
}

// client uses no proxy, follows no redirects and decompresses nothing: the address is that of the host below this machine. A
// neighbor that answers in its place must not fill the attester's memory.
var client = &http.Client{
	Transport:     &http.Transport{DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: maxHeader},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}

func (r *Reports) call(ctx context.Context, method, path string, body []byte, answer any) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, r.metadata+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Metadata", "true")
	req.Header.Set("Content-Type", "application/json")
	rsp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer rsp.Body.Close()
	if rsp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s: %s", method, path, rsp.Status)
	}
	b, err := io.ReadAll(io.LimitReader(rsp.Body, maxAnswer+1))
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	if len(b) > maxAnswer {
		return fmt.Errorf("%s %s: the answer has more than %d bytes", method, path, maxAnswer)
	}
	if err := json.Unmarshal(b, answer); err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	return nil
}
