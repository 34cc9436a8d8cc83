package eventlog

import (
	"bytes"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/tpm"
)

// Replayed is a log whose digests replay to quoted PCR values.
type Replayed struct {
	// Events are the measurements into PCR 0 to 15, in order.
	Events []Event
	bank   tpm.Bank
}

func refuse(format string, args ...any) error {
	return attest.Refuse(attestv1.Reason_REASON_EVENTLOG_REPLAY, "event log: "+format, args...)
}

// Replay replays a log to the quoted values of PCR 0 to 15. The result must equal the quoted value
// for every PCR that has an event in the log. It does not check PCRs without events, for instance
// that of the node lock. The refusal is EVENTLOG_REPLAY.
func Replay(l *Log, quoted [tpm.PCRCount][]byte) (*Replayed, error) {
	out := &Replayed{bank: l.bank}
	for _, e := range l.events {
		if e.PCR < tpm.PCRCount { // the quote covers no other PCR
			out.Events = append(out.Events, e)
		}
	}
	for i, v := range l.PCRs() {
		if v != nil && !bytes.Equal(v, quoted[i]) {
			return nil, refuse("replay leads to %x in PCR %d, the quote has %x", v, i, quoted[i])
		}
	}
	if err := out.checkData(); err != nil {
		return nil, err
	}
	return out, nil
}

// PCRs returns the values of PCR 0 to 15 that the log replays to; nil for a PCR without events.
// These values are unverified; compare them with a quote.
func (l *Log) PCRs() [tpm.PCRCount][]byte {
	var values [tpm.PCRCount][]byte
	for _, e := range l.events {
		if e.PCR >= tpm.PCRCount {
			continue
		}
		if values[e.PCR] == nil {
			values[e.PCR] = make([]byte, l.bank.Size())
			if e.PCR == 0 {
				values[0][l.bank.Size()-1] = l.locality
			}
		}
		values[e.PCR] = l.bank.Extended(values[e.PCR], e.Digest)
	}
	return values
}

const (
	exitBootServices = "Exit Boot Services Returned with Success"
	efiEvents        = Type(0x80000000) // from here on: events that firmware makes
)

// checkData checks event types and order.
func (r *Replayed) checkData() error {
	exited := false
	for i, e := range r.Events {
		if e.Type.coversData() && !e.Covered(r.bank) {
			return refuse("event %d: the digest of %s in PCR %d is not that of its data", i+1, e.Type, e.PCR)
		}
		if exited && e.PCR < firmwarePCRs && e.Type >= efiEvents && e.Type != EFIAction {
			return refuse("event %d: %s in PCR %d after ExitBootServices", i+1, e.Type, e.PCR)
		}
		if e.Type == EFIAction && string(e.Data) == exitBootServices {
			exited = true
		}
	}
	return nil
}
