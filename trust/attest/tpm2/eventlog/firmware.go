package eventlog

import "bytes"

// PCRs that firmware extends (PC Client Platform Firmware Profile, section 3.3.4).
const (
	pcrDrivers      = 2 // drivers and option ROMs from outside the firmware volume
	pcrDriverConfig = 3
	pcrSecureBoot   = 7
	firmwarePCRs    = 8 // 0 to 7 have a separator
)

// Firmware is what a replayed log says of the time before the boot loader.
//
// Software that runs after the firmware can append measurements, and forge event types and data in the log. It can't undo an extend, nor find other data for
// a digest. So separators, and what PCR 7 has before its own, are recognized by digest and place; no other event is
// believed to be of the type that the log gives it.
type Firmware struct {
	// Drivers are the events of PCR 2 but for its separator, whatever their type: drivers and option ROMs that do not come
	// from the firmware volume.
	Drivers []Event
	// DriverConfig are those of PCR 3.
	DriverConfig []Event
	// SecureBoot reports whether Secure Boot was on.
	SecureBoot bool
	// Keys has, by the names PK, KEK, db and dbx, the digests of these variables (UEFI_VARIABLE_DATA, section 10.2.6).
	Keys map[string][]byte
	// Authorities are the events of PCR 7 after its separator: with Secure Boot on, the keys by which images were
	// accepted.
	Authorities []Event
}

// Firmware returns what the log says of the firmware. The refusal, EVENTLOG_REPLAY, names PCR and event.
func (r *Replayed) Firmware() (*Firmware, error) {
	var events [firmwarePCRs][]Event
	var ends [firmwarePCRs]int // where the separator is
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

// judged are the PCRs of which rules say what may be before the separator, and after it.
var judged = map[int]bool{pcrDrivers: true, pcrDriverConfig: true, pcrSecureBoot: true}

// separator returns the place of a PCR's separator. In those that rules judge it is the only event with its digest: the log could otherwise
// call the firmware's separator something else, and append one (A9). Firmware in use measures its code, in PCR 0, by such digests.
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
		case !is, e.Type != Separator && !judged[pcr]:
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

// keyVariables are those that firmware measures into PCR 7 after SecureBoot, in this order (section 3.3.4.8).
var keyVariables = []string{"PK", "KEK", "db", "dbx"}

// secureBoot reads the events of PCR 7 before its separator. Which of them is which follows from the order: data of the keys may be missing.
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
