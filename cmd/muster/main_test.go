package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"go.uber.org/goleak"
)

// leakChecked looks for goroutines after the tests; testscript.Main exits the process.
type leakChecked struct{ *testing.M }

func (m leakChecked) Run() int {
	code := m.M.Run()
	if err := stopCluster(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	// klog starts its flusher with the process.
	if err := goleak.Find(goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return max(code, 1)
	}
	return code
}

func TestMain(m *testing.M) { testscript.Main(leakChecked{m}, map[string]func(){"muster": main}) }

// TestCommands runs the scripts in testdata/script: everything that works without a machine.
func TestCommands(t *testing.T) {
	shared, err := filepath.Abs(filepath.Join("..", "..", "internal", "policyfile", "testdata"))
	if err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir: filepath.Join("testdata", "script"),
		Setup: func(env *testscript.Env) error {
			for _, name := range []string{"measurements.json", "ek-root.pem", "policy.yaml"} {
				b, err := os.ReadFile(filepath.Join(shared, name))
				if err != nil {
					return err
				}
				if err := os.WriteFile(filepath.Join(env.WorkDir, name), b, 0o600); err != nil {
					return err
				}
			}
			return nil
		},
	})
}
