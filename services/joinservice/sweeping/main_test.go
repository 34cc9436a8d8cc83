package sweeping

import (
	"context"
	"errors"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/services/joinservice/servicetest"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestMain(m *testing.M) { kubetest.Verify(m, servicetest.Start) }

// replica is one joinservice. Its Enforcer does not run yet.
type replica struct {
	*servicetest.Rooms
	*Enforcer
}

func newReplica(t *testing.T, with ...func(*servicetest.Rooms)) *replica {
	t.Helper()
	r := &replica{}
	r.Rooms = servicetest.New(t, append(with, func(p *servicetest.Rooms) {
		var err error
		if r.Enforcer, err = NewEnforcer(p.State, p.List, p.Requests); err != nil {
			t.Fatal(err)
		}
	})...)
	return r
}

// enforce runs an Enforcer until the test ends, and reports the machines whose connections it cut.
func enforce(t *testing.T, e *Enforcer) <-chan attest.MachineID {
	t.Helper()
	cut := make(chan attest.MachineID, 16)
	servicetest.Serve(t, func(ctx context.Context) error { return e.Serve(ctx, func(m attest.MachineID) { cut <- m }) })
	return cut
}

// hanging is an API server that answers nothing as long as the test runs.
type hanging struct {
	client.Client
	until context.Context // the end of the test
}

func (h hanging) hang(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-h.until.Done():
		return errors.New("the test is over")
	}
}

func (h hanging) Get(ctx context.Context, _ client.ObjectKey, _ client.Object, _ ...client.GetOption) error {
	return h.hang(ctx)
}

func (h hanging) Update(ctx context.Context, _ client.Object, _ ...client.UpdateOption) error {
	return h.hang(ctx)
}
