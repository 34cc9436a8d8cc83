package backups

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
)

// logServer is an API server of control planes, through which it serves their logs: a body, or nothing for ever.
type logServer struct {
	nodes []string
	files map[string][]byte // by path below /api/v1/nodes; nil: it is never sent
}

func (s *logServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	reply := func(v any) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(v)
	}
	v := metav1.GroupVersionForDiscovery{GroupVersion: v1alpha1.GroupVersion.String(), Version: v1alpha1.GroupVersion.Version}
	group := metav1.APIGroup{Name: v1alpha1.GroupVersion.Group, Versions: []metav1.GroupVersionForDiscovery{v}, PreferredVersion: v}
	switch r.URL.Path {
	case "/api":
		reply(metav1.APIVersions{Versions: []string{"v1"}})
	case "/apis":
		reply(metav1.APIGroupList{Groups: []metav1.APIGroup{group}})
	case "/api/v1":
		reply(metav1.APIResourceList{GroupVersion: "v1", APIResources: []metav1.APIResource{{Name: "nodes", Kind: "Node", Verbs: []string{"list"}}}})
	case "/apis/" + group.Name:
		reply(group)
	case "/apis/" + v.GroupVersion:
		reply(metav1.APIResourceList{GroupVersion: v.GroupVersion, APIResources: []metav1.APIResource{{Name: "attestednodes", Kind: "AttestedNode", Verbs: []string{"list"}}}})
	case "/api/v1/nodes":
		list := corev1.NodeList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}}
		for _, n := range s.nodes {
			list.Items = append(list.Items, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n}, Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}}}})
		}
		reply(list)
	case "/apis/" + v.GroupVersion + "/attestednodes":
		list := v1alpha1.AttestedNodeList{TypeMeta: metav1.TypeMeta{APIVersion: v.GroupVersion, Kind: "AttestedNodeList"}}
		for _, n := range s.nodes {
			list.Items = append(list.Items, v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: n}, Spec: v1alpha1.AttestedNodeSpec{Role: v1alpha1.RoleControlPlane}})
		}
		reply(list)
	default:
		body, there := s.files[strings.TrimPrefix(r.URL.Path, "/api/v1/nodes/")]
		switch {
		case !there:
			w.WriteHeader(http.StatusNotFound)
		case body == nil:
			w.WriteHeader(http.StatusOK)
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		default:
			_, _ = w.Write(body)
		}
	}
}

// backups is an owner whose control planes have backups.
type backups struct {
	*ownertest.Owned
	*logServer
	ca     ownertest.Authority
	folder string
}

func newBackups(t *testing.T, nodes ...string) *backups {
	t.Helper()
	b := &backups{logServer: &logServer{nodes: nodes, files: map[string][]byte{}}, ca: ownertest.NewAuthority(t), folder: filepath.Join(t.TempDir(), "backups")}
	server := httptest.NewUnstartedServer(b.logServer)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	leaf := b.ca.Sign(t, &x509.Certificate{SerialNumber: big.NewInt(2), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}, key.Public())
	server.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{leaf.Raw}, PrivateKey: key}}, MinVersion: tls.VersionTLS13}
	server.StartTLS()
	t.Cleanup(server.Close)
	conf := clientcmdapi.NewConfig()
	conf.Clusters["c"] = &clientcmdapi.Cluster{Server: server.URL, CertificateAuthorityData: ownertest.PEMOf(b.ca.Cert)}
	conf.Contexts["x"], conf.CurrentContext = &clientcmdapi.Context{Cluster: "c"}, "x"
	text, err := clientcmd.Write(*conf)
	if err != nil {
		t.Fatal(err)
	}
	b.Owned = ownertest.Own(t, &ownertest.FirstMachine{Addr: "192.0.2.1:9000"}, strings.TrimPrefix(server.URL, "https://"), []byte("version: 1\n"))
	c := b.Cluster()
	c.ClusterID, c.Stage = b.ClusterID().String(), ownerdir.StageInstalled
	if err := errors.Join(b.Write(ownerdir.AdminConf, text), b.Save(c)); err != nil {
		t.Fatal(err)
	}
	return b
}

