package uki

import (
	"bytes"
	"crypto"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/internal/image/uki/ukitest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func sections() []Section {
	return []Section{{".osrel", []byte("ID=x\n")}, {".cmdline", []byte("quiet\x00")}, {".linux", bytes.Repeat([]byte("k"), 5000)}, {".initrd", bytes.Repeat([]byte("i"), 513)}}
}

func TestSectionsAreAddedAndReadBack(t *testing.T) {
	for name, l := range map[string][]byte{
		"room in the headers":       ukitest.Program(1024),
		"headers that have to grow": ukitest.Program(512),
		"symbols after the end":     append(ukitest.Program(1024), "symbols"...),
	} {
		t.Run(name, func(t *testing.T) {
			b, err := Build(l, sections())
			if err != nil {
				t.Fatal(err)
			}
			again, err := Build(l, sections())
			if err != nil || !bytes.Equal(b, again) {
				t.Errorf("the same parts give another image: %v", err)
			}
			if bytes.Contains(b, []byte("symbols")) {
				t.Error("the symbols are still there")
			}
			got, err := Sections(b, ".osrel", ".cmdline", ".linux", ".initrd", ".absent")
			if err != nil || len(got) != 4 {
				t.Fatalf("%d sections, %v", len(got), err)
			}
			for i, want := range sections() {
				if got[i].Name != want.Name || !bytes.Equal(got[i].Data, want.Data) {
					t.Errorf("%s is %d bytes", got[i].Name, len(got[i].Data))
				}
			}
			p, err := parse(b)
			if err != nil {
				t.Fatal(err)
			}
			list := p.list()
			for i, s := range list {
				if s.address%4096 != 0 || s.raw%512 != 0 || i > 0 && s.address < list[i-1].address+list[i-1].size {
					t.Errorf("section %s: %+v", s.name, s)
				}
			}
			text, err := Sections(b, ".text", ".data")
			if err != nil || text[0].Data[0] != 1 || text[1].Data[511] != 2 {
				t.Errorf("the loader's own sections changed: %v", err)
			}
		})
	}
}

func TestOtherProgramsRead(t *testing.T) {
	b, err := Build(ukitest.Program(512), sections())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "x.efi")
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "objdump", "-h", file).CombinedOutput()
	if err != nil || !strings.Contains(string(out), ".initrd") {
		t.Errorf("objdump: %v: %s", err, out)
	}
}

func TestTheHashIsWhatOtherProgramsSign(t *testing.T) {
	b, err := Build(ukitest.Program(512), sections())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	at := func(n string) string { return filepath.Join(dir, n) }
	if err := os.WriteFile(at("x.efi"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range [][]string{
		{"openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", at("key"), "-out", at("cert"), "-subj", "/CN=test", "-days", "2"},
		{"sbsign", "--key", at("key"), "--cert", at("cert"), "--output", at("signed.efi"), at("x.efi")},
		{"sbattach", "--detach", at("signature"), at("signed.efi")},
	} {
		if out, err := exec.CommandContext(t.Context(), c[0], c[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", c[0], err, out)
		}
	}
	sum, err := Authenticode(b, crypto.SHA256)
	if err != nil {
		t.Fatal(err)
	}
	signature, err := os.ReadFile(at("signature"))
	if err != nil || !bytes.Contains(signature, sum) { // SpcIndirectDataContent has the digest in clear
		t.Errorf("sbsign did not sign %x: %v", sum, err)
	}
	signed, err := os.ReadFile(at("signed.efi"))
	if err != nil {
		t.Fatal(err)
	}
	if after, err := Authenticode(signed, crypto.SHA256); err != nil || !bytes.Equal(after, sum) {
		t.Errorf("signed it hashes to %x, %v", after, err)
	}
	for i, change := range map[string]int{"a header": ukitest.PE + 8, "a section": len(b) - 512} {
		c := bytes.Clone(signed)
		c[change] ^= 1
		if other, err := Authenticode(c, crypto.SHA256); err == nil && bytes.Equal(other, sum) {
			t.Errorf("%s changes, the hash doesn't", i)
		}
	}
	c := bytes.Clone(signed)
	c[ukitest.Optional+optCheckSum] ^= 1
	if same, err := Authenticode(c, crypto.SHA256); err != nil || !bytes.Equal(same, sum) {
		t.Errorf("the checksum counts: %v", err)
	}
}

func TestWhatIsNoProgramIsRefused(t *testing.T) {
	good := ukitest.Program(512)
	le := binary.LittleEndian
	opt := ukitest.Optional
	for name, change := range map[string]func([]byte) []byte{
		"empty":                  func([]byte) []byte { return nil },
		"text":                   func([]byte) []byte { return bytes.Repeat([]byte("MZ"), 500) },
		"cut off":                func(b []byte) []byte { return b[:len(b)-1] },
		"cut off in the headers": func(b []byte) []byte { return b[:300] },
		"32 bits":                func(b []byte) []byte { le.PutUint16(b[opt:], 0x10b); return b },
		"no alignment":           func(b []byte) []byte { le.PutUint32(b[opt+optFileAlign:], 0); return b },
		"headers without end":    func(b []byte) []byte { le.PutUint32(b[opt+optHeadersSize:], 1<<31); return b },
		"a section outside":      func(b []byte) []byte { le.PutUint32(b[ukitest.Table+16:], 1<<31); return b },
		"far away":               func(b []byte) []byte { le.PutUint32(b[offPE:], 1<<30); return b },
		"many sections":          func(b []byte) []byte { le.PutUint16(b[ukitest.PE+6:], 0xffff); return b },
	} {
		t.Run(name, func(t *testing.T) {
			b := change(bytes.Clone(good))
			if _, err := Build(b, sections()); err == nil {
				t.Error("it was built on")
			}
			if _, err := Authenticode(b, crypto.SHA256); err == nil {
				t.Error("it has a hash")
			}
		})
	}
	for name, s := range map[string]Section{
		"no dot": {"linux", []byte("x")}, "a long name": {".linuxlinux", []byte("x")}, "empty": {".linux", nil}, "one that is there": {".text", []byte("x")},
	} {
		if _, err := Build(good, []Section{s}); err == nil {
			t.Errorf("%s: it was added", name)
		}
	}
	var many []Section
	for i := range 120 {
		many = append(many, Section{fmt.Sprintf(".s%d", i), []byte("x")})
	}
	if _, err := Build(good, many); err == nil || !strings.Contains(err.Error(), "room") {
		t.Errorf("more sections than there is room for: %v", err)
	}
}

func FuzzPrograms(f *testing.F) {
	f.Add(ukitest.Program(512))
	f.Fuzz(func(_ *testing.T, b []byte) {
		_, _ = Authenticode(b, crypto.SHA256)
		_, _ = Sections(b, ".text")
		if out, err := Build(b, []Section{{".linux", []byte("x")}}); err == nil {
			_, _ = Sections(out, ".linux")
		}
	})
}
