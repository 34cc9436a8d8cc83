// Package intruder tries to become a node without evidence. It has everything of another node's ticket but the
// private keys, which never leave their machine, and uses it in raw requests to the API server and the joinservice.
//
// It is an attacker's program against the real services, so it bypasses the checks that a client's library would
// make.
package intruder

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"time"

	"connectrpc.com/connect"

	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
)

// Config is what the intruder holds.
type Config struct {
	Server      string // HOST:PORT of the API server
	Joinservice string // HOST:PORT
	CA          string // file: the cluster's CA (PEM)
	Certificate string // file: a node's client certificate (PEM), without its key
	Serving     string // file: its serving certificate (PEM), without its key
	Ticket      string // its ticket's ID, hexadecimal
	EKRoots     string // roots of TPMs (PEM), which are no secret
	Victim      string // the node whose ticket it is
	Token       string // a bootstrap token; empty: attempts without
}

// An Attempt is one attempt and its result.
type Attempt struct {
	What string `json:"what"`
	// In reports that it succeeded, which must never happen.
	In bool `json:"in"`
	// Reason is the reason code or HTTP status.
	Reason string `json:"reason"`
	Answer string `json:"answer"`
}

// Run makes all attempts. An error means that one could not be made at all.
func Run(ctx context.Context, c Config) ([]Attempt, error) {
	ca, err := os.ReadFile(c.CA)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("%s: no certificate", c.CA)
	}
	if c.Token != "" {
		return withToken(ctx, c, pool)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	client, err := stolen(c.Certificate, key)
	if err != nil {
		return nil, err
	}
	serving, err := stolen(c.Serving, key)
	if err != nil {
		return nil, err
	}
	forged, err := selfSigned(c.Victim, key)
	if err != nil {
		return nil, err
	}
	var out []Attempt
	for _, who := range []struct {
		name string
		cert *tls.Certificate
	}{
		{"anonymous", nil},
		{c.Victim + "'s certificate with a key of my own", client},
		{c.Victim + "'s serving certificate with a key of my own", serving},
		{"a certificate for " + c.Victim + " that I signed myself", forged},
	} {
		client := apiClient(pool, who.cert)
		for _, t := range requests(c.Server, c.Victim, key) {
			out = append(out, t.do(ctx, client, who.name, ""))
		}
		client.CloseIdleConnections()
	}
	js, err := joinservice(ctx, c)
	return append(out, js...), err
}

// stolen combines another machine's certificate with a key that does not belong to it.
func stolen(path string, key *ecdsa.PrivateKey) (*tls.Certificate, error) {
	list, err := certificates(path)
	if err != nil {
		return nil, err
	}
	out := &tls.Certificate{PrivateKey: key}
	for _, c := range list {
		out.Certificate = append(out.Certificate, c.Raw)
	}
	return out, nil
}

func withToken(ctx context.Context, c Config, pool *x509.CertPool) ([]Attempt, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	client := apiClient(pool, nil)
	defer client.CloseIdleConnections()
	var out []Attempt
	for _, t := range requests(c.Server, c.Victim, key) {
		if t.public {
			continue // kubeadm's bindings show those two to its tokens; they hold no secret
		}
		out = append(out, t.do(ctx, client, "a bootstrap token", c.Token))
	}
	return out, nil
}

func apiClient(pool *x509.CertPool, cert *tls.Certificate) *http.Client {
	conf := &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13}
	if cert != nil {
		// Not tls.X509KeyPair, which would detect that key and certificate do not match.
		conf.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return cert, nil }
	}
	return &http.Client{Timeout: 5 * time.Minute, Transport: &http.Transport{TLSClientConfig: conf}}
}

func selfSigned(node string, key *ecdsa.PrivateKey) (*tls.Certificate, error) {
	t := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: nodeSubject(node), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

func nodeSubject(node string) pkix.Name {
	return pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}}
}

type request struct {
	what, method, url string
	body              func() ([]byte, error)
	public            bool // readable with kubeadm's default bindings
}

func requests(server, victim string, key *ecdsa.PrivateKey) []request {
	base := "https://" + server
	csr := func(node, signer, usage string) func() ([]byte, error) {
		return func() ([]byte, error) { return csrObject(node, signer, usage, key) }
	}
	const csrs = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
	const client, serving = "kubernetes.io/kube-apiserver-client-kubelet", "kubernetes.io/kubelet-serving"
	return []request{
		{what: "ask for a certificate of " + victim, method: http.MethodPost, url: base + csrs, body: csr(victim, client, "client auth")},
		{what: "ask for a certificate of a node of my own", method: http.MethodPost, url: base + csrs, body: csr("intruder", client, "client auth")},
		{what: "ask for a serving certificate of " + victim, method: http.MethodPost, url: base + csrs, body: csr(victim, serving, "server auth")},
		{what: "create a Node", method: http.MethodPost, url: base + "/api/v1/nodes", body: func() ([]byte, error) {
			return []byte(`{"apiVersion":"v1","kind":"Node","metadata":{"name":"intruder"}}`), nil
		}},
		{what: "read the cluster's root secret", method: http.MethodGet, url: base + "/api/v1/namespaces/muster-system/secrets/muster-kms-root"},
		{what: "read cluster-info", method: http.MethodGet, url: base + "/api/v1/namespaces/kube-public/configmaps/cluster-info", public: true},
		{what: "read kubeadm-config", method: http.MethodGet, url: base + "/api/v1/namespaces/kube-system/configmaps/kubeadm-config", public: true},
	}
}

