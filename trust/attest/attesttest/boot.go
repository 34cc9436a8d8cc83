package attesttest

import (
	"encoding/binary"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/muster-k8s/muster/trust/attest/tpm2/eventlog"
	"github.com/muster-k8s/muster/trust/attest/tpm2/eventlog/eventlogtest"
	"github.com/muster-k8s/muster/trust/tpm"
)

// Measurement is one extension of a PCR.
type Measurement struct {
	PCR     int
	Digests map[tpm.Bank][]byte
}

// BootLog returns the event log of a boot, and the extended measurements in order.
func BootLog(t testing.TB, opts Options, banks ...tpm.Bank) ([]byte, []Measurement) {
	t.Helper()
	w := eventlogtest.NewWriter(banks...)
	var all []Measurement
	add := func(pcr int, typ eventlog.Type, data []byte) {
		d, err := w.Measure(pcr, typ, data)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, Measurement{pcr, d})
	}
	state := byte(0)
	if opts.SecureBoot {
		state = 1
	}
	add(0, eventlog.SCRTMVersion, []byte("a\x00t\x00\x00\x00"))
	add(7, eventlog.EFIVariableDriverConfig, Variable("SecureBoot", []byte{state}))
	for _, name := range []string{"PK", "KEK", "db", "dbx"} {
		add(7, eventlog.EFIVariableDriverConfig, Variable(name, []byte(name+" of the test")))
	}
	for _, driver := range opts.Drivers {
		add(2, eventlog.EFIBootServicesDriver, []byte(driver))
	}
	add(4, eventlog.EFIAction, []byte("Calling EFI Application from Boot Option"))
	for pcr := range 8 {
		add(pcr, eventlog.Separator, make([]byte, 4))
	}
	add(4, eventlog.EFIBootApplication, []byte("loader of "+opts.Image+", in place of its device path"))
	add(5, eventlog.EFIAction, []byte("Exit Boot Services Invocation"))
	add(5, eventlog.EFIAction, []byte("Exit Boot Services Returned with Success"))
	add(9, eventlog.IPL, []byte("initrd of "+opts.Image))
	add(11, eventlog.IPL, []byte("kernel and command line of "+opts.Image))
	return w.Bytes(), all
}

// Variable returns a UEFI_VARIABLE_DATA of one of the variables of Secure Boot.
func Variable(name string, value []byte) []byte {
	out := []byte("\x61\xdf\xe4\x8b\xca\x93\xd2\x11\xaa\x0d\x00\xe0\x98\x03\x2b\x8c") // EFI_GLOBAL_VARIABLE
	if strings.HasPrefix(name, "db") {
		out = []byte("\xcb\xb2\x19\xd7\x3a\x3d\x96\x45\xa3\xbc\xda\xd0\x0e\x67\x65\x6f") // EFI_IMAGE_SECURITY_DATABASE_GUID
	}
	units := utf16.Encode([]rune(name))
	out = binary.LittleEndian.AppendUint64(out, uint64(len(units)))
	out = binary.LittleEndian.AppendUint64(out, uint64(len(value)))
	for _, u := range units {
		out = binary.LittleEndian.AppendUint16(out, u)
	}
	return append(out, value...)
}
