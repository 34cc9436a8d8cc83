package lifecycle

import (
	"context"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
)

func plan(ctx context.Context, t *testing.T, o *ownertest.Owned, name string, to *clusterapi.Replacement) (d *Departure) {
	t.Helper()
	var err error
	if to == nil {
		d, err = PlanForget(ctx, o.Dir, name, true, false)
	} else {
		d, err = PlanReplace(ctx, o.Dir, name, *to)
	}
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func leave(ctx context.Context, t *testing.T, o *ownertest.Owned, name string, to *clusterapi.Replacement) {
	t.Helper()
	if _, err := plan(ctx, t, o, name, to).Do(ctx, func(string) {}); err != nil {
		t.Fatal(err)
	}
}

// Certificates expire by the API server's clock, so it determines how long they are retired; the owner's clock may be
// hours wrong, and then a retirement by it would end before they do.
func TestARevocationLastsByTheAPIServersClock(t *testing.T) {
	const year = 365 * 24 * time.Hour
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	kube := ownertest.Defined(t)
	const life, foreign = nodeaccess.CertificateLife, nodeaccess.ForeignLife
	for name, tt := range map[string]struct {
		ahead      time.Duration // the owner's clock
		unattested bool
		before     time.Duration // until when there is a revocation already, from now; 0: there is none
		want       time.Duration // from now, within the margin and the skew that both may have
	}{
		"the same time":                     {want: life},
		"a little behind":                   {ahead: -4 * time.Minute, want: life},
		"3 hours behind":                    {ahead: -3 * time.Hour, want: life},
		"30 days behind":                    {ahead: -30 * 24 * time.Hour, want: life},
		"3 hours ahead":                     {ahead: 3 * time.Hour, want: life},
		"a year ahead":                      {ahead: year, want: life},
		"behind, and one is there":          {ahead: -3 * time.Hour, before: 20 * time.Hour, want: life},
		"behind, and a longer one is there": {ahead: -3 * time.Hour, before: 40 * time.Hour, want: 40 * time.Hour},
		"ahead, and a longer one is there":  {ahead: 72 * time.Hour, before: 40 * time.Hour, want: 40 * time.Hour},
		"a node of before, behind":          {ahead: -2 * year, unattested: true, want: foreign},
		"a node of before, ahead":           {ahead: 2 * year, unattested: true, want: foreign},
	} {
		t.Run(name, func(t *testing.T) {
			now := time.Now()
			had := nodeaccess.Entry{Unattested: tt.unattested}
			if tt.before > 0 {
				had.Revoked = &nodeaccess.Revocation{Until: now.Add(tt.before).UTC().Truncate(time.Second), Allowed: []string{"X509SHA256=01"}}
			}
			ownertest.Access(t, map[string]nodeaccess.Entry{"w1": had, "other": {Suspended: true}})
			p, err := kube.Presence(ctx, "w1")
			if err != nil {
				t.Fatal(err)
			}
			said, err := kube.Forget(ctx, p, now.Add(tt.ahead), func(string) {})
			if err != nil {
				t.Fatal(err)
			}
			l := ownertest.Listed(t)
			e := l.Entry("w1")
			if e.Revoked == nil || e.Unattested || !e.Revoked.Until.Equal(said) || len(e.Revoked.Allowed) > 0 || !l.Entry("other").Suspended {
				t.Fatalf("the list says %+v, %+v; %s was said", e, e.Revoked, said)
			}
			if off := e.Revoked.Until.Sub(now.Add(tt.want)); off < -time.Minute || off > 25*time.Minute {
				t.Errorf("revoked until %s, which is %s off", e.Revoked.Until, off)
			}
		})
	}
}

// A pod with a finalizer stays, and the machine's certificate can read what it uses: the command fails, and finishes
// when it is repeated.
func TestAPodThatIsHeldIsNotForgotten(t *testing.T) {
	ownertest.Fresh(t)
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	kube := ownertest.Defined(t)
	ownertest.Access(t, nil)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "held", Finalizers: []string{"example.com/keep"}},
		Spec:       corev1.PodSpec{NodeName: "held", Containers: []corev1.Container{{Name: "x", Image: "x"}}},
	}
	if err := ownertest.Shared.Client.Create(ctx, pod); err != nil {
		t.Fatal(err)
	}
	forget := func() error {
		p, err := kube.Presence(ctx, "held")
		if err != nil {
			t.Fatal(err)
		}
		_, err = kube.Forget(ctx, p, time.Now(), func(string) {})
		return err
	}
	if err := forget(); err == nil || !strings.Contains(err.Error(), "default/held with finalizers") {
		t.Errorf("error %v", err)
	}
	if err := ownertest.Shared.Client.Patch(ctx, pod, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))); err != nil {
		t.Fatal(err)
	}
	if err := forget(); err != nil {
		t.Error(err)
	}
}
