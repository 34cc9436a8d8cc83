package doctor

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/peerdial"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/internal/objects/jointoken"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/trust/attest"
)

// access compares the list of nodes that may not write with the enrollments.
func (d *doctor) access(ctx context.Context) error {
	m := &corev1.ConfigMap{}
	err := d.kube.Reader().Get(ctx, enrollment.Key(), m)
	if clusterapi.Absent(err) {
		d.Add(CheckAccess, checkup.Fail, "Recreate it: docs/operate.md, “muster-node-access is lost”.", "the ConfigMap %s is gone: no node can write", nodeaccess.ConfigMap)
		return nil
	}
	if err != nil {
		return err
	}
	list, err := nodeaccess.Parse(m.Data)
	if err != nil {
		d.Add(CheckAccess, checkup.Fail, "Correct that line: kubectl -n muster-system edit configmap "+nodeaccess.ConfigMap+". Until then bans and removals take no effect.", "%v", err)
		return nil
	}
	var attested v1alpha1.AttestedNodeList
	if err := d.kube.Reader().List(ctx, &attested); err != nil {
		return err
	}
	var nodes corev1.NodeList
	if err := d.kube.Reader().List(ctx, &nodes); err != nil {
		return err
	}
	there := map[string]enrollment.Present{}
	for i := range nodes.Items {
		there[nodes.Items[i].Name] = enrollment.PresentNode(&nodes.Items[i])
	}
	const remedy = "joinservice corrects that within two minutes. If it does not, check its pods: kubectl -n muster-system get pods."
	known, refused := map[string]bool{}, 0
	for _, n := range attested.Items {
		known[n.Name] = true
		have := list.Entry(n.Name)
		want := enrollment.Access(have, &n, there[n.Name], list.MembersOnly, enrollment.Clock{Latest: d.Now()})
		switch {
		case want.Suspended && !have.Suspended:
			d.Add(CheckAccess, checkup.Fail, remedy, "%s may write, although it is banned or has returned its ticket", n.Name)
		case have.Suspended && !want.Suspended || want.Member && !have.Member:
			d.Add(CheckAccess, checkup.Fail, remedy, "%s is enrolled, but %s refuses its writes", n.Name, nodeaccess.ConfigMap)
		case !want.Equal(have):
			d.Add(CheckAccess, checkup.Fail, remedy, "%s has another entry for %s than its AttestedNode requires", nodeaccess.ConfigMap, n.Name)
		}
		if foreign := there[n.Name].Foreign(n.Spec.Addresses); len(foreign) > 0 && !have.Unattested {
			d.Add(CheckAccess, checkup.Warn, "If a cloud's controller has written them, they are right. If they were its machine's, restart that. If they are another machine's, root on "+n.Name+" may have written them, so that kubectl exec and logs for its pods reach that machine: muster ban "+n.Name+".",
				"the Node %s has the addresses %q, which are not in its enrollment", n.Name, foreign)
		}
	}
	for _, name := range list.Nodes() {
		e := list.Entry(name)
		if e.Suspended || e.Revoked != nil {
			refused++
		}
		if e.Unattested {
			d.Add(CheckAccess, checkup.Warn, "Replace it by a machine that joins by attestation, and remove it: muster forget "+name+". Don't remove its line by hand: its certificates would then be valid for the next node with this name.", "%s was a node before Muster was installed: it may write, although its machine never attested", name)
		}
		if !known[name] && (e.Member && !e.Unattested || e.ControlPlane && !e.Unattested) {
			d.Add(CheckAccess, checkup.Fail, remedy, "%s is listed as a node that may write, but is not enrolled", name)
		}
	}
	for _, n := range nodes.Items {
		if e := list.Entry(n.Name); !known[n.Name] && !e.Unattested && e.Revoked == nil && !e.Suspended && !list.MembersOnly {
			d.Add(CheckAccess, checkup.Fail, "Find out who made the Node. kubectl delete node "+n.Name+" deletes it; muster forget "+n.Name+" also revokes certificates of that name.", "there is a Node %s, but no machine is enrolled under that name", n.Name)
		}
	}
	if d.Clean(CheckAccess) {
		d.OK(CheckAccess, "%d nodes are refused all writes, or writes with older certificates, as the admission policy requires", refused)
	}
	return nil
}

// forbidden are bindings that kubeadm makes for its tokens and that `kubeadm upgrade` may restore. The admission
// policies hold even with them; the check is a second line of defense.
var forbidden = []string{"kubeadm:kubelet-bootstrap", "kubeadm:node-autoapprove-bootstrap", "kubeadm:node-autoapprove-certificate-rotation"}

