package main

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
)

// alpn is that of docs/attested-tls.md.
const alpn = "muster-atls/1"

var tpm2 = []attestv1.Format{attestv1.Format_FORMAT_TPM2}

// session is a connection over muster-atls/1 whose exchange is not finished.
type session struct{ *tls.Conn }

func (c *client) session(ctx context.Context) (session, error) {
	conn, err := c.plain(ctx, alpn)
	return session{conn}, err
}

func (s session) send(f *attestv1.Frame) error {
	b, err := proto.Marshal(f)
	if err != nil {
		return err
	}
	_, err = s.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...))
	return err
}

func (s session) offer(gives, accepts []attestv1.Format) error {
	return s.send(&attestv1.Frame{Message: &attestv1.Frame_Offer{Offer: &attestv1.Offer{Gives: gives, Accepts: accepts}}})
}

func (s session) receive() (*attestv1.Frame, error) {
	head := make([]byte, 4)
	if _, err := io.ReadFull(s, head); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head)
	if n > 1<<20 {
		return nil, errors.New("a frame that is too long")
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(s, b); err != nil {
		return nil, err
	}
	f := &attestv1.Frame{}
	return f, proto.Unmarshal(b, f)
}

// until reads frames until the wanted one, or until the peer's verdict is a refusal.
func (s session) until(wanted func(*attestv1.Frame) bool) error {
	for {
		f, err := s.receive()
		if err != nil {
			return err
		}
		if wanted(f) {
			return nil
		}
		if v := f.GetVerdict(); v != nil && v.GetReason() != attestv1.Reason_REASON_ACCEPTED {
			return fmt.Errorf("refused: %s", v.GetReason())
		}
	}
}

// empty runs an exchange that neither presents nor requests evidence.
func (c *client) empty(ctx context.Context) (session, error) {
	s, err := c.session(ctx)
	if err != nil {
		return s, err
	}
	if err := s.offer(nil, nil); err != nil {
		return s, err
	}
	if err := s.until(func(f *attestv1.Frame) bool { return f.GetVerdict() != nil }); err != nil {
		return s, err
	}
	return s, s.send(&attestv1.Frame{Message: &attestv1.Frame_Verdict{Verdict: &attestv1.Verdict{Reason: attestv1.Reason_REASON_ACCEPTED}}})
}

// begun sends all but the last byte of a frame of that size.
func (s session) begun(size int) error {
	if _, err := s.Write(binary.BigEndian.AppendUint32(nil, uint32(size))); err != nil {
		return err
	}
	_, err := s.Write(zeroes[:size-1])
	return err
}

// zeroes are the content of bodies.
var zeroes = make([]byte, 1<<20)

// challenge makes the peer prove that its AK belongs to its TPM, with a credential that any TPM computes on: the
// point is on the curve, so that the TPM computes before it refuses.
func (s session) challenge() error {
	return s.send(&attestv1.Frame{Message: &attestv1.Frame_Challenge{Challenge: &attestv1.Challenge{CredentialBlob: credentialBlob, EncryptedSecret: encryptedSecret}}})
}
