package machinetest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// Machine simulates kubeadm and systemctl on real files below Root. Like kubeadm itself it fails on files that an earlier run left, so that a missing
// clean-up is found.
type Machine struct {
	// Root is the root of the file system.
	Root string
	// API is the API server of the administrator's kubeconfig. If it runs in another process, AdminConf, its kubeconfig, is set instead.
	API       *APIServer
	AdminConf []byte
	// Step, if set, is called before each effect with its name; an error ends the simulated program in the middle of its work.
	Step func(name string) error
	// Units, if set, is a folder with a file for each unit that runs: they outlive this process.
	Units string

	mu    sync.Mutex
	calls []string
	units map[string]bool
}

var _ machine.Machine = (*Machine)(nil)

// Calls returns the calls so far, as in "kubeadm init" or "start kubelet.service".
func (m *Machine) Calls() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.calls)
}

// Running reports whether a unit was started and not stopped.
func (m *Machine) Running(unit string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.Units != "" {
		_, err := os.Stat(filepath.Join(m.Units, unit))
		return err == nil
	}
	return m.units[unit]
}

// Runs marks a unit as running that another process has started.
func (m *Machine) Runs(unit string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.set(unit, true)
}

// set is called with the mutex held.
func (m *Machine) set(unit string, runs bool) error {
	if m.units == nil {
		m.units = map[string]bool{}
	}
	m.units[unit] = runs
	switch {
	case m.Units == "":
	case runs:
		return machine.WriteFile(filepath.Join(m.Units, unit), nil, 0o600, 0o700)
	default:
		return os.RemoveAll(filepath.Join(m.Units, unit))
	}
	return nil
}

// Reboot stops all units and clears files in memory.
func (m *Machine) Reboot() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.units = nil
	if m.Units != "" {
		if err := os.RemoveAll(m.Units); err != nil {
			return err
		}
	}
	return os.RemoveAll(m.on("/run"))
}

// Member reports whether the machine is in the cluster's etcd.
func (m *Machine) Member() bool {
	_, err := os.Stat(m.on(memberFile))
	return err == nil
}

// memberFile stands for the membership in the cluster's etcd, which is elsewhere: neither a reset nor the end of this process removes the machine from
// it.
const memberFile = "/cluster/etcd-member"

// Images returns the images of Kubernetes that tests list.
func Images() versions.Images {
	var refs []string
	for i, name := range versions.ImageNames() {
		refs = append(refs, fmt.Sprintf("registry.example/%s:v1@sha256:%064x", name, i+1))
	}
	images, err := versions.ParseImages(refs)
	if err != nil {
		panic("machinetest: " + err.Error()) // the list above is wrong
	}
	return images
}

// LeaveEtcd removes the machine from the cluster's etcd, as [etcd.Clean] does on a real one.
func (m *Machine) LeaveEtcd(ctx context.Context) error {
	m.note("leave etcd")
	if err := m.step(ctx, "before the member is removed"); err != nil {
		return err
	}
	if err := os.RemoveAll(m.on(memberFile)); err != nil {
		return err
	}
	return m.step(ctx, "after the member is removed")
}

func (m *Machine) note(call string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls = append(m.calls, call)
}

func (m *Machine) step(ctx context.Context, name string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if m.Step == nil {
		return nil
	}
	return m.Step(name)
}

// Unit implements [machine.Machine].
func (m *Machine) Unit(ctx context.Context, verb, unit string) error {
	m.note(verb + " " + unit)
	if err := m.step(ctx, verb+" "+unit); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch verb {
	case "start", "restart":
		if _, err := os.Stat(m.on(machine.KubeletMayStart)); err != nil && unit == machine.UnitKubelet {
			return nil // as systemd: a unit whose condition is not met does not fail
		}
		return m.set(unit, true)
	case "stop":
		return m.set(unit, false)
	}
	return nil
}