func csrObject(node, signer, usage string, key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: nodeSubject(node)}, key)
	if err != nil {
		return nil, err
	}
	request := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
	return json.Marshal(map[string]any{
		"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
		"metadata": map[string]string{"generateName": "intruder-"},
		"spec":     map[string]any{"signerName": signer, "usages": []string{"digital signature", usage}, "request": base64.StdEncoding.EncodeToString(request)},
	})
}

func (t request) do(ctx context.Context, c *http.Client, who, token string) Attempt {
	a := Attempt{What: who + ": " + t.what}
	var body io.Reader
	if t.body != nil {
		b, err := t.body()
		if err != nil {
			a.Reason, a.Answer = "BROKEN", err.Error()
			return a
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, t.method, t.url, body)
	if err != nil {
		a.Reason, a.Answer = "BROKEN", err.Error()
		return a
	}
	req.Header.Set("Content-Type", "application/json")
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := c.Do(req)
	if err != nil {
		// The server's alert proves that it refused; anything else is no answer.
		a.Reason, a.Answer = "NO_ANSWER", err.Error()
		if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "remote error" {
			a.Reason = "TLS"
		}
		return a
	}
	defer resp.Body.Close()
	var status struct{ Message string }
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	_ = json.Unmarshal(b, &status)
	a.Reason, a.Answer, a.In = fmt.Sprint(resp.StatusCode), status.Message, resp.StatusCode < 400
	return a
}

// joinservice asks for a ticket over plain HTTPS, and over attested TLS without evidence.
func joinservice(ctx context.Context, c Config) ([]Attempt, error) {
	var out []Attempt
	ticket, err := hex.DecodeString(c.Ticket)
	if err != nil {
		return nil, err
	}
	ask := func(who string, t http.RoundTripper) {
		client := joinv1connect.NewJoinServiceClient(rpc.HTTPClient(t), "https://"+c.Joinservice, rpc.ClientOptions()...)
		ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
		defer cancel()
		note := func(what string, err error) {
			a := Attempt{What: who + ": " + what, In: err == nil}
			if err != nil {
				a.Reason, a.Answer = attest.ReasonName(rpc.ReasonFrom(err)), connect.CodeOf(err).String()+": "+err.Error()
			}
			out = append(out, a)
		}
		_, err := client.ReturnJoinTicket(ctx, &joinv1.ReturnJoinTicketRequest{TicketId: ticket})
		note("return "+c.Victim+"'s ticket", err)
		_, err = client.IssueJoinTicket(ctx, &joinv1.IssueJoinTicketRequest{NodeName: c.Victim, Role: joinv1.Role_ROLE_WORKER})
		note("ask the joinservice for a ticket", err)
	}
	plain := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}, ForceAttemptHTTP2: true}
	ask("plain HTTPS", plain)
	plain.CloseIdleConnections()

	roots, err := certificates(c.EKRoots)
	if err != nil {
		return out, err
	}
	v, err := tpm2.NewVerifier(tpm2.VerifierConfig{Roots: func() []*x509.Certificate { return roots }, Now: time.Now})
	if err != nil {
		return out, err
	}
	t, err := atls.NewTransport(atls.ClientConfig{Attester: atls.NoAttester, Verifier: v, Appraiser: anyServer{}, PeerPurpose: attest.PurposeJoinservice})
	if err != nil {
		return out, err
	}
	ask("attested TLS without evidence of my own", t)
	return out, t.Close()
}

func certificates(path string) ([]*x509.Certificate, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var out []*x509.Certificate
	for {
		var block *pem.Block
		if block, b = pem.Decode(b); block == nil {
			if len(out) == 0 {
				return nil, fmt.Errorf("%s: no certificate", path)
			}
			return out, nil
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		out = append(out, cert)
	}
}

// anyServer accepts every server: an intruder has no secret to protect.
type anyServer struct{}

func (anyServer) Appraise(context.Context, attest.Claims) (attest.Appraisal, error) {
	return attest.Appraisal{}, nil
}
