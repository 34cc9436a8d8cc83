package renewal

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/kubernetes/cmd/kubeadm/app/util/pkiutil"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/rotation"
)

func newChange(t *testing.T) (*Renewer, *memoryCluster) {
	t.Helper()
	c := &memoryCluster{root: newControlPlane(t), lease: &sync.Mutex{}}
	return newRenewer(t, c, time.Now()), c
}

// restarts notes a restart of both components, so that the next one is because of a change.
func restarts(t *testing.T, r *Renewer) {
	t.Helper()
	if err := r.Change(t.Context(), false, func() error { return nil }, components...); err != nil {
		t.Fatal(err)
	}
}

func TestAChangeRestartsWhatReadsTheFilesUnderTheLease(t *testing.T) {
	for name, tt := range map[string]struct {
		file string
		want []string
	}{
		"the keys that verify tokens": {"sa.pub", []string{"kube-apiserver"}},
		"the key that signs tokens":   {"sa.key", []string{"kube-apiserver", "kube-controller-manager"}},
		"the front proxy's authority": {"front-proxy-ca.crt", []string{"kube-apiserver", "kube-controller-manager"}},
		"the key of Secrets":          {"encryption.yaml", []string{"kube-apiserver"}},
		"etcd's authority":            {"etcd/ca.crt", []string{"etcd", "kube-apiserver"}},
		"the cluster's authority":     {"ca.crt", []string{"kube-apiserver", "kube-controller-manager"}},
		"a file that is not read":     {"other", nil},
	} {
		t.Run(name, func(t *testing.T) {
			r, c := newChange(t)
			restarts(t, r)
			note := func(component string) string {
				n, err := NoteOf(c.root, component)
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
			before := map[string]string{}
			for _, component := range components {
				before[component] = note(component)
			}
			held := false
			if err := r.Change(t.Context(), false, func() error {
				held = !c.lease.TryLock() // J8
				file := filepath.Join(c.root, pki, tt.file)
				text, err := os.ReadFile(file)
				if err != nil && tt.file != "encryption.yaml" && tt.file != "other" {
					return err
				}
				return machine.WriteFile(file, append(text, "# more\n"...), 0o600, 0o700)
			}, components...); err != nil {
				t.Fatal(err)
			}
			if !held {
				t.Error("it was done without the lease")
			}
			var changed []string
			for _, component := range components {
				if note(component) != before[component] {
					changed = append(changed, component)
				}
			}
			if !slices.Equal(changed, tt.want) {
				t.Errorf("restarted %q, want %q", changed, tt.want)
			}
		})
	}
}

func TestAChangeDoesNotBeginOnAnUnhealthyCluster(t *testing.T) {
	for name, tt := range map[string]struct {
		down   []string
		resume bool
		out    bool
		begins bool
	}{
		"all are well":                            {nil, false, false, true},
		"another control plane is not":            {[]string{"etcd-node2"}, false, false, false},
		"another is not, and it was begun":        {[]string{"etcd-node2"}, true, false, false},
		"this one is not":                         {[]string{"kube-apiserver-node1"}, false, false, false},
		"this one is not, because it was begun":   {[]string{"kube-apiserver-node1"}, true, false, true},
		"a node whose name ends as this one's is": {[]string{"kube-apiserver-x-node1"}, true, false, false},
		"this one is banned":                      {nil, false, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			r, c := newChange(t)
			c.down, c.out = tt.down, tt.out
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			if tt.begins {
				cancel()
				ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
			}
			defer cancel()
			begun := false
			err := r.Change(ctx, tt.resume, func() error { begun = true; return nil }, apiServer)
			if begun != tt.begins || (err == nil) != tt.begins {
				t.Errorf("begun %v, %v", begun, err)
			}
			c.down, c.out = nil, false
			if err := r.Change(t.Context(), tt.resume, func() error { return nil }, apiServer); err != nil {
				t.Errorf("when all are well: %v", err)
			}
		})
	}
}

func TestAFailedChangeRestartsNothing(t *testing.T) {
	r, c := newChange(t)
	no := errors.New("no")
	if err := r.Change(t.Context(), false, func() error { return no }, apiServer); !errors.Is(err, no) || slices.Contains(c.order, apiServer) {
		t.Errorf("%v; %q", err, c.order)
	}
}

