package tsm

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/snp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func captured(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "attest", "hardware", "testdata", path))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// kernel is a folder that behaves as configfs does: it makes and removes the attributes of an entry,
// counts writes, and makes the report when it is read.
type kernel struct {
	folder
	provider  string
	floor     string // empty: the driver has no privilege levels
	report    func(inblob []byte) ([]byte, error)
	aux       []byte // nil: the driver has no auxblob
	interfere bool   // another program writes to the entry
	inblob    []byte
	privlevel string
}

func (k *kernel) put(entry, attribute string, data []byte) error {
	return os.WriteFile(filepath.Join(string(k.folder), entry, attribute), data, 0o600)
}

func (k *kernel) mkdir(entry string) error {
	if err := k.folder.mkdir(entry); err != nil {
		return err
	}
	attributes := map[string][]byte{"provider": []byte(k.provider + "\n"), "generation": []byte("0\n"), "inblob": nil, "outblob": nil}
	if k.aux != nil {
		attributes["auxblob"] = k.aux
	}
	if k.floor != "" {
		attributes["privlevel_floor"], attributes["privlevel"] = []byte(k.floor+"\n"), nil
	}
	for name, data := range attributes {
		if err := k.put(entry, name, data); err != nil {
			return err
		}
	}
	return nil
}

func (k *kernel) rmdir(entry string) error {
	all, err := os.ReadDir(filepath.Join(string(k.folder), entry))
	if err != nil {
		return err
	}
	for _, a := range all {
		if err := os.Remove(filepath.Join(string(k.folder), entry, a.Name())); err != nil {
			return err
		}
	}
	return k.folder.rmdir(entry)
}

func (k *kernel) write(entry, attribute string, data []byte) error {
	if err := k.folder.write(entry, attribute, data); err != nil {
		return err
	}
	b, err := k.folder.read(entry, "generation")
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return err
	}
	switch n++; attribute {
	case "inblob":
		k.inblob = bytes.Clone(data)
	case "privlevel":
		if k.privlevel = string(data); k.privlevel < k.floor {
			return syscall.EINVAL
		}
	}
	return k.put(entry, "generation", fmt.Appendf(nil, "%d\n", n))
}

func (k *kernel) read(entry, attribute string) ([]byte, error) {
	if attribute == "outblob" {
		b, err := k.report(k.inblob)
		if err == nil {
			err = k.put(entry, "outblob", b)
		}
		if err != nil {
			return nil, err
		}
	}
	if attribute == "auxblob" && k.interfere {
		if err := k.write(entry, "inblob", make([]byte, 64)); err != nil {
			return nil, err
		}
	}
	return k.folder.read(entry, attribute)
}

// table returns a host's table of certificates: entries of identifier and content.
func table(entries ...[2]string) []byte {
	offset := 24 * (len(entries) + 1)
	var head, tail []byte
	for _, e := range entries {
		id, err := hex.DecodeString(e[0])
		if err != nil {
			panic(err) // of a test's constant
		}
		head = append(head, id...)
		head = binary.LittleEndian.AppendUint32(head, uint32(offset+len(tail)))
		head = binary.LittleEndian.AppendUint32(head, uint32(len(e[1])))
		tail = append(tail, e[1]...)
	}
	return append(append(head, make([]byte, 24)...), tail...)
}

const other = "4ab7b379bbac4fe4a02f05aef327c782" // the issuer's

// newSNP returns the kernel of an SEV-SNP guest; the report is a captured one over the caller's data.
func newSNP(t testing.TB) *kernel {
	report := captured(t, "snp/milan-v2-vcek/report.bin")
	return &kernel{
		folder: folder(t.TempDir()), provider: providerSNP, floor: "0",
		report: func(in []byte) ([]byte, error) {
			b := bytes.Clone(report)
			copy(b[0x50:0x90], in)
			return b, nil
		},
		aux: table([2]string{other, "issuer"}, [2]string{tableKeys[snp.VCEK], string(captured(t, "snp/milan-v2-vcek/vcek.der"))}),
	}
}

