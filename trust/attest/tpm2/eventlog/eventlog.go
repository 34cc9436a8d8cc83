// Package eventlog reads and replays the TCG2 crypto-agile event log (TCG PC Client Platform
// Firmware Profile, revision 1.06, section 10).
//
// An event log is unsigned. It is used only if its digests replay to the quoted PCR values. An
// event's data is used only if the specification makes its digest the hash of the data, and the
// hash is correct. Other data is for display only.
package eventlog

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/tpm"
)

// Limits of the parser.
const (
	// MaxSize is the largest size of a log, in bytes.
	MaxSize = 512 << 10
	// maxEvents is the largest number of events. A PC's firmware writes 100 to 200.
	maxEvents = 4096
	// maxAlgorithms is the largest number of banks of one log.
	maxAlgorithms = 8
	maxPCR        = 23
)

// Event is one measurement in one bank.
type Event struct {
	// PCR is the register that was extended.
	PCR int
	// Type is the kind of event.
	Type Type
	// Digest is the extended value, in the log's bank.
	Digest []byte
	// Data is the event's data. It is not covered by Digest unless [Event.Covered].
	Data []byte
	// Text is Data in readable form, at most 256 printable characters.
	Text string
}

// Covered reports whether Digest is the hash of Data, so that Data can be trusted.
func (e Event) Covered(bank tpm.Bank) bool {
	h, ok := bank.Hash()
	if !ok {
		return false
	}
	d := h.New()
	d.Write(e.Data)
	return bytes.Equal(d.Sum(nil), e.Digest)
}

// Log is a log that was parsed for one bank, and not yet replayed.
type Log struct {
	bank     tpm.Bank
	locality byte // of TPM2_Startup; the start value of PCR 0 depends on it
	events   []Event
}

const (
	evNoAction       = 0x00000003
	specIDSignature  = "Spec ID Event03\x00"
	startupSignature = "StartupLocality\x00"
)

var errShort = errors.New("it ends in the middle of an event")

// cursor reads little-endian values, the byte order of event logs.
type cursor struct{ b []byte }

func (c *cursor) take(n uint32) ([]byte, error) {
	if uint64(n) > uint64(len(c.b)) {
		return nil, errShort
	}
	out := c.b[:n:n]
	c.b = c.b[n:]
	return out, nil
}

func (c *cursor) u32() (uint32, error) {
	b, err := c.take(4)
	if err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint32(b), nil
}

func (c *cursor) u16() (uint16, error) {
	b, err := c.take(2)
	if err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint16(b), nil
}

// Read reads the log in a file, usually /sys/kernel/security/tpm0/binary_bios_measurements, for one
// bank. It refuses a log that does not follow the specification with EVIDENCE_MALFORMED.
func Read(path string, bank tpm.Bank) (*Log, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("event log: %w", err)
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, MaxSize+1)) // files in securityfs report no size
	if err != nil {
		return nil, fmt.Errorf("event log %s: %w", path, err)
	}
	return Parse(raw, bank)
}

// Parse reads a log for one bank. The refusal is EVIDENCE_MALFORMED.
func Parse(raw []byte, bank tpm.Bank) (*Log, error) {
	l, err := parse(raw, bank)
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_EVIDENCE_MALFORMED, "event log: %w", err)
	}
	return l, nil
}

func parse(raw []byte, bank tpm.Bank) (*Log, error) {
	if len(raw) > MaxSize {
		return nil, fmt.Errorf("%d bytes, more than %d", len(raw), MaxSize)
	}
	c := &cursor{b: raw}
	sizes, err := header(c)
	if err != nil {
		return nil, err
	}
	if sizes[uint16(bank)] != bank.Size() || bank.Size() == 0 {
		return nil, fmt.Errorf("it has no digests of %s", bank)
	}
	l := &Log{bank: bank}
	for n := 0; len(c.b) > 0; n++ {
		if n == maxEvents {
			return nil, fmt.Errorf("more than %d events", maxEvents)
		}
		if err := l.next(c, sizes); err != nil {
			return nil, fmt.Errorf("event %d: %w", n+1, err)
		}
	}
	return l, nil
}

