package rotation

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	certutil "k8s.io/client-go/util/cert"
	kubeadmapi "k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm"
	certsphase "k8s.io/kubernetes/cmd/kubeadm/app/phases/certs"
	kubeadmconfig "k8s.io/kubernetes/cmd/kubeadm/app/util/config"
	"k8s.io/kubernetes/cmd/kubeadm/app/util/pkiutil"

	"github.com/muster-k8s/muster/internal/disktest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/etcdencryption"
	"github.com/muster-k8s/muster/internal/ownerorder"
	files "github.com/muster-k8s/muster/services/bootstrapper/clusterca"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

func TestMain(m *testing.M) {
	// klog starts its flusher at init.
	goleak.VerifyTestMain(disktest.InMemory(m), goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"))
}

var ecdsa = kubeadmapi.ClusterConfiguration{EncryptionAlgorithm: kubeadmapi.EncryptionAlgorithmECDSAP256}

// original returns a control plane's folder as kubeadm makes it, made once.
var original = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "control-plane")
	if err != nil {
		return "", err
	}
	cfg, err := kubeadmconfig.DefaultedStaticInitConfiguration()
	if err != nil {
		return "", err
	}
	cfg.CertificatesDir, cfg.EncryptionAlgorithm = filepath.Join(dir, machine.PKIFolder), ecdsa.EncryptionAlgorithm
	if err := certsphase.CreatePKIAssets(cfg); err != nil {
		return "", err
	}
	first := etcdencryption.NewKey()
	first.Name = "muster-v1"
	return dir, os.WriteFile(filepath.Join(cfg.CertificatesDir, etcdencryption.Name), etcdencryption.Format([]etcdencryption.Key{first}), 0o600)
})

// plane is one control plane in memory: what its static pods have read is what was on the disk when they were restarted last.
type plane struct {
	t    *testing.T
	root string
	*Rotator
	runs      clusterinfo.KeyStates // the state that the static pods run with
	restarted []string
	published clusterinfo.KeyStates
	counted   []clusterinfo.KeyStates // the disk's state when the TPM's counter was incremented
	worn      error                   // why the counter is not incremented
	old       int                     // Secrets of another key in etcd
	elsewhere error                   // why no Secret is found
	prefix    string
	crash     string // where the program ends: "files", "restart", "publish"
	resumed   bool
	from      []*plane // other control planes
	order     string   // its digest
}

var errCrash = errors.New("the program ends here")

func newPlanes(t *testing.T, n int) []*plane {
	t.Helper()
	from, err := original()
	if err != nil {
		t.Fatal(err)
	}
	var out []*plane
	for range n {
		p := &plane{t: t, root: t.TempDir(), order: strings.Repeat("0a", 32)}
		if err := os.CopyFS(p.root, os.DirFS(from)); err != nil {
			t.Fatal(err)
		}
		if p.Rotator, err = New(Config{
			Root: p.root, Kubeadm: ecdsa, ControlPlane: p, Fetch: p.fetch, Now: time.Now, Log: slog.New(slog.DiscardHandler),
			OldSecrets: func(_ context.Context, prefix string) (int, error) { p.prefix = prefix; return p.old, p.elsewhere },
			Count:      func(context.Context) error { p.counted = append(p.counted, p.disk()); return p.worn },
		}); err != nil {
			t.Fatal(err)
		}
		p.runs = p.disk()
		out = append(out, p)
	}
	for _, p := range out {
		p.from = slices.DeleteFunc(slices.Clone(out), func(o *plane) bool { return o == p })
	}
	return out
}

// disk returns the state of the files, also in the middle of a change.
func (p *plane) disk() clusterinfo.KeyStates {
	p.t.Helper()
	out := clusterinfo.KeyStates{}
	for name, k := range kinds {
		s, err := k.state(p.pki())
		if err != nil {
			p.t.Fatal(err)
		}
		out[name] = s
	}
	return out
}

// fetch reads what a joinservice on another control plane would send.
func (p *plane) fetch(_ context.Context, key clusterinfo.RotatedKey, id string) ([]byte, error) {
	for _, o := range p.from {
		if b, err := os.ReadFile(filepath.Join(o.pki(), StagedFile(key, id))); err == nil {
			return b, nil
		}
	}
	return nil, errors.New("no control plane has it")
}

