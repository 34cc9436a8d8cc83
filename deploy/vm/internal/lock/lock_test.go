package lock

import (
	"bytes"
	"reflect"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func example() Lock {
	return Lock{
		Go: "go1.26.8", Tools: []Tool{{"apt", "2.6.1"}, {"dpkg", "1.21.22"}}, Programs: []Program{{"ctr", Sum{1}}}, Root: Sum{2},
		Packages: []Package{{"bash", "5.2.15-2+b13", "amd64", Sum{3}}, {"dbus", "1:2~rc", "all", Sum{4}}},
	}
}

func TestAListIsReadAsItWasWritten(t *testing.T) {
	l, err := Parse(example().Format())
	if err != nil || !reflect.DeepEqual(l, example()) {
		t.Errorf("%+v, %v", l, err)
	}
	if p, ok := l.Package("dbus"); !ok || p.Sum != (Sum{4}) {
		t.Errorf("%v %v", p, ok)
	}
	if _, ok := l.Package("dash"); ok {
		t.Error("a package that it doesn't have")
	}
}

func TestListsThatAreRefused(t *testing.T) {
	good := string(example().Format())
	bash := "package bash 5.2.15-2+b13 amd64 " + Sum{3}.String() + "\n"
	for name, change := range map[string][2]string{
		"a package twice":          {bash, bash + bash},
		"a package out of order":   {bash, bash + strings.Replace(bash, "bash", "aash", 1)},
		"a short hash":             {Sum{3}.String(), "0303"},
		"a hash in capitals":       {Sum{3}.String(), "AB" + Sum{3}.String()[2:]},
		"no hash":                  {bash, "package bash 5.2.15-2+b13 amd64\n"},
		"one field more":           {bash, strings.Replace(bash, "\n", " x\n", 1)},
		"a version with a path":    {"5.2.15-2+b13", "../../x"},
		"an unknown line":          {bash, bash + "mirror x\n"},
		"two compilers":            {"go go1.26.8\n", "go go1.26.8\ngo go1.26.9\n"},
		"no compiler":              {"go go1.26.8\n", ""},
		"no root":                  {"root " + Sum{2}.String() + "\n", ""},
		"a root of zeros":          {Sum{2}.String(), Sum{}.String()},
		"no tools":                 {"tool apt 2.6.1\ntool dpkg 1.21.22\n", ""},
		"no programs":              {"program ctr " + Sum{1}.String() + "\n", ""},
		"two spaces":               {"tool apt", "tool  apt"},
		"a comment of another one": {bash, "# reviewed\n" + bash},
	} {
		text := strings.Replace(good, change[0], change[1], 1)
		if text == good {
			t.Fatalf("%s: nothing was changed", name)
		}
		if l, err := Parse([]byte(text)); err == nil {
			t.Errorf("%s: %+v", name, l)
		}
	}
	if _, err := Parse(nil); err == nil {
		t.Error("nothing is a list")
	}
}

func FuzzParse(f *testing.F) {
	f.Add(example().Format())
	f.Fuzz(func(t *testing.T, b []byte) {
		if l, err := Parse(b); err == nil && !bytes.Equal(l.Format(), b) {
			t.Errorf("%q has another form", b)
		}
	})
}
