package access_test

import (
	"testing"

	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/services/joinservice/servicetest"
)

func TestMain(m *testing.M) { kubetest.Verify(m, servicetest.Start) }
