package audit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
)

// Bounds of a record, in bytes of the line that it takes in the file. A disk has room for a number of lines that can be
// told beforehand, so that nobody who is recorded decides how long records are kept.
const (
	// MaxRecord bounds every record.
	MaxRecord = 2048
	// MaxRefusal bounds the record of a refusal.
	MaxRefusal = 1792
	// MaxChosen bounds what of a refusal's record the peer has chosen: names, and what error texts quote of it. IDs and
	// digests, whose form and length are fixed, are not counted.
	MaxChosen = 128

	maxDetail        = 512 // of what was done
	maxRefusalDetail = 848 // three PCRs, each as it is and as an image should have it, and what the event log has in them
	maxName          = 63  // of an image or class
	maxSerials       = 4
)

// replacements are what stands for characters that JSON would have to escape. So a text takes as many bytes
// in the file as it has, and a limit means the same before and after.
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

// quoted is what an error text quotes (%q), which is how our texts show what a peer has sent.
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

// bounded returns r with texts that keep the record's limit.
func (r Record) bounded(refusal bool) Record {
	for _, f := range []struct {
		text  *string
		limit int
	}{
		{&r.Service, 16}, {&r.Event, 32}, {&r.Reason, 32}, {&r.Machine, 64}, {&r.Node, 63}, {&r.Role, 16}, {&r.Disk, 36}, {&r.Ticket, 32},
		{&r.Request, 48}, {&r.Purpose, 32}, {&r.Evidence, 64}, {&r.Image, maxName}, {&r.Class, maxName},
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

// line returns the record as it stands in the file. refusal is whether it is one.
func (r Record) line(refusal bool) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false) // six bytes for one
	if err := e.Encode(r.bounded(refusal)); err != nil {
		return nil, fmt.Errorf("audit record: %w", err)
	}
	return b.Bytes(), nil
}
