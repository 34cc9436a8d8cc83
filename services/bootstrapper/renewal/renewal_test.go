package renewal

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubeadmapi "k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm"

	authority "github.com/muster-k8s/muster/services/bootstrapper/clusterca"
)

func TestRenewedAtTwoThirdsOfALife(t *testing.T) {
	for _, tt := range []struct {
		share float64
		want  []string
	}{
		{0.1, nil},
		{0.66, nil},
		{0.67, []string{"lease", "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "released"}},
		{0.99, []string{"lease", "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "released"}},
		{1.01, nil}, // expired: the API server serves no request, so there is no lease and no wait
	} {
		t.Run(fmt.Sprint(tt.share), func(t *testing.T) {
			root := newControlPlane(t)
			before, now := leaves(t, root), at(t, root, tt.share)
			c := &memoryCluster{root: root, lease: new(sync.Mutex)}
			wait, err := newRenewer(t, c, now).once(t.Context())
			if err != nil || wait <= 0 || wait > quick.Interval {
				t.Fatalf("again in %s, %v", wait, err)
			}
			if !slices.Equal(c.order, tt.want) {
				t.Errorf("done: %q, want %q", c.order, tt.want)
			}
			soundAt(t, root, now)
			for name, after := range leaves(t, root) {
				was := before[name]
				if tt.share < 2.0/3 {
					if !after.Equal(was) {
						t.Errorf("%s was renewed", name)
					}
					continue
				}
				if after.Equal(was) || after.Subject.String() != was.Subject.String() || !slices.Equal(after.DNSNames, was.DNSNames) || len(after.IPAddresses) != len(was.IPAddresses) || !slices.Equal(after.ExtKeyUsage, was.ExtKeyUsage) {
					t.Errorf("%s is for %s %q %s, and was for %s %q %s", name, after.Subject, after.DNSNames, after.IPAddresses, was.Subject, was.DNSNames, was.IPAddresses)
				}
				if fmt.Sprint(after.PublicKey) == fmt.Sprint(was.PublicKey) {
					t.Errorf("%s has its old key", name)
				}
			}
			if len(c.list) != len(files) {
				t.Errorf("%d certificates are published, want %d", len(c.list), len(files))
			}
			if _, err := os.Stat(filepath.Join(root, Folder)); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("keys are left in %s: %v", Folder, err)
			}
		})
	}
}

func TestNotRenewedWhileAnotherControlPlaneIsBroken(t *testing.T) {
	root := newControlPlane(t)
	c := &memoryCluster{root: root, lease: new(sync.Mutex), down: []string{"etcd-node3"}}
	before := leaves(t, root)
	if _, err := newRenewer(t, c, at(t, root, 0.8)).once(t.Context()); err == nil || !strings.Contains(err.Error(), "etcd-node3") {
		t.Errorf("error %v", err)
	}
	if len(c.order) > 0 || !leaves(t, root)["apiserver"].Equal(before["apiserver"]) {
		t.Errorf("done: %q", c.order)
	}
	// Near the end of a certificate it does not wait any longer.
	if _, err := newRenewer(t, c, at(t, root, 0.95)).once(t.Context()); err != nil || len(c.order) == 0 {
		t.Errorf("%v, done: %q", err, c.order)
	}
}

// While a component does not come back, no other control plane renews: the lease is kept, also over many checks.
func TestTheLeaseIsKeptUntilAllParts(t *testing.T) {
	root := newControlPlane(t)
	c := &memoryCluster{root: root, lease: new(sync.Mutex), dead: "kube-apiserver"}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- newRenewer(t, c, at(t, root, 0.7)).Run(ctx) }()
	seen := func(what string) { t.Helper(); c.await(t, what) }
	seen("kube-apiserver")
	if c.lease.TryLock() {
		t.Error("the lease is free while the API server is down")
		c.lease.Unlock()
	}
	c.mu.Lock()
	c.dead = ""
	c.mu.Unlock()
	seen("released")
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if slices.ContainsFunc(c.order, func(s string) bool { return strings.HasPrefix(s, "too early") }) {
		t.Errorf("done: %q", c.order)
	}
}

// The cluster never sees the pods of a banned control plane as Ready, so it would keep the lease for months, and no machine could become a control
// plane.
func TestABannedControlPlaneDoesNotTakeTheLease(t *testing.T) {
	root := newControlPlane(t)
	before, now := leaves(t, root), at(t, root, 0.7)
	c := &memoryCluster{root: root, lease: new(sync.Mutex), out: true}
	if _, err := newRenewer(t, c, now).once(t.Context()); !errors.Is(err, errShutOut) || len(c.order) > 0 {
		t.Errorf("%v, done: %q", err, c.order)
	}
	if !leaves(t, root)["apiserver"].Equal(before["apiserver"]) {
		t.Error("its certificates are renewed")
	}
	// A control plane that is banned in the middle of its renewal returns the lease, and continues once the ban is lifted.
	c.out, c.dead = false, "kube-apiserver"
	done := make(chan error, 1)
	go func() {
		_, err := newRenewer(t, c, now).once(t.Context())
		done <- err
	}()
	c.await(t, "kube-apiserver")
	c.mu.Lock()
	c.out = true
	c.mu.Unlock()
	if err := <-done; !errors.Is(err, errShutOut) || !slices.Equal(c.order, []string{"lease", "etcd", "kube-apiserver", "released"}) {
		t.Errorf("%v, done: %q", err, c.order)
	}
	c.out, c.dead = false, ""
	if _, err := newRenewer(t, c, now).once(t.Context()); err != nil {
		t.Error(err)
	}
	soundAt(t, root, now)
}

// A holder that never returns the lease delays the other control planes until their certificates expire, and no longer.
func TestALeaseThatIsNeverFreeIsNotWaitedForLongerThanTheCertificatesLive(t *testing.T) {
	root := newControlPlane(t)
	c := &memoryCluster{root: root, lease: new(sync.Mutex), taken: true}
	r := newRenewer(t, c, time.Time{})
	began, near := time.Now(), first(Read(root)).Add(-200*time.Millisecond)
	r.Now = func() time.Time { return near.Add(time.Since(began)) }
	if _, err := r.once(t.Context()); !errors.Is(err, context.DeadlineExceeded) || !slices.Equal(c.order, []string{"waits"}) {
		t.Fatalf("%v, done: %q", err, c.order)
	}
	if _, err := r.once(t.Context()); err != nil {
		t.Fatal(err)
	}
	soundAt(t, root, r.Now())
}

// Invariant J8.
func TestOneControlPlaneAfterAnother(t *testing.T) {
	lease, inside := new(sync.Mutex), 0
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range 3 {
		root := newControlPlane(t)
		c := &memoryCluster{root: root, lease: lease}
		r := newRenewer(t, c, at(t, root, 0.7))
		r.plane.step = func(string) error {
			if lease.TryLock() {
				lease.Unlock()
				return errors.New("without the lease")
			}
			mu.Lock()
			inside++
			mu.Unlock()
			return nil
		}
		wg.Go(func() {
			if _, err := r.once(t.Context()); err != nil {
				t.Error(err)
			}
			soundAt(t, root, r.Now())
		})
	}
	wg.Wait()
	if inside == 0 {
		t.Error("nothing was done")
	}
}

var errKilled = errors.New("killed")

// stopped is the stop function of a kubelet that does not run.
func stopped() error { return nil }

// Killed after any step, by the loop or at boot, the machine starts with certificates that fit their keys, and the renewal is finished.
func TestKilledAnywhereARenewalIsFinished(t *testing.T) {
	kill := map[string]func(r *Renewer, now time.Time) error{
		"with the lease": func(r *Renewer, _ time.Time) error { _, err := r.once(t.Context()); return err },
		"at boot":        func(r *Renewer, now time.Time) error { return r.plane.atBoot(now, r.Log, stopped) },
	}
	for how, run := range kill {
		share := map[string]float64{"with the lease": 0.7, "at boot": 1.1}[how]
		for step, ended := 1, false; !ended; step++ {
			root := newControlPlane(t)
			before, now := leaves(t, root), at(t, root, share)
			c := &memoryCluster{root: root, lease: new(sync.Mutex)}
			r := newRenewer(t, c, now)
			var steps []string
			r.plane.step = func(what string) error {
				if steps = append(steps, what); len(steps) == step {
					return errKilled
				}
				return nil
			}
			err := run(r, now)
			if ended = err == nil; ended {
				if step < 30 {
					t.Errorf("%s: only %d steps: %q", how, step, steps)
				}
				break
			}
			if !errors.Is(err, errKilled) {
				t.Fatalf("%s, step %d: %v", how, step, err)
			}
			// What is in place at the start has to fit before the cluster is asked.
			r.plane.step = func(string) error { return nil }
			if err := r.plane.atBoot(now, r.Log, stopped); err != nil {
				t.Fatalf("%s, after %q: %v", how, steps[len(steps)-1], err)
			}
			if share > 1 {
				soundAt(t, root, now)
			} else {
				for _, f := range files {
					if _, err := f.verified(filepath.Join(root, folder), filepath.Join(root, folder)); err != nil {
						t.Errorf("%s, after %q: %s: %v", how, steps[len(steps)-1], f.name, err)
					}
				}
			}
			// The renewal continues.
			if _, err := r.once(t.Context()); err != nil {
				t.Fatalf("%s, after %q: %v", how, steps[len(steps)-1], err)
			}
			soundAt(t, root, now)
			for name, c := range leaves(t, root) {
				if c.Equal(before[name]) {
					t.Errorf("%s, after %q: %s was not renewed", how, steps[len(steps)-1], name)
				}
			}
			for _, component := range components {
				annotated(t, r.plane, component)
			}
			if r.plane.pending() {
				t.Errorf("%s, after %q: the renewal is not finished", how, steps[len(steps)-1])
			}
		}
	}
}

// annotated fails unless the manifest has the digest of the certificates on the disk.
func annotated(t *testing.T, p plane, component string) {
	t.Helper()
	want, err := p.digest(component)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(p.on(filepath.Join(manifests, component+".yaml")))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), Annotation+": "+want+"\n") {
		t.Errorf("%s was not restarted with the renewed certificates", component)
	}
	for _, kept := range []string{"    kubeadm.kubernetes.io/x: \"1\"\n", "  priority: 2000001000\n", "  - command:\n    - " + component + "\n"} {
		if !strings.Contains(string(text), kept) {
			t.Errorf("%s lost %q:\n%s", component, kept, text)
		}
	}
}

