package main

import (
	"bytes"
	"encoding/pem"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/service/clusterview"
)

// as returns a client with a node's credentials.
func (s *fixture) as(t *testing.T, node string) client.Client {
	t.Helper()
	cfg, err := s.AsUser("system:node:"+node, "system:nodes")
	if err != nil {
		t.Fatal(err)
	}
	cfg.QPS = -1
	api, err := client.New(cfg, client.Options{Scheme: clusterview.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return api
}

// object returns the request as the kubelet writes it.
func (f *filed) object(t *testing.T) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: csr(t, f.template, newKey(t))}),
			SignerName: f.signer, Usages: f.usages,
		},
	}
}

// Requests stay in etcd for up to a day, so a node must not be able to make them large.
func TestANodesLargeRequestsAreRefusedByAdmission(t *testing.T) {
	s := setUp(t)
	api := s.as(t, "w1")
	text := strings.Repeat("x", 3<<10)
	pad := func(o *certificatesv1.CertificateSigningRequest, size int) {
		o.Spec.Request = append(o.Spec.Request, bytes.Repeat([]byte("\n"), size-len(o.Spec.Request))...)
	}
	many := map[string]string{}
	for i := range 20000 {
		many[fmt.Sprint("k", i)] = ""
	}
	membertest.Eventually(t, func() error { return api.Create(t.Context(), renewal("w1").object(t), client.DryRunAll) }) // when the policy knows the node
	for name, tt := range map[string]struct {
		change func(*certificatesv1.CertificateSigningRequest)
		taken  bool
	}{
		"as it is":           {func(*certificatesv1.CertificateSigningRequest) {}, true},
		"8 KiB":              {func(o *certificatesv1.CertificateSigningRequest) { pad(o, 8<<10) }, true},
		"more than 8 KiB":    {func(o *certificatesv1.CertificateSigningRequest) { pad(o, 8<<10+2) }, false},
		"1 MiB":              {func(o *certificatesv1.CertificateSigningRequest) { pad(o, 1<<20) }, false},
		"a short annotation": {func(o *certificatesv1.CertificateSigningRequest) { o.Annotations = map[string]string{"a": "b"} }, true},
		"a long annotation":  {func(o *certificatesv1.CertificateSigningRequest) { o.Annotations = map[string]string{"a": text} }, false},
		"many annotations":   {func(o *certificatesv1.CertificateSigningRequest) { o.Annotations = many }, false},
		"many labels":        {func(o *certificatesv1.CertificateSigningRequest) { o.Labels = many }, false},
		"a finalizer":        {func(o *certificatesv1.CertificateSigningRequest) { o.Finalizers = []string{"example.com/x"} }, false},
		"an owner": {func(o *certificatesv1.CertificateSigningRequest) {
			o.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "x", UID: "x"}}
		}, false},
		"for another signer": {func(o *certificatesv1.CertificateSigningRequest) { o.Spec.SignerName = "example.com/x" }, false},
		"its user's own extra": {func(o *certificatesv1.CertificateSigningRequest) {
			o.Spec.Extra = map[string]certificatesv1.ExtraValue{"a": {text}}
		}, true}, // the API server writes its own value
		"fields that others manage": {func(o *certificatesv1.CertificateSigningRequest) {
			o.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: strings.Repeat("x", 100), Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "certificates.k8s.io/v1", FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(`{"f:` + strings.Repeat("x", 1<<20) + `":{}}`)}}
		}, false},
		"deep fields that others manage": {func(o *certificatesv1.CertificateSigningRequest) {
			o.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "x", Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "certificates.k8s.io/v1", FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(`{"f:a":{"f:b":{"f:c":{"f:` + strings.Repeat("x", 1<<20) + `":{}}}}}`)}}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			o := renewal("w1").object(t)
			tt.change(o)
			err := api.Create(t.Context(), o)
			if tt.taken {
				if err != nil {
					t.Error(err)
				} else if size := o.Size(); size > 16<<10 {
					t.Errorf("it has %d bytes", size)
				}
				return
			}
			if err == nil {
				t.Errorf("%d bytes were taken", o.Size())
			} else if !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
				t.Error(err)
			}
		})
	}
}

// renews files a request as its node, waits until it is signed, and returns its name.
func (s *fixture) renews(t *testing.T, api client.Client, node string) string {
	t.Helper()
	o := renewal(node).object(t)
	membertest.Eventually(t, func() error { return api.Create(t.Context(), o) })
	membertest.Eventually(t, func() error {
		if err := api.Get(t.Context(), client.ObjectKeyFromObject(o), o); err != nil {
			return err
		}
		return membertest.Want(len(o.Status.Certificate) > 0, "%s is not signed", o.Name)
	})
	return o.Name
}

// floods files requests without end as a node, and returns the names of those that were taken.
func floods(t *testing.T, api client.Client, node string, requests, atOnce int) map[string]bool {
	t.Helper()
	o := renewal(node).object(t)
	taken := map[string]bool{}
	var mu sync.Mutex
	var filing errgroup.Group
	filing.SetLimit(atOnce)
	for range requests {
		filing.Go(func() error {
			next := o.DeepCopy()
			err := api.Create(t.Context(), next)
			if says(err, tooMany) == nil {
				return nil // this is a part of the test
			}
			mu.Lock()
			defer mu.Unlock()
			taken[next.Name] = err == nil
			return err
		})
	}
	if err := filing.Wait(); err != nil {
		t.Fatal(err)
	}
	return taken
}

