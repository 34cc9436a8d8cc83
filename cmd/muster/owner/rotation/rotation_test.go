package rotation

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/trust/attest"
)

// newKey is the ID of a key of service accounts with the public part publicPart.
var newKey, publicPart = ownertest.MadeKey(clusterinfo.ServiceAccountKey)

// keyRotation is a cluster whose control planes rotate keys by orders. What they do with the key is in memory, and in their Nodes.
type keyRotation struct {
	*ownertest.Upgrading
	key clusterinfo.RotatedKey

	mu     sync.Mutex
	states map[string]clusterinfo.KeyState
	done   []string // NODE PHASE
	next   string   // the ID of a key that is made
	part   string   // its public part, as it is reported
	// act decides how an order ends; nil: done.
	act func(node string, phase clusterinfo.RotationPhase) v1alpha1.OrderState
	at  time.Time
	// adopted are the authorities that the folder was given, and whether they were the only ones; unfit is why it does not take them.
	adopted []string
	unfit   error
	// again: a control plane has lost the key, and accepts it again in the phase use.
	again bool
}

func newKeyRotation(t *testing.T, key clusterinfo.RotatedKey, names ...string) *keyRotation {
	t.Helper()
	k := &keyRotation{Upgrading: ownertest.NewUpgrading(t, names...), key: key, states: map[string]clusterinfo.KeyState{}, at: time.Now()}
	k.next, k.part = ownertest.MadeKey(key)
	for name := range k.On {
		if strings.HasPrefix(name, "c") {
			k.becomesKey(t.Context(), t, name, clusterinfo.KeyState{Accepts: []string{ownertest.OldKey}, Uses: ownertest.OldKey})
		}
	}
	return k
}

// becomesKey has a control plane publish a state.
func (k *keyRotation) becomesKey(ctx context.Context, t *testing.T, node string, s clusterinfo.KeyState) {
	k.mu.Lock()
	k.states[node] = s
	k.mu.Unlock()
	text, err := json.Marshal(clusterinfo.KeyStates{k.key: s})
	if err != nil {
		t.Error(err)
	}
	n := &corev1.Node{}
	ownertest.Change(ctx, t, false, types.NamespacedName{Name: node}, n, func() {
		if n.Annotations == nil {
			n.Annotations = map[string]string{}
		}
		n.Annotations[clusterinfo.KeysAnnotation] = string(text)
	})
}

// execute does what a machine does, and fails the test if a control plane would then refuse what another one uses.
func (k *keyRotation) execute(ctx context.Context, t *testing.T, node string, args map[string]string) (id string) {
	k.mu.Lock()
	s, id := k.states[node], args[ownerorder.ArgID]
	if id == "" {
		id = k.next
	}
	switch phase := clusterinfo.RotationPhase(args[ownerorder.ArgPhase]); phase {
	case clusterinfo.RotationAccept:
		if !slices.Contains(s.Accepts, id) {
			s.Accepts = append(slices.Clone(s.Accepts), id)
		}
		s.Staged = []string{id}
	case clusterinfo.RotationUse:
		s.Uses = id
	case clusterinfo.RotationFinish:
		s.Accepts, s.Staged = []string{id}, nil
	case clusterinfo.RotationSettled:
		t.Errorf("%s is ordered %q", node, phase)
	}
	k.mu.Unlock()
	k.becomesKey(ctx, t, node, s)
	k.mu.Lock()
	defer k.mu.Unlock()
	for a, accepts := range k.states {
		for b, uses := range k.states {
			if !slices.Contains(accepts.Accepts, uses.Uses) {
				t.Errorf("%s accepts %v, and %s uses %s", a, accepts.Accepts, b, uses.Uses)
			}
		}
	}
	return id
}