func TestAtBootOnlyWhatExpiredIsRenewed(t *testing.T) {
	for _, tt := range []struct {
		share float64
		want  bool
	}{{0.5, false}, {0.9, false}, {1.01, true}, {30, true}, {-0.1, true}} {
		root := newControlPlane(t)
		before, now := leaves(t, root), at(t, root, tt.share)
		if tt.share < 0 {
			// The clock was far ahead when these certificates were issued, and the authorities are older.
			now = at(t, root, 0).Add(2 * life)
			if err := newPlane(root, image).alone(now); err != nil {
				t.Fatal(err)
			}
			before, now = leaves(t, root), at(t, root, 0).Add(-2*time.Hour)
		}
		manifest, off := filepath.Join(root, manifests, "kube-apiserver.yaml"), 0
		if err := AtBoot(root, image, now, slog.New(slog.DiscardHandler), func() error {
			off++
			if text, err := os.ReadFile(manifest); err != nil || tt.share > 0 && strings.Contains(string(text), Annotation) {
				t.Errorf("the kubelet runs while manifests change: %v", err)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if _, err := tls.LoadX509KeyPair(filepath.Join(root, pki, authority.SignerFile), filepath.Join(root, pki, "ca.key")); err != nil {
			t.Errorf("kube-controller-manager can't sign: %v", err)
		}
		if off > 0 != tt.want {
			t.Errorf("at %v of its life: the kubelet was stopped %d times", tt.share, off)
		}
		if got := !leaves(t, root)["apiserver"].Equal(before["apiserver"]); got != tt.want {
			t.Errorf("at %v of its life: renewed %v", tt.share, got)
		}
		if tt.want {
			soundAt(t, root, now)
		}
	}
	if err := AtBoot(t.TempDir(), image, time.Now(), slog.New(slog.DiscardHandler), stopped); err != nil {
		t.Errorf("a worker: %v", err)
	}
}

func TestWhatWouldNotDoIsNotTaken(t *testing.T) {
	year := 365 * 24 * time.Hour
	for name, tt := range map[string]struct {
		now      func(made time.Time) time.Time
		cfg      kubeadmapi.ClusterConfiguration
		harm     func(t *testing.T, root string)
		wantText string
	}{
		"a clock before the authority's time": {now: func(made time.Time) time.Time { return made.Add(-year) }, cfg: image, wantText: "clock"},
		"a clock after the authority's time":  {now: func(made time.Time) time.Time { return made.Add(11 * year) }, cfg: image, wantText: "clock"},
		"lives that are due at once":          {now: func(made time.Time) time.Time { return made.Add(life) }, cfg: kubeadmapi.ClusterConfiguration{EncryptionAlgorithm: image.EncryptionAlgorithm, CertificateValidityPeriod: &metav1.Duration{Duration: time.Minute}}, wantText: "certificateValidityPeriod"},
		"another authority's key": {now: func(made time.Time) time.Time { return made.Add(life) }, cfg: image, wantText: "etcd", harm: func(t *testing.T, root string) {
			key, err := os.ReadFile(filepath.Join(root, pki, "ca.key"))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(root, pki, "etcd", "ca.key"), key, 0o600); err != nil {
				t.Fatal(err)
			}
		}},
		"no authority's key": {now: func(made time.Time) time.Time { return made.Add(life) }, cfg: image, wantText: "front-proxy", harm: func(t *testing.T, root string) {
			if err := os.Remove(filepath.Join(root, pki, "front-proxy-ca.key")); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			root := newControlPlane(t)
			before := leaves(t, root)
			if tt.harm != nil {
				tt.harm(t, root)
			}
			err := newPlane(root, tt.cfg).alone(tt.now(before["apiserver"].NotBefore))
			if err == nil || !strings.Contains(err.Error(), tt.wantText) {
				t.Errorf("error %v, want one with %q", err, tt.wantText)
			}
			for name, c := range leaves(t, root) {
				if !c.Equal(before[name]) {
					t.Errorf("%s was replaced", name)
				}
			}
		})
	}
}

func TestWhileTheLoopIsAtWorkBootLeavesItAlone(t *testing.T) {
	root := newControlPlane(t)
	p := newPlane(root, image)
	unlock, err := p.exclusive()
	if err != nil {
		t.Fatal(err)
	}
	before := leaves(t, root)
	if err := AtBoot(root, image, at(t, root, 2), slog.New(slog.DiscardHandler), stopped); err != nil {
		t.Fatal(err)
	}
	if !leaves(t, root)["apiserver"].Equal(before["apiserver"]) {
		t.Error("two renew at the same time")
	}
	unlock()
	if err := AtBoot(root, image, at(t, root, 2), slog.New(slog.DiscardHandler), stopped); err != nil {
		t.Fatal(err)
	}
	if leaves(t, root)["apiserver"].Equal(before["apiserver"]) {
		t.Error("no machine renews")
	}
	if _, err := tls.LoadX509KeyPair(filepath.Join(root, pki, "apiserver.crt"), filepath.Join(root, pki, "apiserver.key")); err != nil {
		t.Error(err)
	}
}

func TestKeysAreForRootAlone(t *testing.T) {
	root := newControlPlane(t)
	if err := newPlane(root, image).alone(at(t, root, 1.1)); err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		secret := f.key
		if secret == "" {
			secret = f.certificate
		}
		st, err := os.Stat(filepath.Join(root, folder, secret))
		if err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", secret, st.Mode(), err)
		}
	}
}

func TestADamagedFileIsNamed(t *testing.T) {
	root := newControlPlane(t)
	now := at(t, root, 0.7)
	if err := os.WriteFile(filepath.Join(root, folder, "scheduler.conf"), []byte("users: [{user: {client-key-data: c2VjcmV0}}]"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := &memoryCluster{root: root, lease: new(sync.Mutex)}
	_, err := newRenewer(t, c, now).once(t.Context())
	if err == nil || !strings.Contains(err.Error(), "scheduler.conf") || strings.Contains(err.Error(), "c2VjcmV0") || strings.Contains(err.Error(), "secret") {
		t.Errorf("error %v", err)
	}
}
