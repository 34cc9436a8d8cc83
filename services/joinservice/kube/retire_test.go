package kube

import (
	"crypto/x509"
	"log/slog"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/cluster"
	"github.com/muster-k8s/muster/internal/clusterinfo"
	"github.com/muster-k8s/muster/internal/enrolled"
	"github.com/muster-k8s/muster/internal/envtest"
	"github.com/muster-k8s/muster/trust/attest"
)

// The owner takes a name while a ticket for it is under way. Whatever of the owner's two writes, ban
// and strike, has come by then, the ticket's certificate ends up unlisted, and so does its node.
func TestATicketThatMeetsTheOwnersStrikeIsNotVouchedFor(t *testing.T) {
	ctx := t.Context()
	api, err := envtest.Start(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := api.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := api.InstallCRDs(ctx); err != nil {
		t.Fatal(err)
	}
	if err := api.Namespace(ctx, clusterinfo.Namespace); err != nil {
		t.Fatal(err)
	}
	const machine, other = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
	k := &Kube{cluster: &cluster.Cluster{Client: api.Client}, log: slog.New(slog.DiscardHandler), enrolled: &enrolledView{}}
	ticket := &x509.Certificate{Raw: []byte("the ticket's certificate")}
	for name, tt := range map[string]struct {
		meanwhile func(t *testing.T, n *v1alpha1.AttestedNode, list *corev1.ConfigMap)
		refused   bool
		listed    string // machine, at the end
	}{
		"nothing happens": {func(*testing.T, *v1alpha1.AttestedNode, *corev1.ConfigMap) {}, false, machine},
		"it was struck": {func(t *testing.T, _ *v1alpha1.AttestedNode, list *corev1.ConfigMap) {
			delete(list.Data, "w1")
			list.Data[enrolled.Key("w1")] = enrolled.Retire(time.Now()).String()
		}, true, ""},
		"it was banned after the strike of before": {func(t *testing.T, n *v1alpha1.AttestedNode, _ *corev1.ConfigMap) {
			n.Spec.Banned = true
		}, true, ""},
		"the name is another machine's": {func(t *testing.T, n *v1alpha1.AttestedNode, list *corev1.ConfigMap) {
			n.Spec.Banned = true
			if err := api.Client.Update(ctx, n); err != nil {
				t.Fatal(err)
			}
			n.Spec.Banned, n.Spec.MachineID = false, other
			list.Data["w1"] = other
		}, true, other},
	} {
		t.Run(name, func(t *testing.T) {
			n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "w1"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: machine, Role: v1alpha1.RoleWorker}}
			list := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: clusterinfo.Namespace, Name: enrolled.ConfigMap}, Data: map[string]string{
				"w1": machine, enrolled.Key("w1"): enrolled.Retire(time.Now()).String(),
			}}
			for _, o := range []client.Object{n, list} {
				if err := api.Client.Create(ctx, o); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() {
					if err := api.Client.Delete(ctx, o); err != nil {
						t.Error(err)
					}
				})
			}
			e := &Enrolment{kube: k, node: n.DeepCopy(), retired: true}
			tt.meanwhile(t, n, list)
			for _, o := range []client.Object{n, list} {
				if err := api.Client.Update(ctx, o); err != nil {
					t.Fatal(err)
				}
			}
			err := e.Vouch(ctx, ticket)
			if got := attest.ReasonOf(err) == attestv1.Reason_REASON_BANNED; got != tt.refused || !tt.refused && err != nil {
				t.Errorf("%v, want it refused: %v", err, tt.refused)
			}
			if err := api.Client.Get(ctx, client.ObjectKeyFromObject(list), list); err != nil {
				t.Fatal(err)
			}
			r, err := enrolled.ParseRetirement(list.Data[enrolled.Key("w1")])
			if err != nil {
				t.Fatal(err)
			}
			if r.Admits(enrolled.ID(ticket)) == tt.refused || list.Data["w1"] != tt.listed {
				t.Errorf("listed: machine %q, certificates %v", list.Data["w1"], r.Certificates)
			}
		})
	}
}
