package uninstall

import (
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// klog starts its flusher with the process.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"))
}
