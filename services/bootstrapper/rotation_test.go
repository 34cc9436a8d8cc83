package bootstrapper_test

import (
	"encoding/pem"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// During a rotation, a control plane that was faster than the joinservice's keeps its new key. A key that the machine does not have is not added: the new
// key's public part is only an entry of the cluster's description.
func TestAKeyOfARotationIsKeptAndNotAdded(t *testing.T) {
	block := func(name string) string {
		return string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: []byte(name)}))
	}
	const at = "etc/kubernetes/pki/sa.pub"
	for name, tt := range map[string]struct {
		key       clusterinfo.RotatedKey
		has, want string
		finding   bool
	}{
		"a new key that it has":            {clusterinfo.ServiceAccountKey, block("a") + block("new"), block("a") + block("new"), false},
		"a new key that it lacks":          {clusterinfo.ServiceAccountKey, block("a"), block("a"), false},
		"one more than the new key":        {clusterinfo.ServiceAccountKey, block("a") + block("new") + block("evil"), block("a") + block("new"), true},
		"the new key of another file":      {clusterinfo.FrontProxyCA, block("a") + block("new"), block("a"), true},
		"the new key, and none is rotated": {"", block("a") + block("new"), block("a"), true},
	} {
		t.Run(name, func(t *testing.T) {
			w := rebooted(t)
			w.desires(t, func(d *component.Desired) {
				d.Authorities["sa.pub"] = []byte(block("a"))
				if tt.key != "" {
					d.Rotation = &component.Rotation{Key: tt.key, ID: strings.Repeat("ab", 32), Keep: []byte(block("new"))}
				}
			})
			w.put(t, at, tt.has)
			w.startAgain(t)
			if got := w.get(at); got != tt.want {
				t.Errorf("it is %q, want %q", got, tt.want)
			}
			if strings.Contains(w.logged.String(), tampered) != tt.finding {
				t.Errorf("a finding is %v, want %v", !tt.finding, tt.finding)
			}
		})
	}
}

// B8: a staged key that an attacker knows must not become the cluster's new key.
func TestOnlyAStagedKeyOfTheRotationIsKept(t *testing.T) {
	id, other := strings.Repeat("ab", 32), strings.Repeat("cd", 32)
	const folder = "etc/kubernetes/pki/muster-rotation/"
	for name, tt := range map[string]struct {
		rotation *component.Rotation
		file     string
		kept     bool
	}{
		"none is in progress":                 {nil, "service-account-key." + id, false},
		"the key of the rotation":             {&component.Rotation{Key: clusterinfo.ServiceAccountKey, ID: id}, "service-account-key." + id, true},
		"another ID":                          {&component.Rotation{Key: clusterinfo.ServiceAccountKey, ID: id}, "service-account-key." + other, false},
		"another kind of key":                 {&component.Rotation{Key: clusterinfo.EncryptionKey, ID: id}, "service-account-key." + id, false},
		"no control plane has reported its":   {&component.Rotation{Key: clusterinfo.ServiceAccountKey}, "service-account-key." + id, true},
		"another kind, and none has reported": {&component.Rotation{Key: clusterinfo.EtcdCA}, "service-account-key." + id, false},
		"a folder":                            {&component.Rotation{Key: clusterinfo.ServiceAccountKey, ID: id}, "service-account-key." + id + "/file", false},
	} {
		t.Run(name, func(t *testing.T) {
			w := rebooted(t)
			w.desires(t, func(d *component.Desired) { d.Rotation = tt.rotation })
			w.put(t, folder+tt.file, "staged")
			w.startAgain(t)
			if w.exists(folder+tt.file) != tt.kept {
				t.Errorf("it is kept: %v", !tt.kept)
			}
			if strings.Contains(w.logged.String(), tampered) == tt.kept {
				t.Errorf("a finding is %v", tt.kept)
			}
		})
	}
	w := rebooted(t)
	w.put(t, folder+".muster-1", "the rest of a write that a crash has ended")
	w.startAgain(t)
	if w.exists(folder+".muster-1") || strings.Contains(w.logged.String(), tampered) {
		t.Error("the rest of a write is there, or is a finding")
	}
}

// The cluster's authority is in kubeconfigs as well. A machine that was off while it was rotated trusts fewer, and a control plane that was faster than the
// joinservice's more: that is no finding. Any other authority is.
func TestKubeconfigsTrustTheClustersAuthoritiesOfNow(t *testing.T) {
	next, evil := attesttest.NewCA(t).PEM(), attesttest.NewCA(t).PEM()
	for _, file := range []string{"etc/kubernetes/kubelet.conf", "etc/kubernetes/admin.conf"} {
		for name, tt := range map[string]struct {
			lists, keep      string // beside the machine's authority
			has, want        string
			replaces         bool // the machine's authority
			rotates, finding bool
		}{
			"as before":                                    {"", "", "", "", false, false, false},
			"a second one that it lacks":                   {next, "", "", next, false, true, false},
			"a second one that it has":                     {next, "", next, next, false, true, false},
			"a new one that only this machine has":         {"", next, next, next, false, true, false},
			"a new one that no control plane has":          {"", next, "", "", false, true, false},
			"another one beside it":                        {"", "", evil, "", false, false, true},
			"another one instead of it":                    {"", "", evil, "", true, false, true},
			"another one while one is rotated":             {next, "", evil, next, false, true, true},
			"a new one, and the key of Secrets is rotated": {"", next, next, "", false, false, true},
		} {
			t.Run(file+", "+name, func(t *testing.T) {
				w := rebooted(t)
				own := strings.TrimSpace(w.get("etc/kubernetes/pki/ca.crt")) + "\n"
				w.desires(t, func(d *component.Desired) {
					d.Authorities[component.CA] = []byte(own + tt.lists)
					d.Rotation = &component.Rotation{Key: clusterinfo.EncryptionKey, ID: strings.Repeat("ab", 32), Keep: []byte(tt.keep)}
					if tt.rotates {
						d.Rotation.Key = clusterinfo.ClusterCA
					}
				})
				if tt.keep != "" && tt.has != "" { // the control plane accepts the new one already
					w.put(t, "etc/kubernetes/pki/ca.crt", own+tt.has)
				}
				has := own + tt.has
				if tt.replaces {
					has = tt.has
				}
				text, err := kubelet.WithAuthorities([]byte(w.get(file)), []byte(has))
				if err != nil {
					t.Fatal(err)
				}
				w.put(t, file, string(text))
				w.startAgain(t)
				if got := string(kubelet.Authorities([]byte(w.get(file)))); strings.TrimSpace(got) != strings.TrimSpace(own+tt.want) {
					t.Errorf("it trusts %s, want %s", got, own+tt.want)
				}
				if strings.Contains(w.logged.String(), tampered) != tt.finding {
					t.Errorf("a finding is %v: %s", !tt.finding, w.logged)
				}
			})
		}
	}
}
