package luks2

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
)

// maxDepth is more than the depth of Muster's metadata.
const maxDepth = 8

// object is a JSON object without duplicate names.
type object map[string]any

// parseJSON reads one JSON object. cryptsetup reads the same text with another parser, so everything that two parsers might read differently is refused:
// duplicate names, escapes, characters beyond printable ASCII, and text after the end.
func parseJSON(b []byte) (any, error) {
	for i, c := range b {
		if c < ' ' || c > '~' || c == '\\' {
			return nil, fmt.Errorf("byte %d is %#x", i, c)
		}
	}
	if !json.Valid(b) {
		return nil, errors.New("it is not one JSON value")
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	return value(d, 0)
}

func value(d *json.Decoder, depth int) (any, error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("deeper than %d", maxDepth)
	}
	t, err := d.Token()
	if err != nil {
		return nil, err
	}
	switch t {
	case json.Delim('{'):
		o := object{}
		for d.More() {
			name, err := d.Token()
			if err != nil {
				return nil, err
			}
			n, ok := name.(string)
			if !ok {
				return nil, errors.New("a name is not a text")
			}
			if _, twice := o[n]; twice {
				return nil, fmt.Errorf("%.40q is there twice", n)
			}
			if o[n], err = value(d, depth+1); err != nil {
				return nil, err
			}
		}
		_, err = d.Token()
		return o, err
	case json.Delim('['):
		a := []any{}
		for d.More() {
			v, err := value(d, depth+1)
			if err != nil {
				return nil, err
			}
			a = append(a, v)
		}
		_, err = d.Token()
		return a, err
	}
	return t, nil
}

// rule checks the value at a path.
type rule func(path string, v any) error

// fields is a rule for an object with exactly these fields.
type fields map[string]rule

func (f fields) check(path string, v any) error {
	o, ok := v.(object)
	if !ok {
		return fmt.Errorf("%s is not an object", path)
	}
	unknown := []string{}
	for name := range o {
		if f[name] == nil {
			unknown = append(unknown, name)
		}
	}
	if len(unknown) > 0 {
		return fmt.Errorf("%s has %.40q, which Muster does not write", path, slices.Min(unknown))
	}
	names := []string{}
	for name := range f {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		v, ok := o[name]
		if !ok {
			return fmt.Errorf("%s lacks %q", path, name)
		}
		if err := f[name](path+"."+name, v); err != nil {
			return err
		}
	}
	return nil
}

// is returns a rule for one of a few texts.
func is(want ...string) rule {
	return func(path string, v any) error {
		if s, ok := v.(string); !ok || !slices.Contains(want, s) {
			return fmt.Errorf("%s is %.40q, want %q", path, fmt.Sprint(v), want)
		}
		return nil
	}
}

// number returns a rule for a number from least to most, in canonical form.
func number(least, most int64) rule {
	return func(path string, v any) error {
		n, ok := v.(json.Number)
		if !ok {
			return fmt.Errorf("%s is not a number", path)
		}
		i, err := n.Int64()
		if err != nil || strconv.FormatInt(i, 10) != n.String() || i < least || i > most {
			return fmt.Errorf("%s is %.40q, want %d to %d", path, n.String(), least, most)
		}
		return nil
	}
}

// random returns a rule for n bytes in base64.
func random(size int) rule {
	return func(path string, v any) error {
		s, ok := v.(string)
		b, err := base64.StdEncoding.Strict().DecodeString(s)
		if !ok || err != nil || len(b) != size {
			return fmt.Errorf("%s is not the base64 form of %d bytes", path, size)
		}
		return nil
	}
}

// onlyZero is a rule for the list ["0"].
func onlyZero(path string, v any) error {
	if a, ok := v.([]any); !ok || len(a) != 1 || a[0] != "0" {
		return fmt.Errorf(`%s is not ["0"]`, path)
	}
	return nil
}

// metadata returns the rule for all JSON that Muster writes (sections 3.1 to 3.6). There is one key slot, so no two areas overlap, and its area is in
// one of two places, so it does not overlap with metadata or data. There is no token, no flag and no requirement, so no re-encryption is under way.
func metadata(want Integrity) rule {
	iterations := number(Iterations, maxIterations)
	keySize := number(int64(want.KeySize()), int64(want.KeySize()))
	sixtyFour := number(64, 64)
	first := 2 * MetadataSize
	keyslot := fields{
		"type": is("luks2"), "key_size": keySize,
		"af": fields{"type": is("luks1"), "stripes": number(stripes, stripes), "hash": is(Hash)}.check,
		"area": fields{
			"type": is("raw"), "offset": is(strconv.Itoa(first), strconv.Itoa(first+want.AreaSize())), "size": is(strconv.Itoa(want.AreaSize())),
			"encryption": is(Cipher), "key_size": sixtyFour,
		}.check,
		"kdf": fields{"type": is("pbkdf2"), "hash": is(Hash), "iterations": iterations, "salt": random(32)}.check,
	}
	segment := fields{
		"type": is("crypt"), "offset": is(strconv.Itoa(Size)), "size": is("dynamic"), "iv_tweak": is("0"),
		"encryption": is(Cipher), "sector_size": number(SectorSize, SectorSize),
	}
	if want == HMACSHA256 {
		segment["integrity"] = fields{"type": is("hmac(sha256)"), "journal_encryption": is("none"), "journal_integrity": is("none")}.check
	}
	digest := fields{
		"type": is("pbkdf2"), "keyslots": onlyZero, "segments": onlyZero, "hash": is(Hash), "iterations": iterations,
		"salt": random(32), "digest": random(32),
	}
	return fields{
		"keyslots": fields{"0": keyslot.check}.check,
		"tokens":   fields{}.check,
		"segments": fields{"0": segment.check}.check,
		"digests":  fields{"0": digest.check}.check,
		"config":   fields{"json_size": is(strconv.Itoa(jsonSize)), "keyslots_size": is(strconv.Itoa(KeyslotsSize))}.check,
	}.check
}