// machines has the control planes execute orders until the test ends.
func (k *keyRotation) machines(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for name, on := range k.On {
		all.Go(func() {
			for range ownertest.Changes(ctx, &v1alpha1.AttestedNodeList{}, name) {
				n := &v1alpha1.AttestedNode{}
				if err := ownertest.Shared.Client.Get(ctx, types.NamespacedName{Name: name}, n); err != nil || n.Annotations[v1alpha1.OwnerOrder] == "" {
					continue
				}
				s, err := ownerorder.ParseMachineNote(n.Annotations[v1alpha1.OwnerOrder])
				if err != nil {
					t.Error(err)
					return
				}
				if r := n.Status.Order; r != nil && r.Digest == s.Digest() {
					continue
				}
				o, err := s.Genuine(attest.OwnerKeys{k.Public}, on)
				if err != nil || o.Action != ownerorder.ActionRotateKey || o.Args[ownerorder.ArgKey] != string(k.key) {
					t.Errorf("%s: %s: %v", name, s.Text, err)
					return
				}
				phase := clusterinfo.RotationPhase(o.Args[ownerorder.ArgPhase])
				k.mu.Lock()
				act := k.act
				k.done = append(k.done, name+" "+string(phase))
				k.mu.Unlock()
				state, output := v1alpha1.OrderDone, ""
				if act != nil {
					state = act(name, phase)
				}
				if i := k.Info(ctx, t); i.Rotation == nil || i.Rotation.Phase != phase && (!k.again || phase != clusterinfo.RotationAccept || i.Rotation.Phase != clusterinfo.RotationUse) || i.Rotation.Joins() {
					t.Errorf("while %s does %s, the cluster says %+v", name, phase, i.Rotation)
				}
				if state == v1alpha1.OrderDone {
					id := k.execute(ctx, t, name, o.Args)
					k.mu.Lock()
					output = fmt.Sprintf(`{"id":%q,"public":%q}`, id, k.part)
					k.mu.Unlock()
				}
				ownertest.Change(ctx, t, true, types.NamespacedName{Name: name}, n, func() {
					n.Status.Order = &v1alpha1.OrderReport{Digest: s.Digest(), Action: string(o.Action), State: state, Message: "because", Output: output}
				})
			}
		})
	}
	t.Cleanup(func() { cancel(); all.Wait() })
}

func (k *keyRotation) acts(f func(node string, phase clusterinfo.RotationPhase) v1alpha1.OrderState) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.act = f
}

// took returns what was ordered since the last call.
func (k *keyRotation) took() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := k.done
	k.done = nil
	return out
}

func (k *keyRotation) config(finish bool) RotationConfig {
	return RotationConfig{
		Dir: k.Dir, Key: k.key, Finish: finish, Wait: ownertest.Patience, Poll: 100 * time.Millisecond, Report: func(string, string) {},
		Adopt: func(_ context.Context, ca *x509.Certificate, only bool) error {
			k.mu.Lock()
			defer k.mu.Unlock()
			sum := sha256.Sum256(ca.Raw)
			k.adopted = append(k.adopted, fmt.Sprintf("%x %v", sum, only))
			return k.unfit
		},
	}
}

