package rotation

import (
	"context"
	"crypto/x509"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// reports has a node report that it trusts the new authority, and has the certificates of it, but for a change.
func (k *keyRotation) reports(ctx context.Context, t *testing.T, node string, but func(*v1alpha1.AttestedNodeStatus)) {
	t.Helper()
	n := &v1alpha1.AttestedNode{}
	ownertest.Change(ctx, t, true, types.NamespacedName{Name: node}, n, func() {
		n.Status.Authorities, n.Status.KubeletAuthorities = []string{k.next, ownertest.OldKey}, []string{k.next}
		n.Status.LastVerdict = &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED", Time: metav1.NewTime(k.at)}
		if but != nil {
			but(&n.Status)
		}
	})
}

// A node that does not trust the new authority, or has a certificate of the old one, would be lost.
func TestTheOldAuthorityStaysWhileANodeNeedsIt(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*ownertest.Patience)
	defer cancel()
	k := newKeyRotation(t, clusterinfo.ClusterCA, "c1", "w1", "w2")
	k.machines(t)
	if p, err := PlanRotation(ctx, k.config(false)); err != nil || !strings.Contains(strings.Join(p.Notes, "\n"), "do not report which authority they trust, but --finish requires that: c1, w1, w2") {
		t.Errorf("before it begins: %v, %+v", err, p)
	}
	if _, err := Rotate(ctx, k.config(false)); err != nil {
		t.Fatal(err, problem.Remedy(err))
	}
	ownertest.Create(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespacePublic, Name: "cluster-info"}, Data: map[string]string{"kubeconfig": "apiVersion: v1\nkind: Config\nclusters: [{name: '', cluster: {server: 'https://192.0.2.1:6443'}}]\n"}})
	all := func() {
		for name := range k.On {
			k.reports(ctx, t, name, nil)
		}
	}
	for name, tt := range map[string]struct {
		node, says string
		but        func(*v1alpha1.AttestedNodeStatus)
		without    bool // naming the node solves it
	}{
		"it reports nothing":                   {"w1", "w1 has not reported that it trusts the new authority", func(s *v1alpha1.AttestedNodeStatus) { s.Authorities = nil }, true},
		"it trusts only the old one":           {"w1", "w1 has not reported that it trusts the new authority", func(s *v1alpha1.AttestedNodeStatus) { s.Authorities = []string{ownertest.OldKey} }, true},
		"a control plane trusts only that":     {"c1", "c1 has not reported that it trusts the new authority", func(s *v1alpha1.AttestedNodeStatus) { s.Authorities = []string{ownertest.OldKey} }, false},
		"its kubelet has both":                 {"w1", "the kubelet of w1 has a certificate of the old authority", func(s *v1alpha1.AttestedNodeStatus) { s.KubeletAuthorities = []string{k.next, ownertest.OldKey} }, true},
		"its kubelet has none that is trusted": {"w1", "the kubelet of w1 has a certificate of the old authority", func(s *v1alpha1.AttestedNodeStatus) { s.KubeletAuthorities = nil }, true},
		"it is off": {"w1", "w1 is off", func(s *v1alpha1.AttestedNodeStatus) {
			s.LastVerdict.Time = metav1.NewTime(k.at.Add(-offAfter - time.Minute))
		}, true},
		"it is refused": {"w1", "the machine of w1 is refused (POLICY_REFUSED)", func(s *v1alpha1.AttestedNodeStatus) {
			s.LastVerdict.Accepted, s.LastVerdict.Reason = false, "POLICY_REFUSED"
		}, true},
		"it was never accepted": {"w1", "w1 is off", func(s *v1alpha1.AttestedNodeStatus) { s.LastVerdict = nil }, true},
	} {
		all()
		k.reports(ctx, t, tt.node, tt.but)
		if p, err := PlanRotation(ctx, k.config(false)); err != nil || p.Err() != nil || !strings.Contains(strings.Join(p.Notes, "\n"), "Before --finish: "+tt.says) {
			t.Errorf("%s: without --finish: %v, %+v", name, err, p)
		}
		if _, err := Rotate(ctx, k.config(true)); err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: got %v, want %q", name, err, tt.says)
		}
		without := k.config(true)
		without.Without = []string{tt.node}
		p, err := PlanRotation(ctx, without)
		if err != nil || (p.Err() == nil) != tt.without {
			t.Errorf("%s, named: %v, %v", name, err, p.Problems)
		}
		without.Without = []string{"w2"}
		if p, err := PlanRotation(ctx, without); err != nil || p.Err() == nil {
			t.Errorf("%s, and another one is named: %v", name, err)
		}
	}
	all()
	for name, says := range map[string]string{"nobody": "there is no such node", "c1": "it is a control plane"} {
		c := k.config(true)
		c.Without = []string{name}
		if p, err := PlanRotation(ctx, c); err != nil || p.Err() == nil || !strings.Contains(p.Err().Error(), says) {
			t.Errorf("--without %s: %v, %+v", name, err, p)
		}
	}
	k.took()
	if i := k.Info(ctx, t); i.Rotation == nil || i.Rotation.Phase != clusterinfo.RotationSettled {
		t.Fatalf("the cluster says %+v", i.Rotation)
	}
	// It was checked when the command began, and is checked again until a control plane has dropped the old one.
	kube, err := access.Connect(k.Dir)
	if err != nil {
		t.Fatal(err)
	}
	set := func(phase clusterinfo.RotationPhase) {
		if err := kube.Describe(ctx, func(i *clusterinfo.Info) error { i.Rotation.Phase = phase; return nil }); err != nil {
			t.Fatal(err)
		}
	}
	set(clusterinfo.RotationFinish)
	k.reports(ctx, t, "w1", func(s *v1alpha1.AttestedNodeStatus) { s.Authorities = nil })
	if _, err := Rotate(ctx, k.config(true)); err == nil || !strings.Contains(err.Error(), "w1 has not reported") || len(k.took()) > 0 {
		t.Errorf("the old one is dropped: %v", err)
	}
	set(clusterinfo.RotationSettled)
	all()
	// The folder needs the new authority before the old one is dropped.
	k.unfit = errors.New("not today")
	if _, err := Rotate(ctx, k.config(true)); err == nil || !strings.Contains(err.Error(), "not today") || len(k.took()) > 0 {
		t.Errorf("%v", err)
	}
	k.unfit = nil
	// One that is banned has no rights.
	n := &v1alpha1.AttestedNode{}
	ownertest.Change(ctx, t, false, types.NamespacedName{Name: "w2"}, n, func() { n.Spec.Banned = true })
	k.reports(ctx, t, "w2", func(s *v1alpha1.AttestedNodeStatus) { s.Authorities = nil })
	if p, err := Rotate(ctx, k.config(true)); err != nil || p.Phase != "" || !slices.Equal(k.took(), []string{"c1 finish"}) {
		t.Fatalf("%v: %s; %+v", err, problem.Remedy(err), p)
	}
	m := &corev1.ConfigMap{}
	if err := ownertest.Shared.Client.Get(ctx, types.NamespacedName{Namespace: metav1.NamespacePublic, Name: "cluster-info"}, m); err != nil {
		t.Fatal(err)
	}
	conf, err := clientcmd.Load([]byte(m.Data["kubeconfig"]))
	if err != nil || strings.TrimSpace(string(conf.Clusters[""].CertificateAuthorityData)) != strings.TrimSpace(string(ownertest.Shared.CA())) || conf.Clusters[""].Server != "https://192.0.2.1:6443" {
		t.Errorf("machines with a token are told %s, %v", m.Data["kubeconfig"], err)
	}
}

