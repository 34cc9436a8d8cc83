package install

import (
	"testing"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
)

func TestMain(m *testing.M) { ownertest.Main(m) }
