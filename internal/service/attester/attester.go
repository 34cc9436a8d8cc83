// Package attester gets evidence of the machine for a service that may not open the TPM: it asks `bootstrapper attester`
// over a unix socket.
//
// The socket determines the purpose. Each purpose has its own socket in its own folder, and a pod gets only the folder of
// its purpose. So evidence made for a service is never valid for a machine (A5). The purpose is not in the request.
//
// The protocol is HTTP/1.1 with protobuf bodies (application/x-protobuf):
//
//	POST /v1/evidence  GetEvidenceRequest, whose nonce is the session's binding  →  Evidence
//	POST /v1/respond   Challenge, with the binding in hexadecimal digits in the header
//	                   Muster-Binding  →  Response
//
// Any other status than 200 has an [attestv1.ErrorInfo] as its body.
package attester

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// The protocol's constants, for both sides.
const (
	// Dir holds one folder per purpose.
	Dir = "/run/muster/attest"
	// socketName is the socket in each of them.
	socketName    = "attest.sock"
	EvidencePath  = "/v1/evidence"
	RespondPath   = "/v1/respond"
	BindingHeader = "Muster-Binding"
	ContentType   = "application/x-protobuf"
	// MaxRequest and maxResponse bound bodies, in bytes.
	MaxRequest  = 4 << 10
	maxResponse = 1 << 20
)

// Socket returns the socket of one purpose below dir, which is [Dir] on a machine.
func Socket(dir string, p attest.Purpose) string {
	return filepath.Join(dir, string(p), socketName)
}

// Client is a client of this machine's attester. It implements [attest.Attester].
type Client struct {
	socket string
	http   *http.Client
}

var _ attest.Attester = (*Client)(nil)

// New returns a client of the attester at a socket. The attester need not run yet.
func New(socket string) (*Client, error) {
	if !filepath.IsAbs(socket) {
		return nil, fmt.Errorf("attester's socket: want an absolute path, not %q", socket)
	}
	var d net.Dialer
	return &Client{socket: socket, http: &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return d.DialContext(ctx, "unix", socket)
		},
		MaxIdleConns: 8, IdleConnTimeout: time.Minute, DisableCompression: true,
	}}}, nil
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Formats implements [attest.Attester]. An attester of this version makes evidence only of a TPM 2.0.
func (c *Client) Formats() []attestv1.Format {
	return []attestv1.Format{attestv1.Format_FORMAT_TPM2}
}

// Attest implements [attest.Attester].
func (c *Client) Attest(ctx context.Context, f attestv1.Format, b attest.Binding) (*attestv1.Evidence, error) {
	if f != attestv1.Format_FORMAT_TPM2 {
		return nil, attest.Refuse(attestv1.Reason_REASON_FORMAT_NONE, "the attester makes no evidence of format %s", f)
	}
	ev := &attestv1.Evidence{}
	if err := c.call(ctx, EvidencePath, nil, &attestv1.GetEvidenceRequest{Nonce: b[:]}, ev); err != nil {
		return nil, err
	}
	return ev, nil
}

// Respond implements [attest.Attester].
func (c *Client) Respond(ctx context.Context, ch *attestv1.Challenge, b attest.Binding) ([]byte, error) {
	r := &attestv1.Response{}
	if err := c.call(ctx, RespondPath, http.Header{BindingHeader: {hex.EncodeToString(b[:])}}, ch, r); err != nil {
		return nil, err
	}
	return r.GetMac(), nil
}

func (c *Client) call(ctx context.Context, path string, header http.Header, in, out proto.Message) error {
	body, err := proto.Marshal(in)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://attester"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	if header != nil {
		req.Header = header
	}
	req.Header.Set("Content-Type", ContentType)
	resp, err := c.http.Do(req)
	if err != nil {
		return fmt.Errorf("the machine's attester at %s does not answer; is muster-attester.service running? %w", c.socket, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxResponse+1))
	if err != nil {
		return fmt.Errorf("read the attester's answer: %w", err)
	}
	if len(b) > maxResponse {
		return fmt.Errorf("the attester's answer is longer than %d bytes", maxResponse)
	}
	if resp.StatusCode != http.StatusOK {
		return refusal(resp.Status, b)
	}
	if err := proto.Unmarshal(b, out); err != nil {
		return fmt.Errorf("the attester's answer: %w", err)
	}
	return nil
}

// refusal converts an answer that is not 200 into its error.
func refusal(status string, body []byte) error {
	info := &attestv1.ErrorInfo{}
	if err := proto.Unmarshal(body, info); err != nil || info.GetReason() == attestv1.Reason_REASON_UNSPECIFIED {
		return fmt.Errorf("the attester answers %s", status)
	}
	return &attest.Refusal{
		Reason: info.GetReason(), RetryAfter: max(info.GetRetryAfter().AsDuration(), 0),
		Err: errors.New("the machine's attester refused; its log shows why"),
	}
}