// header reads the first event, which has the old format and contains the length of each
// algorithm's digests.
func header(c *cursor) (map[uint16]int, error) {
	fixed, err := c.take(4 + 4 + 20)
	if err != nil {
		return nil, errShort
	}
	size, err := c.u32()
	if err != nil {
		return nil, err
	}
	data, err := c.take(size)
	if err != nil {
		return nil, err
	}
	if binary.LittleEndian.Uint32(fixed[4:]) != evNoAction || !bytes.HasPrefix(data, []byte(specIDSignature)) {
		return nil, errors.New("it does not begin with a Spec ID event: only the crypto-agile format is read")
	}
	// platformClass (4 bytes), minor, major, errata, uintnSize (1 each).
	d := &cursor{b: data[len(specIDSignature):]}
	if _, err := d.take(8); err != nil {
		return nil, err
	}
	count, err := d.u32()
	if err != nil {
		return nil, err
	}
	if count < 1 || count > maxAlgorithms {
		return nil, fmt.Errorf("%d algorithms, want 1 to %d", count, maxAlgorithms)
	}
	sizes := make(map[uint16]int, count)
	for range count {
		alg, err := d.u16()
		if err != nil {
			return nil, err
		}
		n, err := d.u16()
		if err != nil {
			return nil, err
		}
		if _, twice := sizes[alg]; twice || n < 20 || n > 64 {
			return nil, fmt.Errorf("algorithm 0x%04x with digests of %d bytes, or twice", alg, n)
		}
		sizes[alg] = int(n)
	}
	vendor, err := d.take(1)
	if err != nil {
		return nil, err
	}
	if int(vendor[0]) != len(d.b) {
		return nil, errors.New("vendor information of another length than announced")
	}
	return sizes, nil
}

// next reads one TCG_PCR_EVENT2. It must have exactly one digest of each algorithm.
func (l *Log) next(c *cursor, sizes map[uint16]int) error {
	pcr, err := c.u32()
	if err != nil {
		return err
	}
	typ, err := c.u32()
	if err != nil {
		return err
	}
	count, err := c.u32()
	if err != nil {
		return err
	}
	if int64(count) != int64(len(sizes)) {
		return fmt.Errorf("%d digests, the log has %d algorithms", count, len(sizes))
	}
	seen := make(map[uint16]bool, count)
	var digest []byte
	for range count {
		alg, err := c.u16()
		if err != nil {
			return err
		}
		size, known := sizes[alg]
		if !known || seen[alg] {
			return fmt.Errorf("a digest of algorithm 0x%04x, which the log does not have, or a second one", alg)
		}
		seen[alg] = true
		b, err := c.take(uint32(size))
		if err != nil {
			return err
		}
		if alg == uint16(l.bank) {
			digest = b
		}
	}
	size, err := c.u32()
	if err != nil {
		return err
	}
	data, err := c.take(size)
	if err != nil {
		return err
	}
	if typ == evNoAction { // extends nothing
		return l.noAction(data)
	}
	if pcr > maxPCR {
		return fmt.Errorf("PCR %d", pcr)
	}
	e := Event{PCR: int(pcr), Type: Type(typ), Digest: bytes.Clone(digest), Data: bytes.Clone(data)}
	e.Text = text(e)
	l.events = append(l.events, e)
	return nil
}

// noAction handles events that extend nothing. One of them matters: it contains the locality from
// which the TPM was started, and then PCR 0 did not start with zero.
func (l *Log) noAction(data []byte) error {
	rest, ok := bytes.CutPrefix(data, []byte(startupSignature))
	if !ok {
		return nil
	}
	for _, e := range l.events {
		if e.PCR == 0 {
			return errors.New("the startup locality comes after measurements into PCR 0")
		}
	}
	if len(rest) != 1 || (rest[0] != 0 && rest[0] != 3 && rest[0] != 4) || l.locality != 0 {
		return errors.New("the startup locality is malformed, or comes twice")
	}
	l.locality = rest[0]
	return nil
}