func (d *doctor) bindings(ctx context.Context) error {
	for _, name := range forbidden {
		o := &unstructured.Unstructured{}
		o.SetGroupVersionKind(schema.GroupVersionKind{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: "ClusterRoleBinding"})
		o.SetName(name)
		have, err := d.get(ctx, o)
		if err != nil {
			return err
		}
		if have != nil {
			d.Add(CheckBindings, checkup.Fail, "kubectl delete clusterrolebinding "+name, "%s is back: with it, tokens or nodes get certificates without attestation once the admission policies are gone", name)
		}
	}
	if d.Clean(CheckBindings) {
		d.OK(CheckBindings, "none that lets a token's holder join as a node")
	}
	return nil
}

// usesTokens reports whether this cluster's tickets have bootstrap tokens.
func (d *doctor) usesTokens() bool {
	if d.release == nil {
		return false
	}
	values, _ := d.release.Config["joinservice"].(map[string]any)
	return values["joinCredential"] == jointoken.Credential
}

// tokens looks for bearer credentials. Those of tickets are allowed where the cluster is configured for them.
func (d *doctor) tokens(ctx context.Context) error {
	var all corev1.SecretList
	if err := d.kube.Reader().List(ctx, &all, client.InNamespace("kube-system"), client.MatchingFields{"type": string(corev1.SecretTypeBootstrapToken)}); err != nil {
		return err
	}
	tickets := 0
	for _, s := range all.Items {
		if d.usesTokens() && jointoken.Is(&s, d.Now(), failSkew) {
			tickets++ // a machine is joining, or has just failed to join
			continue
		}
		d.Add(CheckTokens, checkup.Fail, "kubectl -n kube-system delete secret "+s.Name, "%s is a bootstrap token: without the admission policies, its holder can join as a node if token authentication is on", s.Name)
	}
	switch {
	case !d.Clean(CheckTokens):
	case tickets > 0:
		d.OK(CheckTokens, "%d, from tickets that were issued in the last %s", tickets, jointoken.Life)
	default:
		d.OK(CheckTokens, "none")
	}
	return nil
}

// joinservices dials each control plane as a machine would, and appraises it.
func (d *doctor) joinservices(ctx context.Context) error {
	asked := 0
	err := d.controlPlanes(ctx, CheckJoinservice, func(_ v1alpha1.AttestedNode, at string) {
		if at != "" {
			asked++
		}
	})
	if err == nil && d.policy != nil {
		err = d.listed(ctx)
	}
	if err == nil && d.policy != nil && d.Clean(CheckJoinservice) {
		d.OK(CheckJoinservice, "%d, reached from here and accepted by the policy", asked)
	}
	return err
}

