// Package membertest provides a cluster for tests of Muster's services: a real control plane with Muster's CRDs and the
// chart's own RBAC and admission policies, an owner who signs policies, and services that run in the test's process as they
// do in a pod.
package membertest

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/enrollment"
	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/internal/objects/waiting"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// patience is how long a condition may take on a machine that builds at the same time.
const patience = 5 * time.Minute

// Cluster is a control plane with the objects of Muster's chart, and its owner.
type Cluster struct {
	*kubetest.Cluster
	// Owner signs policies; Public is the key with which services verify them.
	Owner  ed25519.PrivateKey
	Public ed25519.PublicKey
	// Root and Salt are the cluster's secrets, and ID is derived from them.
	Root, Salt, MeasurementSalt [32]byte
	ID                          keys.ClusterID
}

// Start starts a cluster; chart is the path of the rendered chart.
func Start(ctx context.Context, chart string) (*Cluster, error) {
	rendered, err := os.ReadFile(chart)
	if err != nil {
		return nil, err
	}
	e, err := kubetest.Start(ctx)
	if err != nil {
		return nil, err
	}
	c := &Cluster{Cluster: e, Root: [32]byte{1, 2, 3}, Salt: [32]byte{4, 5, 6}, MeasurementSalt: [32]byte{7, 8, 9}}
	c.ID = keys.NewRoot(c.Root, c.Salt).ClusterID(c.MeasurementSalt)
	c.Public, c.Owner, err = ed25519.GenerateKey(nil)
	err = errors.Join(err,
		e.InstallCRDs(ctx),
		e.Namespace(ctx, clusterinfo.Namespace),
		c.describe(ctx, c.MeasurementSalt), // before the admission policy that reads it, as at init
		e.Apply(ctx, rendered, "ConfigMap", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
	)
	if err != nil {
		return nil, errors.Join(err, e.Stop())
	}
	return c, nil
}

// Reset removes the objects of earlier tests and writes those of a new cluster: its description, and an empty list of nodes
// that may not write.
func (c *Cluster) Reset(t testing.TB) {
	t.Helper()
	ctx := t.Context()
	c.release(t)
	for _, o := range []client.Object{&v1alpha1.AttestedNode{}, &v1alpha1.AttestedDisk{}, &v1alpha1.AttestationPolicy{}, &certificatesv1.CertificateSigningRequest{}, &corev1.Node{}} {
		if err := c.Client.DeleteAllOf(ctx, o); err != nil {
			t.Fatal(err)
		}
	}
	for _, o := range []client.Object{&corev1.Pod{}, &corev1.Service{}, &coordinationv1.Lease{}} {
		if err := c.Client.DeleteAllOf(ctx, o, client.InNamespace(clusterinfo.Namespace), client.GracePeriodSeconds(0)); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.describe(ctx, c.MeasurementSalt); err != nil {
		t.Fatal(err)
	}
}

// release lets enrollments be deleted at once: no joinservice runs that would revoke their certificates, and control planes
// are banned first.
func (c *Cluster) release(t testing.TB) {
	t.Helper()
	l := &v1alpha1.AttestedNodeList{}
	if err := c.Client.List(t.Context(), l); err != nil {
		t.Fatal(err)
	}
	for i := range l.Items {
		free := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null},"spec":{"banned":true}}`))
		if err := c.Client.Patch(t.Context(), &l.Items[i], free); client.IgnoreNotFound(err) != nil {
			t.Fatal(err)
		}
	}
}

// SetMeasurementSalt writes the cluster's description again, with that salt.
func (c *Cluster) SetMeasurementSalt(t testing.TB, salt [32]byte) {
	t.Helper()
	if err := c.describe(t.Context(), salt); err != nil {
		t.Fatal(err)
	}
}

// Upgrading writes the cluster's description again, in the middle of an upgrade of its nodes.
func (c *Cluster) Upgrading(t testing.TB, change func(*clusterinfo.Info)) {
	t.Helper()
	if err := c.describe(t.Context(), c.MeasurementSalt, change); err != nil {
		t.Fatal(err)
	}
}

// describe writes the two ConfigMaps as init does, and empties the list of waiting machines.
func (c *Cluster) describe(ctx context.Context, salt [32]byte, changes ...func(*clusterinfo.Info)) error {
	info := &clusterinfo.Info{ClusterID: c.ID, MeasurementSalt: salt, KubernetesVersion: "1.36.1", ControlPlaneEndpoint: "192.168.77.1:6443", APIServerSANs: []string{"api.example.com", "192.168.77.200"}}
	info.Components = []versions.Component{{URL: "http://mirror.example/kubelet", SHA256: strings.Repeat("0", 64), Path: "/usr/local/bin/kubelet", Mode: 0o755}}
	for i, name := range versions.ImageNames() {
		info.Images = append(info.Images, fmt.Sprintf("registry.example/%s:v1@sha256:%064x", name, i+1))
	}
	for _, change := range changes {
		change(info)
	}
	text, err := info.Marshal()
	if err != nil {
		return err
	}
	for name, data := range map[string]map[string]string{clusterinfo.ConfigMap: {clusterinfo.Key: string(text)}, nodeaccess.ConfigMap: nil, waiting.ConfigMap: nil} {
		m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: clusterinfo.Namespace, Name: name}, Data: data}
		err := c.Client.Update(ctx, m)
		if apierrors.IsNotFound(err) {
			err = c.Client.Create(ctx, m)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// SetPolicy signs a policy and writes it where services read it. It returns the object's generation.
func (c *Cluster) SetPolicy(t testing.TB, policy []byte) int64 {
	t.Helper()
	signed := attest.SignPolicy(c.Owner, policy)
	return c.SetPolicyObject(t, string(policy), base64.StdEncoding.EncodeToString(signed.GetSignature()))
}

// SetPolicyObject writes the AttestationPolicy as it is.
func (c *Cluster) SetPolicyObject(t testing.TB, policy, signature string) int64 {
	t.Helper()
	ctx := t.Context()
	p := &v1alpha1.AttestationPolicy{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.PolicyName}}
	Eventually(t, func() error { // joinservice may be writing its status
		err := c.Client.Get(ctx, client.ObjectKeyFromObject(p), p)
		p.Spec = v1alpha1.AttestationPolicySpec{Policy: policy, Signature: signature}
		if err != nil {
			return c.Client.Create(ctx, p)
		}
		return c.Client.Update(ctx, p)
	})
	return p.Generation
}

// Enroll writes an AttestedNode.
func (c *Cluster) Enroll(t testing.TB, name string, spec v1alpha1.AttestedNodeSpec) {
	t.Helper()
	if err := c.Client.Create(t.Context(), &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}); err != nil {
		t.Fatal(err)
	}
}

// Node reads an AttestedNode; nil if it does not exist.
func (c *Cluster) Node(t testing.TB, name string) *v1alpha1.AttestedNode {
	t.Helper()
	n := &v1alpha1.AttestedNode{}
	if err := c.Client.Get(t.Context(), client.ObjectKey{Name: name}, n); err != nil {
		if client.IgnoreNotFound(err) != nil {
			t.Fatal(err)
		}
		return nil
	}
	return n
}

// DiskOf returns the machine ID of a disk; empty if no machine has it.
func (c *Cluster) DiskOf(t testing.TB, disk string) string {
	t.Helper()
	d := &v1alpha1.AttestedDisk{}
	if err := c.Client.Get(t.Context(), client.ObjectKey{Name: disk}, d); client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
	return d.Spec.MachineID
}

// GiveDisk assigns a disk with a salt to a machine, as the owner's program does.
func (c *Cluster) GiveDisk(t testing.TB, disk string, machine attest.MachineID) {
	t.Helper()
	d := &v1alpha1.AttestedDisk{ObjectMeta: metav1.ObjectMeta{Name: disk}, Spec: v1alpha1.AttestedDiskSpec{
		MachineID: machine.String(), Salt: keys.NewDiskSalt().String(), RootVersion: int32(keys.FirstVersion),
	}}
	if err := c.Client.Create(t.Context(), d); err != nil {
		t.Fatal(err)
	}
}

// EraseDisk deletes a disk's salt, as its owner does.
func (c *Cluster) EraseDisk(t testing.TB, disk string) {
	t.Helper()
	d := &v1alpha1.AttestedDisk{}
	if err := c.Client.Get(t.Context(), client.ObjectKey{Name: disk}, d); err != nil {
		t.Fatal(err)
	}
	d.Spec.Salt, d.Spec.Erased = "", true
	if err := c.Client.Update(t.Context(), d); err != nil {
		t.Fatal(err)
	}
}

// DiskKey derives the key of a disk from its present salt.
func (c *Cluster) DiskKey(t testing.TB, disk string) []byte {
	t.Helper()
	d := &v1alpha1.AttestedDisk{}
	if err := c.Client.Get(t.Context(), client.ObjectKey{Name: disk}, d); err != nil {
		t.Fatal(err)
	}
	id, err := keys.ParseDiskID(disk)
	if err != nil {
		t.Fatal(err)
	}
	salt, err := keys.ParseDiskSalt(d.Spec.Salt)
	if err != nil {
		t.Fatal(err)
	}
	key, err := keys.NewRoot(c.Root, c.Salt).Disk(id, salt)
	if err != nil {
		t.Fatal(err)
	}
	return key.Expose()
}

// FreeDisk removes a disk from its machine, as its owner does.
func (c *Cluster) FreeDisk(t testing.TB, disk string) {
	t.Helper()
	if err := c.Client.Delete(t.Context(), &v1alpha1.AttestedDisk{ObjectMeta: metav1.ObjectMeta{Name: disk}}); client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
}

// Access returns the list of nodes that may not write.
func (c *Cluster) Access(t testing.TB) *nodeaccess.List {
	t.Helper()
	m := &corev1.ConfigMap{}
	if err := c.Client.Get(t.Context(), enrollment.Key(), m); err != nil {
		t.Fatal(err)
	}
	l, err := nodeaccess.Parse(m.Data)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// SetAccess changes the list's entry of a node, as an administrator would by hand.
func (c *Cluster) SetAccess(t testing.TB, node string, change func(nodeaccess.Entry) nodeaccess.Entry) {
	t.Helper()
	if _, err := enrollment.Change(t.Context(), c.Client, func(_ context.Context, l *nodeaccess.List) error {
		l.Set(node, change(l.Entry(node)))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// CSRs returns the names of all CertificateSigningRequests.
func (c *Cluster) CSRs(t testing.TB) []string {
	t.Helper()
	l := &certificatesv1.CertificateSigningRequestList{}
	if err := c.Client.List(t.Context(), l); err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, o := range l.Items {
		out = append(out, o.Name)
	}
	return out
}

// Service is a service that runs until its test ends.
type Service struct {
	// Addr is the address of its RPCs, Probes the base URL of its metrics and probes.
	Addr, Probes string
	// Log is its log, JSON lines.
	Log *Buffer
}

// Serve runs a service, which logs to stderr, and waits until it is ready.
func Serve(t testing.TB, run func(ctx context.Context, rpcs, probes net.Listener, stderr io.Writer) error) *Service {
	t.Helper()
	rpcs, probes := listen(t), listen(t)
	s := &Service{Addr: rpcs.Addr().String(), Probes: "http://" + probes.Addr().String(), Log: &Buffer{}}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- run(ctx, rpcs, probes, s.Log) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("the service ended with %v", err)
			}
		case <-time.After(patience):
			t.Error("the service does not stop")
		}
		if t.Failed() {
			t.Logf("its log:\n%s", s.Log)
		}
	})
	Eventually(t, func() error {
		select {
		case err := <-done:
			done <- err
			t.Fatalf("the service ended with %v\n%s", err, s.Log)
		default:
		}
		return s.Ready(t)
	})
	return s
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func (s *Service) get(t testing.TB, path string) (int, string, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.Probes+path, nil)
	if err != nil {
		return 0, "", err
	}
	transport := &http.Transport{DisableKeepAlives: true}
	resp, err := (&http.Client{Transport: transport, Timeout: 5 * time.Second}).Do(req)
	if err != nil {
		return 0, "", err
	}
	body, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body), errors.Join(err, resp.Body.Close())
}

// Ready returns nil, or an error with what is not ready.
func (s *Service) Ready(t testing.TB) error {
	t.Helper()
	code, body, err := s.get(t, "/readyz")
	if err != nil || code == http.StatusOK {
		return err
	}
	return errors.New(body)
}

// Families reads its metrics.
func (s *Service) Families(t testing.TB) []*dto.MetricFamily {
	t.Helper()
	return s.families(t, "/metrics")
}

func (s *Service) families(t testing.TB, path string) []*dto.MetricFamily {
	t.Helper()
	var body string
	Eventually(t, func() error {
		code, text, err := s.get(t, path)
		if err == nil && code != http.StatusOK { // a test that asks very often is refused for a moment
			err = fmt.Errorf("metrics: %d %s", code, text)
		}
		body = text
		return err
	})
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	return slices.Collect(maps.Values(families))
}

// Observations returns the service's observations for [refusaltest.Refused]; auditLog returns its audit log, and is nil if
// it keeps none.
func (s *Service) Observations(auditLog func() []byte) refusaltest.Service {
	return refusaltest.Service{Families: s.Families, Log: s.Log.Bytes, Audit: auditLog}
}

// Metric returns the sum of a metric's series that have all of the labels, given as name, value, name, value.
func (s *Service) Metric(t testing.TB, name string, labels ...string) float64 {
	t.Helper()
	return refusaltest.Sum(s.families(t, "/metrics?"+url.Values{"name[]": {name}}.Encode()), name, labels...)
}

// Logged reports whether a line of the log has all of the attributes, given as name, value, name, value.
func (s *Service) Logged(attrs ...string) bool { return refusaltest.HasLine(s.Log.Bytes(), attrs...) }

// Eventually repeats f until it returns nil, and fails the test if that takes too long. Most conditions are those of an
// informer, a few milliseconds later; the pauses double up to 200 ms, since f is often a request with new evidence.
func Eventually(t testing.TB, f func() error) {
	t.Helper()
	end := time.After(patience)
	for pause := 3 * time.Millisecond; ; pause = min(2*pause, 200*time.Millisecond) {
		err := f()
		if err == nil {
			return
		}
		select {
		case <-time.After(pause):
		case <-end:
			t.Fatalf("after %s: %v", patience, err)
		case <-t.Context().Done():
			t.Fatalf("the test ends, and %v", err)
		}
	}
}

// Want returns an error unless ok.
func Want(ok bool, format string, args ...any) error {
	if ok {
		return nil
	}
	return fmt.Errorf(format, args...)
}

// Buffer collects the output of several goroutines.
type Buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements [io.Writer].
func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

// Bytes returns a copy of what was written.
func (b *Buffer) Bytes() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	return bytes.Clone(b.b.Bytes())
}

func (b *Buffer) String() string { return string(b.Bytes()) }
