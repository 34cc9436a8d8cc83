package metadata

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"
)

// bomb is less than 64 KiB, and gigabytes if each alias is expanded.
func bomb() string {
	list := func(item string, n int) string {
		return "[" + strings.TrimSuffix(strings.Repeat(item+",", n), ",") + "]"
	}
	return "x: " + list("0", 4000) + "\na: &a \"" + strings.Repeat("<", 30000) + "\"\nb: &b " + list("*a", 60) + "\nc: &c " + list("*b", 60) + "\nd: " + list("*c", 100) + "\n"
}

func TestYAMLThatIsRefused(t *testing.T) {
	const rest = "role: worker\naddresses: [10.0.0.1]\n"
	for name, tt := range map[string]struct{ wrong, right, want string }{
		"an alias":                         {"name: &a n1\npool: *a\n", "name: n1\npool: n1\n", "line 5: anchors"},
		"an anchor alone":                  {"name: &a n1\n", "name: n1\n", "anchors"},
		"an anchor of a list":              {"name: n1\ntaints: &t []\n", "name: n1\ntaints: []\n", "anchors"},
		"an alias as key":                  {"name: n1\nlabels: {&a a/b: c}\n", "name: n1\nlabels: {a/b: c}\n", "anchors"},
		"expanding aliases":                {bomb() + "name: n1\n", "name: n1\n", "anchors"},
		"a second document":                {"name: n1\n---\nname: n2\n", "name: n1\n", "one document, not 2"},
		"one behind a marker with text":    {"name: n1\n--- # network\nname: n2\n", "name: n1\n", "one document, not 2"},
		"one behind a marker with a tag":   {"name: n1\n--- !tag\nname: n2\n", "name: n1\n", "one document, not 2"},
		"one on the line of its marker":    {"name: n1\n--- {name: n2}\n", "name: n1\n", "one document, not 2"},
		"one behind the end of a document": {"name: n1\n...\nname: n2\n", "name: n1\n...\n", "did not find expected <document start>"},
		"a marker behind the end":          {"name: n1\n...\n---\nname: n2\n", "name: n1\n...\n---\n", "one document, not 2"},
		"a key twice":                      {"name: n1\nname: n1\n", "name: n1\n", `key "name" is already set`},
		"a key in two cases":               {"name: n1\nName: n2\n", "name: n1\n", `key "Name" is already set`},
		"a key in a case of its own":       {"name: n1\nlabels: {a/s: b, a/\u017f: b}\n", "name: n1\nlabels: {a/s: b}\n", "is already set"},
		"a key twice below":                {"name: n1\nlabels: {a/b: c, 'a/b': c}\n", "name: n1\nlabels: {a/b: c}\n", `key "a/b" is already set`},
		"a deep list":                      {"name: n1\nlabels: " + strings.Repeat("[", maxDepth) + strings.Repeat("]", maxDepth) + "\n", "name: n1\nlabels: {}\n", "in each other"},
		"a list as key":                    {"name: n1\nlabels: {[a]: b}\n", "name: n1\nlabels: {a: b}\n", "want text as key"},
	} {
		if _, err := ParseMachine([]byte(machineHead + rest + tt.right)); err != nil {
			t.Errorf("%s, corrected: %v", name, err)
		}
		if m, err := ParseMachine([]byte(machineHead + rest + tt.wrong)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %+v, %v, want an error with %q", name, m, err, tt.want)
		}
	}
}

// Decoders keep to what was checked, also where YAML's versions differ.
func TestWhatIsDecodedIsWhatWasWritten(t *testing.T) {
	m, err := ParseMachine([]byte(`# comment
apiVersion: 'muster.dev/v1alpha1' # comment
kind: >-
  MachineMetadata
# comment
name: "n\u0031"
role: worker
addresses:
# comment
- 10.0.0.1 # comment
joinEndpoints:
- 10.0.0.2:1

labels: {a/b: 'yes', a/c: "1", a/d: 2}
taints:
- {key: a/b, effect: NoSchedule, value: ""} # comment
`))
	if err != nil || m.Name != "n1" || m.Labels["a/b"] != "yes" || m.Labels["a/c"] != "1" || m.Labels["a/d"] != "2" || m.JoinEndpoints[0] != "10.0.0.2:1" || len(m.Taints) != 1 {
		t.Errorf("%+v, %v", m, err)
	}
}

// Each text has the size of the largest document of a source that is not trusted, and a form that parsers are slow with.
func TestHostileYAMLCostsABoundedTimeAndMemory(t *testing.T) {
	const size, most = 64 << 10, 128 << 20 // bytes
	numbered := func(form string) string {
		var b strings.Builder
		for i := 0; b.Len() < size-20; i++ {
			fmt.Fprintf(&b, form, i)
		}
		return b.String()
	}
	for name, text := range map[string]string{
		"aliases": bomb(), "keys": numbered("k%x:\n"), "one key": "{" + strings.Repeat("? a : b,", size/8-1) + "}", "comments": strings.Repeat("#\n", size/2),
		"a comment on each line": strings.Repeat("- a #x\n", size/7), "lists in lists": strings.Repeat("[", 9000) + strings.Repeat("]", 9000), "items in items": strings.Repeat("- ", 9000),
		"keys in keys": strings.Repeat("? ", 9000), "values": "a: [" + strings.Repeat("1,", size/2-4) + "]", "documents": strings.Repeat("--- a\n", size/6),
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		began := time.Now()
		_, err := ParseMachine([]byte(text))
		took := time.Since(began)
		runtime.ReadMemStats(&after)
		if allocated := after.TotalAlloc - before.TotalAlloc; err == nil || took > time.Minute || allocated > most {
			t.Errorf("%s: %s, %d MiB: %.200v", name, took, allocated>>20, err)
		}
	}
}