// listed finds machines that the policy lists as control planes, but that are no control planes of the cluster:
// machines would still trust a joinservice on them (A7). It also compares the cluster with the control planes that the
// folder records.
func (d *doctor) listed(ctx context.Context) error {
	var nodes v1alpha1.AttestedNodeList
	if err := d.kube.Reader().List(ctx, &nodes); err != nil {
		return err
	}
	is, named := map[string]v1alpha1.AttestedNode{}, map[string]v1alpha1.AttestedNode{}
	for _, n := range nodes.Items {
		is[n.Spec.MachineID], named[n.Name] = n, n
	}
	cluster := d.dir.Cluster()
	remedy := "Take it out of controlPlanes in " + d.dir.File(ownerdir.PolicyFile) + ", increase serial, and run muster policy apply: machines still trust a joinservice or kms on it."
	for _, m := range d.policy.ControlPlanes() {
		switch n, ok := is[m.String()]; {
		case !ok && cluster.ControlPlane(m) != "": // below
		case !ok:
			d.Add(CheckJoinservice, checkup.Warn, remedy, "the policy lists machine %s as a control plane, but it is not enrolled as one", m)
		case n.Spec.Banned:
			d.Add(CheckJoinservice, checkup.Fail, remedy, "%s is banned, but the policy lists its machine %s as a control plane", n.Name, m)
		case n.Spec.Role != v1alpha1.RoleControlPlane:
			d.Add(CheckJoinservice, checkup.Fail, remedy, "%s is a worker, but the policy lists its machine %s as a control plane", n.Name, m)
		case cluster.ControlPlane(m) == "":
			d.Add(CheckJoinservice, checkup.Warn, policies.RecordIt(n.Name), "in the cluster, %s is a control plane with machine %s, which the policy lists. This folder records no name of that machine, so muster forget and replace refuse it", n.Name, m)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(cluster.ControlPlanes)) {
		had := cluster.ControlPlanes[name]
		switch n, ok := named[name]; {
		case !ok:
			d.Add(CheckJoinservice, checkup.Warn, "If you have removed it, complete that: muster forget "+name+". If not, it was removed without you: enroll it again (muster enroll "+name+" --role control-plane --machine-id "+had.String()+").",
				"this folder records the control plane %s, machine %s, but the cluster does not have it", name, had)
		case n.Spec.MachineID != had.String() || n.Spec.Role != v1alpha1.RoleControlPlane:
			d.Add(CheckJoinservice, checkup.Fail, "If another copy of the folder is newer, use that one. Otherwise the enrollment was changed without this folder: docs/control-planes.md#an-enrollment-that-is-not-yours.",
				"in the cluster %s is a %s with machine %s, but this folder records a control plane with machine %s", name, n.Spec.Role, n.Spec.MachineID, had)
		}
	}
	return nil
}

// controlPlanes appraises the joinservice of each control plane that is not banned. It reports those that are refused
// or unreachable, and calls accepted with the address of each other one. at is empty if there is no address.
func (d *doctor) controlPlanes(ctx context.Context, check string, accepted func(n v1alpha1.AttestedNode, at string)) error {
	if d.policy == nil {
		return nil // another check reports it
	}
	var id [32]byte
	if err := ownerdir.ParseHex([]byte(d.dir.Cluster().ClusterID), id[:]); err != nil {
		d.Add(check, checkup.Fail, restoreFolder, "cluster.json names no cluster ID: %v", err)
		return nil
	}
	port := clusterapi.Values{}.JoinPort()
	if d.release != nil {
		port = clusterapi.Values{More: d.release.Config}.JoinPort()
	}
	var nodes v1alpha1.AttestedNodeList
	if err := d.kube.Reader().List(ctx, &nodes); err != nil {
		return err
	}
	for _, n := range nodes.Items {
		if n.Spec.Role != v1alpha1.RoleControlPlane || n.Spec.Banned {
			continue
		}
		if len(n.Spec.Addresses) == 0 {
			accepted(n, "")
			continue
		}
		at := net.JoinHostPort(n.Spec.Addresses[0], strconv.Itoa(port))
		only, err := attest.ParseMachineID(n.Spec.MachineID)
		if err == nil {
			err = d.appraise(ctx, at, only, id)
		}
		if err == nil {
			accepted(n, n.Spec.Addresses[0])
			continue
		}
		remedy := problem.Explain(err).Remedy
		if _, refused := errors.AsType[*attest.Refusal](err); !refused || remedy == "" {
			remedy = "From here, TCP to " + at + " must get through; on that node, the pod of muster-joinservice must be ready (externalTrafficPolicy is Local)."
		}
		d.Add(check, checkup.Fail, remedy, "%s at %s: %v", n.Name, at, err)
	}
	return nil
}

func (d *doctor) appraise(ctx context.Context, at string, only attest.MachineID, clusterID [32]byte) error {
	s, err := peerdial.Open(peerdial.Target{
		Addr: at, Purpose: attest.PurposeJoinservice, Policy: d.policy, Locks: []attest.Lock{attest.LockedTo(clusterID)}, Only: &only, DialContext: d.DialContext,
	})
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }()
	_, err = s.Exchange(ctx)
	return err
}

// auditLog checks each joinservice's metrics for missing records.
func (d *doctor) auditLog(ctx context.Context) error {
	var pods corev1.PodList
	if err := d.kube.Reader().List(ctx, &pods, client.InNamespace(clusterapi.Namespace), client.MatchingLabels{"app.kubernetes.io/name": "muster-joinservice"}); err != nil {
		return err
	}
	for _, p := range pods.Items {
		text, err := d.kube.PodMetrics(ctx, p.Name)
		if err != nil {
			d.Add(CheckAudit, checkup.Warn, "Look at kubectl -n muster-system logs "+p.Name+"; the file is /var/log/muster/audit.jsonl on its node.", "the metrics of %s can't be read through the API server: %v", p.Name, err)
			continue
		}
		d.auditOf(p.Name, text)
	}
	if d.Clean(CheckAudit) {
		d.OK(CheckAudit, "no record is missing, by the metrics of %d joinservices", len(pods.Items))
	}
	return nil
}

func (d *doctor) auditOf(pod string, metrics []byte) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(metrics))
	if err != nil {
		d.Add(CheckAudit, checkup.Warn, "Look at kubectl -n muster-system logs "+pod+".", "the metrics of %s can't be read: %v", pod, err)
		return
	}
	dropped, failed := 0.0, 0.0
	for _, m := range families["muster_refusals_unrecorded_total"].GetMetric() {
		dropped += m.GetCounter().GetValue()
	}
	for _, m := range families["muster_join_tickets_total"].GetMetric() {
		for _, l := range m.GetLabel() {
			if l.GetName() == "reason" && strings.EqualFold(l.GetValue(), "AUDIT_UNAVAILABLE") {
				failed += m.GetCounter().GetValue()
			}
		}
	}
	if failed > 0 {
		d.Add(CheckAudit, checkup.Fail, "Free space on the disk of its node: without an audit record, joinservice issues nothing.", "%s refused %.0f tickets since it could not write its audit log", pod, failed)
	}
	if dropped > 0 {
		d.Add(CheckAudit, checkup.Warn, "Find the source of these requests: muster status and joinservice's log have machines and addresses.", "%s recorded %.0f refusals only as a count", pod, dropped)
	}
}
