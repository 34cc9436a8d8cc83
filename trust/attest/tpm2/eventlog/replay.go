package eventlog

import (
	"bytes"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/tpm"
)

// Replayed is a log whose digests lead to quoted PCR values.
type Replayed struct {
	// Events are the measurements into PCR 0 to 15, in order.
	Events []Event
	// SecureBoot is the state that the firmware measured before it handed over; nil if the
	// log does not say.
	SecureBoot *bool
}

func refuse(format string, args ...any) error {
	return attest.Refuse(attestv1.Reason_REASON_EVENTLOG_REPLAY, "event log: "+format, args...)
}

// Replay parses a log and replays it to the quoted values of PCR 0 to 15. Every PCR that
// the log has an event for must come out as quoted; one without events (the node lock's,
// for instance) is not the log's to explain. Refusals: EVIDENCE_MALFORMED if it cannot be
// parsed, else EVENTLOG_REPLAY.
func Replay(raw []byte, bank tpm.Bank, quoted [tpm.PCRCount][]byte) (*Replayed, error) {
	l, err := Parse(raw, bank)
	if err != nil {
		return nil, err
	}
	out := &Replayed{}
	for _, e := range l.events {
		if e.PCR < tpm.PCRCount { // what is not quoted, nothing is known about
			out.Events = append(out.Events, e)
		}
	}
	for i, v := range l.PCRs() {
		if v != nil && !bytes.Equal(v, quoted[i]) {
			return nil, refuse("replay leads to %x in PCR %d, the quote has %x", v, i, quoted[i])
		}
	}
	if err := out.checkData(bank); err != nil {
		return nil, err
	}
	return out, nil
}

// PCRs gives the values of PCR 0 to 15 that the log leads to; nil where it has no event.
// They are the log's word: nothing but a quote makes them true.
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
	pcrSecureBoot    = 7
	efiEvents        = Type(0x80000000) // from here on: events that firmware makes
)

// checkData holds the log against what firmware does, and reads the Secure Boot state. An
// operating system can extend PCR 7 with whatever it likes after the firmware's separator;
// so only what comes before that one counts, and it must be there.
func (r *Replayed) checkData(bank tpm.Bank) error {
	separated, exited := false, false
	for i, e := range r.Events {
		covered := e.Covered(bank)
		if e.Type.coversData() && !covered {
			return refuse("event %d: the digest of %s in PCR %d is not that of its data", i, e.Type, e.PCR)
		}
		if exited && e.PCR < 8 && e.Type >= efiEvents && e.Type != EFIAction {
			return refuse("event %d: %s in PCR %d after ExitBootServices", i, e.Type, e.PCR)
		}
		if e.Type == EFIAction && string(e.Data) == exitBootServices {
			exited = true
		}
		if e.PCR != pcrSecureBoot {
			continue
		}
		switch {
		case e.Type == Separator && separated:
			return refuse("event %d: a second separator in PCR 7", i)
		case e.Type == Separator:
			separated = true
		case e.Type == EFIVariableDriverConfig:
			v, ok := parseVariable(e.Data)
			if !ok {
				return refuse("event %d: malformed UEFI variable", i)
			}
			if v.guid != globalVariable || v.name != "SecureBoot" {
				continue
			}
			if separated || r.SecureBoot != nil {
				return refuse("event %d: the Secure Boot state is told twice, or after the separator", i)
			}
			on := len(v.data) == 1 && v.data[0] == 1
			r.SecureBoot = &on
		}
	}
	if r.SecureBoot != nil && !separated {
		return refuse("PCR 7 has no separator, so the Secure Boot state may be anybody's word")
	}
	return nil
}
