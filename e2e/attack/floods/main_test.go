package floods

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/membertest"
)

const (
	rendered  = "../../../deploy/charts/testdata/rendered.yaml"
	namespace = "muster-system"
)

var (
	long   = flag.Bool("long", os.Getenv("MUSTER_FLOODS_LONG") != "", "every flood against every listener, each for a minute")
	length = flag.Duration("length", 0, "how long each flood lasts; 0: a minute in a long run, five seconds in a short one")
	bin    = flag.String("bin", "", "folder that has the programs already; empty: they are built")
)

func TestMain(m *testing.M) {
	flag.Parse()
	if *length == 0 {
		*length = 5 * time.Second
		if *long {
			*length = time.Minute
		}
	}
	kubetest.Verify(m, func(ctx context.Context) (stop func() error, err error) {
		dir, err := os.MkdirTemp("", "muster-floods")
		if err != nil {
			return nil, err
		}
		if *bin == "" {
			*bin = dir
			build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-o", dir+"/",
				"../../../cmd/joinservice", "../../../cmd/kms", "../../../cmd/bootstrapper", "../flooder")
			build.Env = append(os.Environ(), "CGO_ENABLED=0")
			if out, err := build.CombinedOutput(); err != nil {
				return nil, fmt.Errorf("build the programs: %w\n%s", err, out)
			}
		}
		return func() error {
			if shared != nil {
				err = shared.Stop()
			}
			return errors.Join(err, os.RemoveAll(dir))
		}, nil
	})
}

// shared is nil until a test needs a cluster.
var shared *membertest.Cluster

// cluster returns the control plane that tests share.
func cluster(t *testing.T) *membertest.Cluster {
	t.Helper()
	if shared == nil {
		c, err := membertest.Start(context.WithoutCancel(t.Context()), rendered) // it outlives this test
		if err != nil {
			t.Fatal(err)
		}
		shared = c
	}
	return shared
}
