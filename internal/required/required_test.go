package required

import (
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type base struct {
	Root  string
	Limit int
}

type config struct {
	base
	Hook     func()
	Any      any
	List     []int
	Optional *int
	hidden   int
}

func TestMissingFieldsAreNamed(t *testing.T) {
	for name, tt := range map[string]struct {
		cfg  config
		want string
	}{
		"all":          {config{base: base{"/", 1}, Hook: func() {}, Any: 1, List: []int{0}}, ""},
		"of the outer": {config{base: base{"/", 1}, Hook: func() {}, List: []int{}}, "x.New: required fields are not set: Any, List"},
		"of the inner": {config{base: base{Limit: 1}, Hook: func() {}, Any: 1, List: []int{0}, hidden: 1}, "x.New: required fields are not set: Root"},
		"nothing set":  {config{}, "x.New: required fields are not set: Root, Limit, Hook, Any, List"},
	} {
		got := ""
		if err := Fields("x.New", &tt.cfg, "Optional"); err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}
