package policy_test

import (
	"encoding/base64"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/service/policy"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

func TestTheEndsOfCollateralAreAMetric(t *testing.T) {
	info, err := os.ReadFile(filepath.Join("..", "..", "..", "trust", "attest", "hardware", "testdata", "tdx", "collateral-2026-03", "tcb_info_90c06f000000.json"))
	if err != nil {
		t.Fatal(err)
	}
	o, registry := newOwner(t), prometheus.NewRegistry()
	s, err := policy.New(policy.Config{Owner: attest.OwnerKeys{o.public}, Log: slog.New(slog.DiscardHandler), Metrics: registry})
	if err != nil {
		t.Fatal(err)
	}
	ends := func() map[string]float64 {
		all, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]float64{}
		for _, f := range all {
			if f.GetName() != "muster_collateral_end_seconds" {
				continue
			}
			for _, m := range f.GetMetric() {
				out[m.GetLabel()[0].GetValue()] = m.GetGauge().GetValue()
			}
		}
		return out
	}
	set := func(generation int64, collateral *attestv1.Collateral) {
		json := attesttest.Policy(t, o.ca, []*attesttest.Machine{o.machine}, func(p *attestv1.Policy) {
			p.Serial, p.Hardware = uint64(generation), &attestv1.HardwarePolicy{Collateral: collateral}
		})
		signed := attest.SignPolicy(o.private, json)
		s.Set(&v1alpha1.AttestationPolicy{
			ObjectMeta: metav1.ObjectMeta{Name: "default", UID: "u", Generation: generation},
			Spec:       v1alpha1.AttestationPolicySpec{Policy: string(json), Signature: base64.StdEncoding.EncodeToString(signed.GetSignature())},
		})
	}
	set(1, &attestv1.Collateral{TcbInfos: [][]byte{info}})
	want := float64(time.Date(2026, 4, 15, 22, 6, 9, 0, time.UTC).Unix())
	if got := ends(); len(got) != 1 || got["TCB info of 90c06f000000"] != want {
		t.Errorf("%v, want %v", got, want)
	}
	set(2, nil)
	if got := ends(); len(got) != 0 {
		t.Errorf("of a policy without collateral: %v", got)
	}
}
