package orders

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/ownerorder"
)

// An interruption while the API server is slow: the order may be stored already, or be on its way still.
func TestAnOrderThatIsBeingWrittenIsWithdrawn(t *testing.T) {
	for name, late := range map[string]bool{"stored before": false, "stored after": true} {
		t.Run(name, func(t *testing.T) {
			l := ownertest.NewLifecycle(t)
			l.Node(t, "w1", 71, v1alpha1.RoleWorker)
			transport, err := rest.TransportFor(ownertest.Shared.Admin)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			over, code, first := make(chan struct{}), make(chan int, 1), true
			l.Through(t, func(r *http.Request) {
				if r.Method != http.MethodPut || !first {
					return
				}
				first = false // the next one is sent when this one is interrupted
				if late {
					cancel()
					<-over
				}
				resp, err := transport.RoundTrip(r.Clone(context.WithoutCancel(r.Context())))
				if err != nil {
					t.Error(err)
					close(code)
					return
				}
				_ = resp.Body.Close()
				code <- resp.StatusCode
				cancel()
			})
			_, err = Execute(ctx, l.Dir, "w1", ownerorder.ActionReset, nil, func(string) { t.Error("it is said to be written") })
			close(over)
			if err == nil || !strings.Contains(err.Error(), `the order "reset" to w1 is withdrawn`) || !strings.Contains(problem.Remedy(err), "may still start it") {
				t.Errorf("%v: %s", err, problem.Remedy(err))
			}
			if got := <-code; (got == http.StatusConflict) != late {
				t.Errorf("the API server answers %d", got)
			}
			if note := ownertest.EnrollmentOf(t, "w1").Annotations[v1alpha1.OwnerOrder]; note != "" {
				t.Errorf("the machine gets %s", note)
			}
		})
	}
}

func TestOnlyTheRunThatSignedAnOrderWithdrawsIt(t *testing.T) {
	l := ownertest.NewLifecycle(t)
	l.Node(t, "w1", 72, v1alpha1.RoleWorker)
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	written, done := make(chan struct{}), make(chan error, 1)
	waiting, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		_, err := Execute(waiting, l.Dir, "w1", ownerorder.ActionReboot, nil, func(string) { close(written) })
		done <- err
	}()
	<-written
	note := ownertest.EnrollmentOf(t, "w1").Annotations[v1alpha1.OwnerOrder]
	joined, interrupt := context.WithCancel(ctx)
	defer interrupt()
	_, err := Execute(joined, l.Dir, "w1", ownerorder.ActionReboot, nil, func(string) { interrupt() })
	if err == nil || strings.Contains(err.Error(), "withdrawn") || !strings.Contains(problem.Remedy(err), "Another run of muster") {
		t.Errorf("%v: %s", err, problem.Remedy(err))
	}
	if got := ownertest.EnrollmentOf(t, "w1").Annotations[v1alpha1.OwnerOrder]; got != note || note == "" {
		t.Errorf("the other run's order is replaced by %q", got)
	}
	stop()
	if err := <-done; err == nil || !strings.Contains(err.Error(), "is withdrawn") {
		t.Error(err)
	}
}

// The machine reports between this program's last look and the interruption.
func TestAnOrderThatHasBegunIsNotSaidToBeWithdrawn(t *testing.T) {
	l := ownertest.NewLifecycle(t)
	l.Node(t, "w1", 73, v1alpha1.RoleWorker)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, err := Execute(ctx, l.Dir, "w1", ownerorder.ActionReset, nil, func(string) {
		n := ownertest.EnrollmentOf(t, "w1")
		signed, err := ownerorder.ParseMachineNote(n.Annotations[v1alpha1.OwnerOrder])
		if err != nil {
			t.Error(err)
		}
		n.Status.Order = &v1alpha1.OrderReport{Digest: signed.Digest(), Action: string(ownerorder.ActionReset), State: v1alpha1.OrderRunning, BeganAt: new(metav1.NewTime(time.Now()))}
		if err := ownertest.Shared.Client.Status().Update(t.Context(), n); err != nil {
			t.Error(err)
		}
		cancel()
	})
	if err == nil || !strings.Contains(err.Error(), "has already started the order") || ownertest.EnrollmentOf(t, "w1").Annotations[v1alpha1.OwnerOrder] == "" {
		t.Error(err)
	}
}
