package floods

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/muster-k8s/muster/internal/envtest"
	"github.com/muster-k8s/muster/internal/membertest"
)

const (
	rendered  = "../../../deploy/charts/testdata/rendered.yaml"
	namespace = "muster-system"
)

var (
	shared *membertest.Cluster
	bin    string // where the programs are
)

// long runs every flood, against every listener, from one address and from 200, for a minute each.
var long = flag.Bool("long", os.Getenv("MUSTER_FLOODS_LONG") != "", "every flood at full length")

func TestMain(m *testing.M) {
	envtest.Verify(m, func(ctx context.Context) (stop func() error, err error) {
		if bin, err = os.MkdirTemp("", "muster-floods"); err != nil {
			return nil, err
		}
		build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-o", bin+"/",
			"../../../cmd/joinservice", "../../../cmd/kms", "../../../cmd/bootstrapper", "../flooder")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("build the programs: %w\n%s", err, out)
		}
		if shared, err = membertest.Start(ctx, rendered); err != nil {
			return nil, err
		}
		return func() error { return errors.Join(shared.Stop(), os.RemoveAll(bin)) }, nil
	})
}
