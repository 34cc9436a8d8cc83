package kube

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/policy"
	"github.com/muster-k8s/muster/trust/attest"
)

// A kubelet files what is denied as often as it likes. What is approved is recorded one by one.
func TestDenialsOfOneNodeAreRationedAndApprovalsAreNot(t *testing.T) {
	shared.Reset(t)
	k, _ := replica(t)
	var out bytes.Buffer
	log, registry := audit.NewStream(&out), prometheus.NewRegistry()
	strangers, err := audit.NewStrangers("joinservice", log, slog.New(slog.DiscardHandler), registry)
	if err != nil {
		t.Fatal(err)
	}
	rations, err := audit.NewRations(strangers)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.NewApprover(log, nil, &policy.Store{}, time.Minute, registry); err == nil {
		t.Error("an approver without rations was made")
	}
	a, err := k.NewApprover(log, rations, &policy.Store{}, time.Minute, registry)
	if err != nil {
		t.Fatal(err)
	}
	decide := func(n int, node string, refusal error) {
		t.Helper()
		for i := range n { // their requests are gone by the time that the API server is told
			o := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("csr-", i)}}
			o.Spec.Username = "system:node:" + node
			if err := a.decide(t.Context(), o, &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: node}}, refusal); err != nil {
				t.Fatal(err)
			}
		}
	}
	refusal := attest.Refuse(attestv1.Reason_REASON_ADDRESS_REFUSED, "not its own")
	began := time.Now()
	decide(70, "w1", refusal)
	ration := 50 + int(time.Since(began)/(10*time.Second)) + 1
	decide(60, "w1", nil)
	decide(1, "w2", refusal)
	if n := strings.Count(out.String(), "certificate denied") - 1; n < 50 || n > ration {
		t.Errorf("%d denials of w1 are recorded, want 50 to %d", n, ration)
	}
	if !strings.Contains(out.String(), `"node":"w2"`) {
		t.Error("w1's denials keep w2's out")
	}
	if n := strings.Count(out.String(), "certificate approved"); n != 60 {
		t.Errorf("%d of 60 approvals are recorded", n)
	}
}
