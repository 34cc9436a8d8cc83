package statecheck

import (
	"encoding/pem"
	"strings"
	"testing"
)

func keysOf(names ...string) (text string) {
	for _, n := range names {
		text += string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: []byte(n)}))
	}
	return text
}

func TestOnlyAnAdditionalKeyOfAMachineIsAFinding(t *testing.T) {
	for name, tt := range map[string]struct {
		is, want, keep, get string
		more                bool
	}{
		"the same":                          {keysOf("a", "b"), keysOf("a", "b"), "", keysOf("a", "b"), false},
		"another order":                     {keysOf("b", "a"), keysOf("a", "b"), "", keysOf("b", "a"), false},
		"one less":                          {keysOf("b"), keysOf("a", "b"), "", keysOf("b", "a"), false},
		"one more":                          {keysOf("a", "evil"), keysOf("a"), "", keysOf("a"), true},
		"one more, first":                   {keysOf("evil", "a"), keysOf("a"), "", keysOf("a"), true},
		"another one":                       {keysOf("evil"), keysOf("a"), "", keysOf("a"), true},
		"one more, one less":                {keysOf("b", "evil"), keysOf("a", "b"), "", keysOf("b", "a"), true},
		"text behind":                       {keysOf("a") + "more", keysOf("a"), "", keysOf("a"), true},
		"nothing":                           {"", keysOf("a"), "", keysOf("a"), true},
		"the cluster's file has no key":     {keysOf("a"), "content", "", "content", true},
		"one to keep":                       {keysOf("a", "new"), keysOf("a"), keysOf("new"), keysOf("a", "new"), false},
		"one to keep, first":                {keysOf("new", "a"), keysOf("a"), keysOf("new"), keysOf("new", "a"), false},
		"one to keep, and one more":         {keysOf("a", "new", "evil"), keysOf("a"), keysOf("new"), keysOf("a", "new"), true},
		"it lacks one to keep":              {keysOf("a"), keysOf("a"), keysOf("new"), keysOf("a"), false},
		"it lacks one to keep and another":  {keysOf("a"), keysOf("a", "b"), keysOf("new"), keysOf("a", "b"), false},
		"it has only one to keep":           {keysOf("new"), keysOf("a"), keysOf("new"), keysOf("new", "a"), false},
		"a key of the cluster in two forms": {strings.ReplaceAll(keysOf("a"), "\n", "\r\n"), keysOf("a"), "", keysOf("a"), false},
	} {
		get, more := inOrder([]byte(tt.is), []byte(tt.want), []byte(tt.keep))
		if string(get) != tt.get || more != tt.more {
			t.Errorf("%s: %q, %v", name, get, more)
		}
	}
}
