package problem

import (
	"fmt"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/internal/printable"
)

// Named returns the first [MaxNamed] names of a list in alphabetical order, and how many more there are.
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

// Some returns the first three names of a list in alphabetical order.
func Some(names []string) string {
	names = slices.Sorted(slices.Values(names))
	if len(names) > 3 {
		return strings.Join(names[:3], ", ") + ", …"
	}
	return strings.Join(names, ", ")
}

const maxShown = 300 // characters of a text that a machine chose

// Printable makes a text that a machine chose harmless for a terminal, and cuts it.
func Printable(s string) string { return printable.ASCII(s, maxShown) }

// MaxNamed is the number of nodes or disks that one line lists.
const MaxNamed = 100
