package backups

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/trust/keys"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// plane is a control plane.
type plane struct {
	t         *testing.T
	cfg       Config
	owner     ed25519.PrivateKey
	authority *x509.Certificate
	snapshot  []byte
	size      int64 // what etcd says before
	fails     error
	made      atomic.Int64
	broken    atomic.Bool // etcd sends nothing
}

func newPlane(t *testing.T) *plane {
	t.Helper()
	public, owner, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	p := &plane{t: t, owner: owner, snapshot: database("one"), size: 100}
	p.cfg = Config{
		Root: t.TempDir(), Cluster: keys.ClusterID{1}, Node: "node1", Keep: 2, Now: time.Now, Log: slog.New(slog.DiscardHandler),
		State: func(context.Context) (backup.State, ed25519.PublicKey, error) {
			return backup.State{Epoch: 4, Cluster: json.RawMessage("{}")}, public, p.fails
		},
		Snapshot: func(_ context.Context, caCert, caKey []byte, room func(int64) error, w io.Writer) error {
			if string(caCert) != "etcd/ca.crt" || string(caKey) != "etcd/ca.key" {
				t.Errorf("etcd is asked with %q and %q", caCert, caKey)
			}
			if err := room(p.size); err != nil {
				return err
			}
			p.made.Add(1)
			if p.broken.Load() {
				return nil
			}
			_, err := w.Write(p.snapshot)
			return err
		},
	}
	for _, name := range clusterinfo.ControlPlaneFiles() {
		p.file(name, []byte(name))
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	p.file("ca.crt", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	p.file("ca.key", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}))
	if p.authority, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	return p
}

// database returns a snapshot as etcd sends it.
func database(text string) []byte {
	sum := sha256.Sum256([]byte(text))
	return append([]byte(text), sum[:]...)
}

func (p *plane) file(name string, content []byte) {
	p.t.Helper()
	path := filepath.Join(p.cfg.Root, "/etc/kubernetes/pki", name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, content, 0o600)); err != nil {
		p.t.Fatal(err)
	}
}

func (p *plane) maker() *Maker {
	p.t.Helper()
	m, err := New(p.cfg)
	if err != nil {
		p.t.Fatal(err)
	}
	return m
}

// files are the names in the folder of backups and in the one for work.
func (p *plane) files() (out []string) {
	p.t.Helper()
	for _, dir := range []string{Folder, workFolder} {
		entries, err := os.ReadDir(filepath.Join(p.cfg.Root, dir))
		if err != nil {
			p.t.Fatal(err)
		}
		for _, e := range entries {
			out = append(out, e.Name())
		}
	}
	return out
}

func TestABackupHasWhatNewControlPlanesNeed(t *testing.T) {
	p := newPlane(t)
	s, err := p.maker().Make(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(p.cfg.Root, Folder, s.Name)
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if sum := sha256.Sum256(file); s.SHA256 != hex.EncodeToString(sum[:]) || s.Size != int64(len(file)) || !s.Valid() {
		t.Errorf("%+v, of %d bytes", s, len(file))
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st, err)
	}
	id, err := backup.Identity([]ed25519.PrivateKey{p.owner})
	if err != nil {
		t.Fatal(err)
	}
	var db bytes.Buffer
	m, small, err := backup.Read(bytes.NewReader(file), id, p.authority, &db)
	if err != nil {
		t.Fatal(err)
	}
	if m.Node != "node1" || m.ClusterID != p.cfg.Cluster.String() || m.Epoch != 4 || !bytes.Equal(db.Bytes(), p.snapshot) || len(small) != len(clusterinfo.ControlPlaneFiles()) || string(small["pki/sa.key"]) != "sa.key" {
		t.Errorf("%+v, %q, %q", m, small, db.Bytes())
	}
	if latest, err := Latest(p.cfg.Root); err != nil || latest != s {
		t.Errorf("the latest is %+v, %v", latest, err)
	}
	if got := p.files(); !slices.Equal(got, []string{s.Name, backup.Latest, "lock"}) {
		t.Errorf("files: %q", got)
	}
}

func TestABackupThatFailsLeavesNothing(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*plane)
		says   string
	}{
		"the API server does not answer": {func(p *plane) { p.fails = errors.New("no answer") }, "no answer"},
		"no key of etcd's authority":     {func(p *plane) { p.remove("etcd/ca.key") }, "etcd/ca.key is missing"},
		"no key of the authority":        {func(p *plane) { p.remove("ca.key") }, "ca.key is missing"},
		"a snapshot that was cut off":    {func(p *plane) { p.snapshot = p.snapshot[:len(p.snapshot)-1] }, "cut off or damaged"},
		"a snapshot that was changed":    {func(p *plane) { p.snapshot[0] ^= 1 }, "cut off or damaged"},
		"an empty snapshot":              {func(p *plane) { p.snapshot = nil }, "cut off or damaged"},
		"no room":                        {func(p *plane) { p.size = 1 << 60 }, "MiB free"},
		"too large a file":               {func(p *plane) { p.file("sa.pub", make([]byte, backup.MaxSmall+1)) }, "at most"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlane(t)
			before, err := p.maker().Make(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			tt.change(p)
			p.cfg.Now = func() time.Time { return time.Now().Add(time.Minute) }
			if s, err := p.maker().Make(t.Context()); err == nil || !strings.Contains(err.Error(), tt.says) || s != (backup.Stored{}) {
				t.Errorf("%+v, %v", s, err)
			}
			if got := p.files(); !slices.Equal(got, []string{before.Name, backup.Latest, "lock"}) {
				t.Errorf("files: %q", got)
			}
			if latest, err := Latest(p.cfg.Root); err != nil || latest != before {
				t.Errorf("the latest is %+v, %v", latest, err)
			}
		})
	}
}

