package main

import (
	"context"
	"fmt"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
)

// With another node's address in its Node, `kubectl exec` and the API server's proxy would reach that node's kubelet for it, or an API server.
func TestANodeAddsNoForeignAddressToItsNode(t *testing.T) {
	s := setUp(t)
	w := worker(t)
	kubelet := s.asNode(t, w, s.ticketFor(t, s.machine(t), w))
	internal := func(a ...string) (out []corev1.NodeAddress) {
		for _, a := range a {
			out = append(out, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
		}
		return append(out, corev1.NodeAddress{Type: corev1.NodeHostName, Address: "w1"})
	}
	const own, later, foreign = "192.168.77.12", "192.168.77.13", "192.168.77.11"
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}, Status: corev1.NodeStatus{Addresses: internal(own)}}
	membertest.Eventually(t, func() error { return kubelet.Create(t.Context(), node.DeepCopy()) })
	report := func(addresses []corev1.NodeAddress, o ...client.SubResourceUpdateOption) func() error {
		return func() error {
			n := &corev1.Node{}
			if err := s.Client.Get(t.Context(), client.ObjectKeyFromObject(node), n); err != nil {
				return err
			}
			n.Status.Addresses = addresses
			n.Status.NodeInfo.KubeletVersion = "v1.36.1"
			return kubelet.Status().Update(t.Context(), n, o...)
		}
	}
	dry := func(addresses ...corev1.NodeAddress) func() error { return report(addresses, client.DryRunAll) }
	with := func(kind corev1.NodeAddressType, a string) func() error {
		return dry(append(internal(own), corev1.NodeAddress{Type: kind, Address: a})...)
	}
	const no, where = "adds an address that its enrollment does not have", "listens on port 10250"
	for what, a := range map[string]corev1.NodeAddress{
		"an external one":  {Type: corev1.NodeExternalIP, Address: foreign},
		"another's name":   {Type: corev1.NodeHostName, Address: "cp1"},
		"a name in DNS":    {Type: corev1.NodeInternalDNS, Address: "cp1"},
		"of another type ": {Type: "x", Address: foreign},
	} {
		o := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}, Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{a}}}
		s.try(t, map[string]write{"it begins with " + what: {func() error { return kubelet.Create(t.Context(), o.DeepCopy(), client.DryRunAll) }, no}})
	}
	var many []string
	for i := range 3000 {
		many = append(many, fmt.Sprintf("10.0.%d.%d", i/250, i%250))
	}
	s.try(t, map[string]write{
		"another's":              {dry(internal(foreign)...), no},
		"another's beside it":    {dry(internal(foreign, own)...), no},
		"of another type":        {with(corev1.NodeExternalIP, foreign), no},
		"its own as an external": {with(corev1.NodeExternalIP, own), no},
		"another's name":         {with(corev1.NodeHostName, "cp1"), no},
		"a name in DNS":          {with(corev1.NodeInternalDNS, "kubernetes.default"), no},
		"many":                   {dry(internal(many...)...), no},
		"the same":               {dry(internal(own)...), ""},
		"fewer":                  {dry(), ""},
	})
	if s.Access(t).Entry("w1").Addresses != "" {
		t.Error("a node with the addresses of its enrollment is listed")
	}

	// Its machine joined again with another address.
	enrolled := s.Node(t, "w1")
	enrolled.Spec.Addresses = []string{later}
	if err := s.Client.Update(t.Context(), enrolled); err != nil {
		t.Fatal(err)
	}
	membertest.Eventually(t, report(internal(later)))
	s.try(t, map[string]write{
		"the one of before, of another machine by now": {dry(internal(own)...), no},
		"another's":                   {dry(internal(foreign)...), no},
		"external":                    {with(corev1.NodeExternalIP, later), no},
		"another's after that change": {dry(internal(later, foreign)...), no},
	})

	// A node may restore what it took away; its list entry stays, whatever it does.
	entry := s.Access(t).Entry("w1")
	if entry.Addresses != later {
		t.Errorf("%+v", entry)
	}
	if err := report(nil)(); err != nil {
		t.Fatal(err)
	}
	s.try(t, map[string]write{"itself again": {dry(internal(later)...), ""}, "another's": {dry(internal(foreign)...), no}})

	// An administrator deletes the Node. The same limits hold when the kubelet registers again.
	again := func(port int32, addresses ...corev1.NodeAddress) func() error {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}, Status: corev1.NodeStatus{Addresses: addresses}}
		n.Status.DaemonEndpoints.KubeletEndpoint.Port = port
		return func() error { return kubelet.Create(t.Context(), n.DeepCopy(), client.DryRunAll) }
	}
	s.try(t, map[string]write{"the port of an API server": {func() error {
		p := client.RawPatch(types.MergePatchType, []byte(`{"status":{"daemonEndpoints":{"kubeletEndpoint":{"Port":6443}}}}`))
		return kubelet.Status().Patch(t.Context(), node.DeepCopy(), p, client.DryRunAll)
	}, where}, "another instance's ID": {func() error {
		p := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"providerID":"aws:///a/i-1"}}`))
		return kubelet.Patch(t.Context(), node.DeepCopy(), p, client.DryRunAll)
	}, "does not change its provider ID"}})
	if err := s.Client.Delete(t.Context(), node.DeepCopy()); err != nil {
		t.Fatal(err)
	}
	s.try(t, map[string]write{
		"again":             {again(10250, internal(later)...), ""},
		"with another's":    {again(10250, internal(foreign)...), no},
		"with another port": {again(6443, internal(later)...), where},
	})
	if err := again(6443, internal(later)...)(); !apierrors.IsForbidden(err) {
		t.Errorf("%v: after any other refusal a kubelet does not read its present Node", err)
	}

	// A node that is older than Muster has no enrollment that says its addresses.
	before := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w0"}, Status: corev1.NodeStatus{Addresses: internal(own)}}
	if err := s.Client.Create(t.Context(), before); err != nil {
		t.Fatal(err)
	}
	s.SetAccess(t, "w0", func(nodeaccess.Entry) nodeaccess.Entry { return nodeaccess.Entry{Unattested: true} })
	moved := before.DeepCopy()
	moved.Status.Addresses = internal("192.168.77.30")
	s.try(t, map[string]write{"a node of before Muster": {func() error { return s.as(t, "w0").Status().Update(t.Context(), moved.DeepCopy(), client.DryRunAll) }, ""}})
}

// With another node's label kubernetes.io/hostname, pods and local volumes that name that node, and their Secrets, would come to this one.
func TestANodeIsNamedByItsNameAlone(t *testing.T) {
	s := setUp(t)
	w := worker(t)
	kubelet := s.asNode(t, w, s.ticketFor(t, s.machine(t), w))
	const label = "kubernetes.io/hostname"
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1", Labels: map[string]string{label: "w1"}}}
	another := node.DeepCopy()
	another.Labels[label] = "cp1"
	const no = "kubernetes.io/hostname that a node gives itself is its name"
	s.try(t, map[string]write{"it begins as another": {func() error { return kubelet.Create(t.Context(), another.DeepCopy(), client.DryRunAll) }, no}})
	membertest.Eventually(t, func() error { return kubelet.Create(t.Context(), node.DeepCopy()) })
	labeled := func(value string, status bool) func() error {
		p := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"`+label+`":`+value+`,"example.com/x":"y"}}}`))
		return func() error {
			if status {
				return kubelet.Status().Patch(t.Context(), node.DeepCopy(), p, client.DryRunAll)
			}
			return kubelet.Patch(t.Context(), node.DeepCopy(), p, client.DryRunAll)
		}
	}
	s.try(t, map[string]write{
		"as another":             {labeled(`"cp1"`, false), no},
		"as another, by status":  {labeled(`"cp1"`, true), no},
		"by its name":            {labeled(`"w1"`, false), ""},
		"without a name":         {labeled("null", false), ""},
		"by its name, by status": {labeled(`"w1"`, true), ""},
	})
	// A node of before Muster may have another; it keeps that.
	other := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w0", Labels: map[string]string{label: "host0"}}}
	if err := s.Client.Create(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	s.SetAccess(t, "w0", func(nodeaccess.Entry) nodeaccess.Entry { return nodeaccess.Entry{Unattested: true} })
	s.try(t, map[string]write{"it keeps another": {func() error {
		return s.as(t, "w0").Patch(t.Context(), other.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"example.com/x":"y"}}}`)), client.DryRunAll)
	}, ""}})
}

// The chart's nodeAddresses.writers write the addresses of the Node that their token was made for.
func TestACloudsPodWritesTheAddressesOfItsOwnNode(t *testing.T) {
	s := setUp(t)
	admin := s.asUser(t, "admin", "system:masters")
	policy := &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: "muster-node-metadata"}}
	exchange := func(ctx context.Context, from, to string) {
		if err := admin.Get(ctx, client.ObjectKeyFromObject(policy), policy); err != nil {
			t.Fatal(err)
		}
		for i, v := range policy.Spec.Validations {
			policy.Spec.Validations[i].Expression = strings.ReplaceAll(v.Expression, from+".exists(w,", to+".exists(w,")
		}
		if err := admin.Update(ctx, policy); err != nil {
			t.Fatal(err)
		}
	}
	const none, one = "[]", `["kube-system:cloud-node-manager"]`
	exchange(t.Context(), none, one)
	t.Cleanup(func() { exchange(context.WithoutCancel(t.Context()), one, none) })
	role := &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "addresses"}, Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"nodes", "nodes/status"}, Verbs: []string{"get", "patch"}}},
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "addresses"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "addresses"},
		Subjects: []rbacv1.Subject{{Kind: "Group", Name: "system:serviceaccounts"}},
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}
	for _, o := range []client.Object{role, binding, node} {
		if err := s.Client.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Client.Delete(context.WithoutCancel(t.Context()), o) })
	}
	as := func(account string, of ...string) func() error {
		cfg := rest.CopyConfig(s.Admin)
		cfg.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + account, Groups: []string{"system:serviceaccounts"}}
		if len(of) > 0 {
			cfg.Impersonate.Extra = map[string][]string{"authentication.kubernetes.io/node-name": of}
		}
		c, err := client.New(cfg, client.Options{})
		if err != nil {
			t.Fatal(err)
		}
		p := client.RawPatch(types.MergePatchType, []byte(`{"status":{"addresses":[{"type":"InternalIP","address":"192.168.77.11"}]}}`))
		return func() error { return c.Status().Patch(t.Context(), node.DeepCopy(), p, client.DryRunAll) }
	}
	const no = "changes the addresses of one"
	s.try(t, map[string]write{
		"of its own Node":       {as("kube-system:cloud-node-manager", "w1"), ""},
		"of another":            {as("kube-system:cloud-node-manager", "w2"), no},
		"by a token of no Node": {as("kube-system:cloud-node-manager"), no},
		"another account":       {as("kube-system:driver", "w1"), no},
	})
}
