package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// visibleWriter escapes characters that a terminal obeys or hides, as in JSON (\u001b), because the API server or a
// machine has chosen parts of the output. These are control characters except line feed and tab, characters that
// change the direction of text or have no width, spaces other than that of ASCII, and bytes that are not UTF-8. JSON
// keeps its meaning, since it has such characters only in strings.
type visibleWriter struct {
	out io.Writer

	mu   sync.Mutex
	rest []byte // the start of an incomplete character, at most 3 bytes
}

// visible returns a [visibleWriter] to w.
func visible(w io.Writer) io.Writer {
	if v, ok := w.(*visibleWriter); ok {
		return v
	}
	return &visibleWriter{out: w}
}

// fileBelow returns the file that a [visibleWriter] writes to.
func fileBelow(w io.Writer) (*os.File, bool) {
	if v, ok := w.(*visibleWriter); ok {
		w = v.out
	}
	f, ok := w.(*os.File)
	return f, ok
}

// Write implements [io.Writer].
func (v *visibleWriter) Write(b []byte) (int, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	text := slices.Concat(v.rest, b)
	out := make([]byte, 0, len(text))
	for len(text) > 0 && utf8.FullRune(text) {
		r, n := utf8.DecodeRune(text)
		switch {
		case r == '\n', r == '\t', unicode.IsPrint(r) && (r != utf8.RuneError || n > 1):
			out = append(out, text[:n]...)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			out = fmt.Appendf(out, `\u%04x\u%04x`, high, low)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
		text = text[n:]
	}
	v.rest = append([]byte(nil), text...)
	if _, err := v.out.Write(out); err != nil {
		return 0, err
	}
	return len(b), nil
}
