package problem

import (
	"fmt"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/internal/printable"
)

// Named returns the first names of a list in their order, and how many more there are.
func Named(names []string) string {
	slices.Sort(names)
	var shown []string
	for _, name := range names[:min(len(names), MaxNamed)] {
		shown = append(shown, Printable(name))
	}
	text := strings.Join(shown, ", ")
	if more := len(names) - len(shown); more > 0 {
		text += fmt.Sprintf(", and %d more", more)
	}
	return text
}

// Some returns the first three names of a list in their order.
func Some(names []string) string {
	names = slices.Sorted(slices.Values(names))
	if len(names) > 3 {
		return strings.Join(names[:3], ", ") + ", …"
	}
	return strings.Join(names, ", ")
}

const maxShown = 300 // characters of a text that a machine chose

// Printable prevents a machine from writing more than text to the terminal.
func Printable(s string) string { return printable.ASCII(s, maxShown) }

// MaxNamed is the number of nodes or disks that a line names.
const MaxNamed = 100
