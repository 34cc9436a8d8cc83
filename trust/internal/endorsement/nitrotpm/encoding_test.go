package nitrotpm

import (
	"bytes"
	"strings"
	"testing"

	"github.com/fxamacker/cbor/v2"
)

// pair is an entry of a map.
func pair(t testing.TB, key, value any) []byte {
	t.Helper()
	return append(encode(t, key), encode(t, value)...)
}

func encode(t testing.TB, v any) []byte {
	t.Helper()
	b, err := cbor.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// sign1 returns the four elements, in an array.
func sign1(t testing.TB, protected []byte, unprotected any, payload, signature []byte) []byte {
	t.Helper()
	return encode(t, []any{protected, unprotected, payload, signature})
}

// entries returns a map of n entries.
func entries(n int) map[int]int {
	out := map[int]int{}
	for i := range n {
		out[i] = i
	}
	return out
}

func TestEncodingsThatAreRefused(t *testing.T) {
	raw := read(t, "nitrotpm.cbor")
	good, _, err := parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	payload, signature := []byte(good.Payload), []byte(good.Signature)
	outer := func(protected []byte, unprotected any, payload []byte) []byte {
		return sign1(t, protected, unprotected, payload, signature)
	}
	inner := func(payload []byte) []byte { return outer(protectedHeader, map[int]any{}, payload) }
	with := func(pairs ...[]byte) []byte { // more entries, before the end of the map of indefinite length
		return inner(append(append(bytes.Clone(payload[:len(payload)-1]), bytes.Join(pairs, nil)...), 0xFF))
	}
	without := func(name string) []byte { // the field has another name of the same length
		return inner(bytes.Replace(payload, []byte(name), []byte(strings.Repeat("x", len(name))), 1))
	}
	alone := func(pairs ...[]byte) []byte { // a map of these entries
		return inner(append([]byte{byte(0xA0 + len(pairs))}, bytes.Join(pairs, nil)...))
	}
	if !bytes.Equal(inner(payload), raw) {
		t.Fatal("the document is encoded in another way")
	}
	for name, tt := range map[string]struct {
		raw  []byte
		want string // part of the error; empty: accepted
	}{
		"no change":                      {raw, ""},
		"nothing":                        {nil, "EOF"},
		"a tag":                          {append([]byte{0xD2}, raw...), "tag"},
		"bytes behind it":                {append(bytes.Clone(raw), 0), "extraneous"},
		"cut short":                      {raw[:len(raw)-1], "unexpected EOF"},
		"three elements":                 {encode(t, []any{protectedHeader, map[int]any{}, payload}), "structure"},
		"five elements":                  {encode(t, []any{protectedHeader, map[int]any{}, payload, signature, 1}), "structure"},
		"a map":                          {encode(t, map[int]any{1: 2}), "structure"},
		"an array of indefinite length":  {append(append([]byte{0x9F}, raw[1:]...), 0xFF), "indefinite"},
		"a payload of indefinite length": {append(append([]byte{0x84}, bytes.Join([][]byte{encode(t, protectedHeader), {0xA0, 0x5F}, encode(t, payload), {0xFF}}, nil)...), encode(t, signature)...), "indefinite"},
		"ES256":                          {outer([]byte{0xA1, 0x01, 0x26}, map[int]any{}, payload), "headers"},
		"ES512":                          {outer([]byte{0xA1, 0x01, 0x38, 0x23}, map[int]any{}, payload), "headers"},
		"no algorithm":                   {outer([]byte{0xA0}, map[int]any{}, payload), "headers"},
		"an empty protected header":      {outer([]byte{}, map[int]any{}, payload), "headers"},
		"another encoding of ES384":      {outer([]byte{0xA1, 0x01, 0x39, 0x00, 0x22}, map[int]any{}, payload), "headers"},
		"a second protected header":      {outer([]byte{0xA2, 0x01, 0x38, 0x22, 0x02, 0x80}, map[int]any{}, payload), "headers"},
		"an unprotected header":          {outer(protectedHeader, map[int]any{4: []byte("kid")}, payload), "headers"},
		"the algorithm unprotected, too": {outer(protectedHeader, map[int]any{1: -35}, payload), "headers"},
		"no unprotected header":          {outer(protectedHeader, nil, payload), "headers"},
		"a text as payload":              {encode(t, []any{protectedHeader, map[int]any{}, "text", signature}), "structure"},
		"numbers as payload":             {encode(t, []any{protectedHeader, map[int]any{}, []int{1, 2}, signature}), "structure"},
		"no payload":                     {encode(t, []any{protectedHeader, map[int]any{}, nil, signature}), "payload"},
		"a signature of 95 bytes":        {sign1(t, protectedHeader, map[int]any{}, payload, signature[:95]), "95 bytes"},
		"a signature of 97 bytes":        {sign1(t, protectedHeader, map[int]any{}, payload, append(bytes.Clone(signature), 0)), "97 bytes"},
		"a signature in DER":             {sign1(t, protectedHeader, map[int]any{}, payload, append([]byte{0x30, 0x64}, signature...)), "98 bytes"},
		"a field that is not known":      {with(pair(t, "new", 1)), ""},
		"one field twice":                {with(pair(t, "nonce", []byte{1})), "duplicate"},
		"an unknown field twice":         {with(pair(t, "new", 1), pair(t, "new", 1)), "duplicate"},
		"a PCR twice":                    {inner(bytes.Replace(payload, []byte{0x01, 0x58, 0x30}, []byte{0x00, 0x58, 0x30}, 1)), "duplicate"},
		"a tag in the payload":           {with([]byte{0x63, 'n', 'e', 'w', 0xC0, 0x00}), "tag"},
		"bytes behind the payload":       {inner(append(bytes.Clone(payload), 0)), "extraneous"},
		"a payload cut short":            {inner(payload[:len(payload)-1]), "unexpected EOF"},
		"an array as payload":            {inner([]byte{0x80}), "malformed"},
		"deep nesting":                   {with([]byte{0x63, 'n', 'e', 'w', 0x81, 0x81, 0x81, 0x81, 0x81, 0x00}), "nested"},
		"a long array":                   {with(pair(t, "new", make([]int, 17))), "array"},
		"a map of many entries":          {with(pair(t, "new", entries(65))), "exceeded"},
		"a map of fewer entries":         {with(pair(t, "new", entries(64))), ""},
		"a text as module":               {alone(pair(t, "module_id", "i-1")), ""},
		"bytes as module":                {alone(pair(t, "module_id", []byte("i-1"))), "malformed"},
		"a text as nonce":                {alone(pair(t, "nonce", "nonce")), "malformed"},
		"numbers as nonce":               {alone(pair(t, "nonce", []int{1, 2})), "malformed"},
		"a negative time":                {alone(pair(t, "timestamp", -1)), "malformed"},
		"a fraction as time":             {alone(pair(t, "timestamp", 1.5)), "malformed"},
		"a time that is too late":        {alone(pair(t, "timestamp", uint64(1<<63))), "out of range"},
		"a negative PCR":                 {alone(pair(t, "nitrotpm_pcrs", map[int]any{-1: []byte{1}})), "malformed"},
		"a text as PCR":                  {alone(pair(t, "nitrotpm_pcrs", map[int]any{1: "x"})), "malformed"},
		"a text that is not UTF-8":       {alone(append(encode(t, "module_id"), 0x61, 0xFF)), "UTF-8"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := parse(tt.raw)
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want an error about %q", err, tt.want)
			}
		})
	}
	// A field of another case is another field.
	if _, d, err := parse(inner(bytes.Replace(payload, []byte("nonce"), []byte("Nonce"), 1))); err != nil || d.Nonce != "" {
		t.Errorf("%q, %v", d.Nonce, err)
	}
	// A field that lacks is empty, and so are null and undefined.
	for _, raw := range [][]byte{without("public_key"), alone(pair(t, "public_key", nil)), alone(append(encode(t, "public_key"), 0xF7))} {
		if _, d, err := parse(raw); err != nil || d.PublicKey != "" {
			t.Errorf("%v, %+v", err, d)
		}
	}
	if _, err := Module(make([]byte, maxDocument+1)); err == nil || !strings.Contains(err.Error(), "too long") {
		t.Error(err)
	}
	if _, err := Module(read(t, "enclave.cbor")); err == nil {
		t.Error("an enclave's document names a NitroTPM")
	}
}

func FuzzDocument(f *testing.F) {
	for _, name := range []string{"nitrotpm.cbor", "enclave.cbor"} {
		raw := read(f, name)
		s, _, err := parse(raw)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
		f.Add([]byte(s.Payload))
	}
	root := rootG1(f)
	f.Fuzz(func(t *testing.T, raw []byte) {
		for _, raw := range [][]byte{raw, encode(t, []any{protectedHeader, map[int]any{}, raw, make([]byte, signatureLen)})} {
			s, d, err := parse(raw)
			if err != nil {
				continue
			}
			if string(s.Protected) != string(protectedHeader) || len(s.Signature) != signatureLen || d.Timestamp > maxTime {
				t.Fatalf("%+v", s)
			}
			if _, err := authenticate(s, d, root, d.at()); err == nil && d.Module != instanceSeen+"-tpm0000000000000000" && len(d.EnclavePCRs) == 0 {
				t.Fatalf("authentic: %+v", d)
			}
		}
	})
}
