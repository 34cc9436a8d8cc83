package audit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
)

// Bounds of a record, in bytes of its line in the file. The number of lines that fit on a disk is thus known, so that a
// refused peer cannot shorten the time for which records are kept.
const (
	// MaxRecord bounds every record.
	MaxRecord = 2048
	// MaxRefusal bounds the record of a refusal.
	MaxRefusal = 1792
	// MaxChosen bounds the part of a refusal's record that the peer has chosen: names, and what error texts quote of it.
	// IDs and digests, which have a fixed form and length, are not counted.
	MaxChosen = 128

	maxDetail        = 512 // of an action
	maxRefusalDetail = 848 // three PCRs, each with its value and the image's value, and their events in the log
	maxName          = 63  // of an image or class
	maxSerials       = 4
)

// replacements replace characters that JSON would have to escape. So a text has the same number of bytes in the file, and a
// limit applies before and after.
var replacements = map[rune]rune{'"': '\'', '\\': '/', '\n': ' ', '\t': ' '}

// plainText returns s in at most limit bytes of printable ASCII that needs no escapes in JSON.
func plainText(s string, limit int) string {
	if len(s) > 4*limit { // a rune has at most four bytes
		s = s[:4*limit]
	}
	var b strings.Builder
	for _, c := range s {
		if b.Len() == limit {
			break
		}
		if r, ok := replacements[c]; ok {
			c = r
		}
		if c < ' ' || c > '~' {
			c = '?'
		}
		b.WriteByte(byte(c))
	}
	return b.String()
}

// quoted matches what an error text quotes (%q), which is how our texts show data from a peer.
const quoted = `"(?:[^"\\]|\\.)*"?`

// shorten returns text in which the quoted parts, and name wherever it stands, have at most limit bytes altogether.
func shorten(text, name string, limit int) string {
	chosen := quoted
	if name != "" {
		chosen += "|" + regexp.QuoteMeta(name)
	}
	return regexp.MustCompile(chosen).ReplaceAllStringFunc(text, func(part string) string {
		part = part[:min(len(part), limit)]
		limit -= len(part)
		return part
	})
}

// bounded returns r with its texts cut to the limits.
func (r Record) bounded(refusal bool) Record {
	for _, f := range []struct {
		text  *string
		limit int
	}{
		{&r.Service, 16}, {&r.Event, 32}, {&r.Reason, 32}, {&r.Machine, 64}, {&r.Node, 63}, {&r.Role, 16}, {&r.Disk, 36}, {&r.Ticket, 32},
		{&r.Order, 97}, {&r.Request, 48}, {&r.Purpose, 32}, {&r.Evidence, 64}, {&r.Image, maxName}, {&r.Class, maxName},
	} {
		*f.text = plainText(*f.text, f.limit)
	}
	if refusal {
		r.Detail = plainText(shorten(r.Detail, r.Node, MaxChosen-len(r.Node)-len(r.Request)), maxRefusalDetail)
		r.Serials = nil
		return r
	}
	r.Detail = plainText(r.Detail, maxDetail)
	serials := r.Serials[:min(len(r.Serials), maxSerials)]
	r.Serials = nil
	for _, s := range serials {
		r.Serials = append(r.Serials, plainText(s, 40)) // 20 bytes: RFC 5280, section 4.1.2.2
	}
	return r
}

// line returns the record's line in the file. refusal is true for a refusal.
func (r Record) line(refusal bool) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false) // escapes take six bytes for one
	if err := e.Encode(r.bounded(refusal)); err != nil {
		return nil, fmt.Errorf("audit record: %w", err)
	}
	return b.Bytes(), nil
}
