package bootstrapper_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/internal/disktest"
)

// suite are the tests, and the mirror that they share.
type suite struct{ *testing.M }

func (s suite) Run() int {
	mirror.Start()
	defer mirror.Close()
	return s.M.Run()
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(disktest.InMemory(suite{m})) }
