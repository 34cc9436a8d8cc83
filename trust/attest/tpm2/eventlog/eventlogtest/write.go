// Package eventlogtest writes event logs as firmware does.
package eventlogtest

import (
	"encoding/binary"
	"fmt"

	"github.com/muster-k8s/muster/trust/attest/tpm2/eventlog"
	"github.com/muster-k8s/muster/trust/tpm"
)

// Writer builds a log. The zero value is not usable.
type Writer struct {
	banks []tpm.Bank
	raw   []byte
}

// NewWriter begins a log with digests of the banks given.
func NewWriter(banks ...tpm.Bank) *Writer {
	data := []byte("Spec ID Event03\x00")
	data = append(data, 0, 0, 0, 0, 0, 2, 0, 2) // class client; specification 2.0, errata 0; UINTN of 64 bits
	data = binary.LittleEndian.AppendUint32(data, uint32(len(banks)))
	for _, b := range banks {
		data = binary.LittleEndian.AppendUint16(data, uint16(b))
		data = binary.LittleEndian.AppendUint16(data, uint16(b.Size()))
	}
	data = append(data, 0) // no vendor information
	raw := binary.LittleEndian.AppendUint32(nil, 0)
	raw = binary.LittleEndian.AppendUint32(raw, 3) // EV_NO_ACTION
	raw = append(raw, make([]byte, 20)...)
	raw = binary.LittleEndian.AppendUint32(raw, uint32(len(data)))
	return &Writer{banks: banks, raw: append(raw, data...)}
}

// Append adds an event. digests has one for each bank of the log.
func (w *Writer) Append(pcr int, typ eventlog.Type, digests map[tpm.Bank][]byte, data []byte) error {
	raw := binary.LittleEndian.AppendUint32(nil, uint32(pcr))
	raw = binary.LittleEndian.AppendUint32(raw, uint32(typ))
	raw = binary.LittleEndian.AppendUint32(raw, uint32(len(w.banks)))
	for _, b := range w.banks {
		d := digests[b]
		if len(d) != b.Size() {
			return fmt.Errorf("a digest of %d bytes in %s", len(d), b)
		}
		raw = binary.LittleEndian.AppendUint16(raw, uint16(b))
		raw = append(raw, d...)
	}
	raw = binary.LittleEndian.AppendUint32(raw, uint32(len(data)))
	w.raw = append(append(w.raw, raw...), data...)
	return nil
}

// Measure adds an event whose digests are the hashes of data, and returns them. The caller extends
// the PCR of each bank with them.
func (w *Writer) Measure(pcr int, typ eventlog.Type, data []byte) (map[tpm.Bank][]byte, error) {
	digests := make(map[tpm.Bank][]byte, len(w.banks))
	for _, b := range w.banks {
		h, ok := b.Hash()
		if !ok {
			return nil, fmt.Errorf("unknown %s", b)
		}
		d := h.New()
		d.Write(data)
		digests[b] = d.Sum(nil)
	}
	return digests, w.Append(pcr, typ, digests, data)
}

// Bytes returns the log so far.
func (w *Writer) Bytes() []byte { return append([]byte(nil), w.raw...) }
