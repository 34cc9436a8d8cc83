package kubetest

import (
	"context"
	"fmt"
	"os"
	"runtime/debug"
	"testing"

	"go.uber.org/goleak"
)

// Verify is for TestMain: it starts what the tests of a package share, runs them, stops it, and then looks for leaked
// goroutines.
func Verify(m *testing.M, start func(context.Context) (stop func() error, err error)) {
	debug.SetGCPercent(garbagePercent)
	goleak.VerifyTestMain(suite{m, start},
		// klog starts it with the process.
		goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"),
	)
}

type suite struct {
	m     *testing.M
	start func(context.Context) (func() error, error)
}

// Run implements [goleak.TestingM].
func (s suite) Run() int {
	// At the start of the process there is no context yet that could end it.
	stop, err := s.start(context.Background())
	if err != nil {
		fmt.Fprintln(os.Stderr, "the tests cannot start:", err)
		return 1
	}
	code := s.m.Run()
	if err := stop(); err != nil {
		fmt.Fprintln(os.Stderr, "after the tests:", err)
		return max(code, 1)
	}
	return code
}
