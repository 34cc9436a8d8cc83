// Package lock reads and writes the list of all third-party parts of an image, each with its SHA-256, and of the
// tools that build the image.
//
// A cache or a mirror can return any content. A build uses only content that matches the list.
package lock

import (
	"bytes"
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Sum is a SHA-256.
type Sum [32]byte

func (s Sum) String() string { return hex.EncodeToString(s[:]) }

// Tool is a Debian package of the machine that builds.
type Tool struct{ Name, Version string }

// Program is one that is not built from this checkout.
type Program struct {
	Name string // its file name
	Sum  Sum
}

// Package is a Debian package that goes into the image.
type Package struct {
	Name, Version, Architecture string
	Sum                         Sum // of the .deb
}

func (p Package) String() string { return p.Name + " " + p.Version + " " + p.Architecture }

// Lock is the list. Its parts are sorted by name.
type Lock struct {
	Go       string // as runtime.Version prints it
	Tools    []Tool
	Programs []Program
	// Root is the archive of the root file system that the tools make of the packages.
	Root     Sum
	Packages []Package
}

const head = `# What others made and what goes into the image of machines, and the tools that build it (docs/image.md, "The lock file").
# ` + "`make vm-lock`" + ` writes this file; look at the difference before you commit it.
`

// Format returns the file of a list, which has exactly one form.
func (l Lock) Format() []byte {
	var b bytes.Buffer
	b.WriteString(head)
	fmt.Fprintf(&b, "go %s\n", l.Go)
	for _, t := range l.Tools {
		fmt.Fprintf(&b, "tool %s %s\n", t.Name, t.Version)
	}
	for _, p := range l.Programs {
		fmt.Fprintf(&b, "program %s %s\n", p.Name, p.Sum)
	}
	fmt.Fprintf(&b, "root %s\n", l.Root)
	for _, p := range l.Packages {
		fmt.Fprintf(&b, "package %s %s\n", p, p.Sum)
	}
	return b.Bytes()
}

// Parse reads a file that [Lock.Format] has written, and no other form of it.
func Parse(b []byte) (Lock, error) {
	var l Lock
	n := 0
	for line := range strings.Lines(string(b)) {
		n++
		if strings.HasPrefix(line, "#") {
			continue
		}
		if err := l.line(strings.Fields(line)); err != nil {
			return Lock{}, fmt.Errorf("line %d: %w", n, err)
		}
	}
	if l.Go == "" || l.Root == (Sum{}) || len(l.Tools) == 0 || len(l.Programs) == 0 || len(l.Packages) == 0 {
		return Lock{}, errors.New("it lacks one of go, tool, program, root, package")
	}
	if !slices.IsSortedFunc(l.Tools, func(a, b Tool) int { return ascending(a.Name, b.Name) }) ||
		!slices.IsSortedFunc(l.Programs, func(a, b Program) int { return ascending(a.Name, b.Name) }) ||
		!slices.IsSortedFunc(l.Packages, func(a, b Package) int { return ascending(a.key(), b.key()) }) {
		return Lock{}, errors.New("its entries are not in order, or one is there twice")
	}
	if !bytes.Equal(l.Format(), b) {
		return Lock{}, errors.New("it is not in the form in which it was written")
	}
	return l, nil
}

// ascending makes [slices.IsSortedFunc] refuse two equal keys, too.
func ascending(a, b string) int { return cmp.Or(cmp.Compare(a, b), -1) }

func (p Package) key() string { return p.Name + " " + p.Architecture }

func (l *Lock) line(f []string) error {
	var err error
	switch {
	case len(f) == 2 && f[0] == "go" && l.Go == "":
		l.Go = f[1]
	case len(f) == 3 && f[0] == "tool":
		l.Tools = append(l.Tools, Tool{f[1], f[2]})
	case len(f) == 3 && f[0] == "program":
		p := Program{Name: f[1]}
		p.Sum, err = sum(f[2])
		l.Programs = append(l.Programs, p)
	case len(f) == 2 && f[0] == "root" && l.Root == (Sum{}):
		l.Root, err = sum(f[1])
	case len(f) == 5 && f[0] == "package":
		p := Package{Name: f[1], Version: f[2], Architecture: f[3]}
		// Names become names of files (Debian policy, section 5.6.7; versions, section 5.6.12, never have a slash).
		if strings.ContainsAny(f[1]+f[2]+f[3], "/_") {
			return fmt.Errorf("%s is no name, version and architecture of Debian's", p)
		}
		p.Sum, err = sum(f[4])
		l.Packages = append(l.Packages, p)
	default:
		return errors.New("want go, tool, program, root or package, each with its fields")
	}
	return err
}

func sum(s string) (Sum, error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(Sum{}) {
		return Sum{}, fmt.Errorf("%q is no SHA-256", s)
	}
	return Sum(b), nil
}

// Sort brings packages into the file's order.
func Sort(p []Package) {
	slices.SortFunc(p, func(a, b Package) int { return cmp.Compare(a.key(), b.key()) })
}

// Package returns the package of a name.
func (l Lock) Package(name string) (Package, bool) {
	i := slices.IndexFunc(l.Packages, func(p Package) bool { return p.Name == name })
	if i < 0 {
		return Package{}, false
	}
	return l.Packages[i], true
}
