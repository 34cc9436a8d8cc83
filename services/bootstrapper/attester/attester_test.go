package attester_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	client "github.com/muster-k8s/muster/internal/service/attester"
	"github.com/muster-k8s/muster/services/bootstrapper/attester"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// start runs an attester for the machine and returns the folder of its sockets.
func start(t *testing.T, attesters map[attest.Purpose]attest.Attester) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "attest")
	log := &bytes.Buffer{}
	s, err := attester.New(attester.Config{Dir: dir, Attesters: attesters, Metrics: prometheus.NewRegistry(), Log: slog.New(slog.NewJSONHandler(log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	deadline := time.After(5 * time.Minute)
	for _, p := range attester.Purposes {
		for {
			c, err := new(net.Dialer).DialContext(t.Context(), "unix", client.Socket(dir, p))
			if err == nil {
				_ = c.Close()
				break
			}
			select {
			case <-deadline:
				t.Fatal(err)
			case <-time.After(time.Millisecond):
			}
		}
	}
	return dir
}

func of(m *attesttest.Machine) map[attest.Purpose]attest.Attester {
	out := map[attest.Purpose]attest.Attester{}
	for _, p := range attester.Purposes {
		out[p] = m.Attester(p)
	}
	return out
}

func dial(t *testing.T, dir string, p attest.Purpose) *client.Client {
	t.Helper()
	c, err := client.New(client.Socket(dir, p))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// A5: the purpose in evidence is that of the socket, whatever the client requests. The real verifier, with activation, accepts it only for that purpose.
func TestThePurposeIsTheSocket(t *testing.T) {
	ca := attesttest.NewCA(t)
	m := attesttest.NewMachine(t, ca, attesttest.Options{})
	dir := start(t, of(m))
	for _, asked := range attester.Purposes {
		c := dial(t, dir, asked)
		for _, wanted := range append([]attest.Purpose{attest.PurposeMachine}, attester.Purposes...) {
			claims, err := attesttest.Claims(t.Context(), c, attesttest.Verifier(t, ca), wanted, attest.Binding{1, 2, 3})
			if wanted != asked {
				if attest.ReasonOf(err) != attestv1.Reason_REASON_BINDING_MISMATCH {
					t.Errorf("evidence of %s as %s: %v", asked, wanted, err)
				}
				continue
			}
			if err != nil || claims.Machine() != m.ID() || len(claims.Events()) == 0 {
				t.Errorf("evidence of %s: %v", asked, err)
			}
		}
	}
}

func TestSocketsAreReachedByTheirFolderAlone(t *testing.T) {
	dir := start(t, of(attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})))
	for path, want := range map[string]os.FileMode{
		dir: 0o700 | os.ModeDir, filepath.Join(dir, "kms"): 0o755 | os.ModeDir, client.Socket(dir, attest.PurposeKMS): 0o666 | os.ModeSocket,
	} {
		st, err := os.Stat(path)
		if err != nil || st.Mode() != want {
			t.Errorf("%s: %v, %v; want %v", path, st.Mode(), err, want)
		}
	}
	if _, err := os.Stat(client.Socket(dir, attest.PurposeMachine)); !os.IsNotExist(err) {
		t.Error("services can get evidence of the machine itself")
	}
}

// failing is an attester that always fails.
type failing struct {
	attest.Attester
	err error
}

func (f failing) Attest(context.Context, attestv1.Format, attest.Binding) (*attestv1.Evidence, error) {
	return nil, f.err
}

func (f failing) Respond(context.Context, *attestv1.Challenge, attest.Binding) ([]byte, error) {
	return nil, f.err
}

func TestACallerLearnsTheReasonAlone(t *testing.T) {
	m := attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})
	for name, tt := range map[string]struct {
		err  error
		want attestv1.Reason
		wait time.Duration
	}{
		"a refusal":          {attest.Refuse(attestv1.Reason_REASON_ACTIVATION_FAILED, "hidden cause"), attestv1.Reason_REASON_ACTIVATION_FAILED, 0},
		"a refusal for now":  {attest.RefuseFor(3*time.Second, attestv1.Reason_REASON_BUSY, "hidden cause"), attestv1.Reason_REASON_BUSY, 3 * time.Second},
		"a fault of the TPM": {errors.New("hidden cause"), attestv1.Reason_REASON_INTERNAL, 0},
	} {
		all := of(m)
		all[attest.PurposeKMS] = failing{m.Attester(attest.PurposeKMS), tt.err}
		c := dial(t, start(t, all), attest.PurposeKMS)
		_, err := c.Attest(t.Context(), attestv1.Format_FORMAT_TPM2, attest.Binding{})
		_, err2 := c.Respond(t.Context(), &attestv1.Challenge{}, attest.Binding{})
		for _, err := range []error{err, err2} {
			r, ok := errors.AsType[*attest.Refusal](err)
			if !ok || r.Reason != tt.want || r.RetryAfter != tt.wait || strings.Contains(err.Error(), "hidden") {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

func TestRequestsAreRefused(t *testing.T) {
	dir := start(t, of(attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})))
	hc := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", client.Socket(dir, attest.PurposeKMS))
	}}}
	for name, tt := range map[string]struct {
		method, path, binding string
		body                  []byte
		want                  int
	}{
		"another method":       {http.MethodGet, client.EvidencePath, "", nil, http.StatusMethodNotAllowed},
		"another path":         {http.MethodPost, "/v1/sign", "", nil, http.StatusNotFound},
		"no binding":           {http.MethodPost, client.EvidencePath, "", nil, http.StatusForbidden},
		"a short binding":      {http.MethodPost, client.EvidencePath, "", []byte{0x0a, 1, 0}, http.StatusForbidden},
		"no protobuf":          {http.MethodPost, client.EvidencePath, "", []byte{0xff}, http.StatusForbidden},
		"a large body":         {http.MethodPost, client.EvidencePath, "", make([]byte, client.MaxRequest+1), http.StatusForbidden},
		"respond unbound":      {http.MethodPost, client.RespondPath, "", nil, http.StatusForbidden},
		"respond to a garbage": {http.MethodPost, client.RespondPath, strings.Repeat("00", 32), []byte{0xff}, http.StatusForbidden},
	} {
		req, err := http.NewRequestWithContext(t.Context(), tt.method, "http://attester"+tt.path, bytes.NewReader(tt.body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set(client.BindingHeader, tt.binding)
		resp, err := hc.Do(req)
		if err != nil {
			t.Fatal(name, err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != tt.want {
			t.Errorf("%s: %s", name, resp.Status)
		}
	}
}

func TestAClientSaysWhatIsMissing(t *testing.T) {
	if _, err := client.New("relative"); err == nil {
		t.Error("a relative path was taken")
	}
	c, err := client.New(filepath.Join(t.TempDir(), "none"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Attest(t.Context(), attestv1.Format_FORMAT_TPM2, attest.Binding{}); err == nil || !strings.Contains(err.Error(), "muster-attester.service") {
		t.Error(err)
	}
	if _, err := c.Attest(t.Context(), 99, attest.Binding{}); attest.ReasonOf(err) != attestv1.Reason_REASON_FORMAT_NONE {
		t.Error(err)
	}
}

func TestNothingConfiguredIsAnError(t *testing.T) {
	all := of(attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{}))
	delete(all, attest.PurposeKMS)
	if _, err := attester.New(attester.Config{Dir: "/x", Attesters: all, Metrics: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler)}); err == nil || !strings.Contains(err.Error(), "kms") {
		t.Error(err)
	}
	if _, err := attester.New(attester.Config{}); err == nil {
		t.Error("an empty Config was taken")
	}
}