func (p *plane) Change(_ context.Context, resume bool, do func() error, components ...string) error {
	p.resumed = resume
	if err := do(); err != nil {
		return err
	}
	if p.crash == "files" {
		return errCrash
	}
	p.restarted = append(p.restarted, components...)
	p.runs = p.disk()
	if p.crash == "restart" {
		return errCrash
	}
	return nil
}

func (p *plane) Reissue(authority string) error {
	ca, key, err := pkiutil.TryLoadCertAndKeyFromDisk(p.pki(), authority)
	if err != nil {
		return err
	}
	for _, name := range authorities[authority].issued {
		was, err := certutil.CertsFromFile(filepath.Join(p.pki(), name))
		if err != nil {
			return err
		}
		cert, leafKey, err := pkiutil.NewCertAndKey(ca, key, &pkiutil.CertConfig{NotAfter: time.Now().Add(time.Hour), EncryptionAlgorithm: ecdsa.EncryptionAlgorithm, Config: certutil.Config{
			CommonName: was[0].Subject.CommonName, Organization: was[0].Subject.Organization, Usages: was[0].ExtKeyUsage, AltNames: certutil.AltNames{DNSNames: was[0].DNSNames, IPs: was[0].IPAddresses},
		}})
		if err != nil {
			return err
		}
		if err := pkiutil.WriteCertAndKey(p.pki(), strings.TrimSuffix(name, ".crt"), cert, leafKey); err != nil {
			return err
		}
		if cross, err := files.Cross(p.pki()); err != nil {
			return err
		} else if cross != nil && authority == "ca" {
			if err := certutil.WriteCert(filepath.Join(p.pki(), name), append(pkiutil.EncodeCertPEM(cert), pkiutil.EncodeCertPEM(cross)...)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *plane) PublishKeys(_ context.Context, s clusterinfo.KeyStates) error {
	if p.crash == "publish" {
		return errCrash
	}
	p.published = s
	return nil
}

// do executes an order.
func (p *plane) do(key clusterinfo.RotatedKey, phase clusterinfo.RotationPhase, id string) (Result, error) {
	text, err := p.Run(p.t.Context(), p.order, map[string]string{ownerorder.ArgKey: string(key), ownerorder.ArgPhase: string(phase), ownerorder.ArgID: id})
	var out Result
	if err == nil {
		err = json.Unmarshal([]byte(text), &out)
	}
	return out, err
}

func (p *plane) must(key clusterinfo.RotatedKey, phase clusterinfo.RotationPhase, id string) Result {
	p.t.Helper()
	out, err := p.do(key, phase, id)
	if err != nil {
		p.t.Fatalf("%s: %v", phase, err)
	}
	return out
}

// agree fails unless each control plane accepts what any other uses.
func agree(t *testing.T, key clusterinfo.RotatedKey, planes []*plane) {
	t.Helper()
	for i, p := range planes {
		for j, o := range planes {
			if !slices.Contains(p.runs[key].Accepts, o.runs[key].Uses) {
				t.Errorf("control plane %d accepts %v, and %d uses %s", i, p.runs[key].Accepts, j, o.runs[key].Uses)
			}
		}
	}
}

func TestAtEachTimeAllAcceptWhatAnyUses(t *testing.T) {
	for _, key := range clusterinfo.RotatedKeys() {
		t.Run(string(key), func(t *testing.T) {
			planes := newPlanes(t, 3)
			before := planes[0].runs[key].Uses
			made := planes[0].must(key, clusterinfo.RotationAccept, "")
			rotation := &clusterinfo.Rotation{Key: key, ID: made.ID}
			if (made.Public != "") != (key.PublicFile() != "") {
				t.Errorf("public part %q", made.Public)
			}
			for _, phase := range []clusterinfo.RotationPhase{clusterinfo.RotationAccept, clusterinfo.RotationUse, clusterinfo.RotationFinish} {
				for _, p := range planes {
					p.must(key, phase, made.ID)
					agree(t, key, planes)
					if !rotation.Reached(phase, p.published[key]) {
						t.Errorf("after %s it publishes %+v", phase, p.published[key])
					}
				}
			}
			for _, p := range planes {
				if s := p.disk()[key]; s.Uses != made.ID || !slices.Equal(s.Accepts, []string{made.ID}) || s.Uses == before {
					t.Errorf("in the end %+v", s)
				}
				if left, err := os.ReadDir(filepath.Join(p.pki(), Staged)); err != nil || len(left) > 0 {
					t.Errorf("staged keys are left: %v, %v", left, err)
				}
				secret := map[clusterinfo.RotatedKey]string{clusterinfo.ServiceAccountKey: "sa.key", clusterinfo.FrontProxyCA: "front-proxy-ca.key", clusterinfo.EtcdCA: "etcd/ca.key", clusterinfo.ClusterCA: "ca.key", clusterinfo.EncryptionKey: etcdencryption.Name}[key]
				if st, err := os.Stat(filepath.Join(p.pki(), secret)); err != nil || st.Mode().Perm() != 0o600 {
					t.Errorf("%s: %v, %v", secret, st, err)
				}
			}
		})
	}
}

// An earlier copy of the disk accepts the old key. The TPM's counter is incremented when the disk has only the new one, and before the phase counts as done (B7).
func TestAnEarlierCopyOfTheDiskIsOlderOnceTheOldKeyIsDropped(t *testing.T) {
	for _, key := range clusterinfo.RotatedKeys() {
		t.Run(string(key), func(t *testing.T) {
			p := newPlanes(t, 1)[0]
			made := p.must(key, clusterinfo.RotationAccept, "")
			p.must(key, clusterinfo.RotationUse, made.ID)
			if len(p.counted) > 0 {
				t.Errorf("the counter was incremented while the old key is accepted: %+v", p.counted)
			}
			p.worn, p.published = errors.New("the TPM is worn out"), nil
			if _, err := p.do(key, clusterinfo.RotationFinish, made.ID); !errors.Is(err, p.worn) || p.published != nil {
				t.Errorf("without the counter: %v, it publishes %+v", err, p.published)
			}
			if read, err := Read(p.root); err != nil || read != nil {
				t.Errorf("without the counter, the renewal would publish %v, %v", read, err)
			}
			p.worn, p.counted = nil, nil
			p.must(key, clusterinfo.RotationFinish, made.ID)
			if len(p.counted) != 1 || !slices.Equal(p.counted[0][key].Accepts, []string{made.ID}) {
				t.Errorf("the counter was incremented for a disk with %+v", p.counted)
			}
		})
	}
}

// kubeadm reads the files when a control plane joins.
func TestKubeadmTakesTheFilesOfAHalfDoneRotation(t *testing.T) {
	planes := newPlanes(t, 1)
	p := planes[0]
	for _, key := range []clusterinfo.RotatedKey{clusterinfo.ServiceAccountKey, clusterinfo.FrontProxyCA, clusterinfo.EtcdCA, clusterinfo.ClusterCA} {
		made := p.must(key, clusterinfo.RotationAccept, "")
		for _, phase := range []clusterinfo.RotationPhase{clusterinfo.RotationAccept, clusterinfo.RotationUse} {
			p.must(key, phase, made.ID)
			_, public, err := pkiutil.TryLoadPrivatePublicKeyFromDisk(p.pki(), "sa")
			if err != nil {
				t.Fatal(err)
			}
			if id, err := idOf(public); err != nil || id != p.disk()[clusterinfo.ServiceAccountKey].Uses {
				t.Errorf("%s, %s: kubeadm takes %s for the public key in use, %v", key, phase, id, err)
			}
			for file, a := range authorities {
				ca, _, err := pkiutil.TryLoadCertAndKeyFromDisk(p.pki(), file)
				if err != nil {
					t.Fatal(err)
				}
				if signs, err := a.signs(p.pki(), ca); err != nil || !signs {
					t.Errorf("%s, %s: kubeadm takes another authority of %s than that of its key: %v", key, phase, file, err)
				}
			}
		}
	}
}

func TestAPhaseGoesOnAfterACrash(t *testing.T) {
	for _, key := range clusterinfo.RotatedKeys() {
		for _, at := range []string{"files", "restart", "publish"} {
			t.Run(string(key)+" "+at, func(t *testing.T) {
				p := newPlanes(t, 1)[0]
				id := ""
				for _, phase := range []clusterinfo.RotationPhase{clusterinfo.RotationAccept, clusterinfo.RotationUse, clusterinfo.RotationFinish} {
					p.crash, p.published = at, nil
					if _, err := p.do(key, phase, id); !errors.Is(err, errCrash) {
						t.Fatalf("%s: %v", phase, err)
					}
					staged, err := stagedIDs(p.pki(), key)
					if err != nil {
						t.Fatal(err)
					}
					if read, err := Read(p.root); at != "publish" && (err != nil || read != nil) {
						t.Errorf("%s: the renewal would publish %v, %v", phase, read, err)
					}
					p.crash = ""
					out := p.must(key, phase, id)
					if phase == clusterinfo.RotationAccept && !slices.Equal(staged, []string{out.ID}) {
						t.Errorf("it has made another key: %v, then %s", staged, out.ID)
					}
					if want := at != "publish"; p.resumed != want {
						t.Errorf("%s: it resumes: %v", phase, p.resumed)
					}
					id = out.ID
					if !(&clusterinfo.Rotation{Key: key, ID: id}).Reached(phase, p.published[key]) || !slices.Equal(p.runs[key].Accepts, p.published[key].Accepts) {
						t.Errorf("%s: it publishes %+v and runs with %+v", phase, p.published[key], p.runs[key])
					}
				}
			})
		}
	}
}

func TestOrdersThatWouldLoseAKeyAreRefused(t *testing.T) {
	other := strings.Repeat("a", 64)
	for name, tt := range map[string]struct {
		key    clusterinfo.RotatedKey
		done   []clusterinfo.RotationPhase // before
		phase  clusterinfo.RotationPhase
		wrong  func(p *plane, id *string)
		repair func(p *plane)
		says   string
	}{
		"use before accept": {clusterinfo.ServiceAccountKey, nil, clusterinfo.RotationUse, nil, func(p *plane) {
			ids, _ := stagedIDs(p.pki(), clusterinfo.ServiceAccountKey)
			p.must(clusterinfo.ServiceAccountKey, clusterinfo.RotationAccept, ids[0])
		}, "does not accept"},
		"finish before use": {clusterinfo.ServiceAccountKey, []clusterinfo.RotationPhase{clusterinfo.RotationAccept}, clusterinfo.RotationFinish, nil, func(p *plane) {
			ids, _ := stagedIDs(p.pki(), clusterinfo.ServiceAccountKey)
			p.must(clusterinfo.ServiceAccountKey, clusterinfo.RotationUse, ids[0])
		}, "does not use"},
		"Secrets of the old key in etcd": {clusterinfo.EncryptionKey, []clusterinfo.RotationPhase{clusterinfo.RotationAccept, clusterinfo.RotationUse}, clusterinfo.RotationFinish, func(p *plane, _ *string) { p.old = 3 }, func(p *plane) { p.old = 0 }, "3 Secrets"},
		"no Secret is found in etcd":     {clusterinfo.EncryptionKey, nil, clusterinfo.RotationAccept, func(p *plane, _ *string) { p.elsewhere = errors.New("no Secret") }, func(p *plane) { p.elsewhere = nil }, "no Secret"},
		"a key that nobody has":          {clusterinfo.FrontProxyCA, nil, clusterinfo.RotationAccept, func(_ *plane, id *string) { *id = other }, nil, "no control plane has it"},
		"an ID of another form":          {clusterinfo.FrontProxyCA, nil, clusterinfo.RotationAccept, func(_ *plane, id *string) { *id = "../sa.key" }, nil, "not that of a key"},
		"no ID":                          {clusterinfo.FrontProxyCA, []clusterinfo.RotationPhase{clusterinfo.RotationAccept}, clusterinfo.RotationUse, func(_ *plane, id *string) { *id = "" }, nil, "not that of a key"},
		"an unknown phase":               {clusterinfo.FrontProxyCA, []clusterinfo.RotationPhase{clusterinfo.RotationAccept}, "drop", nil, nil, "no phase"},
		"an unknown key":                 {"another-ca", nil, clusterinfo.RotationAccept, nil, nil, "no key"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlanes(t, 1)[0]
			id := ""
			if k := kinds[tt.key]; k != nil {
				made, err := p.make(p.order, tt.key, k)
				if err != nil {
					t.Fatal(err)
				}
				id = made
			}
			for _, phase := range tt.done {
				p.must(tt.key, phase, id)
			}
			right, before := id, p.disk()
			if tt.wrong != nil {
				tt.wrong(p, &id)
			}
			if _, err := p.do(tt.key, tt.phase, id); err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Fatalf("got %v, want %q", err, tt.says)
			}
			if after := p.disk(); !slices.Equal(after[tt.key].Accepts, before[tt.key].Accepts) || after[tt.key].Uses != before[tt.key].Uses {
				t.Errorf("it was %+v, and is %+v", before[tt.key], after[tt.key])
			}
			if tt.repair != nil {
				tt.repair(p)
			}
			if kinds[tt.key] == nil {
				tt.key = clusterinfo.FrontProxyCA
				right = ""
			}
			if tt.phase == "drop" {
				tt.phase = clusterinfo.RotationUse
			}
			p.must(tt.key, tt.phase, right)
		})
	}
}

func TestAnAuthorityOfAnotherNameIsRefused(t *testing.T) {
	for file, a := range authorities {
		for other, b := range authorities {
			made, err := b.create(ecdsa, time.Now())
			if err != nil {
				t.Fatal(err)
			}
			if _, _, err := a.identify(made); (err == nil) != (file == other) {
				t.Errorf("an authority of %s as that of %s: %v", other, file, err)
			}
		}
	}
}

func TestThePrefixOfTheNewKeyIsAskedFor(t *testing.T) {
	p := newPlanes(t, 1)[0]
	made := p.must(clusterinfo.EncryptionKey, clusterinfo.RotationAccept, "")
	p.must(clusterinfo.EncryptionKey, clusterinfo.RotationUse, made.ID)
	p.must(clusterinfo.EncryptionKey, clusterinfo.RotationFinish, made.ID)
	if want := "k8s:enc:secretbox:v1:muster-" + made.ID[:16] + ":"; p.prefix != want {
		t.Errorf("%q, want %q", p.prefix, want)
	}
}

// A configuration that its administrators have changed is not written anew.
func TestAnotherEncryptionConfigurationIsLeftAlone(t *testing.T) {
	p := newPlanes(t, 1)[0]
	file := filepath.Join(p.pki(), etcdencryption.Name)
	right, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string][2]string{
		"another resource":  {"[secrets]", "[secrets, configmaps]"},
		"another provider":  {"  - secretbox:", "  - identity: {}\n  - secretbox:"},
		"an unknown field":  {"kind: EncryptionConfiguration", "kind: EncryptionConfiguration\nmore: 1"},
		"a key of 0 bytes":  {"secret: ", "secret: \"\" # "},
		"a name with space": {"muster-v1", "\"muster v1\""},
	} {
		text := strings.Replace(string(right), change[0], change[1], 1)
		if name == "a key of 0 bytes" {
			text = strings.Replace(text, "}", "\n        }", 1)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := p.do(clusterinfo.EncryptionKey, clusterinfo.RotationAccept, ""); err == nil {
			t.Errorf("%s: it was rotated", name)
		} else if strings.Contains(err.Error(), "secret:") {
			t.Errorf("%s: the error may have the key: %v", name, err)
		}
		if is, err := os.ReadFile(file); err != nil || string(is) != text {
			t.Errorf("%s: it was changed: %v", name, err)
		}
	}
	if err := os.WriteFile(file, right, 0o600); err != nil {
		t.Fatal(err)
	}
	p.must(clusterinfo.EncryptionKey, clusterinfo.RotationAccept, "")
}

// One that joined while the old key was still accepted has the new one in its ticket, and nothing staged.
func TestAControlPlaneThatJoinedMeanwhileFinishes(t *testing.T) {
	for _, key := range clusterinfo.RotatedKeys() {
		planes := newPlanes(t, 2)
		made := planes[0].must(key, clusterinfo.RotationAccept, "")
		planes[0].must(key, clusterinfo.RotationUse, made.ID)
		if err := os.CopyFS(planes[1].root+"/joined", os.DirFS(planes[0].root)); err != nil {
			t.Fatal(err)
		}
		joined := planes[1]
		joined.root += "/joined"
		joined.Root = joined.root
		if err := os.RemoveAll(filepath.Join(joined.pki(), Staged)); err != nil {
			t.Fatal(err)
		}
		for _, phase := range []clusterinfo.RotationPhase{clusterinfo.RotationAccept, clusterinfo.RotationUse, clusterinfo.RotationFinish} {
			joined.must(key, phase, made.ID)
		}
		if s := joined.disk()[key]; !slices.Equal(s.Accepts, []string{made.ID}) || s.Uses != made.ID {
			t.Errorf("%s: %+v", key, s)
		}
	}
}