// Kubeadm implements [machine.Machine].
func (m *Machine) Kubeadm(ctx context.Context, line func(string), args ...string) error {
	words := 1
	switch {
	case len(args) > 1 && args[1] == "phase":
		words = 4
	case args[0] == "upgrade":
		words = 2
	}
	m.note("kubeadm " + strings.Join(args[:words], " "))
	if _, err := os.Stat(m.on("/usr/local/bin/kubeadm")); err != nil {
		return errors.New("kubeadm is not installed")
	}
	switch args[0] {
	case "reset":
		return m.reset(ctx)
	case "upgrade":
		return m.upgrade(ctx, line, args)
	case "init", "join":
		if args[1] == "phase" && args[2] == "addon" {
			if !slices.Equal(args, kubeadm.ProxyManifest(args[len(args)-1])) {
				return fmt.Errorf("kubeadm %q", args)
			}
			line("I0101 00:00:00.000000       1 version.go:1] what a library logs")
			for l := range strings.SplitSeq(proxyManifest, "\n") {
				line(l)
			}
			return nil
		}
		if args[1] == "phase" {
			if len(args) != 6 || !slices.Equal(args[:5], []string{"init", "phase", "certs", "ca", "--config"}) {
				return fmt.Errorf("kubeadm %q", args)
			}
			return m.authority()
		}
		return m.bring(ctx, line, args)
	}
	return fmt.Errorf("kubeadm %q", args)
}

// proxyManifest has the parts of kube-proxy's manifest that are read.
const proxyManifest = `---
apiVersion: v1
kind: ServiceAccount
metadata: {name: kube-proxy, namespace: kube-system}
---
kind: ConfigMap
apiVersion: v1
metadata: {name: kube-proxy, namespace: kube-system}
data: {config.conf: "mode: nftables"}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: kube-proxy, namespace: kube-system}
spec:
  selector: {matchLabels: {k8s-app: kube-proxy}}
  template:
    metadata: {labels: {k8s-app: kube-proxy}}
    spec:
      containers: [{name: kube-proxy, image: registry.k8s.io/kube-proxy:v1.36.1}]`

func (m *Machine) on(path string) string { return filepath.Join(m.Root, path) }

func (m *Machine) bring(ctx context.Context, line func(string), args []string) error {
	verb := args[0]
	if len(args) != 3 || args[1] != "--config" {
		return fmt.Errorf("kubeadm %q", args)
	}
	config, err := os.ReadFile(args[2])
	if err != nil {
		return err
	}
	line("[preflight] Running pre-flight checks")
	for name, patch := range kubeadm.Patches(Images()) {
		at := m.on(filepath.Join(kubeadm.PatchesFolder, name))
		if have, err := os.ReadFile(at); err != nil || string(have) != string(patch) {
			return fmt.Errorf("%s: the static pods' images are not those of the list: %q, %w", at, have, err)
		}
	}
	if err := m.preflight(verb, string(config)); err != nil {
		line("error execution phase preflight: " + err.Error())
		return err
	}
	if err := m.step(ctx, "kubeadm "+verb+" begins"); err != nil {
		return err
	}
	line("[control-plane] Creating static Pod manifest for \"kube-apiserver\"")
	files := map[string]string{"/etc/kubernetes/manifests/kube-apiserver.yaml": "half", "/var/lib/etcd/member": "data"}
	if restored(string(config)) {
		delete(files, "/var/lib/etcd/member")
	}
	if verb == "join" && !controlPlane(string(config)) {
		files = map[string]string{"/etc/kubernetes/pki/ca.crt": "ca", "/var/lib/kubelet/kubeadm-flags.env": "flags"}
	}
	if verb == "join" && controlPlane(string(config)) {
		if err := machine.WriteFile(m.on(memberFile), nil, 0o600, 0o700); err != nil { // before its manifest exists
			return err
		}
		if err := m.step(ctx, "kubeadm join has added a member"); err != nil {
			return err
		}
		files["/etc/kubernetes/manifests/etcd.yaml"] = "etcd"
	}
	for name, content := range files {
		if err := machine.WriteFile(m.on(name), []byte(content), 0o600, 0o755); err != nil {
			return err
		}
	}
	line("[bootstrap-token] Using token: abcdef.0123456789abcdef")
	if err := m.step(ctx, "kubeadm "+verb+" is half done"); err != nil {
		line("error execution phase wait-control-plane: " + err.Error())
		return err
	}
	if verb == "init" {
		if err := m.kubelet(); err != nil {
			return err
		}
		conf := m.AdminConf
		if m.API != nil {
			conf = m.API.Kubeconfig()
		}
		if err := machine.WriteFile(m.on("/etc/kubernetes/admin.conf"), conf, 0o600, 0o755); err != nil {
			return err
		}
	}
	if err := machine.WriteFile(m.on("/var/lib/kubelet/config.yaml"), config, 0o600, 0o755); err != nil {
		return err
	}
	return m.Unit(ctx, "start", machine.UnitKubelet)
}

