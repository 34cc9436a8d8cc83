package doctor

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"net"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/keys"
)

const enrolledDisk = "3f1c9d2a-5b7e-4c1d-8a6f-0123456789ab"

// versions returns the resource versions of the objects that a drill reads: they change with every write.
func versions(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, kind := range []schema.GroupVersionKind{
		corev1.SchemeGroupVersion.WithKind("SecretList"), corev1.SchemeGroupVersion.WithKind("ConfigMapList"), corev1.SchemeGroupVersion.WithKind("NodeList"),
		v1alpha1.GroupVersion.WithKind("AttestedNodeList"), v1alpha1.GroupVersion.WithKind("AttestationPolicyList"),
	} {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(kind)
		try(t, shared.Client.List(t.Context(), list))
		for _, o := range list.Items {
			out[o.GetKind()+" "+o.GetNamespace()+"/"+o.GetName()] = o.GetResourceVersion()
		}
	}
	return out
}

// testDrill runs drills on a healthy cluster; then the folder or the cluster is broken in one way, the drill fails in
// the expected check, and passes again after the repair.
func testDrill(t *testing.T, p *patient) {
	drill := func(t *testing.T) *checkup.Report {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		return Drill(ctx, Config{Folder: p.folder, DialContext: p.dial, Now: p.now})
	}
	node := typed(v1alpha1.GroupVersion.WithKind("AttestedNode"), "node1")
	try(t, shared.Client.Get(t.Context(), client.ObjectKeyFromObject(node), node))
	machine, _, _ := unstructured.NestedString(node.Object, "spec", "machineID")
	setDisk(t, enrolledDisk)
	defer setDisk(t, "")
	salted := created(&v1alpha1.AttestedDisk{ObjectMeta: metav1.ObjectMeta{Name: enrolledDisk}, Spec: v1alpha1.AttestedDiskSpec{MachineID: machine, Salt: keys.DiskSalt{3}.String(), RootVersion: 1}})(t)
	defer salted(t)
	try(t, p.dir.Remember(&ownerdir.Known{Nodes: map[string]ownerdir.KnownNode{"node1": {MachineID: machine, Disk: ownerdir.KnownDisk{ID: enrolledDisk, Salt: keys.DiskSalt{3}.String(), RootVersion: 1}}}}))
	defer func() { try(t, os.Remove(p.dir.File(ownerdir.KnownFile))) }()
	p.examine(t) // records the disk

	sound := func(t *testing.T) {
		t.Helper()
		before := versions(t)
		r := drill(t)
		for _, f := range r.Findings {
			if f.Level == checkup.Fail {
				t.Errorf("a sound cluster: %+v", f)
			}
		}
		if err := r.Verdict(); err != nil {
			t.Error(err)
		}
		for name, version := range versions(t) {
			if before[name] != version {
				t.Errorf("the drill changed %s", name)
			}
		}
		for _, check := range []string{CheckFolder, CheckClusterID, CheckAPI, CheckOwnerKey, CheckRoot, CheckDescription, CheckDiskKeys, CheckControlPlanes} {
			if !found(r, check, checkup.OK, "") {
				t.Errorf("%s was not made: %+v", check, r.Findings)
			}
		}
		if !found(r, CheckControlPlanes, checkup.OK, "muster recover 192.168.77.11 --machine-id "+machine) {
			t.Errorf("nothing says how to recover the control plane: %+v", r.Findings)
		}
		secrets, err := p.dir.Secrets()
		try(t, err)
		for _, f := range r.Findings {
			for _, s := range [][]byte{secrets.Root[:], secrets.Salt[:]} {
				if strings.Contains(f.Detail+f.Remedy, hex.EncodeToString(s)) || strings.Contains(f.Detail, base64.StdEncoding.EncodeToString(s)) {
					t.Errorf("a secret is shown: %+v", f)
				}
			}
		}
	}
	sound(t)

	core := corev1.SchemeGroupVersion
	digits := func(b byte) []byte { return []byte(strings.Repeat(hex.EncodeToString([]byte{b}), 32) + "\n") }
	write := func(content []byte) func(string, []byte) error {
		return func(path string, _ []byte) error { return os.WriteFile(path, content, 0o600) }
	}
	tampered := attesttest.NewMachine(t, attesttest.NewCA(t), attesttest.Options{})
	for _, tt := range []struct {
		name         string
		check, says  string
		harm         func(*testing.T) func(*testing.T)
		notLookedFor string // a check that is left out, since it could report nothing
	}{
		{"another root secret in the folder", CheckClusterID, "the cluster ID derived from root-secret, salt and measurement-salt is", p.file("root-secret", write(digits(7))), ""},
		{"another salt in the folder", CheckDiskKeys, "the key for disk " + enrolledDisk + " derived from the folder differs", p.file("salt", write(digits(7))), ""},
		{"another root secret in the folder, by the Secret", CheckRoot, "not the one", p.file("root-secret", write(digits(7))), ""},
		{"another measurement salt in the folder", CheckDescription, "measurementSalt", p.file("measurement-salt", write(digits(7))), ""},
		{"a root secret of zeroes", CheckClusterID, "all zeroes", p.file("root-secret", write(digits(0))), ""},
		{"no root secret", CheckFolder, "root-secret", p.file("root-secret", func(path string, _ []byte) error { return os.Remove(path) }), CheckClusterID},
		{"a root secret that others may read", CheckFolder, "mode 0644", p.file("root-secret", func(path string, _ []byte) error { return os.Chmod(path, 0o644) }), CheckClusterID},
		{"another owner's key", CheckOwnerKey, "another owner's key", p.file("owner.key", func(path string, _ []byte) error {
			_ = os.Remove(path)
			_, err := ownerdir.NewKeyFile(path)
			return err
		}), ""},
		{"another owner's key, by cluster.json", CheckClusterID, "owner.key", p.file("owner.key", func(path string, _ []byte) error {
			_ = os.Remove(path)
			_, err := ownerdir.NewKeyFile(path)
			return err
		}), ""},
		{"a policy that does not parse", CheckPolicy, "POLICY_INVALID", p.file(ownerdir.PolicyFile, write([]byte("version: 9\n"))), CheckControlPlanes},
		{"another policy of the cluster's serial", CheckPolicy, "differs from the cluster's", p.file(ownerdir.PolicyFile, func(path string, content []byte) error {
			return os.WriteFile(path, []byte(strings.Replace(string(content), "10.0.0.0/8", "10.0.0.0/9", 1)), 0o600)
		}), ""},
		{"a damaged known.json", CheckFolder, "known.json: the file is damaged", p.file(ownerdir.KnownFile, write([]byte("{bad"))), CheckControlPlanes},
		{"a known.json of another version", CheckFolder, "known.json: version 99 was written by another version of muster", p.file(ownerdir.KnownFile, write([]byte(`{"version": 99}`))), CheckControlPlanes},
		{"a policy that would not accept the machines", CheckControlPlanes, "EK_UNTRUSTED", p.file(ownerdir.PolicyFile, write(attesttest.Policy(t, attesttest.NewCA(t), []*attesttest.Machine{tampered}))), ""},
		{"no kubeconfig", CheckKubeconfig, "has no admin.conf yet", p.file(ownerdir.AdminConf, func(path string, _ []byte) error { return os.Remove(path) }), CheckRoot},
		{"the Secret is gone", CheckRoot, "gone", deleted(namespaced(core.WithKind("Secret"), "muster-kms-root")), CheckDiskKeys},
		{"another root in the Secret", CheckDiskKeys, "derived from the folder differs from the cluster's", edited(namespaced(core.WithKind("Secret"), "muster-kms-root"), base64.StdEncoding.EncodeToString([]byte(strings.Repeat("x", 32))), "data", "root"), ""},
		{"a short root in the Secret", CheckDiskKeys, "32 bytes", edited(namespaced(core.WithKind("Secret"), "muster-kms-root"), "eA==", "data", "root"), ""},
		{"the description is gone", CheckDescription, "gone", deleted(namespaced(core.WithKind("ConfigMap"), clusterinfo.ConfigMap)), ""},
		{"an enrollment without its disk", CheckControlPlanes, "names no disk", diskless, ""},
		{"a folder without the salt of its disk", CheckControlPlanes, "can't recover it: DISK_ERASED: the folder has no salt of disk " + enrolledDisk, p.file(ownerdir.KnownFile, func(path string, _ []byte) error { return os.Remove(path) }), ""},
		{"no control plane", CheckControlPlanes, "no enrolled control plane", edited(node, true, "spec", "banned"), ""},
		{"a control plane out of reach", CheckControlPlanes, "no route to host", func(*testing.T) func(*testing.T) {
			dial := p.dial
			p.dial = func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("no route to host") }
			return func(*testing.T) { p.dial = dial }
		}, ""},
		{"another machine at its address", CheckControlPlanes, "EK_UNTRUSTED", func(t *testing.T) func(*testing.T) {
			dial := p.dial
			p.dial = serveJoin(t, tampered)
			return func(*testing.T) { p.dial = dial }
		}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			repair := tt.harm(t)
			r := drill(t)
			if r.Verdict() == nil || !found(r, tt.check, checkup.Fail, tt.says) {
				t.Errorf("%s does not say %q: %+v", tt.check, tt.says, r.Findings)
			}
			for _, f := range r.Findings {
				if f.Level != checkup.OK && f.Remedy == "" {
					t.Errorf("without a remedy: %+v", f)
				}
				if f.Check == CheckAPI && f.Level == checkup.Fail || tt.name == "a damaged known.json" && f.Level == checkup.Fail && !strings.Contains(f.Remedy, "newest copy") {
					t.Errorf("a remedy of something else: %+v", f)
				}
				if f.Level == checkup.Fail && strings.Contains(f.Detail, "muster recover ") {
					t.Errorf("a command is shown that will be refused: %+v", f)
				}
				if strings.Contains(f.Detail, "not the one in the owner's folder") && !strings.Contains(f.Remedy, "Change nothing in the cluster") {
					t.Errorf("whoever drills with another folder is told to harm the cluster: %+v", f)
				}
			}
			if tt.notLookedFor != "" && found(r, tt.notLookedFor, checkup.OK, "") {
				t.Errorf("%s says OK: %+v", tt.notLookedFor, r.Findings)
			}
			repair(t)
		})
	}
	t.Run("a folder that has the salt, and knows the disk as another machine's", func(t *testing.T) {
		repair := p.file(ownerdir.KnownFile, func(path string, content []byte) error {
			return os.WriteFile(path, []byte(strings.ReplaceAll(string(content), machine, strings.Repeat("9", 64))), 0o600)
		})(t)
		defer repair(t)
		r := drill(t)
		if r.Verdict() != nil || !found(r, CheckControlPlanes, checkup.Warn, "--machine-id "+machine+" --disk "+enrolledDisk) {
			t.Errorf("%+v", r.Findings)
		}
	})
	sound(t)
}

// setDisk changes the disk of the control plane's enrollment, or takes it out of it, as a restore of etcd can. The API server permits that only of a banned one.
func setDisk(t *testing.T, disk string) {
	t.Helper()
	for _, banned := range []bool{true, false} {
		change(t, &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}, false, func(n *v1alpha1.AttestedNode) {
			if n.Spec.Banned = banned; !banned {
				n.Spec.DiskID = disk
			}
		})
	}
}

func diskless(t *testing.T) func(*testing.T) {
	t.Helper()
	setDisk(t, "")
	return func(t *testing.T) { t.Helper(); setDisk(t, enrolledDisk) }
}

func found(r *checkup.Report, check string, level checkup.Level, says string) bool {
	for _, f := range r.Findings {
		if f.Check == check && f.Level == level && strings.Contains(f.Detail, says) {
			return true
		}
	}
	return false
}

func TestADrillOnAFolderThatIsNone(t *testing.T) {
	r := Drill(t.Context(), Config{Folder: t.TempDir()})
	if r.Verdict() == nil || !found(r, CheckFolder, checkup.Fail, "") {
		t.Errorf("%+v", r.Findings)
	}
}
