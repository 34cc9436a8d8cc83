// Package required checks that a configuration is complete.
package required

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Fields returns an error that names the empty or zero exported fields of cfg, except the optional ones; nil if there are
// none. cfg is a struct or a pointer to one. It also checks fields of embedded structs. where is the constructor that
// takes cfg, such as "joinservice.New".
func Fields(where string, cfg any, optional ...string) error {
	var missing []string
	v := reflect.Indirect(reflect.ValueOf(cfg))
	for _, f := range reflect.VisibleFields(v.Type()) {
		if !f.IsExported() || f.Anonymous || slices.Contains(optional, f.Name) {
			continue
		}
		if field := v.FieldByIndex(f.Index); field.IsZero() || field.Kind() == reflect.Slice && field.Len() == 0 {
			missing = append(missing, f.Name)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("%s: required fields are not set: %s", where, strings.Join(missing, ", "))
	}
	return nil
}
