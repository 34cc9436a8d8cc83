package lifecycle

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/orders"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/internal/ownerorder"
)

// B11: the API, which says what machine and disk a node has, can't have an order signed for another node than the owner has typed.
func TestAnOrderIsForTheNodeThatItsOwnerTyped(t *testing.T) {
	l := ownertest.NewLifecycle(t)
	l.Node(t, "typed", 61, v1alpha1.RoleWorker)
	other := l.Node(t, "other", 62, v1alpha1.RoleWorker)
	l.Through(t, func(r *http.Request) {
		r.URL.Path = strings.Replace(r.URL.Path, "/attestednodes/typed", "/attestednodes/other", 1)
	})
	says := func(err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), "answers with the enrollment of other instead of that of typed") {
			t.Error(err)
		}
	}
	_, err := orders.Execute(t.Context(), l.Dir, "typed", ownerorder.ActionReset, nil, func(string) {})
	says(err)
	_, err = PlanReset(t.Context(), l.Dir, "typed")
	says(err)
	says(Ban(t.Context(), l.Dir, "typed", func(string) {}, func() {}))
	if n := ownertest.EnrollmentOf(t, other.Node); n.Annotations[v1alpha1.OwnerOrder] != "" || n.Spec.Banned {
		t.Errorf("the other node has %q, banned: %v", n.Annotations, n.Spec.Banned)
	}
}

// pending gives the node an order of another run, and returns its note.
func (r *runner) pending(t *testing.T, action ownerorder.Action, args map[string]string) string {
	t.Helper()
	n := ownertest.EnrollmentOf(t, runningNode)
	key, err := r.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	o, err := orders.Sign(r.Dir, n, action, args, time.Now(), key)
	if err != nil {
		t.Fatal(err)
	}
	n.Annotations = map[string]string{v1alpha1.OwnerOrder: o.Note()}
	if err := ownertest.Shared.Client.Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	return o.Note()
}
