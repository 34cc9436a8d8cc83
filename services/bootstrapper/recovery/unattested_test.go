package recovery

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/tpm"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

// Unattested clients attack in all known ways. The owner still gets through, and the machine's own work (here: its own evidence) continues meanwhile.
func TestStrangersDoNotKeepTheOwnerOut(t *testing.T) { unattestedClients(t, newFixture(t)) }

// This is the same with a slow TPM: swtpm, and the attester that ships.
func TestStrangersDoNotKeepTheOwnerOutOfARealTPM(t *testing.T) {
	e := tpmtest.SWTPM(t)
	a, err := tpm2.NewAttester(tpm2.Config{TPM: e.Open(), Purpose: attest.PurposeMachine, Bank: tpm.SHA256})
	if err != nil {
		t.Fatal(err)
	}
	// Nothing was measured: all registers are zero.
	rules := &attestv1.Tpm2Policy{Bank: tpm.SHA256.String(), EkRoots: []*attestv1.EkRoot{{Pem: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: e.Root.Raw})), Operator: true, Key: "ecc-p384"}}}
	image := &attestv1.Image{Name: "nothing"}
	for _, pcr := range []uint32{4, 8, 9, 11, 12, 13, 14} {
		image.Pcrs = append(image.Pcrs, &attestv1.PcrValue{Index: pcr, Value: strings.Repeat("0", 64)})
	}
	rules.Images = []*attestv1.Image{image}
	text, err := protojson.Marshal(&attestv1.Policy{Version: 2, Serial: 1, Tpm2: rules, Insecure: &attestv1.InsecureSwitches{AnyFirmware: true}, Roles: []string{"control-plane"}})
	if err != nil {
		t.Fatal(err)
	}
	unattestedClients(t, newFixtureOf(t, a, func() (attest.Verifier, *attest.Policy) {
		policy, perr := attest.ParsePolicy(text)
		verifier, err := tpm2.NewVerifier(tpm2.VerifierConfig{Roots: func() []*x509.Certificate { return []*x509.Certificate{e.Root} }, Now: time.Now})
		if err := errors.Join(perr, err); err != nil {
			t.Fatal(err)
		}
		return verifier, policy
	}))
}

func unattestedClients(t *testing.T, w *fixture) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for i := range 24 {
		c := w.from("127.0.1." + string(rune('1'+i%9)))
		wg.Go(func() {
			for ctx.Err() == nil {
				_, _ = w.recover(ctx, c, wrong(), nil)
			}
		})
	}
	for name, hostile := range map[string]func(conn net.Conn) error{
		"silence":      func(net.Conn) error { return nil },
		"half a hello": func(c net.Conn) error { _, err := c.Write([]byte{0x16, 3, 1, 2, 0, 1}); return err },
		"no TLS": func(c net.Conn) error {
			_, err := c.Write(bytes.Repeat([]byte("GET / HTTP/1.1\r\n"), 1000))
			return err
		},
	} {
		dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP("127.0.2.1")}}
		for range 40 {
			conn, err := dialer.DialContext(ctx, "tcp", w.addr)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			defer func() { _ = conn.Close() }()
			_ = hostile(conn) // the server may have closed it
		}
	}
	slow := w.from("127.0.2.2")
	slow.Transport = stalling{slow.Transport}
	wg.Go(func() { _, _ = w.recover(ctx, slow, wrong(), nil) })
	// The machine's own attempts to rejoin need the TPM and the disk.
	for i := range 20 {
		if _, err := w.own.Attest(ctx, attestv1.Format_FORMAT_TPM2, attest.Binding{byte(i)}); err != nil {
			t.Errorf("the machine's own evidence: %v", err)
		}
	}
	w.opens(t, w.from("127.0.0.1"))
	// The machine boots, also while clients hold connections.
	began := time.Now()
	if err := w.stop(); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > patience {
		t.Errorf("it took %s to end", took)
	}
}

// stalling sends the beginning of a body, and then nothing until the body is closed.
type stalling struct{ http.RoundTripper }

func (s stalling) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	_ = r.Body.Close()
	body, begin := io.Pipe()
	go func() { _, _ = begin.Write([]byte{0}) }()
	r.Body, r.ContentLength, r.GetBody = body, -1, nil
	return s.RoundTripper.RoundTrip(r)
}
