package etcdencryption

import (
	"slices"
	"strings"
	"testing"
)

func TestOnlyTheFormThatMusterWritesIsRead(t *testing.T) {
	keys := []Key{NewKey(), NewKey()}
	right := string(Format(keys))
	if got, err := Parse([]byte(right)); err != nil || !slices.Equal(got, keys) {
		t.Fatalf("%v, %v", got, err)
	}
	withoutKeys, _, _ := strings.Cut(right, "      - {")
	second := "\n  - secretbox:\n      keys:\n      - {name: more, secret: " + keys[0].Secret + "}\n"
	for name, text := range map[string]string{
		"another resource":        strings.Replace(right, "[secrets]", "[configmaps]", 1),
		"one resource more":       strings.Replace(right, "[secrets]", "[secrets, configmaps]", 1),
		"no resource":             strings.Replace(right, "[secrets]", "[]", 1),
		"one list more":           right + "- resources: [configmaps]\n  providers:\n  - secretbox:\n      keys:\n      - {name: more, secret: " + keys[0].Secret + "}\n",
		"another provider":        strings.Replace(right, "secretbox", "aesgcm", 1),
		"one provider more":       strings.TrimRight(right, "\n") + second,
		"no provider":             strings.Replace(right, "secretbox:", "identity: {}\n    unused:", 1),
		"no key":                  withoutKeys,
		"another kind":            strings.Replace(right, "kind: Encryption", "kind: Other", 1),
		"another version":         strings.Replace(right, "/v1", "/v2", 1),
		"an unknown field":        right + "more: 1\n",
		"a key of 31 bytes":       strings.Replace(right, keys[1].Secret, "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA==", 1),
		"a key without a name":    strings.Replace(right, keys[1].Name, `""`, 1),
		"a name with a separator": strings.Replace(right, keys[1].Name, `"a:b"`, 1),
		"nothing":                 "",
	} {
		if text == right {
			t.Fatalf("%s: nothing is wrong", name)
		}
		if got, err := Parse([]byte(text)); err == nil {
			t.Errorf("%s: %v", name, got)
		} else if strings.Contains(err.Error(), keys[0].Secret) { // K3
			t.Errorf("%s: the key is in %v", name, err)
		}
	}
}

func TestAKeysIDIsThatOfItsBytes(t *testing.T) {
	a, b := NewKey(), NewKey()
	one, err := a.ID()
	if err != nil {
		t.Fatal(err)
	}
	other, err := b.ID()
	if err != nil || one == other || a.Name == b.Name || a.Name != "muster-"+one[:16] {
		t.Errorf("%s %s, %s %s: %v", a.Name, one, b.Name, other, err)
	}
	a.Name = "another"
	if again, err := a.ID(); err != nil || again != one {
		t.Errorf("%s, %v", again, err)
	}
}
