package eventlog

import "bytes"

// PCRs that firmware extends (PC Client Platform Firmware Profile, section 3.3.4).
const (
	pcrDrivers      = 2 // drivers and option ROMs from outside the firmware volume
	pcrDriverConfig = 3
	pcrSecureBoot   = 7
	firmwarePCRs    = 8 // 0 to 7 have a separator
)

// Firmware is the part of a replayed log that precedes the boot loader.
//
// Software that runs after the firmware can append measurements, and forge event types and data in
// the log. It cannot undo an extend, nor find other data for a digest. So separators, and the
// events of PCR 7 before its separator, are recognized by digest and position; no other event's
// type in the log is trusted.
type Firmware struct {
	// Drivers are all events of PCR 2 except its separator, of any type: drivers and option ROMs
	// from outside the firmware volume.
	Drivers []Event
	// DriverConfig are the same events of PCR 3.
	DriverConfig []Event
	// SecureBoot reports whether Secure Boot was on.
	SecureBoot bool
	// Keys has, by the names PK, KEK, db and dbx, the digests of these variables (UEFI_VARIABLE_DATA, section 10.2.6).
	Keys map[string][]byte
	// Authorities are the events of PCR 7 after its separator: with Secure Boot on, the keys that
	// verified the loaded images.
	Authorities []Event
}

// Firmware returns the firmware's part of the log. The refusal, EVENTLOG_REPLAY, names PCR and
// event.
func (r *Replayed) Firmware() (*Firmware, error) {
	var events [firmwarePCRs][]Event
	var ends [firmwarePCRs]int // index of the separator
	for pcr := range firmwarePCRs {
		for _, e := range r.Events {
			if e.PCR == pcr {
				events[pcr] = append(events[pcr], e)
			}
		}
		var err error
		if ends[pcr], err = r.separator(pcr, events[pcr]); err != nil {
			return nil, err
		}
	}
	but := func(pcr int) []Event {
		return append(append([]Event(nil), events[pcr][:ends[pcr]]...), events[pcr][ends[pcr]+1:]...)
	}
	end := ends[pcrSecureBoot]
	out := &Firmware{Drivers: but(pcrDrivers), DriverConfig: but(pcrDriverConfig), Authorities: events[pcrSecureBoot][end+1:]}
	if err := out.secureBoot(events[pcrSecureBoot][:end], func(e Event) bool { return e.Covered(r.bank) }); err != nil {
		return nil, err
	}
	return out, nil
}

// separators are the data of a separator that reports no error (section 10.4.1).
var separators = [][]byte{{0, 0, 0, 0}, {0xFF, 0xFF, 0xFF, 0xFF}}

// appraised are the PCRs for which rules restrict the events before and after the separator.
var appraised = map[int]bool{pcrDrivers: true, pcrDriverConfig: true, pcrSecureBoot: true}

// separator returns the index of a PCR's separator. In the appraised PCRs it must be the only event
// with its digest: otherwise the log could change the type of the firmware's separator and append
// another separator (A9). The other PCRs are not restricted, because existing firmware measures its
// code, in PCR 0, by such digests.
func (r *Replayed) separator(pcr int, events []Event) (int, error) {
	found := -1
	for i, e := range events {
		is := false
		for _, data := range separators {
			is = is || Event{Digest: e.Digest, Data: data}.Covered(r.bank)
		}
		switch {
		case !is && e.Type == Separator:
			return 0, refuse("event %d of PCR %d: a separator that reports the error %x", i+1, pcr, e.Data)
		case !is, e.Type != Separator && !appraised[pcr]:
		case e.Type != Separator:
			return 0, refuse("event %d of PCR %d: %s with the digest of a separator", i+1, pcr, e.Type)
		case found >= 0:
			return 0, refuse("event %d of PCR %d: a second separator", i+1, pcr)
		default:
			found = i
		}
	}
	if found < 0 {
		return 0, refuse("PCR %d has no separator, so what is in it need not be the firmware's", pcr)
	}
	return found, nil
}

// keyVariables are the variables that firmware measures into PCR 7 after SecureBoot, in this order
// (section 3.3.4.8).
var keyVariables = []string{"PK", "KEK", "db", "dbx"}

// secureBoot reads the events of PCR 7 before its separator. Their order identifies them, because
// data of the keys may be missing.
func (f *Firmware) secureBoot(events []Event, covered func(Event) bool) error {
	if len(events) != 1+len(keyVariables) {
		return refuse("PCR 7 has %d events before its separator, want the variables SecureBoot, PK, KEK, db and dbx alone", len(events))
	}
	for i, e := range events {
		if e.Type != EFIVariableDriverConfig {
			return refuse("event %d of PCR 7: %s (%s), want UEFI variables alone before the separator", i+1, e.Type, e.Text)
		}
	}
	v, ok := parseVariable(events[0].Data)
	if !ok || !covered(events[0]) || v.guid != globalVariable || v.name != "SecureBoot" {
		return refuse("event 1 of PCR 7 is not the variable SecureBoot")
	}
	f.SecureBoot = bytes.Equal(v.data, []byte{1})
	f.Keys = map[string][]byte{}
	for i, name := range keyVariables {
		f.Keys[name] = events[1+i].Digest
	}
	return nil
}
