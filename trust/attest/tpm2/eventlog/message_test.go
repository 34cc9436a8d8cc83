package eventlog_test

import (
	"bytes"
	"testing"

	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/tpm2/eventlog"
	"github.com/muster-k8s/muster/trust/tpm"
)

// Invariant A9.
func TestASentLogIsRefused(t *testing.T) {
	good := func() *attestv1.EventLog {
		return &attestv1.EventLog{Events: []*attestv1.MeasuredEvent{{Pcr: 15, Type: 13, Digest: make([]byte, 32), Data: make([]byte, 256)}}, StartupLocality: 3}
	}
	event := func(f func(*attestv1.MeasuredEvent)) []byte {
		m := good()
		f(m.GetEvents()[0])
		return marshaled(t, m)
	}
	many := &attestv1.EventLog{}
	for range 1025 {
		many.Events = append(many.Events, good().GetEvents()[0])
	}
	locality := good()
	locality.StartupLocality = 5
	for name, raw := range map[string][]byte{
		"PCR 16":                  event(func(e *attestv1.MeasuredEvent) { e.Pcr = 16 }),
		"EV_NO_ACTION":            event(func(e *attestv1.MeasuredEvent) { e.Type = 3 }),
		"no digest":               event(func(e *attestv1.MeasuredEvent) { e.Digest = nil }),
		"a digest of SHA-1":       event(func(e *attestv1.MeasuredEvent) { e.Digest = make([]byte, 20) }),
		"257 bytes of data":       event(func(e *attestv1.MeasuredEvent) { e.Data = make([]byte, 257) }),
		"locality 5":              marshaled(t, locality),
		"more than 256 KiB":       make([]byte, eventlog.MaxMessage+1),
		"1,025 events":            marshaled(t, many),
		"1,025 empty events":      bytes.Repeat([]byte{1<<3 | 2, 0}, 1025),
		"65,536 locality fields":  bytes.Repeat([]byte{2 << 3, 0}, 1<<16),
		"an event of many fields": append([]byte{1<<3 | 2, 18}, bytes.Repeat([]byte{1 << 3, 1}, 9)...),
		"no protobuf":             {0xff},
		"cut short":               marshaled(t, good())[:40],
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := eventlog.Unmarshal(raw, tpm.SHA256); attest.ReasonOf(err) != malformed {
				t.Errorf("%v, want EVIDENCE_MALFORMED", err)
			}
		})
	}
	if _, err := eventlog.Unmarshal(marshaled(t, good()), tpm.SHA256); err != nil {
		t.Error(err)
	}
}

func marshaled(t *testing.T, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// BenchmarkLargestLog measures the largest cost that a peer with a genuine EK certificate can cause
// a verifier before it has proven that it has the TPM.
func BenchmarkLargestLog(b *testing.B) {
	m := &attestv1.EventLog{}
	for range 1000 {
		m.Events = append(m.Events, &attestv1.MeasuredEvent{Pcr: 4, Type: uint32(eventlog.EFIAction), Digest: make([]byte, 32), Data: make([]byte, 210)})
	}
	raw, err := proto.Marshal(m)
	if err != nil || len(raw) > eventlog.MaxMessage {
		b.Fatal(len(raw), err)
	}
	b.ReportAllocs()
	for b.Loop() {
		l, err := eventlog.Unmarshal(raw, tpm.SHA256)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := eventlog.Replay(l, l.PCRs()); attest.ReasonOf(err) != replay {
			b.Fatal(err)
		}
	}
}