func TestAKeyIsRotatedOnOneControlPlaneAfterAnother(t *testing.T) {
	for _, key := range clusterinfo.RotatedKeys() {
		t.Run(string(key), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
			defer cancel()
			k := newKeyRotation(t, key, "c1", "c2", "c3", "w1")
			old := secret(t, "old")
			if key == clusterinfo.FrontProxyCA {
				ownertest.Create(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "unrelated"}})
			}
			k.machines(t)
			p, err := Rotate(ctx, k.config(false))
			if err != nil || p.Phase != clusterinfo.RotationSettled || p.ID != k.next {
				t.Fatalf("%v: %s; %+v", err, problem.Remedy(err), p)
			}
			if got, want := k.took(), []string{"c1 accept", "c2 accept", "c3 accept", "c1 use", "c2 use", "c3 use"}; !slices.Equal(got, want) {
				t.Errorf("%q, want %q", got, want)
			}
			i := k.Info(ctx, t)
			if r := i.Rotation; r == nil || !r.Joins() || (r.Public != "") != (key.PublicFile() != "") {
				t.Errorf("the cluster says %+v", i.Rotation)
			}
			if p, err := Rotate(ctx, k.config(false)); err != nil || p.Phase != clusterinfo.RotationSettled || len(k.took()) > 0 {
				t.Errorf("repeated: %v, %+v", err, p)
			}
			k.Describes(t, func(i *clusterinfo.Info) { i.Rotation.Since = i.Rotation.Since.Add(-tokensRenewed - time.Minute) })
			for name := range k.On {
				k.reports(ctx, t, name, nil)
			}
			p, err = Rotate(ctx, k.config(true))
			if err != nil || p.Phase != "" {
				t.Fatalf("%v: %s; %+v", err, problem.Remedy(err), p)
			}
			if got, want := k.took(), []string{"c1 finish", "c2 finish", "c3 finish"}; !slices.Equal(got, want) {
				t.Errorf("%q, want %q", got, want)
			}
			if i := k.Info(ctx, t); i.Rotation != nil {
				t.Errorf("in the end the cluster says %+v", i.Rotation)
			}
			want := []string(nil)
			if key == clusterinfo.ClusterCA { // when it is settled, repeated, before the old one is dropped, and after that
				want = []string{k.next + " false", k.next + " false", k.next + " false", k.next + " true"}
			}
			if !slices.Equal(k.adopted, want) {
				t.Errorf("the folder was given %q, want %q", k.adopted, want)
			}
			if k.Cluster().EncryptionKeyRotated != (key == clusterinfo.EncryptionKey) {
				t.Error("what the folder says of the encryption key is wrong")
			}
			if err := ownertest.Shared.Client.Get(ctx, types.NamespacedName{Namespace: old.Namespace, Name: old.Name}, old); err != nil || string(old.Data["a"]) != "b" {
				t.Errorf("a Secret was changed: %+v, %v", old.Data, err)
			}
		})
	}
}

func secret(t *testing.T, name string) *corev1.Secret {
	t.Helper()
	s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Data: map[string][]byte{"a": []byte("b")}}
	ownertest.Create(t, s)
	return s
}

