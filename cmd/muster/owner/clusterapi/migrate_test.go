package clusterapi

import (
	"crypto/sha256"
	"fmt"
	"log/slog"
	"os"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
)

// An upgrade keeps the list of a version before v0.1 (J4): its nodes go on writing, and no removed or banned node
// writes again.
func TestTheListOfAnEarlierVersionIsTakenOver(t *testing.T) {
	api := start(t)
	if err := api.InstallCRDs(t.Context()); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	c, err := Connect(text)
	if err != nil {
		t.Fatal(err)
	}
	until := time.Now().Add(10 * time.Hour).UTC().Truncate(time.Second)
	list := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: former}, Data: map[string]string{
		"node0": "machine0", "node1": "machine1", "_control-planes": "node0",
		"node1_requests":     "2026-01-02T03:04:05Z",
		"node9_certificates": until.Format(time.RFC3339),
		// A second machine has the name: certificates of the first one write nothing.
		"node3": "machine3", "node3_certificates": until.Format(time.RFC3339) + " X509SHA256=new",
	}}
	for _, o := range append(needs()[1:], list) {
		if err := api.Client.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	node := func(name string, role v1alpha1.Role, banned bool) {
		n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.AttestedNodeSpec{
			MachineID: fmt.Sprintf("%x", sha256.Sum256([]byte(name))), Role: role, Banned: banned,
		}}
		if err := api.Client.Create(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		n.Status.LastVerdict = &v1alpha1.Verdict{Time: metav1.Now(), Accepted: true}
		if err := api.Client.Status().Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
	}
	node("node0", v1alpha1.RoleControlPlane, false)
	node("node1", v1alpha1.RoleWorker, false)
	node("node2", v1alpha1.RoleWorker, true) // a ban removed its key from the former list
	node("node3", v1alpha1.RoleWorker, false)

	get := func() *nodeaccess.List {
		m := &corev1.ConfigMap{}
		if err := api.Client.Get(t.Context(), client.ObjectKey{Namespace: Namespace, Name: nodeaccess.ConfigMap}, m); err != nil {
			t.Fatal(err)
		}
		l, err := nodeaccess.Parse(m.Data)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	want := map[string]nodeaccess.Entry{
		"node0": {ControlPlane: true}, "node1": {}, "node2": {Suspended: true},
		"node3": {Revoked: &nodeaccess.Revocation{Until: until, Allowed: []string{"X509SHA256=new"}}},
		"node9": {Revoked: &nodeaccess.Revocation{Until: until}},
	}
	check := func(when string) {
		t.Helper()
		l := get()
		for name, e := range want {
			if have := l.Entry(name); !have.Equal(e) {
				t.Errorf("%s: %s: %+v (%+v), want %+v (%+v)", when, name, have, have.Revoked, e, e.Revoked)
			}
		}
		if l.MembersOnly {
			t.Errorf("%s: members only", when)
		}
	}
	if found, err := c.MigrateAccess(t.Context(), false, false); err != nil || !found {
		t.Fatalf("found %t, %v", found, err)
	}
	check("before the services")

	// The services of the earlier version still run, while the chart of this version is installed.
	if _, err := c.InstallChart(t.Context(), values, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	writers(t, api).want(t, map[string]string{"an enrolled node": "", "a node that was removed": "had the node's name before, or was removed", "an administrator": "", "a controller": ""})
	if err := api.Client.Delete(t.Context(), &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}); err != nil {
		t.Fatal(err)
	}
	later := until.Add(time.Hour)
	free := client.RawPatch("application/merge-patch+json", []byte(`{"data":{"node1":null,"node1_certificates":"`+later.Format(time.RFC3339)+`"}}`))
	if err := api.Client.Patch(t.Context(), list, free); err != nil {
		t.Fatal(err)
	}
	if found, err := c.MigrateAccess(t.Context(), false, true); err != nil || !found {
		t.Fatalf("found %t, %v", found, err)
	}
	want["node1"] = nodeaccess.Entry{Revoked: &nodeaccess.Revocation{Until: later}}
	check("after them")
	if found, err := c.MigrateAccess(t.Context(), false, true); err != nil || found {
		t.Errorf("once more: found %t, %v", found, err)
	}
	check("once more")
}
