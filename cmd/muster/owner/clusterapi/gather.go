package clusterapi

import (
	"cmp"
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"regexp"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/objects/waiting"
	"github.com/muster-k8s/muster/internal/printable"
	"github.com/muster-k8s/muster/internal/rpc"
)

func timeOf(t *metav1.Time) *time.Time {
	if t == nil {
		return nil
	}
	return &t.Time
}

// revocations finds the nodes whose machines have only revoked certificates. muster doctor reports a list that can't be read.
func (c *Client) revocations(ctx context.Context, s *Status, _ time.Time) error {
	var m corev1.ConfigMap
	if err := c.client.Get(ctx, enrollment.Key(), &m); err != nil && !Absent(err) {
		return err
	}
	list, err := nodeaccess.Parse(m.Data)
	if err != nil {
		return nil //nolint:nilerr // as above
	}
	for i := range s.Nodes {
		n := &s.Nodes[i]
		if e := list.Entry(n.Name); n.enrollment != nil && !n.enrollment.ShutOut() && enrollment.Locked(n.enrollment, e) {
			n.RevokedUntil = &e.Revoked.Until
		}
	}
	return nil
}

// pods reads the state of each pod of Muster's services.
func (c *Client) pods(ctx context.Context, s *Status, _ time.Time) error {
	for _, name := range Services {
		var pods corev1.PodList
		if err := c.client.List(ctx, &pods, client.InNamespace(Namespace), client.MatchingLabels{"app.kubernetes.io/name": name}); err != nil {
			return err
		}
		for i := range pods.Items {
			p := &pods.Items[i]
			out := PodStatus{Name: p.Name, Node: p.Spec.NodeName, Problem: podWaits(p)}
			for _, cond := range p.Status.Conditions {
				out.Ready = out.Ready || cond.Type == corev1.PodReady && cond.Status == corev1.ConditionTrue
			}
			for _, cs := range p.Status.ContainerStatuses {
				out.Restarts += cs.RestartCount
			}
			s.Pods = append(s.Pods, out)
		}
	}
	slices.SortFunc(s.Pods, func(a, b PodStatus) int { return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Name, b.Name)) })
	return nil
}

// waiting reads joinservice's list.
func (c *Client) waiting(ctx context.Context, s *Status, now time.Time) error {
	var m corev1.ConfigMap
	if err := c.client.Get(ctx, types.NamespacedName{Namespace: Namespace, Name: waiting.ConfigMap}, &m); err != nil {
		if Absent(err) {
			return nil // an older chart; doctor reports it
		}
		return err
	}
	entries, _ := waiting.Parse(m.Data)
	// joinservice lists no more. A longer list was written by another program, and must not make muster approve connect to
	// all of them.
	for _, e := range entries[:min(len(entries), waiting.Max+waiting.MaxUnlisted)] {
		if e.Expired(now) || s.acceptedSince(e.Machine, e.Last) {
			continue
		}
		s.Waiting = append(s.Waiting, waitingOf(e))
	}
	return nil
}

// waitingOf returns an entry of joinservice's list, with texts that are harmless for a terminal.
func waitingOf(e waiting.Entry) Waiting {
	w := Waiting{
		Machine: e.Machine, Node: e.Node, Role: e.Role, Reason: e.Reason, Remedy: rpc.RemedyFor(attestv1.Reason(attestv1.Reason_value["REASON_"+e.Reason]), e.Role),
		Address: e.Address, Since: e.Since, Last: e.Last,
		Endorsement: e.Endorsement, Instance: e.Instance, Image: e.Image, Class: e.Class, List: e.List, Differs: e.Differs,
	}
	if e.Listable() {
		w.Remedy = "The policy lacks only the machine's ID in " + e.List + ": compare the ID with the machine's own, then run muster approve."
	}
	for _, text := range []*string{&w.Machine, &w.Node, &w.Role, &w.Reason, &w.Remedy, &w.Address, &w.Endorsement, &w.Instance, &w.Image, &w.Class, &w.List, &w.Differs} {
		*text = printable.ASCII(*text, maxEntryText)
	}
	return w
}

// maxEntryText bounds a text of an entry, in characters.
const maxEntryText = 300

// Waiting reads joinservice's list of waiting machines, oldest first.
func (c *Client) Waiting(ctx context.Context) ([]Waiting, error) {
	s := &Status{}
	var err error
	if s.Nodes, err = c.nodes(ctx); err != nil {
		return nil, err
	}
	err = c.waiting(ctx, s, time.Now())
	return s.Waiting, err
}