// Another authority replaces the present one, with kubeadm's files: at once, and with a crash at each step.
func TestAnAuthorityIsRotated(t *testing.T) {
	for key, certificates := range map[clusterinfo.RotatedKey]int{clusterinfo.FrontProxyCA: 1, clusterinfo.EtcdCA: 4, clusterinfo.ClusterCA: 4} { // two, and four kubeconfigs
		t.Run(string(key), func(t *testing.T) {
			crashes := 0
			for rotates(t, key, crashes+1) {
				crashes++
			}
			// Each certificate and its key are put in place, and two components restart.
			if want := 2*certificates + 2; crashes < want {
				t.Errorf("%d crashes only, want %d", crashes, want)
			}
		})
	}
}

func TestAnUnknownAuthorityIssuesNothing(t *testing.T) {
	r, c := newChange(t)
	if err := r.Reissue("ca2"); err == nil || !strings.Contains(err.Error(), "ca2") {
		t.Errorf("%v", err)
	}
	if err := r.Reissue("etcd/ca"); err != nil {
		t.Error(err)
	}
	soundAt(t, c.root, time.Now())
}

// rotates rotates an authority. The program ends at a step of the phase use, and the machine boots; false: the phase has fewer steps.
func rotates(t *testing.T, key clusterinfo.RotatedKey, at int) (crashed bool) {
	t.Helper()
	r, c := newChange(t)
	steps, end := 0, 0
	crash := errors.New("the program ends here")
	r.plane.step = func(string) error {
		if steps++; steps == end {
			return crash
		}
		return nil
	}
	rotate, err := rotation.New(rotation.Config{
		Root: c.root, Kubeadm: image, ControlPlane: r, Now: time.Now, Log: r.Log,
		Fetch:      func(context.Context, clusterinfo.RotatedKey, string) ([]byte, error) { return nil, errors.New("none") },
		OldSecrets: func(context.Context, string) (int, error) { return 0, nil },
		Count:      func(context.Context) error { return nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	do := func(phase clusterinfo.RotationPhase, id string) error {
		_, err := rotate.Run(t.Context(), strings.Repeat("0a", 32), map[string]string{"key": string(key), "phase": string(phase), "id": id})
		return err
	}
	if err := do(clusterinfo.RotationAccept, ""); err != nil {
		t.Fatal(err)
	}
	soundAt(t, c.root, time.Now())
	id := c.keys[key].Staged[0]
	steps, end = 0, at
	switch err := do(clusterinfo.RotationUse, id); {
	case errors.Is(err, crash):
		crashed, end = true, 0
		// The machine boots: whatever is started next reads a certificate with its key.
		if err := AtBoot(c.root, image, time.Now(), r.Log, func() error { return nil }); err != nil {
			t.Fatal(err)
		}
		soundAt(t, c.root, time.Now())
		if err := do(clusterinfo.RotationUse, id); err != nil {
			t.Fatal(err)
		}
	case err != nil:
		t.Fatal(err)
	}
	soundAt(t, c.root, time.Now())
	if s := c.keys[key]; s.Uses != id || len(s.Accepts) != 2 {
		t.Errorf("%+v", s)
	}
	end = 0
	sent, trusted := 1, 1
	if key == clusterinfo.ClusterCA {
		sent, trusted = 2, 2
	}
	hasCertificates(t, c.root, "two authorities", sent, trusted)
	if err := r.plane.prepare(time.Now()); err != nil { // a renewal meanwhile
		t.Fatal(err)
	}
	if err := errors.Join(r.plane.place(), r.plane.finish()); err != nil {
		t.Fatal(err)
	}
	soundAt(t, c.root, time.Now())
	hasCertificates(t, c.root, "renewed meanwhile", sent, trusted)
	if err := do(clusterinfo.RotationFinish, id); err != nil {
		t.Fatal(err)
	}
	soundAt(t, c.root, time.Now())
	if s := c.keys[key]; s.Uses != id || len(s.Accepts) != 1 {
		t.Errorf("%+v", s)
	}
	hasCertificates(t, c.root, "one authority", 1, 1)
	// The renewal goes on with the new authority.
	if err := r.plane.prepare(time.Now()); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(c.root, pki, key.PublicFile()))
	if err != nil || strings.Count(string(text), "BEGIN CERTIFICATE") != 1 {
		t.Errorf("%s, %v", text, err)
	}
	return crashed
}

// A cluster that was made by an earlier Muster signs with ca.crt, of which kube-controller-manager takes no second certificate.
func TestARestartedControllerManagerSignsWithOneCertificate(t *testing.T) {
	r, c := newChange(t)
	const flag = "--cluster-signing-cert-file=/etc/kubernetes/pki/"
	for _, component := range components {
		text, err := os.ReadFile(filepath.Join(c.root, manifests, component+".yaml"))
		if err != nil || !strings.Contains(string(text), flag+"ca.crt\n") {
			t.Fatalf("%s, %v", text, err)
		}
	}
	restarts(t, r)
	for _, component := range components {
		text, err := os.ReadFile(filepath.Join(c.root, manifests, component+".yaml"))
		if one := strings.Contains(string(text), flag+"muster-signing.crt\n") && !strings.Contains(string(text), flag+"ca.crt\n"); err != nil || one != (component == controllerManager) {
			t.Errorf("%s, %v", text, err)
		}
	}
	want, err := os.ReadFile(filepath.Join(c.root, pki, "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(c.root, pki, "muster-signing.crt")); err != nil || string(got) != string(want) {
		t.Errorf("%s, %v", got, err)
	}
}

// hasCertificates fails unless the certificates of the cluster's authority are followed by the cross certificate, and kubeconfigs trust as many authorities.
func hasCertificates(t *testing.T, root, when string, sent, trusted int) {
	t.Helper()
	for _, f := range files {
		if f.ca != clusterCA {
			continue
		}
		path := filepath.Join(root, folder, f.certificate)
		chain, err := loadChain(path)
		if err != nil || len(chain) != sent {
			t.Errorf("%s: %s has %d certificates, want %d: %v", when, f.name, len(chain), sent, err)
		}
		if f.key != "" {
			continue
		}
		c, err := clientcmd.LoadFromFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, cluster := range c.Clusters {
			if n := strings.Count(string(cluster.CertificateAuthorityData), "BEGIN CERTIFICATE"); n != trusted {
				t.Errorf("%s: %s trusts %d authorities, want %d", when, f.name, n, trusted)
			}
		}
	}
}

// A kubeconfig whose owner has put a load balancer with another authority before the API servers keeps that.
func TestAKubeconfigOfAnotherAuthorityKeepsIt(t *testing.T) {
	r, c := newChange(t)
	path := filepath.Join(c.root, folder, "admin.conf")
	conf, err := clientcmd.LoadFromFile(path)
	if err != nil {
		t.Fatal(err)
	}
	other, err := os.ReadFile(filepath.Join(c.root, pki, "etcd", "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	for _, cluster := range conf.Clusters {
		cluster.CertificateAuthorityData = other
	}
	if err := clientcmd.WriteToFile(*conf, path); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.plane.prepare(time.Now()), r.plane.place()); err != nil {
		t.Fatal(err)
	}
	if conf, err = clientcmd.LoadFromFile(path); err != nil {
		t.Fatal(err)
	}
	for _, cluster := range conf.Clusters {
		if string(cluster.CertificateAuthorityData) != string(other) {
			t.Errorf("%s", cluster.CertificateAuthorityData)
		}
	}
}

// kubeadm has issued the certificates of a control plane that has just joined, and knows no cross certificate.
func TestAControlPlaneThatHasJoinedSendsTheCrossCertificate(t *testing.T) {
	r, c := newChange(t)
	rotate, err := rotation.New(rotation.Config{
		Root: c.root, Kubeadm: image, ControlPlane: r, Now: time.Now, Log: r.Log,
		Fetch:      func(context.Context, clusterinfo.RotatedKey, string) ([]byte, error) { return nil, errors.New("none") },
		OldSecrets: func(context.Context, string) (int, error) { return 0, nil },
		Count:      func(context.Context) error { return nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	id := ""
	for _, phase := range []clusterinfo.RotationPhase{clusterinfo.RotationAccept, clusterinfo.RotationUse} {
		if _, err := rotate.Run(t.Context(), strings.Repeat("0a", 32), map[string]string{"key": string(clusterinfo.ClusterCA), "phase": string(phase), "id": id}); err != nil {
			t.Fatal(err)
		}
		id = c.keys[clusterinfo.ClusterCA].Staged[0]
	}
	for _, name := range []string{"apiserver.crt", "apiserver-kubelet-client.crt"} {
		path := filepath.Join(c.root, pki, name)
		leaf, err := load(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, pkiutil.EncodeCertPEM(leaf), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := AtBoot(c.root, image, time.Now(), r.Log, func() error { return nil }); err != nil {
		t.Fatal(err)
	}
	hasCertificates(t, c.root, "after the join", 2, 2)
	soundAt(t, c.root, time.Now())
}
