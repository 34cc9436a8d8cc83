package atls

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// maxFrame limits every frame without evidence, in bytes without the length prefix. The longest
	// one is a Challenge, with less than 800 bytes.
	maxFrame = 4 << 10
	// maxEvidenceFrame limits a frame that carries evidence.
	maxEvidenceFrame = 1 << 20
	// maxSmallEvidence is the length up to which a frame with evidence is not charged to the memory
	// that all peers share: enough for a quote, 16 PCRs and a certificate chain of the usual size.
	maxSmallEvidence = 16 << 10
	// maxFields limits the fields of one frame. Two bytes on the wire can become 24 bytes of memory
	// (an empty element of a repeated field); an honest frame has fewer than 50 fields.
	maxFields = 1024
	// maxFormats limits each list of an Offer.
	maxFormats = 16
)

func invalidFrame(format string, args ...any) error {
	return attest.Refuse(attestv1.Reason_REASON_FRAME_INVALID, format, args...)
}

// readFrame reads exactly one frame: the bytes after the last frame belong to HTTP/2. The buffer
// grows with the bytes received, not by the length announced.
//
// It returns the frame's message and its bytes as received, with the length prefix. The end of the
// stream between two frames is errHungUp; within a frame it is FRAME_INVALID. Before it reads a
// frame of more than 16 KiB, it calls large to reserve memory, and returns large's error.
func readFrame(r io.Reader, limit int, large func(size int64) error) (*attestv1.Frame, []byte, error) {
	var raw bytes.Buffer
	switch n, err := io.CopyN(&raw, r, 4); {
	case n == 0 && errors.Is(err, io.EOF):
		return nil, nil, errHungUp
	case errors.Is(err, io.EOF):
		return nil, nil, invalidFrame("it ends after %d bytes of its length", n)
	case err != nil:
		return nil, nil, err
	}
	size := binary.BigEndian.Uint32(raw.Bytes())
	if size > uint32(limit) {
		return nil, nil, invalidFrame("its length is %d bytes, more than the %d that may come now", size, limit)
	}
	if size > maxSmallEvidence {
		if err := large(int64(size)); err != nil {
			return nil, nil, err
		}
	}
	switch n, err := io.CopyN(&raw, r, int64(size)); {
	case errors.Is(err, io.EOF):
		return nil, nil, invalidFrame("it ends after %d of %d bytes", n, size)
	case err != nil:
		return nil, nil, err
	}
	f, err := decodeFrame(raw.Bytes()[4:])
	return f, raw.Bytes(), err
}

// decodeFrame decodes the body of a frame. It drops unknown fields, and refuses an unknown kind of
// message.
func decodeFrame(body []byte) (*attestv1.Frame, error) {
	if err := checkFields(body); err != nil {
		return nil, err
	}
	f := &attestv1.Frame{}
	if err := (proto.UnmarshalOptions{DiscardUnknown: true, RecursionLimit: 8}).Unmarshal(body, f); err != nil {
		return nil, invalidFrame("%w", err)
	}
	if f.GetMessage() == nil {
		return nil, invalidFrame("it carries no message that this version knows")
	}
	if f.GetEvidence() == nil && len(body) > maxFrame {
		return nil, invalidFrame("%d bytes are too many for a frame without evidence", len(body))
	}
	if o := f.GetOffer(); len(o.GetGives()) > maxFormats || len(o.GetAccepts()) > maxFormats {
		return nil, invalidFrame("an offer lists more than %d formats", maxFormats)
	}
	return f, nil
}

// Numbers of the fields that checkFields decodes.
const (
	lastMessageField = 5 // Frame's oneof has the fields 1 to 5
	evidenceField    = 2 // Frame.evidence
	tpm2Field        = 2 // Evidence.tpm2
	// Tpm2Evidence.platform_key and hardware: messages with fields of their own.
	platformKeyField = 12
	hardwareField    = 13
)

// checkFields bounds the memory that decoding can allocate, before decoding: it counts the fields
// of the frame, of its evidence, of the evidence's body and of the messages in it. It refuses a
// second message in one frame, because protobuf would merge it with the first one or replace the
// first one.
func checkFields(body []byte) error {
	fields := 0
	messages := 0
	inTPM2 := func(num protowire.Number, value []byte) error {
		if num == platformKeyField || num == hardwareField {
			return eachField(value, &fields, nil)
		}
		return nil
	}
	evidenceBody := func(num protowire.Number, value []byte) error {
		if num == tpm2Field {
			return eachField(value, &fields, inTPM2)
		}
		return nil
	}
	err := eachField(body, &fields, func(num protowire.Number, value []byte) error {
		if num <= lastMessageField {
			messages++
		}
		if messages > 1 {
			return invalidFrame("it carries more than one message")
		}
		if num == evidenceField {
			return eachField(value, &fields, evidenceBody)
		}
		return nil
	})
	return err
}

// evidenceIn returns the bytes of the evidence in a frame that [readFrame] has read; nil if there
// is none.
func evidenceIn(raw []byte) []byte {
	var out []byte
	fields := 0
	_ = eachField(raw[4:], &fields, func(num protowire.Number, value []byte) error { // decodeFrame has already parsed it
		if num == evidenceField {
			out = value
		}
		return nil
	})
	return out
}

// eachField adds the number of fields of one protobuf message to count, refuses more than
// maxFields, and calls visit for each field; value is nil for a field that is not length-delimited.
func eachField(b []byte, count *int, visit func(num protowire.Number, value []byte) error) error {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return invalidFrame("%w", protowire.ParseError(n))
		}
		b = b[n:]
		if n = protowire.ConsumeFieldValue(num, typ, b); n < 0 {
			return invalidFrame("%w", protowire.ParseError(n))
		}
		if *count++; *count > maxFields {
			return invalidFrame("it has more than %d fields", maxFields)
		}
		var value []byte
		if typ == protowire.BytesType {
			value, _ = protowire.ConsumeBytes(b[:n])
		}
		b = b[n:]
		if visit == nil {
			continue
		}
		if err := visit(num, value); err != nil {
			return err
		}
	}
	return nil
}

// encodeFrame returns a frame with its length prefix.
func encodeFrame(f *attestv1.Frame) ([]byte, error) {
	raw, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(make([]byte, 4), f)
	if err != nil {
		return nil, fmt.Errorf("encode a frame: %w", err)
	}
	limit := maxFrame
	if f.GetEvidence() != nil {
		limit = maxEvidenceFrame
	}
	size := len(raw) - 4
	if size > limit {
		return nil, fmt.Errorf("encode a frame: %d bytes are more than %d", size, limit)
	}
	binary.BigEndian.PutUint32(raw, uint32(size))
	return raw, nil
}

func offerFrame(o *attestv1.Offer) *attestv1.Frame {
	return &attestv1.Frame{Message: &attestv1.Frame_Offer{Offer: o}}
}

func evidenceFrame(e *attestv1.Evidence) *attestv1.Frame {
	return &attestv1.Frame{Message: &attestv1.Frame_Evidence{Evidence: e}}
}

func challengeFrame(c *attestv1.Challenge) *attestv1.Frame {
	return &attestv1.Frame{Message: &attestv1.Frame_Challenge{Challenge: c}}
}

func responseFrame(mac []byte) *attestv1.Frame {
	return &attestv1.Frame{Message: &attestv1.Frame_Response{Response: &attestv1.Response{Mac: mac}}}
}

func verdictFrame(v *attestv1.Verdict) *attestv1.Frame {
	return &attestv1.Frame{Message: &attestv1.Frame_Verdict{Verdict: v}}
}