// acceptedSince reports whether a machine was accepted after the given time: joinservice removes its entry only some seconds
// later.
func (s *Status) acceptedSince(machine string, at time.Time) bool {
	return slices.ContainsFunc(s.Nodes, func(n NodeStatus) bool {
		return n.MachineID == machine && n.Accepted != nil && *n.Accepted && n.AppraisedAt != nil && n.AppraisedAt.After(at)
	})
}

// enrolled reports whether a machine has an enrollment.
func (s *Status) enrolled(machine string) bool {
	return slices.ContainsFunc(s.Nodes, func(n NodeStatus) bool { return n.Enrolled && n.MachineID == machine })
}

// requests lists the pending certificate requests of nodes.
func (c *Client) requests(ctx context.Context, s *Status, _ time.Time) error {
	for _, signer := range []string{certificatesv1.KubeAPIServerClientKubeletSignerName, certificatesv1.KubeletServingSignerName} {
		var all certificatesv1.CertificateSigningRequestList
		if err := c.client.List(ctx, &all, client.MatchingFields{"spec.signerName": signer}); err != nil {
			return err
		}
		for _, o := range all.Items {
			if len(o.Status.Conditions) == 0 {
				s.Requests = append(s.Requests, Request{Name: o.Name, Signer: o.Spec.SignerName, By: o.Spec.Username, Since: o.CreationTimestamp.Time})
			}
		}
	}
	return nil
}

// certificates reads the expiry of the certificates in the administrator's kubeconfig.
func (c *Client) certificates(_ context.Context, s *Status, _ time.Time) (err error) {
	s.Certificates, err = c.Ends()
	return err
}

// Ends returns when the cluster's CA and the administrator's certificate expire.
func (c *Client) Ends() (out []Certificate, err error) {
	for _, f := range []struct {
		name string
		pem  []byte
	}{{"cluster CA", c.rest.CAData}, {"admin.conf", c.rest.CertData}} {
		end, err := Expiry(f.pem)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.name, err)
		}
		out = append(out, Certificate{Name: f.name, Expires: end})
	}
	return out, nil
}

// NodeNames lists the names for which there is a Node or an enrollment.
func (c *Client) NodeNames(ctx context.Context) ([]string, error) {
	nodes, err := c.nodes(ctx)
	out := make([]string, 0, len(nodes))
	for _, n := range nodes {
		out = append(out, n.Name)
	}
	return out, err
}

// Knowledge returns the epochs that control planes' machines and the cluster report, as far as [Status.Behind] needs
// them.
func (c *Client) Knowledge(ctx context.Context) (*Status, error) {
	s := &Status{}
	var err error
	if s.Nodes, err = c.nodes(ctx); err != nil {
		return nil, err
	}
	return s, c.epoch(ctx, s, time.Time{})
}

// maxReported limits the size of a Node's annotation that is read, because the machine may write any text there.
const maxReported = 32

// certificatesOf returns the certificates that a control plane's machine reports on its Node. A worker has none,
// whatever its Node reports.
func certificatesOf(n *corev1.Node) []Certificate {
	if _, is := n.Labels[clusterinfo.ControlPlaneLabel]; !is {
		return nil
	}
	return reported(n.Annotations[clusterinfo.CertificatesAnnotation])
}

// reported reads the certificates that a control plane's machine reports; nothing if they cannot be read.
func reported(annotation string) []Certificate {
	var list []struct {
		Name                string
		NotBefore, NotAfter time.Time
	}
	if json.Unmarshal([]byte(annotation), &list) != nil || len(list) > maxReported {
		return nil
	}
	out := make([]Certificate, 0, len(list))
	for _, c := range list {
		if !certificateName.MatchString(c.Name) {
			return nil
		}
		renews := c.NotBefore.Add(c.NotAfter.Sub(c.NotBefore) / 3 * 2)
		out = append(out, Certificate{Name: c.Name, Expires: c.NotAfter, Renews: &renews})
	}
	return out
}

var certificateName = regexp.MustCompile(`^[a-z][a-z.-]{0,40}$`)

// Expiry returns the end of the first certificate in PEM.
func Expiry(text []byte) (time.Time, error) {
	block, _ := pem.Decode(text)
	if block == nil {
		return time.Time{}, fmt.Errorf("there is no certificate in it")
	}
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return time.Time{}, err
	}
	return leaf.NotAfter, nil
}
