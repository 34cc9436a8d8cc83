package ownertest

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
)

// Fresh removes what an earlier test has left of nodes in the cluster that all tests share, so that tests pass in any order.
func Fresh(t *testing.T) {
	t.Helper()
	l := &v1alpha1.AttestedNodeList{}
	if err := Shared.Client.List(t.Context(), l); meta.IsNoMatchError(err) {
		return // nothing of Muster is defined yet
	} else if err != nil {
		t.Fatal(err)
	}
	for i := range l.Items {
		free := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null},"spec":{"banned":true}}`))
		if err := Shared.Client.Patch(t.Context(), &l.Items[i], free); client.IgnoreNotFound(err) != nil {
			t.Fatal(err)
		}
	}
	for _, o := range []client.Object{&v1alpha1.AttestedNode{}, &v1alpha1.AttestedDisk{}, &v1alpha1.AttestationPolicy{}, &corev1.Node{}} {
		if err := Shared.Client.DeleteAllOf(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
}
