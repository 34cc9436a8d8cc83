package eventlog_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2/eventlog"
	"github.com/muster-k8s/muster/trust/attest/tpm2/eventlog/eventlogtest"
	"github.com/muster-k8s/muster/trust/tpm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	accepted  = attestv1.Reason_REASON_ACCEPTED
	malformed = attestv1.Reason_REASON_EVIDENCE_MALFORMED
	replay    = attestv1.Reason_REASON_EVENTLOG_REPLAY
)

// entry is one event of a log that a test writes.
type entry struct {
	pcr    int
	typ    eventlog.Type
	data   string
	digest []byte // empty: the hash of data
}

// build writes a log in the SHA-256 bank, and returns the PCR values that its digests replay to.
func build(t testing.TB, entries ...entry) ([]byte, [tpm.PCRCount][]byte) {
	t.Helper()
	w := eventlogtest.NewWriter(tpm.SHA256)
	for _, e := range entries {
		if e.digest != nil {
			if err := w.Append(e.pcr, e.typ, map[tpm.Bank][]byte{tpm.SHA256: e.digest}, []byte(e.data)); err != nil {
				t.Fatal(err)
			}
		} else if _, err := w.Measure(e.pcr, e.typ, []byte(e.data)); err != nil {
			t.Fatal(err)
		}
	}
	l, err := eventlog.Parse(w.Bytes(), tpm.SHA256)
	if err != nil {
		t.Fatal(err)
	}
	return w.Bytes(), l.PCRs()
}

const (
	separator  = "\x00\x00\x00\x00"
	exitedBoot = "Exit Boot Services Returned with Success"
)

func secureBoot(v ...byte) entry {
	return entry{pcr: 7, typ: eventlog.EFIVariableDriverConfig, data: string(attesttest.Variable("SecureBoot", v))}
}

// replayed parses, marshals, unmarshals and replays a log.
func replayed(raw []byte, pcrs [tpm.PCRCount][]byte) (*eventlog.Replayed, error) {
	l, err := eventlog.Parse(raw, tpm.SHA256)
	if err != nil {
		return nil, err
	}
	sent, err := l.Marshal()
	if err != nil {
		return nil, err
	}
	if l, err = eventlog.Unmarshal(sent, tpm.SHA256); err != nil {
		return nil, err
	}
	return eventlog.Replay(l, pcrs)
}

func TestReplay(t *testing.T) {
	other := bytes.Repeat([]byte{7}, 32)
	for name, tt := range map[string]struct {
		entries []entry
		want    attestv1.Reason
	}{
		"an empty log is accepted":                          {want: accepted},
		"a log that leads to the quote is accepted":         {entries: []entry{{pcr: 4, typ: eventlog.EFIBootApplication, data: "x"}}, want: accepted},
		"a separator that hashes something else is refused": {entries: []entry{{pcr: 7, typ: eventlog.Separator, data: separator, digest: other}}, want: replay},
		"an action that hashes something else is refused":   {entries: []entry{{pcr: 5, typ: eventlog.EFIAction, data: "x", digest: other}}, want: replay},
		"a loader's digest need not be of the event's data": {entries: []entry{{pcr: 4, typ: eventlog.EFIBootApplication, data: "x", digest: other}}, want: accepted},
		"firmware events after ExitBootServices are refused": {
			entries: []entry{{pcr: 5, typ: eventlog.EFIAction, data: exitedBoot}, {pcr: 4, typ: eventlog.EFIBootApplication, data: "x"}}, want: replay,
		},
		"the kernel's events after ExitBootServices are not": {
			entries: []entry{{pcr: 5, typ: eventlog.EFIAction, data: exitedBoot}, {pcr: 9, typ: eventlog.EventTag, data: "x"}}, want: accepted,
		},
		"events of PCRs that are not quoted are left out": {entries: []entry{{pcr: 16, typ: eventlog.IPL, data: "x"}, {pcr: 23, typ: eventlog.IPL, data: "x"}}, want: accepted},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := replayed(build(t, tt.entries...)); attest.ReasonOf(err) != tt.want {
				t.Fatalf("%v, want %s", err, tt.want)
			}
		})
	}
}

