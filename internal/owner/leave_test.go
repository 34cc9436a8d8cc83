package owner

import (
	"context"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/enrolled"
	"github.com/muster-k8s/muster/internal/owner/cluster"
)

// Certificates are judged by the API server's clock, so it says how long they are retired; the owner's may
// be hours wrong, and then a retirement by it would end before they do.
func TestARetirementLastsByTheAPIServersClock(t *testing.T) {
	const year = 365 * 24 * time.Hour
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	kube := defined(t)
	const life, foreign = enrolled.CertificateLife, enrolled.ForeignLife
	for name, tt := range map[string]struct {
		ahead  time.Duration // the owner's clock
		listed string
		before time.Duration // until when there is a retirement already, from now; 0: there is none
		want   time.Duration // from now, within the margin and the skew that both may have
	}{
		"the same time":                     {0, "m1", 0, life},
		"a little behind":                   {-4 * time.Minute, "m1", 0, life},
		"3 hours behind":                    {-3 * time.Hour, "m1", 0, life},
		"30 days behind":                    {-30 * 24 * time.Hour, "m1", 0, life},
		"3 hours ahead":                     {3 * time.Hour, "m1", 0, life},
		"a year ahead":                      {year, "m1", 0, life},
		"behind, and one is there":          {-3 * time.Hour, "m1", 20 * time.Hour, life},
		"behind, and a longer one is there": {-3 * time.Hour, "m1", 40 * time.Hour, 40 * time.Hour},
		"ahead, and a longer one is there":  {72 * time.Hour, "m1", 40 * time.Hour, 40 * time.Hour},
		"a node of before, behind":          {-2 * year, enrolled.Unattested, 0, foreign},
		"a node of before, ahead":           {2 * year, enrolled.Unattested, 0, foreign},
		"done before, behind":               {-3 * time.Hour, "", life, life},
	} {
		t.Run(name, func(t *testing.T) {
			data := map[string]string{"other": "m2"}
			if tt.listed != "" {
				data["w1"] = tt.listed
			}
			if tt.before > 0 {
				data[enrolled.Key("w1")] = enrolled.Retirement{Until: time.Now().Add(tt.before), Certificates: []string{"X509SHA256=01"}}.String()
			}
			list := list(t, data)
			p, err := kube.Presence(ctx, "w1")
			if err != nil {
				t.Fatal(err)
			}
			now := time.Now()
			said, err := kube.Forget(ctx, p, now.Add(tt.ahead), func(string) {})
			if err != nil {
				t.Fatal(err)
			}
			if err := shared.Client.Get(ctx, client.ObjectKeyFromObject(list), list); err != nil {
				t.Fatal(err)
			}
			r, err := enrolled.ParseRetirement(list.Data[enrolled.Key("w1")])
			if err != nil || !r.Until.Equal(said) || len(r.Certificates) > 0 || list.Data["w1"] != "" || list.Data["other"] != "m2" {
				t.Errorf("%v, %v; %s was said", list.Data, err, said)
			}
			if off := r.Until.Sub(now.Add(tt.want)); off < -time.Minute || off > 25*time.Minute {
				t.Errorf("retired until %s, which is %s off", r.Until, off)
			}
		})
	}
}

// A finalizer that somebody has given a pod keeps it, and what it uses is read by the machine's certificate: that is not done, and the same command finishes it.
func TestAPodThatIsHeldIsNotForgotten(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	kube := defined(t)
	list(t, map[string]string{"held": "m1", "other": "m2"})
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "held", Finalizers: []string{"example.com/keep"}},
		Spec:       corev1.PodSpec{NodeName: "held", Containers: []corev1.Container{{Name: "x", Image: "x"}}},
	}
	if err := shared.Client.Create(ctx, pod); err != nil {
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
	if err := shared.Client.Patch(ctx, pod, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))); err != nil {
		t.Fatal(err)
	}
	if err := forget(); err != nil {
		t.Error(err)
	}
}

// defined gives a client of the cluster, which knows Muster's objects then.
func defined(t *testing.T) *cluster.Client {
	t.Helper()
	kube, err := cluster.Connect(kubeconfig(t))
	if err != nil {
		t.Fatal(err)
	}
	definitions, err := Definitions()
	if err != nil {
		t.Fatal(err)
	}
	if err := kube.Apply(t.Context(), definitions, func(string) {}); err != nil {
		t.Fatal(err)
	}
	if err := kube.EnsureNamespace(t.Context()); err != nil {
		t.Fatal(err)
	}
	return kube
}

// list makes muster-enrolled say this and nothing else, until the test ends. It is never deleted: where the
// chart is, that is refused.
func list(t *testing.T, data map[string]string) *corev1.ConfigMap {
	t.Helper()
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: cluster.Namespace, Name: enrolled.ConfigMap}}
	made := m.DeepCopy()
	made.Data = map[string]string{"other": "m2"} // as always: of an object that is made empty the API server does not say who wrote it when
	if err := shared.Client.Create(t.Context(), made); client.IgnoreAlreadyExists(err) != nil {
		t.Fatal(err)
	}
	// Nobody else may leave the list empty.
	joinservice, err := shared.AsUser("system:serviceaccount:"+cluster.Namespace+":joinservice", "system:masters")
	if err != nil {
		t.Fatal(err)
	}
	writer, err := client.New(joinservice, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	say := func(ctx context.Context, data map[string]string) (was map[string]string) {
		if err := shared.Client.Get(ctx, client.ObjectKeyFromObject(m), m); err != nil {
			t.Fatal(err)
		}
		was, m.Data = m.Data, data
		if err := writer.Update(ctx, m); err != nil {
			t.Fatal(err)
		}
		return was
	}
	was := say(t.Context(), data)
	t.Cleanup(func() { say(context.WithoutCancel(t.Context()), was) })
	return m.DeepCopy()
}
