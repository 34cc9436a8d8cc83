package printable_test

import (
	"testing"
	"unicode"
	"unicode/utf8"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/muster-k8s/muster/internal/printable"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTextOfAnotherSource(t *testing.T) {
	for in, want := range map[string]struct {
		n           int
		ascii, line string
	}{
		"node-1":                {9, "node-1", "node-1"},
		"a\x1b[31m\r\nb":        {20, "a?[31m??b", "a [31m  b"},
		"\x9b31m\u009bc":        {20, "?31m?c", " 31m c"},
		"\u202eabc\u2028":       {20, "?abc?", " abc "},
		"Zürich":                {20, "Z?rich", "Zürich"},
		"Zürich, cut in its ü":  {2, "Z?", "Z"},
		"longer than its limit": {6, "longer", "longer"},
	} {
		if got := printable.ASCII(in, want.n); got != want.ascii {
			t.Errorf("ASCII of %q: %q, want %q", in, got, want.ascii)
		}
		if got := printable.Line(in, want.n); got != want.line {
			t.Errorf("line of %q: %q, want %q", in, got, want.line)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		in, n := string(rapid.SliceOf(rapid.Byte()).Draw(t, "text")), rapid.IntRange(0, 40).Draw(t, "limit")
		for _, out := range []string{printable.ASCII(in, n), printable.Line(in, n)} {
			if len(out) > n || !utf8.ValidString(out) {
				t.Fatalf("%q", out)
			}
			for _, r := range out {
				if !unicode.IsPrint(r) {
					t.Fatalf("%q has %U", out, r)
				}
			}
		}
	})
}
