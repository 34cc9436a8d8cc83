package layout

import (
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestARootIsReadBackFromTheCommandLine(t *testing.T) {
	want := Root{Hash: [32]byte{1, 2, 0xff}, Blocks: 77}
	got, err := RootOf("console=ttyS0 " + VerityKey + want.String() + " quiet\n")
	if err != nil || got != want {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestOtherCommandLinesNameNoRoot(t *testing.T) {
	h := strings.Repeat("ab", 32)
	good := "sha256:" + h + ":77"
	for name, line := range map[string]string{
		"none":                "quiet",
		"two":                 VerityKey + good + " " + VerityKey + good,
		"another hash":        VerityKey + "sha1:" + h + ":77",
		"a short hash":        VerityKey + "sha256:" + h[2:] + ":77",
		"capitals":            VerityKey + "sha256:" + strings.ToUpper(h) + ":77",
		"no size":             VerityKey + "sha256:" + h,
		"one block":           VerityKey + "sha256:" + h + ":1",
		"a size with a zero":  VerityKey + "sha256:" + h + ":077",
		"a size that is huge": VerityKey + "sha256:" + h + ":1099511627776",
		"more":                VerityKey + good + ":1",
	} {
		if r, err := RootOf(line); err == nil {
			t.Errorf("%s: %v", name, r)
		}
	}
}

func FuzzParseRoot(f *testing.F) {
	f.Add("sha256:" + strings.Repeat("ab", 32) + ":77")
	f.Fuzz(func(t *testing.T, s string) {
		if r, err := ParseRoot(s); err == nil && r.String() != s {
			t.Errorf("%q was read as %q", s, r)
		}
	})
}
