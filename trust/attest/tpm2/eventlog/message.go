package eventlog

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/tpm"
)

// Limits of a log in evidence. Servers have 100 to 200 events, which take 10 to 25 KiB.
const (
	// MaxMessage is the largest size of a serialized EventLog, in bytes. Its verification takes at
	// most 2 MiB of memory.
	MaxMessage = 256 << 10
	// maxMessageEvents is the largest number of events in it.
	maxMessageEvents = 1024
	// maxData is the largest size of one event's data, in bytes.
	maxData = 256
	// maxEventFields is the largest number of fields of one event: protobuf allows a field to be
	// repeated.
	maxEventFields = 8
)

// Marshal returns the log as evidence carries it, a serialized EventLog: events of PCR 0 to 15,
// without data longer than 256 bytes. No rule needs such data: a rule over a variable with keys
// compares its digest. It refuses a log with more than 1,024 such events, or more than [MaxMessage]
// bytes of them, with EVIDENCE_MALFORMED.
func (l *Log) Marshal() ([]byte, error) {
	m := &attestv1.EventLog{StartupLocality: uint32(l.locality)}
	for _, e := range l.events {
		if e.PCR >= tpm.PCRCount {
			continue
		}
		event := &attestv1.MeasuredEvent{Pcr: uint32(e.PCR), Type: uint32(e.Type), Digest: e.Digest}
		if len(e.Data) <= maxData {
			event.Data = e.Data
		}
		m.Events = append(m.Events, event)
	}
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	switch {
	case err != nil:
		return nil, err
	case len(m.GetEvents()) > maxMessageEvents || len(b) > MaxMessage:
		return nil, malformed("%d events, %d bytes; evidence has room for %d and %d", len(m.GetEvents()), len(b), maxMessageEvents, MaxMessage)
	}
	return b, nil
}

// Unmarshal reads the result of [Log.Marshal]. The refusal is EVIDENCE_MALFORMED.
func Unmarshal(b []byte, bank tpm.Bank) (*Log, error) {
	if len(b) > MaxMessage {
		return nil, malformed("%d bytes, more than %d", len(b), MaxMessage)
	}
	if err := checkFields(b); err != nil {
		return nil, err
	}
	m := &attestv1.EventLog{}
	if err := (proto.UnmarshalOptions{DiscardUnknown: true, RecursionLimit: 4}).Unmarshal(b, m); err != nil {
		return nil, malformed("%w", err)
	}
	switch m.GetStartupLocality() {
	case 0, 3, 4:
	default:
		return nil, malformed("startup locality %d", m.GetStartupLocality())
	}
	l := &Log{bank: bank, locality: byte(m.GetStartupLocality())}
	for i, e := range m.GetEvents() {
		switch {
		case e.GetPcr() >= tpm.PCRCount:
			return nil, malformed("event %d: PCR %d", i+1, e.GetPcr())
		case e.GetType() == evNoAction:
			return nil, malformed("event %d: EV_NO_ACTION extends nothing", i+1)
		case len(e.GetDigest()) != bank.Size():
			return nil, malformed("event %d: a digest of %d bytes in %s", i+1, len(e.GetDigest()), bank)
		case len(e.GetData()) > maxData:
			return nil, malformed("event %d: %d bytes of data, more than %d", i+1, len(e.GetData()), maxData)
		}
		event := Event{PCR: int(e.GetPcr()), Type: Type(e.GetType()), Digest: e.GetDigest(), Data: e.GetData()}
		event.Text = text(event)
		l.events = append(l.events, event)
	}
	return l, nil
}

// checkFields bounds the memory that decoding can allocate, before decoding: two bytes on the wire
// can become an event of 100 bytes.
func checkFields(b []byte) error {
	events := 0
	return eachField(b, maxMessageEvents+maxEventFields, func(num protowire.Number, value []byte) error {
		if num != 1 {
			return nil
		}
		if events++; events > maxMessageEvents {
			return malformed("more than %d events", maxMessageEvents)
		}
		return eachField(value, maxEventFields, func(protowire.Number, []byte) error { return nil })
	})
}

// eachField calls visit for each field of one protobuf message, and refuses more than most fields;
// value is nil for a field that is not length-delimited.
func eachField(b []byte, most int, visit func(num protowire.Number, value []byte) error) error {
	for n := 0; len(b) > 0; n++ {
		if n == most {
			return malformed("a message of more than %d fields", most)
		}
		num, typ, size := protowire.ConsumeField(b)
		if size < 0 {
			return malformed("%w", protowire.ParseError(size))
		}
		var value []byte
		if typ == protowire.BytesType {
			_, _, tag := protowire.ConsumeTag(b)
			value, _ = protowire.ConsumeBytes(b[tag:size])
		}
		if err := visit(num, value); err != nil {
			return err
		}
		b = b[size:]
	}
	return nil
}

func malformed(format string, args ...any) error {
	return attest.Refuse(attestv1.Reason_REASON_EVIDENCE_MALFORMED, "event log: %w", fmt.Errorf(format, args...))
}