func TestARotationContinuesWhereItEnded(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*ownertest.Patience)
	defer cancel()
	k := newKeyRotation(t, clusterinfo.ServiceAccountKey, "c1", "c2")
	k.machines(t)
	for _, phase := range []clusterinfo.RotationPhase{clusterinfo.RotationAccept, clusterinfo.RotationUse} {
		k.acts(func(node string, p clusterinfo.RotationPhase) v1alpha1.OrderState {
			if node == "c2" && p == phase {
				return v1alpha1.OrderFailed
			}
			return v1alpha1.OrderDone
		})
		if _, err := Rotate(ctx, k.config(false)); err == nil || !strings.Contains(err.Error(), "c2: c2: rotate-key failed: because") || !strings.Contains(problem.Remedy(err), "same command") {
			t.Fatalf("%s: %v: %s", phase, err, problem.Remedy(err))
		}
		if i := k.Info(ctx, t); i.Rotation == nil || i.Rotation.Phase != phase || i.Rotation.Joins() {
			t.Errorf("the cluster says %+v", i.Rotation)
		}
	}
	kube, err := access.Connect(k.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if s, err := kube.Status(ctx, slog.New(slog.DiscardHandler)); err != nil || s.Rotation == nil || s.Rotation.Phase != clusterinfo.RotationUse {
		t.Errorf("muster status: %v, %+v", err, s.Rotation)
	}
	other := k.config(false)
	other.Key = clusterinfo.EncryptionKey
	if _, err := Rotate(ctx, other); err == nil || !strings.Contains(err.Error(), "service-account-key is being rotated") {
		t.Errorf("another key: %v", err)
	}
	if _, err := Rotate(ctx, k.config(true)); err == nil || !strings.Contains(err.Error(), "without --finish first") {
		t.Errorf("finished before all use it: %v", err)
	}
	ownertest.PodIs(t, "c1", versions.APIServer, false)
	short, stop := context.WithCancel(ctx)
	defer stop()
	ends := k.config(false)
	ends.Report = func(_, step string) {
		if strings.HasPrefix(step, "waits: ") {
			stop()
		}
	}
	if _, err := Rotate(short, ends); err == nil || !strings.Contains(err.Error(), "the next control plane was not started: static pods of c1 are not Ready") || strings.Contains(problem.Explain(err).Message+problem.Remedy(err), "forget") {
		t.Errorf("a control plane that is not well: %v", err)
	}
	k.acts(nil)
	k.took()
	// After an interruption, static pods may restart because of its order: that is waited for.
	waits := k.config(false)
	waits.Report = func(_, step string) {
		if strings.HasPrefix(step, "waits: static pods of c1 are not Ready") {
			ownertest.PodIs(t, "c1", versions.APIServer, true)
		}
	}
	if _, err := Rotate(ctx, waits); err != nil {
		t.Fatalf("%v: %s", err, problem.Remedy(err))
	}
	if got, want := k.took(), []string{"c2 use"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	// Pods' tokens may be of the old key.
	if _, err := Rotate(ctx, k.config(true)); err == nil || !strings.Contains(err.Error(), "--early") {
		t.Errorf("finished at once: %v", err)
	}
	early := k.config(true)
	early.Early = true
	if _, err := Rotate(ctx, early); err != nil {
		t.Errorf("finished early: %v", err)
	}
}

// A joinservice with a token of the old key could not record that a machine is done: the command would wait for ever.
func TestMustersServicesGetTokensOfTheNewKeyBeforeTheOldOneIsDroppedEarly(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*ownertest.Patience)
	defer cancel()
	k := newKeyRotation(t, clusterinfo.ServiceAccountKey, "c1")
	k.machines(t)
	if _, err := Rotate(ctx, k.config(false)); err != nil {
		t.Fatal(err)
	}
	service := func(name string) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: clusterapi.Namespace, Name: name, Labels: map[string]string{"app.kubernetes.io/part-of": "muster", "app.kubernetes.io/name": "muster-joinservice"}},
			Spec:       corev1.PodSpec{NodeName: "c1", TerminationGracePeriodSeconds: new(int64(0)), Containers: []corev1.Container{{Name: "x", Image: "x"}}},
		}
	}
	old, next := service("muster-joinservice-old"), service("muster-joinservice-new")
	ownertest.Create(t, old)
	t.Cleanup(func() {
		if err := ownertest.Shared.Client.Delete(context.WithoutCancel(ctx), next); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	})
	k.acts(func(node string, phase clusterinfo.RotationPhase) v1alpha1.OrderState {
		if err := ownertest.Shared.Client.Get(ctx, types.NamespacedName{Namespace: old.Namespace, Name: old.Name}, &corev1.Pod{}); err == nil {
			t.Errorf("%s does %s, and a pod has a token of the old key", node, phase)
		}
		return v1alpha1.OrderDone
	})
	var daemonSet sync.WaitGroup // its controller
	daemonSet.Go(func() {
		for range ownertest.Changes(ctx, &corev1.PodList{}, old.Name) {
			err := ownertest.Shared.Client.Get(ctx, types.NamespacedName{Namespace: old.Namespace, Name: old.Name}, &corev1.Pod{})
			if !apierrors.IsNotFound(err) {
				continue
			}
			if err := ownertest.Shared.Client.Create(ctx, next); err != nil {
				t.Error(err)
				return
			}
			ownertest.Change(ctx, t, true, types.NamespacedName{Namespace: next.Namespace, Name: next.Name}, next, func() {
				next.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
			})
			return
		}
	})
	early := k.config(true)
	early.Early = true
	if _, err := Rotate(ctx, early); err != nil {
		t.Errorf("%v: %s", err, problem.Remedy(err))
	}
	cancel()
	daemonSet.Wait()
}

