// Package labtest gives a test a lab of its own, which is taken down when the test ends.
package labtest

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/muster-k8s/muster/lab/driver"
)

// New names a lab in a new folder below /var/lib, whose name begins with prefix (short: Unix sockets are
// below it), and gives the root of the checkout beside it. What the lab does stands in the test's log. The
// test's working folder is e2e/NAME, as `go test` has it.
func New(t *testing.T, prefix string) (lab *driver.Lab, root string) {
	t.Helper()
	dir, err := os.MkdirTemp("/var/lib", prefix)
	if err != nil {
		t.Fatalf("%v: this test makes machines out of namespaces, so it needs root", err)
	}
	if root, err = filepath.Abs("../.."); err != nil {
		t.Fatal(err)
	}
	if lab, err = driver.Open(dir, t.Output()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lab.Down(context.WithoutCancel(t.Context())); err != nil {
			t.Errorf("take the lab down: %v", err)
		}
	})
	return lab, root
}
