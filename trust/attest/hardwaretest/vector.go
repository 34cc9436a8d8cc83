package hardwaretest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// Vector is an input that must be refused.
type Vector struct {
	// Name describes what is wrong, as the table in hardware/testdata/refused.md writes it.
	Name string
	Want attestv1.Reason
	// Wrong returns the refusal, Right the error of the same input with only that corrected: nil.
	Wrong, Right func(testing.TB) error
}

// Refused runs the vectors of one platform, and compares their table with the page.
func Refused(t *testing.T, platform string, all []Vector) {
	t.Helper()
	inputs := map[string][]string{}
	for _, v := range all {
		reason := attest.ReasonName(v.Want)
		inputs[reason] = append(inputs[reason], v.Name)
		t.Run(v.Name, func(t *testing.T) {
			err := v.Wrong(t)
			if got := attest.ReasonOf(err); got != v.Want {
				t.Fatalf("%s (%v), want %s", attest.ReasonName(got), err, reason)
			}
			t.Log(err)
			if err := v.Right(t); err != nil {
				t.Errorf("the same input, with only that corrected: %v", err)
			}
		})
	}
	var reasons []string
	for r := range inputs {
		reasons = append(reasons, r)
	}
	slices.Sort(reasons)
	var want strings.Builder
	for _, r := range reasons {
		fmt.Fprintf(&want, "| %s | `%s` | %s |\n", platform, r, strings.Join(inputs[r], "; "))
	}
	t.Logf("%d vectors:\n%s", len(all), want.String())
	path := filepath.Join("trust", "attest", "hardware", "testdata", "refused.md")
	for range 4 { // up to the repository
		if _, err := os.Stat(path); err == nil {
			break
		}
		path = filepath.Join("..", path)
	}
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	for line := range strings.Lines(string(page)) {
		if strings.HasPrefix(line, "| "+platform+" | `") {
			got.WriteString(line)
		}
	}
	if got.String() != want.String() {
		t.Errorf("hardware/testdata/refused.md does not list these vectors. Write:\n%s", want.String())
	}
}
