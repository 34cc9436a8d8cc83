// Package required checks that a configuration is complete.
package required

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Fields returns an error that names the exported fields of the struct cfg that have their zero value, except for the optional ones; nil if
// there are none. Fields of embedded structs are checked as well. where is the constructor that cfg is for, as "joinservice.New".
func Fields(where string, cfg any, optional ...string) error {
	var missing []string
	v := reflect.ValueOf(cfg)
	for _, f := range reflect.VisibleFields(v.Type()) {
		if f.IsExported() && !f.Anonymous && !slices.Contains(optional, f.Name) && v.FieldByIndex(f.Index).IsZero() {
			missing = append(missing, f.Name)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("%s: required fields are not set: %s", where, strings.Join(missing, ", "))
	}
	return nil
}