// trustsNow returns the authorities in the folder's kubeconfig, and its certificate.
func trustsNow(t *testing.T, o *ownertest.Owned) ([]*x509.Certificate, *x509.Certificate, *clientcmdapi.Config) {
	t.Helper()
	h, err := access.ReadHolder(o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	return access.TrustedBy(h.Text), h.Old, h.Conf
}

func TestTheFolderFollowsARotationOfTheAuthority(t *testing.T) {
	old, next := ownertest.NewAuthority(t), ownertest.NewAuthority(t)
	end := time.Now().Add(20 * time.Hour).Truncate(time.Second)
	api := &ownertest.APIServer{CA: next, Before: &old, Cross: old.Cross(t, next), Accepts: true}
	api.Answer = func(r *x509.CertificateRequest) ([]byte, string) {
		return ownertest.PEMOf(next.Client(t, r.Subject, r.PublicKey, end.Add(-time.Hour))), "" // the new authority's may end earlier
	}
	dir := ownertest.Administered(t, api, ownertest.Administrator, end, []byte("policy\n"))
	adopt := func(only bool) error {
		return AdoptAuthority(t.Context(), dir.Dir, next.Cert, only, dir.Report(access.RenewSteps))
	}
	for range 2 {
		if err := adopt(false); err != nil {
			t.Fatal(err, problem.Remedy(err))
		}
		trusted, leaf, _ := trustsNow(t, dir)
		if len(trusted) != 2 || !trusted[0].Equal(next.Cert) || !trusted[1].Equal(old.Cert) || leaf.CheckSignatureFrom(next.Cert) != nil {
			t.Errorf("it trusts %d, and has a certificate by %s", len(trusted), leaf.Issuer)
		}
	}
	for range 2 {
		if err := adopt(true); err != nil {
			t.Fatal(err, problem.Remedy(err))
		}
		if trusted, _, _ := trustsNow(t, dir); len(trusted) != 1 || !trusted[0].Equal(next.Cert) {
			t.Errorf("in the end it trusts %d", len(trusted))
		}
	}
	if former, err := access.FormerAuthorities(dir.Dir); err != nil || len(former) != 1 || !former[0].Equal(old.Cert) {
		t.Errorf("%d former authorities, %v", len(former), err)
	}
}

// Who can write objects of the cluster can write another authority into its description, but can't have the old one sign for it.
func TestTheFolderTakesNoAuthorityForWhichNoneStands(t *testing.T) {
	old, next, evil := ownertest.NewAuthority(t), ownertest.NewAuthority(t), ownertest.NewAuthority(t)
	for name, tt := range map[string]struct {
		serves ownertest.Authority
		cross  *x509.Certificate
		says   string
	}{
		"API servers do not use it":          {old, nil, "has no certificate of the new authority"},
		"API servers use another one":        {next, old.Cross(t, next), "has no certificate of the new authority"},
		"a server of it without the old one": {evil, nil, "unknown authority"},
		"it stands for itself":               {evil, evil.Cross(t, evil), "unknown authority"},
	} {
		api := &ownertest.APIServer{CA: tt.serves, Before: &old, Cross: tt.cross, Accepts: true}
		dir := ownertest.Administered(t, api, ownertest.Administrator, time.Now().Add(time.Hour), []byte("policy\n"))
		before, err := dir.Read(ownerdir.AdminConf)
		if err != nil {
			t.Fatal(err)
		}
		if err := AdoptAuthority(t.Context(), dir.Dir, evil.Cert, false, dir.Report(access.RenewSteps)); err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: got %v, want %q", name, err, tt.says)
		}
		if after, err := dir.Read(ownerdir.AdminConf); err != nil || string(after) != string(before) {
			t.Errorf("%s: the kubeconfig was changed: %v", name, err)
		}
	}
}
