// Package printable makes text from another source harmless for a terminal: what it returns is one line without control
// characters.
package printable

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// ASCII returns at most n bytes of the text, with a question mark for each character that is not printable ASCII.
func ASCII(s string, n int) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, s)
	return s[:min(len(s), n)]
}

// Line returns at most n bytes of the text in UTF-8, with a space for each character that is not printable.
func Line(s string, n int) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == utf8.RuneError {
			return ' '
		}
		return r
	}, s)
	return strings.ToValidUTF8(s[:min(len(s), n)], "")
}
