package image

import (
	"bytes"
	"crypto"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/internal/image/gpt"
	"github.com/muster-k8s/muster/internal/image/imagetest"
	"github.com/muster-k8s/muster/internal/image/layout"
	"github.com/muster-k8s/muster/internal/image/measure"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func read(t *testing.T, disk []byte) ([]byte, error) {
	t.Helper()
	return ReadProgram(bytes.NewReader(disk), int64(len(disk)))
}

func content(t *testing.T, p *imagetest.Parts) []byte {
	t.Helper()
	b, err := os.ReadFile(p.Write(t))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestADiskLeadsToTheMeasurementsOfItsProgram(t *testing.T) {
	p := imagetest.New(t)
	program, err := read(t, content(t, p))
	if err != nil || !bytes.Equal(program, p.Program(t)) {
		t.Fatalf("%d bytes, %v", len(program), err)
	}
	for name, secure := range map[string]bool{"muster v1.2.3": false, "muster v1.2.3, Secure Boot": true} {
		got, err := Measurements(program, crypto.SHA384, secure)
		want, werr := measure.Boot{UKI: p.Program(t), SecureBoot: secure, Bank: crypto.SHA384}.Predict(name)
		if err != nil || werr != nil || got.Image != name || got.PCRs["4"] != want.PCRs["4"] || got.PCRs["11"] != want.PCRs["11"] {
			t.Errorf("%s: %v, %v; want %v, %v", name, got, err, want, werr)
		}
	}
}

// Invariant S2.
func TestAlteredImagesAreRefused(t *testing.T) {
	good := content(t, imagetest.New(t))
	if _, err := read(t, good); err != nil {
		t.Fatal(err)
	}
	const mib = 1 << 20
	root, tree := 41*mib, 43*mib // after the first MiB and an ESP of 40; the root has 1.2
	flip := func(at int) func() []byte {
		return func() []byte {
			b := bytes.Clone(good)
			b[(at+len(b))%len(b)] ^= 1
			return b
		}
	}
	made := func(change func(*imagetest.Parts)) func() []byte {
		return func() []byte { p := imagetest.New(t); change(p); return content(t, p) }
	}
	for name, tt := range map[string]struct {
		disk func() []byte
		says string
	}{
		"cut off in the middle":            {func() []byte { return good[:20*mib] }, "not all of it"},
		"without its last MiB":             {func() []byte { return good[:len(good)-mib] }, "not all of it"},
		"without its last byte":            {func() []byte { return good[:len(good)-1] }, "not all of it"},
		"nothing":                          {func() []byte { return nil }, "not all of it"},
		"a byte of the first sector":       {flip(450), "first sector"},
		"a byte of the table's header":     {flip(512 + 40), "damaged"},
		"a byte of the table":              {flip(1024 + 60), "damaged"},
		"a byte of the second table":       {flip(-2000), "damaged"},
		"a byte of the root":               {flip(root + 70000), "muster-root has the root"},
		"the last byte of the root":        {flip(root + 300*layout.BlockSize - 1), "muster-root has the root"},
		"a byte of the hash tree":          {flip(tree + 4097), "is not the hash tree"},
		"a byte of a FAT":                  {flip(mib + 33*512), "allocation tables differ"},
		"a root longer than was hashed":    {made(func(p *imagetest.Parts) { p.Root = append(p.Root, make([]byte, layout.BlockSize)...) }), "muster-root has the root"},
		"another hash in the command line": {made(func(p *imagetest.Parts) { p.Cmdline += "0" }), "muster-root has the root"},
		"no hash in the command line":      {made(func(p *imagetest.Parts) { p.Cmdline = "quiet" }), "0 times"},
		"a tree of something else":         {made(func(p *imagetest.Parts) { p.Tree = make([]byte, len(p.Tree)) }), "is not the hash tree"},
		"a second file for firmware":       {made(func(p *imagetest.Parts) { p.More = "STARTUP.NSH" }), "want EFI alone"},
		"a second program":                 {made(func(p *imagetest.Parts) { p.More = "EFI/BOOT/GRUBX64.EFI" }), "want BOOTX64.EFI alone"},
		"the program elsewhere":            {made(func(p *imagetest.Parts) { p.Folder = "MUSTER" }), "want BOOT alone"},
		"the program by another name":      {made(func(p *imagetest.Parts) { p.File = "BOOTIA32.EFI" }), "want BOOTX64.EFI alone"},
		"a program with a long name":       {made(func(p *imagetest.Parts) { p.File = "bootx64-original.efi" }), "long file name"},
		"one partition less":               {made(func(p *imagetest.Parts) { p.Partitions = p.Partitions[:2] }), "has 2 partitions"},
		"one partition more": {made(func(p *imagetest.Parts) {
			p.Partitions = append(p.Partitions, gpt.Partition{Type: layout.ESPType, GUID: layout.DiskGUID, Name: "more", Content: strings.NewReader("x"), Size: 1})
		}), "has 4 partitions"},
		"a root by another name": {made(func(p *imagetest.Parts) { p.Partitions[1].Name = "root" }), `is "root"`},
		"a root of another GUID": {made(func(p *imagetest.Parts) { p.Partitions[1].GUID = layout.DiskGUID }), "partition 2"},
	} {
		t.Run(name, func(t *testing.T) {
			if program, err := read(t, tt.disk()); err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%d bytes, %v; want %q", len(program), err, tt.says)
			}
		})
	}
	// A byte of the program is another image, with other measurements.
	program, err := read(t, good)
	if err != nil {
		t.Fatal(err)
	}
	before, err := Measurements(program, crypto.SHA384, false)
	if err != nil {
		t.Fatal(err)
	}
	other, err := read(t, bytes.Replace(good, []byte("quiet muster"), []byte("Quiet muster"), 1))
	if err != nil {
		t.Fatal(err)
	}
	after, err := Measurements(other, crypto.SHA384, false)
	if err != nil || after.PCRs["4"] == before.PCRs["4"] || after.PCRs["9"] == before.PCRs["9"] || after.PCRs["11"] == before.PCRs["11"] {
		t.Errorf("%v, %v", after.PCRs, err)
	}
}