// boot returns the log of firmware with Secure Boot on that loaded a driver from an option ROM.
func boot() []entry {
	all := []entry{
		{pcr: 0, typ: eventlog.SCRTMVersion, data: "v"},
		secureBoot(1),
	}
	for _, name := range []string{"PK", "KEK", "db", "dbx"} {
		all = append(all, entry{pcr: 7, typ: eventlog.EFIVariableDriverConfig, data: string(attesttest.Variable(name, []byte(name)))})
	}
	all = append(all, entry{pcr: 2, typ: eventlog.EFIBootServicesDriver, data: "rom"})
	for pcr := range 8 {
		all = append(all, entry{pcr: pcr, typ: eventlog.Separator, data: separator})
	}
	return append(all, entry{pcr: 7, typ: eventlog.EFIVariableAuthority, data: "authority"}, entry{pcr: 4, typ: eventlog.EFIBootApplication, data: "loader"})
}

func at(all []entry, pcr int, typ eventlog.Type) int {
	return slices.IndexFunc(all, func(e entry) bool { return e.pcr == pcr && e.typ == typ })
}

// Invariant A9.
func TestFirmware(t *testing.T) {
	sep7 := entry{pcr: 7, typ: eventlog.Separator, data: separator}
	other := bytes.Repeat([]byte{7}, 32)
	digest := func(data string) []byte { d := sha256.Sum256([]byte(data)); return d[:] }
	change := func(i int, f func(*entry)) func([]entry) []entry {
		return func(all []entry) []entry { f(&all[i]); return all }
	}
	const sb = 1 // index of SecureBoot
	for name, tt := range map[string]struct {
		change      func([]entry) []entry
		want        string // in the refusal
		off         bool
		drivers     int
		authorities int
	}{
		"an honest boot": {drivers: 1, authorities: 1},
		"no driver": {change: func(all []entry) []entry {
			i := at(all, 2, eventlog.EFIBootServicesDriver)
			return slices.Delete(all, i, i+1)
		}, authorities: 1},
		"a driver after the separator": {change: func(all []entry) []entry {
			return append(all, entry{pcr: 2, typ: eventlog.EFIBootServicesDriver, data: "d"})
		}, drivers: 2, authorities: 1},
		"a driver of no known type":      {change: func(all []entry) []entry { return append(all, entry{pcr: 2, typ: eventlog.IPL, data: "d"}) }, drivers: 2, authorities: 1},
		"Secure Boot off":                {change: change(sb, func(e *entry) { e.data = secureBoot(0).data }), off: true, drivers: 1, authorities: 1},
		"a state that is neither is off": {change: change(sb, func(e *entry) { e.data = secureBoot(2).data }), off: true, drivers: 1, authorities: 1},
		"no state is off":                {change: change(sb, func(e *entry) { e.data = secureBoot().data }), off: true, drivers: 1, authorities: 1},

		"Secure Boot off, and the log claims it on":          {change: change(sb, func(e *entry) { e.digest = digest(secureBoot(0).data) }), want: "event 1 of PCR 7 is not the variable SecureBoot"},
		"Secure Boot off, its events relabeled, on appended": {change: relabeled(sep7), want: "with the digest of a separator"},
		"a second separator":                                 {change: func(all []entry) []entry { return append(all, sep7) }, want: "event 8 of PCR 7: a second separator"},
		"a separator called otherwise":                       {change: func(all []entry) []entry { all[at(all, 2, eventlog.Separator)].typ = eventlog.IPL; return all }, want: "event 2 of PCR 2: EV_IPL with the digest of a separator"},
		"the separator of Windows called otherwise": {
			change: func(all []entry) []entry {
				return append(all, entry{pcr: 3, typ: eventlog.IPL, data: "\xff\xff\xff\xff"})
			}, want: "event 2 of PCR 3",
		},
		"a separator that reports an error": {change: func(all []entry) []entry { all[at(all, 0, eventlog.Separator)].data = "\x01\x00\x00\x00"; return all }, want: "reports the error 01000000"},
		"no separator":                      {change: func(all []entry) []entry { i := at(all, 3, eventlog.Separator); return slices.Delete(all, i, i+1) }, want: "PCR 3 has no separator"},
		"no log at all":                     {change: func([]entry) []entry { return nil }, want: "PCR 0 has no separator"},
		"Secure Boot behind the separator":  {change: func(all []entry) []entry { return append(slices.Delete(all, sb, sb+1), secureBoot(1)) }, want: "PCR 7 has 4 events before its separator"},
		"Secure Boot twice":                 {change: func(all []entry) []entry { return slices.Insert(all, sb, secureBoot(0)) }, want: "PCR 7 has 6 events before its separator"},
		"Secure Boot of another vendor":     {change: change(sb, func(e *entry) { e.data = "x" + e.data[1:] }), want: "is not the variable SecureBoot"},
		"another global variable": {
			change: change(sb, func(e *entry) {
				*e = entry{pcr: 7, typ: eventlog.EFIVariableDriverConfig, data: string(attesttest.Variable("SetupMode", []byte{1}))}
			}), want: "is not the variable SecureBoot",
		},
		"a variable that is cut off":       {change: change(sb, func(e *entry) { e.data = e.data[:20] }), want: "is not the variable SecureBoot"},
		"an event of another type":         {change: change(sb+1, func(e *entry) { e.typ = eventlog.EFIAction }), want: "event 2 of PCR 7: EV_EFI_ACTION"},
		"a digest that is not of its data": {change: change(sb, func(e *entry) { e.digest = other }), want: "is not the variable SecureBoot"},
	} {
		t.Run(name, func(t *testing.T) {
			all := boot()
			if tt.change != nil {
				all = tt.change(all)
			}
			r, err := replayed(build(t, all...))
			if err != nil {
				t.Fatal(err)
			}
			fw, err := r.Firmware()
			if tt.want != "" {
				if attest.ReasonOf(err) != replay || !strings.Contains(err.Error(), tt.want) {
					t.Fatalf("%v, want %q", err, tt.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if fw.SecureBoot == tt.off || len(fw.Drivers) != tt.drivers || len(fw.Authorities) != tt.authorities || len(fw.DriverConfig) != 0 {
				t.Errorf("%+v", fw)
			}
			for _, name := range []string{"PK", "KEK", "db", "dbx"} {
				if want := digest(string(attesttest.Variable(name, []byte(name)))); !bytes.Equal(fw.Keys[name], want) {
					t.Errorf("%s is %x, want %x", name, fw.Keys[name], want)
				}
			}
		})
	}
}

// relabeled is an attack by root on a machine with Secure Boot off: change the types of measured
// events, and append measurements.
func relabeled(separator entry) func([]entry) []entry {
	return func(all []entry) []entry {
		all[1].data = secureBoot(0).data
		for i, e := range all {
			if e.pcr == 7 {
				all[i].typ = eventlog.EFIVariableAuthority
			}
		}
		all = append(all, secureBoot(1))
		for _, name := range []string{"PK", "KEK", "db", "dbx"} {
			all = append(all, entry{pcr: 7, typ: eventlog.EFIVariableDriverConfig, data: string(attesttest.Variable(name, []byte(name)))})
		}
		return append(all, separator)
	}
}

func TestALogThatLeadsElsewhereIsRefused(t *testing.T) {
	raw, pcrs := build(t, entry{pcr: 4, typ: eventlog.IPL, data: "x"}, entry{pcr: 9, typ: eventlog.IPL, data: "y"})
	for _, i := range []int{4, 9} {
		changed := pcrs
		changed[i] = bytes.Repeat([]byte{1}, 32)
		if _, err := replayed(raw, changed); attest.ReasonOf(err) != replay {
			t.Errorf("PCR %d: %v", i, err)
		}
	}
	pcrs[15] = bytes.Repeat([]byte{1}, 32) // the firmware's log does not explain the node lock
	if _, err := replayed(raw, pcrs); err != nil {
		t.Error(err)
	}
}

func TestStartupLocality(t *testing.T) {
	base, _ := build(t)
	noAction := func(data string) []byte {
		b := binary.LittleEndian.AppendUint32(nil, 0)
		b = binary.LittleEndian.AppendUint32(b, 3)
		b = binary.LittleEndian.AppendUint32(b, 1)
		b = binary.LittleEndian.AppendUint16(b, 0x000B)
		b = append(b, make([]byte, 32)...)
		b = binary.LittleEndian.AppendUint32(b, uint32(len(data)))
		return append(b, data...)
	}
	full, _ := build(t, entry{pcr: 0, typ: eventlog.SCRTMVersion, data: "v"})
	event := full[len(base):]
	locality3 := noAction("StartupLocality\x00\x03")
	l, err := eventlog.Parse(append(append(bytes.Clone(base), locality3...), event...), tpm.SHA256)
	if err != nil {
		t.Fatal(err)
	}
	start := make([]byte, 32)
	start[31] = 3
	plain, err := eventlog.Parse(full, tpm.SHA256)
	if err != nil {
		t.Fatal(err)
	}
	digest := event[4+4+4+2:][:32]
	if want := tpm.SHA256.Extended(start, digest); !bytes.Equal(l.PCRs()[0], want) {
		t.Errorf("PCR 0 is %x, want %x", l.PCRs()[0], want)
	}
	if bytes.Equal(l.PCRs()[0], plain.PCRs()[0]) {
		t.Error("the startup locality made no difference")
	}
	for name, raw := range map[string][]byte{
		"behind a measurement": append(bytes.Clone(full), locality3...),
		"twice":                append(append(bytes.Clone(base), locality3...), locality3...),
		"of an odd value":      append(bytes.Clone(base), noAction("StartupLocality\x00\x07")...),
		"cut off":              append(bytes.Clone(base), noAction("StartupLocality\x00")...),
	} {
		if _, err := eventlog.Parse(raw, tpm.SHA256); attest.ReasonOf(err) != malformed {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestParseRefusesWhatIsMalformed(t *testing.T) {
	good, _ := build(t, entry{pcr: 4, typ: eventlog.IPL, data: "data"})
	base, _ := build(t)
	at := len(base) // index of the event
	put := func(offset int, v uint32) []byte {
		b := bytes.Clone(good)
		binary.LittleEndian.PutUint32(b[offset:], v)
		return b
	}
	empty := good[at : len(good)-4]
	empty = bytes.Clone(empty)
	binary.LittleEndian.PutUint32(empty[len(empty)-4:], 0)
	two := bytes.Clone(good)
	binary.LittleEndian.PutUint32(two[at+8:], 2)
	for name, raw := range map[string][]byte{
		"nothing":                                     {},
		"a header alone that is cut off":              good[:20],
		"zeros":                                       make([]byte, 100),
		"the old format":                              append(make([]byte, 4), append([]byte{8, 0, 0, 0}, make([]byte, 30)...)...),
		"a header as long as an integer can say":      put(28, 0xFFFFFFFF),
		"more algorithms than there can be":           put(32+16+8, 0xFFFFFFFF),
		"no algorithm":                                put(32+16+8, 0),
		"digests of 65535 bytes":                      put(32+16+12, 0xFFFF000B),
		"vendor information that is longer than said": append(put(28, 34)[:at], 0),
		"PCR 24":                             put(at, 24),
		"PCR 4294967295":                     put(at, 0xFFFFFFFF),
		"no digest":                          put(at+8, 0),
		"4294967295 digests":                 put(at+8, 0xFFFFFFFF),
		"a digest of another algorithm":      put(at+12, 0x000C),
		"data as long as an integer can say": put(len(good)-8, 0xFFFFFFFF),
		"data that end too early":            put(len(good)-8, 5),
		"two digests of the same algorithm":  append(two[:at+12+34], append(bytes.Clone(good[at+12:at+12+34]), good[at+12+34:]...)...),
		"bytes behind the last event":        append(bytes.Clone(good), 1),
		"4097 empty events":                  append(bytes.Clone(base), bytes.Repeat(empty, 4097)...),
		"more than 512 KiB":                  append(bytes.Clone(base), make([]byte, eventlog.MaxSize)...),
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := eventlog.Parse(raw, tpm.SHA256); attest.ReasonOf(err) != malformed {
				t.Errorf("%v, want EVIDENCE_MALFORMED", err)
			}
		})
	}
	for i := 1; i < len(good); i++ {
		if i == at {
			continue // a log without events
		}
		if _, err := eventlog.Parse(good[:i], tpm.SHA256); attest.ReasonOf(err) != malformed {
			t.Errorf("cut off at %d of %d: %v", i, len(good), err)
		}
	}
	if _, err := eventlog.Parse(good, tpm.SHA384); attest.ReasonOf(err) != malformed {
		t.Errorf("a bank that the log does not have: %v", err)
	}
}

func TestTextIsForPeople(t *testing.T) {
	wide := func(s string) string {
		var b []byte
		for _, u := range utf16.Encode([]rune(s)) {
			b = binary.LittleEndian.AppendUint16(b, u)
		}
		return string(b)
	}
	file := wide("\\EFI\\BOOT\\BOOTX64.EFI") + "\x00\x00"
	path := strings.Repeat("\x00", 32) + "\x04\x04" + string(binary.LittleEndian.AppendUint16(nil, uint16(4+len(file)))) + file + "\x7f\xff\x04\x00"
	for want, e := range map[string]entry{
		"SecureBoot=1":             secureBoot(1),
		"quiet splash":             {pcr: 8, typ: eventlog.IPL, data: "quiet splash\x00"},
		"root=/dev/sda1":           {pcr: 12, typ: eventlog.IPL, data: wide("root=/dev/sda1") + "\x00\x00"},
		"00000000":                 {pcr: 4, typ: eventlog.Separator, data: separator},
		"\\EFI\\BOOT\\BOOTX64.EFI": {pcr: 4, typ: eventlog.EFIBootApplication, data: path},
		".[31mred":                 {pcr: 8, typ: eventlog.IPL, data: "\x1b[31mred"},
		strings.Repeat("a", 256):   {pcr: 8, typ: eventlog.IPL, data: strings.Repeat("a", 100000)},
	} {
		entries := []entry{e}
		if e.pcr == 7 {
			entries = append(entries, entry{pcr: 7, typ: eventlog.Separator, data: separator})
		}
		raw, pcrs := build(t, entries...)
		l, err := eventlog.Parse(raw, tpm.SHA256)
		if err != nil {
			t.Fatal(err)
		}
		got, err := eventlog.Replay(l, pcrs)
		if err != nil {
			t.Fatal(err)
		}
		if got.Events[0].Text != want {
			t.Errorf("text %q, want %q", got.Events[0].Text, want)
		}
	}
}

func TestWhatIsWrittenIsRead(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := eventlogtest.NewWriter(tpm.SHA256, tpm.SHA384)
		values := map[tpm.Bank][][]byte{}
		for _, b := range []tpm.Bank{tpm.SHA256, tpm.SHA384} {
			values[b] = make([][]byte, tpm.PCRCount)
		}
		for range rapid.IntRange(0, 20).Draw(rt, "events") {
			pcr := rapid.IntRange(0, 15).Draw(rt, "pcr")
			digests, err := w.Measure(pcr, eventlog.IPL, rapid.SliceOf(rapid.Byte()).Draw(rt, "data"))
			if err != nil {
				rt.Fatal(err)
			}
			for b, d := range digests {
				if values[b][pcr] == nil {
					values[b][pcr] = make([]byte, b.Size())
				}
				values[b][pcr] = b.Extended(values[b][pcr], d)
			}
		}
		for b, want := range values {
			l, err := eventlog.Parse(w.Bytes(), b)
			if err != nil {
				rt.Fatal(err)
			}
			if _, err := eventlog.Replay(l, [tpm.PCRCount][]byte(want)); err != nil {
				rt.Fatalf("%s: %v", b, err)
			}
		}
	})
}

// Invariant A9.
func FuzzReplay(f *testing.F) {
	full, _ := attesttest.BootLog(f, attesttest.Options{SecureBoot: true}, tpm.SHA256)
	f.Add(full)
	both, _ := attesttest.BootLog(f, attesttest.Options{}, tpm.SHA256, tpm.SHA384)
	f.Add(both)
	empty, _ := build(f)
	f.Add(empty)
	f.Add([]byte("Spec ID Event03"))
	for _, log := range []string{"go-tpm-tools/gdc-host.bin", "keylime/bios.bin"} {
		raw, err := os.ReadFile(filepath.Join("testdata", log))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		l, err := eventlog.Parse(raw, tpm.SHA256)
		if err != nil {
			if attest.ReasonOf(err) != malformed {
				t.Fatal(err)
			}
			return
		}
		got, err := eventlog.Replay(l, l.PCRs())
		if err != nil {
			if attest.ReasonOf(err) != replay {
				t.Fatal(err)
			}
			return
		}
		if _, err := got.Firmware(); err != nil && attest.ReasonOf(err) != replay {
			t.Fatal(err)
		}
		for _, e := range got.Events {
			if n := len([]rune(e.Text)); n > 256 {
				t.Fatalf("text of %d characters", n)
			}
		}
	})
}

func FuzzUnmarshal(f *testing.F) {
	raw, _ := attesttest.BootLog(f, attesttest.Options{SecureBoot: true}, tpm.SHA256)
	l, err := eventlog.Parse(raw, tpm.SHA256)
	if err != nil {
		f.Fatal(err)
	}
	sent, err := l.Marshal()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(sent)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, raw []byte) {
		l, err := eventlog.Unmarshal(raw, tpm.SHA256)
		if err != nil {
			if attest.ReasonOf(err) != malformed {
				t.Fatal(err)
			}
			return
		}
		r, err := eventlog.Replay(l, l.PCRs())
		if err == nil {
			_, err = r.Firmware()
		}
		if err != nil && attest.ReasonOf(err) != replay {
			t.Fatal(err)
		}
	})
}
