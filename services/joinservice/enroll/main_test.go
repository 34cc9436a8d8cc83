package enroll_test

import (
	"testing"

	"github.com/muster-k8s/muster/internal/envtest"
	"github.com/muster-k8s/muster/services/joinservice/roomtest"
)

func TestMain(m *testing.M) { envtest.Verify(m, roomtest.Start) }