// The control plane that has made the key is lost before another one has it.
func TestALostKeyIsMadeAnew(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*ownertest.Patience)
	defer cancel()
	k := newKeyRotation(t, clusterinfo.ServiceAccountKey, "c1", "c2")
	k.acts(func(node string, _ clusterinfo.RotationPhase) v1alpha1.OrderState {
		if node == "c2" {
			return v1alpha1.OrderFailed
		}
		return v1alpha1.OrderDone
	})
	k.machines(t)
	if _, err := Rotate(ctx, k.config(false)); err == nil {
		t.Fatal("it has not failed")
	}
	k.becomesKey(ctx, t, "c1", clusterinfo.KeyState{Accepts: []string{ownertest.OldKey}, Uses: ownertest.OldKey})
	k.mu.Lock()
	k.next, k.part = ownertest.MadeKey(k.key)
	second := k.next
	k.mu.Unlock()
	k.acts(nil)
	k.took()
	if p, err := Rotate(ctx, k.config(false)); err != nil || p.ID != second {
		t.Fatalf("%v, %+v", err, p)
	}
	if got, want := k.took(), []string{"c1 accept", "c2 accept", "c1 use", "c2 use"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestWhatPreventsARotation(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*ownertest.Patience)
	defer cancel()
	k := newKeyRotation(t, clusterinfo.ServiceAccountKey, "c1", "c2")
	right := clusterinfo.KeyState{Accepts: []string{ownertest.OldKey}, Uses: ownertest.OldKey}
	for name, tt := range map[string]struct {
		wrong, repair func()
		says          string
	}{
		"an upgrade of Kubernetes": {
			func() {
				k.Describes(t, func(i *clusterinfo.Info) {
					i.Next = &clusterinfo.Release{KubernetesVersion: ownertest.After, Components: k.New.Components, Images: k.New.Images}
				})
			},
			func() { k.Describes(t, func(i *clusterinfo.Info) { i.Next = nil }) }, "being upgraded",
		},
		"a control plane that reports nothing": {
			func() {
				n := &corev1.Node{}
				ownertest.Change(ctx, t, false, types.NamespacedName{Name: "c2"}, n, func() { n.Annotations[clusterinfo.KeysAnnotation] = "damaged" })
			},
			func() { k.becomesKey(ctx, t, "c2", right) }, "c2 has not reported a service-account-key",
		},
		"a control plane that is not Ready": {func() { ownertest.NodeIs(t, "c1", false) }, func() { ownertest.NodeIs(t, "c1", true) }, "c1 is not Ready"},
	} {
		t.Run(name, func(t *testing.T) {
			tt.wrong()
			p, err := PlanRotation(ctx, k.config(false))
			if err != nil || p.Err() == nil || !strings.Contains(p.Err().Error(), tt.says) {
				t.Errorf("%v: %+v", err, p)
			}
			if _, err := Rotate(ctx, k.config(false)); err == nil {
				t.Error("it was rotated")
			}
			if i := k.Info(ctx, t); i.Rotation != nil {
				t.Errorf("the cluster says %+v", i.Rotation)
			}
			tt.repair()
			if p, err := PlanRotation(ctx, k.config(false)); err != nil || p.Err() != nil {
				t.Errorf("repaired: %v, %v", err, p)
			}
		})
	}
}

// Tokens in Secrets have no end, and are not made anew.
func TestAPlanNamesTheTokensThatStopWorking(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	k := newKeyRotation(t, clusterinfo.ServiceAccountKey, "c1")
	k.Describes(t, func(i *clusterinfo.Info) {
		i.Rotation = &clusterinfo.Rotation{Key: k.key, Phase: clusterinfo.RotationSettled, ID: newKey, Public: publicPart, Since: k.at.Add(-48 * time.Hour)}
	})
	k.becomesKey(ctx, t, "c1", clusterinfo.KeyState{Accepts: []string{newKey, ownertest.OldKey}, Uses: newKey})
	ownertest.Create(t, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "robot"}})
	for name, id := range map[string]string{"of-the-old-key": ownertest.OldKey, "of-the-new-key": newKey} {
		var raw []byte
		if _, err := fmt.Sscanf(id, "%x", &raw); err != nil {
			t.Fatal(err)
		}
		head := base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, `{"alg":"ES256","kid":%q}`, base64.RawURLEncoding.EncodeToString(raw)))
		ownertest.Create(t, &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Annotations: map[string]string{corev1.ServiceAccountNameKey: "robot"}},
			Type:       corev1.SecretTypeServiceAccountToken, Data: map[string][]byte{corev1.ServiceAccountTokenKey: []byte(head + ".e30.c2ln")},
		})
	}
	p, err := PlanRotation(ctx, k.config(true))
	if err != nil || p.Err() != nil {
		t.Fatal(err, p.Err())
	}
	notes := strings.Join(p.Notes, "\n")
	if !strings.Contains(notes, "1 Secrets have a token of the old key, which stops working: default/of-the-old-key.") {
		t.Errorf("%s", notes)
	}
}