// authority makes the cluster's authority, as `kubeadm init phase certs ca` does.
func (m *Machine) authority() error {
	if _, err := os.Stat(m.on("/etc/kubernetes/pki/ca.key")); err == nil {
		return nil // it keeps an existing one
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(10, 0, 0),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	for name, block := range map[string]*pem.Block{"ca.crt": {Type: "CERTIFICATE", Bytes: cert}, "ca.key": {Type: "EC PRIVATE KEY", Bytes: der}} {
		if err := machine.WriteFile(m.on("/etc/kubernetes/pki/"+name), pem.EncodeToMemory(block), 0o600, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// kubelet makes the kubelet's credentials, unless they exist: kubeadm's certificate is valid for a year.
func (m *Machine) kubelet() error {
	if _, err := os.Stat(m.on("/etc/kubernetes/kubelet.conf")); err == nil {
		return nil
	}
	if err := m.authority(); err != nil {
		return err
	}
	ca, err := tls.LoadX509KeyPair(m.on("/etc/kubernetes/pki/ca.crt"), m.on("/etc/kubernetes/pki/ca.key"))
	if err != nil {
		return err
	}
	key, _ := ca.PrivateKey.(*ecdsa.PrivateKey)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "system:node:node1", Organization: []string{"system:nodes"}}, NotBefore: time.Now(), NotAfter: time.Now().AddDate(1, 0, 0),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, ca.Leaf, &key.PublicKey, key)
	if err != nil {
		return err
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})
	if err := machine.WriteFile(m.on("/var/lib/kubelet/pki/kubelet-client-current.pem"), text, 0o600, 0o700); err != nil {
		return err
	}
	return machine.WriteFile(m.on("/etc/kubernetes/kubelet.conf"), []byte("kubelet"), 0o600, 0o755)
}

func controlPlane(config string) bool { return strings.Contains(config, "controlPlane") }

// preflight fails where the real one fails.
func (m *Machine) preflight(verb, config string) error {
	for doc := range strings.SplitSeq(config, "---\n") {
		var o map[string]any
		if err := yaml.Unmarshal([]byte(doc), &o); err != nil {
			return err
		}
		if v, _ := o["apiVersion"].(string); v == "" {
			return errors.New("a document without apiVersion")
		}
	}
	absent := []string{"/etc/kubernetes/manifests/kube-apiserver.yaml", "/var/lib/kubelet/config.yaml"}
	present := []string{}
	if restored(config) {
		present = append(present, "/var/lib/etcd/member/snap/db", "/etc/kubernetes/pki/sa.key")
	} else {
		absent = append(absent, "/var/lib/etcd/member")
	}
	if verb == "join" {
		present = []string{"/etc/kubernetes/kubelet.conf", "/run/muster/discovery.conf", "/var/lib/kubelet/pki"}
		if controlPlane(config) {
			if m.Member() {
				return errors.New("etcd: the cluster has a member with this peer URL already")
			}
			present = append(present, "/etc/kubernetes/pki/etcd/ca.key", "/etc/kubernetes/pki/encryption.yaml", "/etc/kubernetes/authz/config.yaml")
		} else {
			absent = append(absent, "/etc/kubernetes/pki/ca.crt")
		}
	} else {
		present = append(present, "/etc/kubernetes/authz/config.yaml", "/etc/kubernetes/pki/encryption.yaml")
	}
	for _, f := range absent {
		if _, err := os.Lstat(m.on(f)); err == nil {
			return fmt.Errorf("[ERROR FileAvailable]: %s already exists", f)
		}
	}
	for _, f := range present {
		if _, err := os.Lstat(m.on(f)); err != nil {
			return fmt.Errorf("[ERROR FileExisting]: %s does not exist", f)
		}
	}
	return nil
}

// restored reports whether kubeadm is told that etcd may have data.
func restored(config string) bool { return strings.Contains(config, "DirAvailable--var-lib-etcd") }

// reset removes what kubeadm's own reset removes; not the state of a half-written etcd.
func (m *Machine) reset(ctx context.Context) error {
	if err := m.step(ctx, "kubeadm reset begins"); err != nil {
		return err
	}
	if m.Member() {
		return errors.New("the disk of a member with a vote would be wiped: with one of two gone, etcd has no quorum")
	}
	for _, f := range []string{"manifests", "pki", "admin.conf", "kubelet.conf"} {
		if err := os.RemoveAll(m.on("/etc/kubernetes/" + f)); err != nil {
			return err
		}
	}
	for _, f := range []string{"config.yaml", "kubeadm-flags.env"} {
		if err := os.RemoveAll(m.on("/var/lib/kubelet/" + f)); err != nil {
			return err
		}
	}
	return m.step(ctx, "kubeadm reset is over")
}
