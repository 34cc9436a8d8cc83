package attack

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// alpn and the roles are those of docs/attested-tls.md, repeated here on purpose.
const (
	alpn   = "muster-atls/1"
	client = 0x01
	server = 0x02
)

var tpm2 = []attestv1.Format{attestv1.Format_FORMAT_TPM2}

// wire is an attacker's end of a session.
type wire struct {
	*tls.Conn
	ekm []byte
}

func newWire(t *testing.T, c *tls.Conn) (*wire, error) {
	t.Helper()
	if err := c.HandshakeContext(t.Context()); err != nil {
		return nil, err
	}
	cs := c.ConnectionState()
	ekm, err := cs.ExportKeyingMaterial("EXPERIMENTAL-muster-atls/1", nil, 32)
	if err != nil {
		return nil, err
	}
	return &wire{Conn: c, ekm: ekm}, c.SetDeadline(time.Now().Add(patience))
}

// open starts a session with a server as an attacker. On a busy computer, the server may not wait for its handshake:
// that is tried again.
func open(t *testing.T, addr string, change func(*tls.Config)) *wire {
	t.Helper()
	var w *wire
	err := insist(t, func() error {
		raw, err := new(net.Dialer).DialContext(t.Context(), "tcp", addr)
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = raw.Close() })
		conf := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{alpn}, ServerName: "muster"}
		if change != nil {
			change(conf)
		}
		w, err = newWire(t, tls.Client(raw, conf))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func encode(t testing.TB, m proto.Message) []byte {
	t.Helper()
	f := &attestv1.Frame{}
	switch m := m.(type) {
	case *attestv1.Offer:
		f.Message = &attestv1.Frame_Offer{Offer: m}
	case *attestv1.Evidence:
		f.Message = &attestv1.Frame_Evidence{Evidence: m}
	case *attestv1.Challenge:
		f.Message = &attestv1.Frame_Challenge{Challenge: m}
	case *attestv1.Response:
		f.Message = &attestv1.Frame_Response{Response: m}
	case *attestv1.Verdict:
		f.Message = &attestv1.Frame_Verdict{Verdict: m}
	default:
		t.Fatalf("no frame carries %T", m)
	}
	body, err := proto.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)
}

func (w *wire) send(t testing.TB, m proto.Message) []byte {
	t.Helper()
	raw := encode(t, m)
	if _, err := w.Write(raw); err != nil {
		t.Fatalf("send %T: %v", m, err)
	}
	return raw
}

func (w *wire) receive() (*attestv1.Frame, []byte, error) {
	head := make([]byte, 4)
	if _, err := io.ReadFull(w, head); err != nil {
		return nil, nil, err
	}
	raw := slices.Concat(head, make([]byte, binary.BigEndian.Uint32(head)))
	if _, err := io.ReadFull(w, raw[4:]); err != nil {
		return nil, nil, err
	}
	f := &attestv1.Frame{}
	return f, raw, proto.Unmarshal(raw[4:], f)
}

// verdict reads until the peer's verdict; UNSPECIFIED if the peer closes without one.
func (w *wire) verdict(t *testing.T) attestv1.Reason {
	t.Helper()
	for {
		f, _, err := w.receive()
		if err != nil {
			if !errors.Is(err, io.EOF) {
				t.Logf("no verdict: %v", err)
			}
			return attestv1.Reason_REASON_UNSPECIFIED
		}
		if v := f.GetVerdict(); v != nil {
			return v.GetReason()
		}
	}
}

// bind is the binding's formula.
func (w *wire) bind(role byte, clientOffer, serverOffer []byte) attest.Binding {
	offers := sha256.Sum256(append(append([]byte{}, clientOffer...), serverOffer...))
	b := append([]byte("muster-atls/1 binding\x00"), role)
	b = append(b, w.ekm...)
	return sha256.Sum256(append(b, offers[:]...))
}

// script is a client that makes one error, or none.
type script struct {
	// offer is what it sends; nil: offers TPM 2.0 evidence and requests none.
	offer *attestv1.Offer
	// hashed is the offer that it uses in the binding; nil: the one that it sent.
	hashed func(sent []byte) []byte
	// evidence is made over its binding.
	evidence func(ctx context.Context, b attest.Binding) (*attestv1.Evidence, error)
	// respond answers a challenge; nil: it closes the connection.
	respond func(ctx context.Context, c *attestv1.Challenge, b attest.Binding) ([]byte, error)
}

// honest is a correct script with a machine's attester.
func honest(a attest.Attester) script {
	return script{
		evidence: func(ctx context.Context, b attest.Binding) (*attestv1.Evidence, error) {
			return a.Attest(ctx, attestv1.Format_FORMAT_TPM2, b)
		},
		respond: a.Respond,
	}
}

// play runs the script in a session of its own and returns the server's verdict. A session that took too long is
// repeated.
func (x *target) play(t *testing.T, s script) (got attestv1.Reason) {
	t.Helper()
	err := insist(t, func() error {
		var err error
		if got, err = open(t, x.addr, nil).play(t, s); got == attestv1.Reason_REASON_DEADLINE {
			err = attest.Refuse(got, "the server did not wait")
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// play runs the script and returns the server's verdict.
func (w *wire) play(t *testing.T, s script) (attestv1.Reason, error) {
	t.Helper()
	const none = attestv1.Reason_REASON_UNSPECIFIED
	if s.offer == nil {
		s.offer = &attestv1.Offer{Gives: tpm2}
	}
	sent := encode(t, s.offer)
	if _, err := w.Write(sent); err != nil {
		return none, err
	}
	if s.hashed != nil {
		sent = s.hashed(sent)
	}
	_, theirs, err := w.receive()
	if err != nil {
		return none, fmt.Errorf("the server's offer: %w", err)
	}
	b := w.bind(client, sent, theirs)
	ev, err := s.evidence(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(encode(t, ev)); err != nil {
		return none, err
	}
	for {
		f, _, err := w.receive()
		if err != nil {
			return none, fmt.Errorf("no verdict: %w", err)
		}
		switch {
		case f.GetVerdict() != nil:
			if f.GetVerdict().GetReason() == attestv1.Reason_REASON_ACCEPTED {
				_, err = w.Write(encode(t, &attestv1.Verdict{Reason: attestv1.Reason_REASON_ACCEPTED}))
			}
			return f.GetVerdict().GetReason(), err
		case f.GetChallenge() != nil:
			if s.respond == nil {
				t.Fatal("challenged, and the script has no answer")
			}
			mac, err := s.respond(t.Context(), f.GetChallenge(), b)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := w.Write(encode(t, &attestv1.Response{Mac: mac})); err != nil {
				return none, err
			}
		}
	}
}