// has gives a control plane a backup of a time, as its newest one. Its database makes it another file.
func (b *backups) has(t *testing.T, node string, at time.Time, db string) (name string, content []byte) {
	t.Helper()
	info := clusterinfo.Info{ClusterID: b.ClusterID(), KubernetesVersion: "1.36.1", ControlPlaneEndpoint: "127.0.0.1:1"}
	cluster, err := info.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	owner, err := b.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	at = at.UTC().Truncate(time.Second)
	m := backup.Manifest{ClusterID: b.ClusterID().String(), Node: node, TakenAt: at, State: backup.State{Epoch: 4, PolicySerial: 1, Cluster: cluster}}
	var out bytes.Buffer
	if err := backup.Write(&out, access.PublicOf(owner), b.ca.Key, m, nil, strings.NewReader(db), int64(len(db)), sha256.Sum256([]byte(db))); err != nil {
		t.Fatal(err)
	}
	b.says(t, node, at, out.Bytes(), access.PublicOf(owner))
	return backup.Name(node, at), out.Bytes()
}

// says has a control plane serve a content as its newest backup.
func (b *backups) says(t *testing.T, node string, at time.Time, content []byte, owner ed25519.PublicKey) {
	t.Helper()
	sum := sha256.Sum256(content)
	latest, err := json.Marshal(backup.Stored{Name: backup.Name(node, at), Size: int64(len(content)), SHA256: hex.EncodeToString(sum[:]), TakenAt: at, OwnerKey: base64.StdEncoding.EncodeToString(owner)})
	if err != nil {
		t.Fatal(err)
	}
	b.files[b.path(node, backup.Latest)], b.files[b.path(node, backup.Name(node, at))] = latest, content
}

func (b *backups) path(node, file string) string {
	return node + "/proxy/logs/" + backup.LogFolder + "/" + file
}

// latest fetches the newest backup. A node may be silent for a moment only.
func (b *backups) latest(t *testing.T, from string) (*BackupInfo, []string, error) {
	t.Helper()
	var reports []string
	f, err := newFetcher(b.Dir, b.folder, func(s string) { reports = append(reports, s) })
	if err != nil {
		t.Fatal(err)
	}
	f.silence = 2 * time.Second
	ctx, cancel := context.WithTimeout(t.Context(), ownertest.Patience)
	defer cancel()
	info, err := f.latest(ctx, from)
	return info, reports, err
}

// stay returns the names in the folder.
func (b *backups) stay(t *testing.T) (names []string) {
	t.Helper()
	files, err := os.ReadDir(b.folder)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, f := range files {
		names = append(names, f.Name())
	}
	return names
}

// A hostile control plane, by whatever it says and serves, does not keep the owner from the newest backup of another one.
func TestAHostileControlPlaneDoesNotStopTheNewestBackup(t *testing.T) {
	now := time.Now().UTC().Truncate(time.Second)
	latest, hour := "hostile/proxy/logs/"+backup.LogFolder+"/"+backup.Latest, now.Add(-time.Hour)
	for name, tt := range map[string]struct {
		hostile func(t *testing.T, b *backups)
		says    string // in the error; "": it is only reported
		reports string
	}{
		"its newest backup is of 2099": {hostile: func(t *testing.T, b *backups) {
			b.has(t, "hostile", time.Date(2099, 1, 1, 0, 0, 0, 0, time.UTC), "x")
		}, says: "its clock is wrong, or the report was forged"},
		"its newest backup is of 11 minutes from now": {hostile: func(t *testing.T, b *backups) { b.has(t, "hostile", now.Add(ownerorder.MaxAge+time.Minute), "x") }, says: "its clock is wrong"},
		"it sends no list":                            {hostile: func(_ *testing.T, b *backups) { b.files[latest] = nil }, reports: "no answer within 2s"},
		"its list is none":                            {hostile: func(_ *testing.T, b *backups) { b.files[latest] = []byte("{}") }, reports: "can't be read"},
		"it has none":                                 {hostile: func(*testing.T, *backups) {}, reports: "hostile: has no backup"},
		"it sends no backup": {hostile: func(t *testing.T, b *backups) {
			name, _ := b.has(t, "hostile", now, "x")
			b.files[b.path("hostile", name)] = nil
		}, says: "it has sent nothing for 2s"},
		"its backup is none": {hostile: func(t *testing.T, b *backups) {
			owner, err := b.OwnerKey()
			if err != nil {
				t.Fatal(err)
			}
			b.says(t, "hostile", now, []byte("none"), access.PublicOf(owner))
		}, says: "is refused"},
		"its backup is for another owner": {hostile: func(t *testing.T, b *backups) { b.says(t, "hostile", now, []byte("x"), make([]byte, 32)) }, says: "can't be read"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBackups(t, "hostile", "older", "good")
			b.has(t, "older", hour.Add(-time.Hour), "older")
			want, _ := b.has(t, "good", hour, "good")
			tt.hostile(t, b)
			info, reports, err := b.latest(t, "")
			if info == nil || info.Node != "good" || info.File != filepath.Join(b.folder, want) {
				t.Fatalf("%+v, %v", info, err)
			}
			if text := strings.Join(reports, "\n"); !strings.Contains(text, tt.reports) || !strings.Contains(text, tt.says) {
				t.Errorf("it reports %s", text)
			}
			if tt.says == "" && err != nil || tt.says != "" && (err == nil || !strings.Contains(err.Error(), tt.says)) {
				t.Errorf("%v, want %q", err, tt.says)
			}
			if names := b.stay(t); !slices.Equal(names, []string{want}) {
				t.Errorf("%q stay", names)
			}
			// The same control plane with a genuine one is not passed over.
			want, _ = b.has(t, "hostile", now, "genuine")
			if info, _, err := b.latest(t, ""); err != nil || info.File != filepath.Join(b.folder, want) {
				t.Errorf("%+v, %v", info, err)
			}
			// Alone, it is an error.
			tt.hostile(t, b)
			delete(b.files, b.path("hostile", backup.Latest))
			tt.hostile(t, b)
			if info, _, err := b.latest(t, "hostile"); err == nil || info != nil {
				t.Errorf("%+v, %v", info, err)
			}
		})
	}
}