func newTDX(t testing.TB) *kernel {
	quote := captured(t, "tdx/gcp-cos113/quote.bin") // 8,000 bytes, with padding
	return &kernel{folder: folder(t.TempDir()), provider: providerTDX, report: func(in []byte) ([]byte, error) {
		b := bytes.Clone(quote)
		copy(b[48+0x208:], in)
		return b, nil
	}}
}

func value() (d hardware.ReportData) {
	for i := range d {
		d[i] = byte(i + 1)
	}
	return d
}

func left(t testing.TB, k *kernel) int {
	t.Helper()
	all, err := os.ReadDir(string(k.folder))
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

func TestReportsAreOverTheCallersData(t *testing.T) {
	data := value()
	amd := newSNP(t)
	r, err := (&Reports{amd}).Report(t.Context(), data)
	if err != nil {
		t.Fatal(err)
	}
	if m := r.GetSevSnp(); !bytes.Equal(m.GetReport()[0x50:0x90], data[:]) || !bytes.Equal(m.GetCertificate(), captured(t, "snp/milan-v2-vcek/vcek.der")) {
		t.Errorf("SEV-SNP: %d bytes of report, %d of certificate", len(m.GetReport()), len(m.GetCertificate()))
	}
	intel := newTDX(t)
	if r, err = (&Reports{intel}).Report(t.Context(), data); err != nil || !bytes.Equal(r.GetTdx().GetQuote()[48+0x208:][:64], data[:]) {
		t.Errorf("TDX: %d bytes of quote, %v", len(r.GetTdx().GetQuote()), err)
	}
	if n := left(t, amd) + left(t, intel); n != 0 {
		t.Errorf("%d folders are left", n)
	}
}

func TestAGuestAsksAtItsOwnPrivilegeLevel(t *testing.T) {
	k := newSNP(t)
	k.floor = "2"
	if _, err := (&Reports{k}).Report(t.Context(), value()); err != nil || k.privlevel != "2" {
		t.Errorf("privlevel %q, %v", k.privlevel, err)
	}
}

// TestTheCertificateIsThatOfTheKeyThatSigned: a host can have both keys, in any order.
func TestTheCertificateIsThatOfTheKeyThatSigned(t *testing.T) {
	vcek, vlek := [2]string{tableKeys[snp.VCEK], "VCEK"}, [2]string{tableKeys[snp.VLEK], "VLEK"}
	for name, tt := range map[string]struct {
		info byte // KEY_INFO of the report
		aux  []byte
		want string
	}{
		"VCEK, alone":                 {0, table(vcek), "VCEK"},
		"VCEK, before the VLEK":       {0, table(vcek, vlek), "VCEK"},
		"VCEK, after the VLEK":        {0, table(vlek, vcek), "VCEK"},
		"VCEK, and the VLEK is there": {0, table(vlek), ""},
		"VLEK, alone":                 {1 << 2, table(vlek), "VLEK"},
		"VLEK, after the VCEK":        {1 << 2, table(vcek, vlek), "VLEK"},
		"VLEK, before the VCEK":       {1 << 2, table(vlek, vcek), "VLEK"},
		"VLEK, and the VCEK is there": {1 << 2, table(vcek), ""},
		"masked key":                  {2, table(vcek, vlek), ""},
		"no key":                      {7 << 2, table(vcek, vlek), ""},
	} {
		k := newSNP(t)
		report := k.report
		k.report = func(in []byte) ([]byte, error) {
			b, err := report(in)
			b[0x48] = tt.info
			return b, err
		}
		k.aux = tt.aux
		if r, err := (&Reports{k}).Report(t.Context(), value()); err != nil || string(r.GetSevSnp().GetCertificate()) != tt.want {
			t.Errorf("%s: %q, %v, want %q", name, r.GetSevSnp().GetCertificate(), err, tt.want)
		}
	}
}

func TestAMachineWithoutTheInterfaceSendsNoReport(t *testing.T) {
	r, err := New(filepath.Join(t.TempDir(), "tsm", "report")).Report(t.Context(), value())
	if r != nil || err != nil {
		t.Errorf("no interface: %v, %v", r, err)
	}
	if r, err := (&Reports{noDriver{newSNP(t)}}).Report(t.Context(), value()); r != nil || err != nil {
		t.Errorf("no driver: %v, %v", r, err)
	}
}

// noDriver is a kernel whose interface no driver uses.
type noDriver struct{ *kernel }

func (noDriver) mkdir(string) error { return &os.PathError{Op: "mkdir", Err: syscall.ENXIO} }

// TestAHostWithoutCertificatesDoesNotStopAMachine: a policy may require no report.
func TestAHostWithoutCertificatesDoesNotStopAMachine(t *testing.T) {
	for name, aux := range map[string][]byte{
		"no table": nil, "empty table": table(), "table of the issuer alone": table([2]string{other, "issuer"}),
		"key after the end of the table": append(make([]byte, 24), table([2]string{tableKeys[snp.VCEK], "certificate"})...),
	} {
		k := newSNP(t)
		k.aux = aux
		if r, err := (&Reports{k}).Report(t.Context(), value()); err != nil || len(r.GetSevSnp().GetReport()) != 1184 || r.GetSevSnp().GetCertificate() != nil {
			t.Errorf("%s: %q, %v", name, r.GetSevSnp().GetCertificate(), err)
		}
	}
}

// TestErrorsOfThePlatformAreReported: a machine that has the hardware never leaves its report out.
func TestErrorsOfThePlatformAreReported(t *testing.T) {
	short := func(n int) func([]byte) ([]byte, error) {
		return func([]byte) ([]byte, error) { return make([]byte, n), nil }
	}
	cut := table([2]string{tableKeys[snp.VCEK], "certificate"})
	for name, tt := range map[string]struct {
		kernel func(testing.TB) *kernel
		change func(*kernel)
		want   string
	}{
		"firmware that refuses":              {newSNP, func(k *kernel) { k.report = func([]byte) ([]byte, error) { return nil, syscall.EIO } }, "input/output error"},
		"quoting service that is away":       {newTDX, func(k *kernel) { k.report = func([]byte) ([]byte, error) { return nil, syscall.ETIMEDOUT } }, "timed out"},
		"unknown driver":                     {newSNP, func(k *kernel) { k.provider = "arm_cca_guest" }, `"arm_cca_guest" makes reports of an unknown kind`},
		"report of 1183 bytes":               {newSNP, func(k *kernel) { k.report = short(1183) }, "has 1183 bytes"},
		"empty quote":                        {newTDX, func(k *kernel) { k.report = short(0) }, "has 0 bytes"},
		"quote of more than 16 KiB":          {newTDX, func(k *kernel) { k.report = short(16<<10 + 1) }, "has 16385 bytes"},
		"report of more than 32 KiB":         {newTDX, func(k *kernel) { k.report = short(32<<10 + 1) }, "more than 32768"},
		"another program's write":            {newSNP, func(k *kernel) { k.interfere = true }, "another program has written"},
		"certificate beyond the table":       {newSNP, func(k *kernel) { k.aux = cut[:len(cut)-1] }, "an entry for the SEV-SNP key"},
		"empty certificate":                  {newSNP, func(k *kernel) { k.aux = table([2]string{tableKeys[snp.VCEK], ""}) }, "an entry for the SEV-SNP key"},
		"certificate of more than 4 KiB":     {newSNP, func(k *kernel) { k.aux = table([2]string{tableKeys[snp.VCEK], strings.Repeat("x", 4097)}) }, "an entry for the SEV-SNP key"},
		"certificate of exactly 4 KiB":       {newSNP, func(k *kernel) { k.aux = table([2]string{tableKeys[snp.VCEK], strings.Repeat("x", 4096)}) }, ""},
		"quote of exactly 16 KiB":            {newTDX, func(k *kernel) { k.report = short(16 << 10) }, ""},
		"issuer beside the key, key as last": {newSNP, func(*kernel) {}, ""},
	} {
		k := tt.kernel(t)
		tt.change(k)
		r, err := (&Reports{k}).Report(t.Context(), value())
		if tt.want == "" && (err != nil || r == nil) || tt.want != "" && (err == nil || r != nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v, want an error about %q", name, err, tt.want)
		}
		if n := left(t, k); n != 0 {
			t.Errorf("%s: %d folders are left", name, n)
		}
	}
}

func TestNoReportIsMadeForACallerThatIsGone(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := (&Reports{newSNP(t)}).Report(ctx, value()); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