// An attacker with root on a worker files requests without end. Another node's renewal does not wait for them, and they are
// soon deleted.
func TestOneNodesRequestsDoNotHoldUpAnothers(t *testing.T) {
	const requests, backlog = 300, 64
	s := setUp(t)
	s.ticketFor(t, s.machine(t), worker(t))
	s.ticketFor(t, s.machine(t), worker(t, named("w2", "5f0c95b6-2a3d-4c7e-9f10-000000000002", "192.168.77.13")))
	one, other := s.as(t, "w1"), s.as(t, "w2")
	s.renews(t, other, "w2")
	filed, left := map[string]bool{}, 0
	membertest.Eventually(t, func() error {
		maps.Copy(filed, floods(t, one, "w1", requests, 8))
		left = 0
		for _, name := range s.CSRs(t) {
			if filed[name] {
				left++
			}
		}
		return membertest.Want(left > backlog, "%d requests of w1 are left", left)
	})
	began := time.Now()
	renewed := s.renews(t, other, "w2")
	var approved time.Time
	deleted := 0 // requests of w1, while w2's waited
	ofService := s.Requests(t, "muster-joinservice/")
	for _, r := range ofService {
		if r.Object.Resource == "certificatesigningrequests" && r.Object.Subresource == "approval" && r.Object.Name == renewed {
			approved = r.Received
		}
	}
	if approved.IsZero() {
		t.Fatalf("joinservice did not approve %s", renewed)
	}
	for _, r := range ofService {
		if r.Verb == "delete" && filed[r.Object.Name] && r.Received.After(began) && r.Received.Before(approved) {
			deleted++
		}
	}
	t.Logf("%d requests of w1, %d were left when w2 renewed, and %d of them were deleted before w2's was approved", len(filed), left, deleted)
	// Without slots all that are left come first. With them it is one slot of four, and those that are deleted while the
	// other slot serves w2.
	if deleted > left/2 {
		t.Errorf("%d of %d requests of w1 came before w2's", deleted, left)
	}
	membertest.Eventually(t, func() error {
		of := map[string]int{}
		l := &certificatesv1.CertificateSigningRequestList{}
		if err := s.Client.List(t.Context(), l); err != nil {
			return err
		}
		for _, o := range l.Items {
			of[o.Spec.Username]++
		}
		return membertest.Want(of["system:node:w1"] <= 16, "requests are left: %v", of)
	})
	if n := s.join.Metric(t, "muster_node_certificate_requests_total", "reason", "BUSY"); n < float64(len(filed))/2 {
		t.Errorf("%v of %d were deleted", n, len(filed))
	}
}

const tooMany = "this node has filed too many certificate requests"

// If a node files requests faster than they can be deleted, admission refuses more until they are deleted.
func TestANodesRequestsAreNoBacklog(t *testing.T) {
	const attempts = 2000
	s := setUp(t)
	s.ticketFor(t, s.machine(t), worker(t))
	s.ticketFor(t, s.machine(t), worker(t, named("w2", "5f0c95b6-2a3d-4c7e-9f10-000000000002", "192.168.77.13")))
	one, other := s.as(t, "w1"), s.as(t, "w2")
	filed := len(floods(t, one, "w1", attempts, 32))
	left := len(s.CSRs(t))
	t.Logf("%d of %d were taken, and %d are left", filed, attempts, left)
	if left > attempts/2 {
		t.Errorf("%d requests are left, want at most %d", left, attempts/2)
	}
	s.renews(t, other, "w2") // other nodes are not affected
	// A slow machine may take long to delete them; it fails if none is deleted any more.
	for fewest := left; fewest > 32; {
		membertest.Eventually(t, func() error {
			n := len(s.CSRs(t))
			if n > 32 && n >= fewest {
				return fmt.Errorf("%d requests are left", n)
			}
			fewest = n
			return nil
		})
	}
}

// A user who may create Services can't block an address of a machine: only addresses that the API server assigns count.
func TestServicesOfTenantsTakeNoAddressFromAMachine(t *testing.T) {
	s := setUp(t)
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "x"}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, Ports: []corev1.ServicePort{{Port: 80}}, ExternalIPs: []string{"192.168.77.12"},
	}}
	first := netip.MustParseAddr("198.18.0.0")
	for range 10000 {
		service.Spec.ExternalIPs, first = append(service.Spec.ExternalIPs, first.String()), first.Next()
	}
	if err := s.Client.Create(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	service.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.168.77.12"}}
	if err := s.Client.Status().Update(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	// The Service's own cluster IP is known, so its other addresses are too.
	owned := worker(t, named("w3", "5f0c95b6-2a3d-4c7e-9f10-000000000003", service.Spec.ClusterIP))
	membertest.Eventually(t, func() error {
		_, err := s.dial(t, s.machine(t).Attester("machine")).IssueJoinTicket(t.Context(), owned.IssueJoinTicketRequest)
		return membertest.Want(rpc.ReasonFrom(err) == attestv1.Reason_REASON_ADDRESS_REFUSED, "%v", err)
	})
	s.ticketFor(t, s.machine(t), worker(t))
}