// Root on a control plane can sign another backup of the same name and time. The owner's copy stays.
func TestABackupNeverReplacesAnotherContent(t *testing.T) {
	now := time.Now().UTC().Truncate(time.Second)
	b := newBackups(t, "node1", "node2")
	older, _ := b.has(t, "node2", now.Add(-time.Hour), "older")
	name, genuine := b.has(t, "node1", now, "genuine")
	for range 2 { // the same content again is no error
		info, _, err := b.latest(t, "")
		if err != nil || info.File != filepath.Join(b.folder, name) {
			t.Fatalf("%+v, %v", info, err)
		}
	}
	b.has(t, "node1", now, "forged")
	info, _, err := b.latest(t, "")
	if err == nil || !strings.Contains(err.Error(), "node1 sent another backup than the existing file") || !strings.Contains(problem.Explain(err).Remedy, "Do not trust node1") || info == nil || info.Node != "node2" {
		t.Errorf("%+v, %v", info, err)
	}
	if have, err := os.ReadFile(filepath.Join(b.folder, name)); err != nil || !bytes.Equal(have, genuine) {
		t.Errorf("the owner's copy was replaced: %v", err)
	}
	if names := b.stay(t); len(names) != 2 || !slices.Contains(names, older) || !slices.Contains(names, name) {
		t.Errorf("%q stay", names)
	}
	// Another name is no obstacle.
	if name, _ = b.has(t, "node1", now.Add(time.Second), "forged"); true {
		if info, _, err := b.latest(t, ""); err != nil || info.File != filepath.Join(b.folder, name) {
			t.Errorf("%+v, %v", info, err)
		}
	}
}

// The report is compared with the order that is waited for, which an earlier run of the command may have signed.
func TestABackupIsYoungerThanItsOrder(t *testing.T) {
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	at := time.Now().Add(-40 * time.Minute)
	signed, err := ownerorder.MachineOrder{Node: "n", Action: ownerorder.ActionBackup, SignedAt: at}.Sign(key)
	if err != nil {
		t.Fatal(err)
	}
	if err := madeFor(signed, "n", backup.Stored{TakenAt: at.Add(time.Minute)}); err != nil {
		t.Errorf("made after the order, before the command was repeated: %v", err)
	}
	if err := madeFor(signed, "n", backup.Stored{TakenAt: at.Add(-ownerorder.MaxAge - time.Minute)}); err == nil || !strings.Contains(err.Error(), "before the order") {
		t.Errorf("%v", err)
	}
}
