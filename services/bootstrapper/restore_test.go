package bootstrapper_test

import (
	"bytes"
	"compress/gzip"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/trust/keys"
)

// saved is a backup of the cluster of [fixture.request], on a web server.
type saved struct {
	w         *fixture
	key       *ecdsa.PrivateKey
	authority []byte
	small     map[string][]byte
	file      []byte
	url       string
}

func (w *fixture) saved() *saved {
	w.t.Helper()
	s := &saved{w: w, small: map[string][]byte{}}
	for _, name := range clusterinfo.ControlPlaneFiles() {
		s.small["pki/"+name] = []byte("the lost cluster's " + name)
	}
	var err error
	if s.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		w.t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(7), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour * 1000), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	if s.authority, err = x509.CreateCertificate(rand.Reader, template, template, s.key.Public(), s.key); err != nil {
		w.t.Fatal(err)
	}
	private, err := x509.MarshalECPrivateKey(s.key)
	if err != nil {
		w.t.Fatal(err)
	}
	s.small["pki/ca.crt"] = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.authority})
	s.small["pki/ca.key"] = pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private})
	s.write()
	server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { _, _ = rw.Write(s.file) }))
	w.t.Cleanup(server.Close)
	s.url = server.URL + "/backup"
	return s
}

// snapshot is one of a real etcd 3.6.16.
func snapshot(t *testing.T) []byte {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", "etcd.snapshot.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (s *saved) write(change ...func(*backup.Manifest)) {
	t := s.w.t.(*testing.T)
	t.Helper()
	req := s.w.request()
	root, err := keys.ParseRoot(keys.FirstVersion, req.GetRootSecret(), req.GetSalt())
	if err != nil {
		t.Fatal(err)
	}
	m := backup.Manifest{ClusterID: root.ClusterID([32]byte(req.GetMeasurementSalt())).String(), Node: "lost1", State: backup.State{Epoch: 4, Cluster: []byte("{}")}}
	for _, f := range change {
		f(&m)
	}
	db := snapshot(t)
	var out bytes.Buffer
	if err := backup.Write(&out, s.w.image.OwnerKeys[0], s.key, m, s.small, bytes.NewReader(db), int64(len(db)), sha256.Sum256(db)); err != nil {
		t.Fatal(err)
	}
	s.file = out.Bytes()
}

// request is what the owner sends.
func (s *saved) request() *initv1.RestoreRequest {
	s.w.t.Helper()
	key, err := backup.FileKey(bytes.NewReader(s.file), []ed25519.PrivateKey{s.w.signer})
	if err != nil {
		s.w.t.Fatal(err)
	}
	sum := sha256.Sum256(s.file)
	out := &initv1.RestoreRequest{Order: s.w.request(), Backup: &initv1.Backup{Url: s.url, Sha256: sum[:], FileKey: key, Authority: s.authority}}
	s.sign(out)
	return out
}

func (s *saved) sign(req *initv1.RestoreRequest) {
	root, err := keys.ParseRoot(keys.FirstVersion, req.GetOrder().GetRootSecret(), req.GetOrder().GetSalt())
	if err != nil {
		s.w.t.Fatal(err)
	}
	signed := ownerorder.Init{Cluster: root.ClusterID([32]byte(req.GetOrder().GetMeasurementSalt())), Machine: s.w.tpm.ID()}
	copy(signed.Backup[:], req.GetBackup().GetSha256())
	req.Order.OwnerSignature = signed.Sign(s.w.signer)
}

// isRestored checks a machine whose kubeadm found what the backup has.
func (s *saved) isRestored(t *testing.T) {
	t.Helper()
	for _, name := range clusterinfo.ControlPlaneFiles() {
		if b, err := os.ReadFile(filepath.Join(s.w.root, "/etc/kubernetes/pki", name)); err != nil || !bytes.Equal(b, s.small["pki/"+name]) {
			t.Errorf("%s is %q, %v", name, b, err)
		}
	}
	if !s.w.exists("/var/lib/etcd/member/snap/db") || s.w.exists("/var/lib/muster/restore") {
		t.Error("etcd has no data, or the backup is left over")
	}
	if rec := s.w.record(); rec.Step != journal.StepDone || rec.Kind != journal.KindInit {
		t.Errorf("journal %+v", rec)
	}
}

func TestAClusterIsRestoredFromABackup(t *testing.T) {
	w := first(t)
	s := w.saved()
	// The machine was in the cluster, under another name.
	s.write(func(m *backup.Manifest) { m.Nodes = []backup.Node{{Name: "lost2", MachineID: w.tpm.ID().String()}} })
	r := w.boot()
	out := w.restore(t.Context(), r, s.request())
	if out.err != nil {
		t.Fatal(out.err, w.logged)
	}
	if err := r.end(t); err != nil {
		t.Fatal(err)
	}
	s.isRestored(t)
	if out.result.GetNodeName() != "node1" || w.machine.API.Object(secretPath) == nil {
		t.Errorf("result %s", text(out.result))
	}
	for _, secret := range []string{"BEGIN EC PRIVATE KEY", "the lost cluster's sa.key"} { // K3
		if strings.Contains(w.logged.String(), secret) {
			t.Errorf("%q is in the log", secret)
		}
	}
}

func TestARestoreIsRefused(t *testing.T) {
	w := first(t)
	s := w.saved()
	r := w.boot()
	defer r.kill(t)
	other := w.saved()
	for name, tt := range map[string]struct {
		change func(*initv1.RestoreRequest)
		want   attestv1.Reason
	}{
		"no backup":                 {func(q *initv1.RestoreRequest) { q.Backup = nil }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a short file key":          {func(q *initv1.RestoreRequest) { q.Backup.FileKey = q.GetBackup().GetFileKey()[1:] }, attestv1.Reason_REASON_REQUEST_INVALID},
		"no authority":              {func(q *initv1.RestoreRequest) { q.Backup.Authority = nil }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a long authority":          {func(q *initv1.RestoreRequest) { q.Backup.Authority = make([]byte, 16<<10+1) }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a URL of another scheme":   {func(q *initv1.RestoreRequest) { q.Backup.Url = "file:///etc/passwd" }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a short digest":            {func(q *initv1.RestoreRequest) { q.Backup.Sha256 = q.GetBackup().GetSha256()[1:] }, attestv1.Reason_REASON_REQUEST_INVALID},
		"a digest of zeroes":        {func(q *initv1.RestoreRequest) { q.Backup.Sha256 = make([]byte, 32); s.sign(q) }, attestv1.Reason_REASON_REQUEST_INVALID},
		"signed for another backup": {func(q *initv1.RestoreRequest) { q.Backup.Sha256[0] ^= 1 }, attestv1.Reason_REASON_OWNER_SIGNATURE},
		"signed for an init":        {func(q *initv1.RestoreRequest) { w.sign(q.GetOrder(), false) }, attestv1.Reason_REASON_OWNER_SIGNATURE},
		"another init secret":       {func(q *initv1.RestoreRequest) { q.Order.InitSecret = make([]byte, 32) }, attestv1.Reason_REASON_INIT_SECRET_INVALID},
	} {
		t.Run(name, func(t *testing.T) {
			req := s.request()
			tt.change(req)
			places := refusaltest.Places{Metric: []string{"muster_init_attempts_total"}, Log: []string{"msg", "call refused", "procedure", initv1connect.InitServiceRestoreProcedure}}
			refusaltest.Refused(t, w.observations(r), tt.want, places, func() error { return w.restore(t.Context(), r, req).err })
		})
	}
	if len(w.steps) > 0 || w.record().Locked() {
		t.Errorf("something happened: %q", w.steps)
	}
	t.Run("an init with the signature for a restore", func(t *testing.T) {
		if out := w.init(t.Context(), r, s.request().GetOrder()); reason(out.err) != "OWNER_SIGNATURE" {
			t.Errorf("%v", out.err)
		}
	})
	// From here on the machine is locked to the cluster: the owner may repeat the request with another backup.
	for _, tt := range []struct {
		name   string
		change func(*initv1.RestoreRequest)
		want   attestv1.Reason
	}{
		{"another file at the URL", func(q *initv1.RestoreRequest) { q.Backup.Url = other.url }, attestv1.Reason_REASON_COMPONENT_HASH},
		{"another authority", func(q *initv1.RestoreRequest) { q.Backup.Authority = other.authority }, attestv1.Reason_REASON_REQUEST_INVALID},
		{"the key of another file", func(q *initv1.RestoreRequest) { q.Backup.FileKey = other.request().GetBackup().GetFileKey() }, attestv1.Reason_REASON_REQUEST_INVALID},
	} { // the first one leaves no file there, the others do
		t.Run(tt.name, func(t *testing.T) {
			req := s.request()
			tt.change(req)
			refusaltest.Refused(t, w.observations(r), tt.want, initFailed(), func() error { return w.restore(t.Context(), r, req).err })
		})
	}
	t.Run("of another cluster", func(t *testing.T) {
		s.write(func(m *backup.Manifest) { m.ClusterID = strings.Repeat("00", 32) })
		if out := w.restore(t.Context(), r, s.request()); reason(out.err) != "REQUEST_INVALID" {
			t.Errorf("%v", out.err)
		}
	})
	t.Run("of a cluster that has a node of its name", func(t *testing.T) {
		s.write(func(m *backup.Manifest) { m.Nodes = []backup.Node{{Name: "node1"}} })
		if out := w.restore(t.Context(), r, s.request()); reason(out.err) != "NAME_TAKEN" {
			t.Errorf("%v", out.err)
		}
	})
	t.Run("of a cluster that does not encrypt", func(t *testing.T) {
		delete(s.small, "pki/encryption.yaml")
		s.write()
		if out := w.restore(t.Context(), r, s.request()); reason(out.err) != "REQUEST_INVALID" {
			t.Errorf("%v", out.err)
		}
	})
	if n := len(w.kubeadms()); n != 0 {
		t.Errorf("kubeadm ran %d times", n)
	}
}

// B3: killed after each of its effects, the machine restores the cluster when the request is repeated.
func TestARestoreSurvivesBeingKilledAnywhere(t *testing.T) {
	for n := 0; ; n++ {
		w := first(t)
		s := w.saved()
		w.dieAfter(n)
		r := w.boot()
		out := w.restore(t.Context(), r, s.request())
		r.kill(t)
		if out.err == nil {
			if n < 12 {
				t.Fatalf("only %d effects: %q", n, w.steps)
			}
			return
		}
		if n%2 == 1 {
			w.reboot()
		}
		w.dieAfter(-1)
		r = w.boot()
		if out = w.restore(t.Context(), r, s.request()); out.err != nil {
			t.Fatalf("after %d effects: %v", n, out.err)
		}
		if err := r.end(t); err != nil {
			t.Fatal(err)
		}
		s.isRestored(t)
	}
}
