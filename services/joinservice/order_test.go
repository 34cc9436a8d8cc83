package joinservice

import (
	"crypto/ed25519"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/ownerorder"
)

// A machine with an order attests twenty times as often: an order is passed on for as long as its machine may begin it, or runs
// it, and what is none is not passed on.
func TestAnOrderIsPassedOnUntilItIsOver(t *testing.T) {
	now := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	until := func(after time.Duration) ownerorder.SignedMachineOrder {
		s, err := ownerorder.MachineOrder{Node: "w1", Action: ownerorder.ActionDoctor, NotAfter: now.Add(after)}.Sign(key)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	good, late := until(time.Hour), until(-time.Second)
	short := good
	short.Signature = good.Signature[1:]
	for name, tt := range map[string]struct {
		note   string
		report *v1alpha1.OrderReport
		want   bool
	}{
		"new":                           {note: good.Note(), want: true},
		"after another one":             {note: good.Note(), report: &v1alpha1.OrderReport{Digest: late.Digest(), State: v1alpha1.OrderDone}, want: true},
		"running":                       {note: good.Note(), report: &v1alpha1.OrderReport{Digest: good.Digest(), State: v1alpha1.OrderRunning}, want: true},
		"running, and expired":          {note: late.Note(), report: &v1alpha1.OrderReport{Digest: late.Digest(), State: v1alpha1.OrderRunning}, want: true},
		"running for more than an hour": {note: until(-time.Hour - time.Second).Note(), report: &v1alpha1.OrderReport{Digest: until(-time.Hour - time.Second).Digest(), State: v1alpha1.OrderRunning}},
		"done":                          {note: good.Note(), report: &v1alpha1.OrderReport{Digest: good.Digest(), State: v1alpha1.OrderDone}},
		"failed":                        {note: good.Note(), report: &v1alpha1.OrderReport{Digest: good.Digest(), State: v1alpha1.OrderFailed}},
		"refused":                       {note: good.Note(), report: &v1alpha1.OrderReport{Digest: good.Digest(), State: v1alpha1.OrderRefused}},
		"expired":                       {note: late.Note()},
		"valid for longer than any":     {note: until(ownerorder.MaxMachineLife + ownerorder.MaxAhead + time.Second).Note()},
		"a short signature":             {note: short.Note()},
		"no JSON":                       {note: ownerorder.SignedMachineOrder{Text: "{", Signature: good.Signature}.Note()},
		"too long":                      {note: good.Note() + strings.Repeat(" ", ownerorder.MaxMachineOrder)},
		"none":                          {},
	} {
		n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{v1alpha1.OwnerOrder: tt.note}}, Status: v1alpha1.AttestedNodeStatus{Order: tt.report}}
		got := orderFor(n, now)
		if (got != nil) != tt.want {
			t.Errorf("%s: %v", name, got)
		}
		if got != nil && (ownerorder.SignedMachineOrder{Text: got.GetText(), Signature: got.GetSignature()}).Note() != tt.note {
			t.Errorf("%s: it is changed: %v", name, got)
		}
	}
}