func (p *plane) remove(name string) {
	p.t.Helper()
	if err := os.Remove(filepath.Join(p.cfg.Root, "/etc/kubernetes/pki", name)); err != nil {
		p.t.Fatal(err)
	}
}

// B4: what a process that was killed has left is removed by the next one, and two do not write at one time.
func TestAfterAKillTheNextBackupIsMade(t *testing.T) {
	p := newPlane(t)
	for _, dir := range []string{Folder, workFolder} {
		if err := os.MkdirAll(filepath.Join(p.cfg.Root, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, left := range []string{filepath.Join(Folder, unfinished), filepath.Join(workFolder, backup.Snapshot)} {
		if err := os.WriteFile(filepath.Join(p.cfg.Root, left), []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m := p.maker()
	unlock, err := m.lock()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.maker().Make(t.Context()); err == nil || !strings.Contains(err.Error(), "another backup") {
		t.Errorf("beside another one: %v", err)
	}
	if err := unlock(); err != nil {
		t.Fatal(err)
	}
	s, err := m.Make(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got := p.files(); !slices.Equal(got, []string{s.Name, backup.Latest, "lock"}) {
		t.Errorf("files: %q", got)
	}
}

func TestTheOldestBackupsAreRemoved(t *testing.T) {
	p := newPlane(t)
	at := time.Date(2026, 11, 26, 10, 0, 0, 0, time.UTC)
	p.cfg.Now = func() time.Time { return at }
	var names []string
	// The last two are made after the clock was put back.
	for _, after := range []time.Duration{0, time.Hour, 2 * time.Hour, -time.Hour, -30 * time.Minute} {
		at = time.Date(2026, 11, 26, 10, 0, 0, 0, time.UTC).Add(after)
		s, err := p.maker().Make(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, s.Name)
	}
	if got := p.files(); !slices.Equal(got, []string{names[3], names[4], backup.Latest, "lock"}) {
		t.Errorf("files: %q of %q", got, names)
	}
}

func TestTheNewestBackupIsMeasured(t *testing.T) {
	p := newPlane(t)
	c := Collector{Root: p.cfg.Root, Every: time.Hour}
	expect := func(made float64, size int64) {
		t.Helper()
		want := fmt.Sprintf("# HELP muster_backup_interval_seconds The time between two backups by the schedule of this control plane's image; 0: there is no schedule.\n# TYPE muster_backup_interval_seconds gauge\nmuster_backup_interval_seconds 3600\n"+
			"# HELP muster_backup_size_bytes The size of that backup; 0: there is none.\n# TYPE muster_backup_size_bytes gauge\nmuster_backup_size_bytes %d\n"+
			"# HELP muster_backup_timestamp_seconds When the newest backup of the cluster on this control plane was made, in seconds since 1970; 0: there is none.\n# TYPE muster_backup_timestamp_seconds gauge\nmuster_backup_timestamp_seconds %g\n", size, made)
		if err := testutil.CollectAndCompare(c, strings.NewReader(want)); err != nil {
			t.Error(err)
		}
	}
	expect(0, 0)
	p.cfg.Now = func() time.Time { return time.Unix(1e9, 0) }
	s, err := p.maker().Make(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	expect(1e9, s.Size)
	if n := testutil.CollectAndCount(Collector{Root: t.TempDir()}); n != 0 {
		t.Errorf("a worker has %d series", n)
	}
}

func TestBackupsAreMadeBySchedule(t *testing.T) {
	p := newPlane(t)
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		m := p.maker()
		go func() { done <- m.Run(ctx, 24*time.Hour) }()
		after := func(d time.Duration, want int64, what string) {
			t.Helper()
			time.Sleep(d)
			synctest.Wait()
			if n := p.made.Load(); n != want {
				t.Errorf("%s: %d backups, want %d", what, n, want)
			}
		}
		after(time.Second, 1, "at once, if there is none")
		after(23*time.Hour, 1, "within a day")
		after(2*time.Hour, 2, "after a day")
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestAScheduleGoesOnAfterFailures(t *testing.T) {
	p := newPlane(t)
	p.broken.Store(true)
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		m := p.maker()
		go func() { done <- m.Run(ctx, 24*time.Hour) }()
		time.Sleep(12 * time.Hour)
		synctest.Wait()
		if n := p.made.Load(); n < 12 || n > 60 {
			t.Errorf("in 12 hours it has tried %d times", n)
		}
		p.broken.Store(false)
		// A file that can't be read is no reason to make none.
		if err := os.WriteFile(filepath.Join(p.cfg.Root, Folder, backup.Latest), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if latest, err := Latest(p.cfg.Root); err != nil || latest.Name == "" {
			t.Errorf("%+v, %v", latest, err)
		}
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
