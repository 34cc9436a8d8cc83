package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/lifecycle"
)

// wrapped is the state of a command that runs, and what it prints.
func wrapped(t *testing.T, output string) (a *app, stdout, stderr *bytes.Buffer) {
	t.Helper()
	stdout, stderr = &bytes.Buffer{}, &bytes.Buffer{}
	a = &app{stdout: stdout, stderr: stderr}
	if err := a.run(t.Context(), []string{"version", "--output", output}); err != nil {
		t.Fatal(err)
	}
	stdout.Reset()
	return a, stdout, stderr
}

// hostile are texts of an API server or a machine, and what a person sees of them.
var hostile = map[string]struct{ text, shown string }{
	"an escape sequence":       {"a\x1b[2Jb", `a\u001b[2Jb`},
	"CSI in one character":     {"a\u009b2Jb", `a\u009b2Jb`},
	"back to the line's begin": {"a\rb", `a\u000db`},
	"back by one":              {"a\bb", `a\u0008b`},
	"DEL":                      {"a\x7fb", `a\u007fb`},
	"text from right to left":  {"a\u202eb", `a\u202eb`},
	"an isolate":               {"a\u2066b", `a\u2066b`},
	"no width":                 {"a\u200bb", `a\u200bb`},
	"a space that is another":  {"a\u00a0b", `a\u00a0b`},
	"another line separator":   {"a\u2028b", `a\u2028b`},
	"a tag":                    {"a\U000e0041b", `a\udb40\udc41b`},
	"a byte that is no UTF-8":  {"a\xffb", `a\ufffdb`},
	"half a character":         {"a\xe2\x82b", `a\ufffd\ufffdb`},
}

func TestWhatATerminalObeysOrHidesIsEscaped(t *testing.T) {
	for name, tt := range hostile {
		t.Run(name, func(t *testing.T) {
			a, stdout, stderr := wrapped(t, outputPlain)
			if _, err := a.stdout.Write([]byte(tt.text)); err != nil || stdout.String() != tt.shown {
				t.Errorf("%q, %v", stdout, err)
			}
			stdout.Reset()
			for _, b := range []byte(tt.text) { // a character may come in several parts
				if n, err := a.stdout.Write([]byte{b}); n != 1 || err != nil {
					t.Errorf("%d, %v", n, err)
				}
			}
			if stdout.String() != tt.shown {
				t.Errorf("byte by byte: %q", stdout)
			}
			a.complain(errors.New(tt.text))
			if want := "Error: " + strings.ReplaceAll(tt.shown, `\u00a0`, " ") + "\n"; stderr.String() != want { // protojson has them in its errors
				t.Errorf("%q, want %q", stderr, want)
			}
		})
	}
	const plain = "Zeile\tüber é 日本 ✓ █ \U0001f600\n\\u001b\n"
	a, stdout, _ := wrapped(t, outputPlain)
	if _, err := a.stdout.Write([]byte(plain)); err != nil || stdout.String() != plain {
		t.Errorf("%q, %v", stdout, err)
	}
}

// A program reads the text that the cluster has.
func TestEscapedJSONHasTheSameMeaning(t *testing.T) {
	for name, tt := range hostile {
		t.Run(name, func(t *testing.T) {
			a, stdout, _ := wrapped(t, outputJSON)
			if err := a.json(map[string]string{tt.text: tt.text}); err != nil {
				t.Fatal(err)
			}
			if strings.Contains(stdout.String(), tt.text) {
				t.Errorf("%q", stdout)
			}
			var got map[string]string
			want := strings.ToValidUTF8(tt.text, "\ufffd")
			if err := json.Unmarshal(stdout.Bytes(), &got); err != nil || strings.ReplaceAll(got[strings.ReplaceAll(tt.text, "\xe2\x82", "\ufffd\ufffd")], "\ufffd\ufffd", "\ufffd") != want && got[want] == "" {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

// Plan and warnings stand directly before the question, and the steps after it.
func TestAPlanDoesNotMoveTheCursor(t *testing.T) {
	for name, tt := range hostile {
		t.Run(name, func(t *testing.T) {
			a, _, stderr := wrapped(t, outputPlain)
			cmd := &cobra.Command{}
			cmd.SetContext(t.Context())
			cmd.SetIn(strings.NewReader("w1\n"))
			if err := a.showDeparture(cmd, leaving{}, &lifecycle.Removal{Plan: []string{"plan " + tt.text}, Warnings: []string{"warning " + tt.text}}, "w1"); err != nil {
				t.Fatal(err)
			}
			if want := "1. plan " + tt.shown + "\nNote: warning " + tt.shown + ".\nType w1 to continue: \n"; stderr.String() != want {
				t.Errorf("%q, want %q", stderr, want)
			}
		})
	}
}

// The progress bar needs the terminal's own file.
func TestTheFileBelowIsFound(t *testing.T) {
	if f, ok := fileBelow(visible(visible(os.Stderr))); !ok || f != os.Stderr {
		t.Errorf("%v, %v", f, ok)
	}
	if _, ok := fileBelow(visible(&bytes.Buffer{})); ok {
		t.Error("a buffer is no file")
	}
}
