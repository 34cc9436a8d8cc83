package upgrade

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterca"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	oldVersion, newVersion = "1.35.4", "1.36.1"
	kubeletFile            = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nstaticPodPath: /etc/kubernetes/manifests\nclusterDomain: cluster.local\nauthentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: /etc/kubernetes/pki/ca.crt}}\nauthorization: {mode: Webhook}\n"
)

// node is a machine at the old release. Its programs have their names and versions as content.
type node struct {
	t            *testing.T
	root         string
	controlPlane bool
	machine      *machinetest.Machine
	cluster      *fakeCluster
	mirror       *httptest.Server
	fetched      atomic.Int32
	down         atomic.Bool // the mirror
	etcd         error
	crash        func(what string) error
	ready, begin time.Duration
}

type fakeCluster struct {
	node      *node
	unhealthy []string
	leased    bool
	loses     bool // the lease, once it is held
	busy      bool // another machine has the lease
	tags      versions.Images
	addons    versions.Images
}

func (c *fakeCluster) Exclusively(ctx context.Context, do func(context.Context) error) error {
	if err := c.node.step("the lease is taken"); err != nil {
		return err
	}
	if c.busy {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	c.leased = true
	defer func() { c.leased = false }()
	ctx, lose := context.WithCancel(ctx)
	defer lose()
	if c.loses {
		lose()
	}
	return do(ctx)
}

func (c *fakeCluster) Unhealthy(context.Context) ([]string, error) { return c.unhealthy, nil }

func (c *fakeCluster) SetTags(_ context.Context, images versions.Images) error {
	if err := c.node.step("the cluster's configuration is written"); err != nil {
		return err
	}
	c.tags = images
	return nil
}

func (c *fakeCluster) SetAddons(_ context.Context, images versions.Images) error {
	if err := c.node.step("the add-ons' images are set"); err != nil {
		return err
	}
	c.addons = images
	return nil
}

func (c *fakeCluster) Close() {}

func (n *node) step(what string) error {
	if n.crash == nil {
		return nil
	}
	return n.crash(what)
}

func newNode(t *testing.T, controlPlane bool) *node {
	t.Helper()
	n := &node{t: t, root: t.TempDir(), controlPlane: controlPlane, ready: time.Minute, begin: time.Hour}
	n.mirror = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n.fetched.Add(1); n.down.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte(strings.ReplaceAll(strings.TrimPrefix(r.URL.Path, "/"), "/", " ")))
	}))
	t.Cleanup(n.mirror.Close)
	n.cluster = &fakeCluster{node: n}
	n.machine = &machinetest.Machine{Root: n.root, Step: func(what string) error { return n.step(what) }}
	list := n.list(oldVersion, "old-only")
	software, err := component.ParseSoftware(list.Wire(), list.Images)
	if err != nil {
		t.Fatal(err)
	}
	in := component.New(n.root, n.limits(), slog.New(slog.DiscardHandler))
	defer in.Close()
	if err := in.Install(t.Context(), software.Components, func(string) {}); err != nil {
		t.Fatal(err)
	}
	if err := component.ListFile(n.on(component.KeptList)).Save(list); err != nil {
		t.Fatal(err)
	}
	n.put(kubeletConfig, kubeletFile)
	n.put("/opt/cni/bin/of-a-pod", "installed by the network's pod")
	n.put("/run/muster/kubelet-may-start", "")
	if controlPlane {
		if err := n.machine.Kubeadm(t.Context(), func(string) {}, "init", "phase", "certs", "ca", "--config", ""); err != nil {
			t.Fatal(err)
		}
		n.put("/var/lib/etcd/member/snap/db", "data")
		for _, name := range kubeadm.StaticPods() {
			n.put(kubeadm.Manifests+"/"+name+".yaml", machinetest.StaticPod(name, images(oldVersion)[name].String()))
		}
	}
	if err := n.machine.Unit(t.Context(), "start", machine.UnitKubelet); err != nil {
		t.Fatal(err)
	}
	n.fetched.Store(0)
	return n
}

func (n *node) on(path string) string { return filepath.Join(n.root, path) }

func (n *node) put(name, content string) {
	n.t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(n.on(name)), 0o755), os.WriteFile(n.on(name), []byte(content), 0o600)); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) get(name string) string {
	b, _ := os.ReadFile(n.on(name))
	return string(b)
}

func (n *node) limits() component.Limits {
	return component.Limits{Download: 1 << 20, Unpacked: 1 << 20, Entries: 20, Attempts: 2, Pause: time.Millisecond, Try: 10 * time.Second}
}

// images returns Kubernetes' images of a release.
func images(version string) versions.Images {
	out := versions.Images{}
	for name, i := range machinetest.Images() {
		i.Tag, i.Digest = "v"+version, fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(name+version)))
		out[name] = i
	}
	return out
}

// list returns a release's list, with further programs.
func (n *node) list(version string, more ...string) versions.List {
	var components []versions.Component
	for _, name := range append([]string{"kubelet", "kubeadm", "kubectl"}, more...) {
		content := name + " " + version
		components = append(components, versions.Component{URL: n.mirror.URL + "/" + name + "/" + version, SHA256: fmt.Sprintf("%x", sha256.Sum256([]byte(content))), Path: "/usr/local/bin/" + name, Mode: 0o755})
	}
	l := versions.NewList(components...)
	l.Images = images(version).References()
	return l
}

func (n *node) args(part string, change ...func(map[string]string)) map[string]string {
	n.t.Helper()
	text, err := json.Marshal(n.list(newVersion))
	if err != nil {
		n.t.Fatal(err)
	}
	args := map[string]string{ownerorder.ArgVersion: newVersion, ownerorder.ArgList: string(text), ownerorder.ArgPart: part}
	for _, c := range change {
		c(args)
	}
	return args
}

func (n *node) image() *kubeadm.Image {
	n.t.Helper()
	img, err := kubeadm.ParseImage("unix:///run/containerd/containerd.sock", nil, nil, nil, nil)
	if err != nil {
		n.t.Fatal(err)
	}
	return img
}

// process returns a new process of `bootstrapper upgrade`.
func (n *node) process() *Upgrader {
	n.t.Helper()
	u, err := New(Config{
		Root: n.root, Kubeadm: n.image(), CRISocket: "unix:///run/containerd/containerd.sock", Machine: n.machine, Components: n.limits(),
		Version: func(_ context.Context, program string) (string, error) {
			if err := n.step("the version of " + program + " is read"); err != nil {
				return "", err
			}
			_, version, _ := strings.Cut(n.get("/usr/local/bin/"+program), " ")
			return version, nil
		},
		Healthy: func(context.Context) error {
			if err := n.step("the kubelet is asked"); err != nil {
				return err
			}
			if !n.machine.Running(machine.UnitKubelet) {
				return errors.New("it does not run")
			}
			return nil
		},
		Connect: func() (Cluster, error) { return n.cluster, nil },
		Etcd:    func(context.Context) error { return n.etcd },
		Timing:  Timing{Poll: time.Millisecond, Ready: n.ready, Begin: n.begin}, Log: slog.New(slog.NewTextHandler(n.t.Output(), nil)),
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return u
}

func (n *node) run(args map[string]string) (string, error) {
	n.t.Helper()
	return n.process().Run(n.t.Context(), args)
}

// isNew fails the test unless everything of the node is at the new release.
func (n *node) isNew() {
	n.t.Helper()
	for _, name := range []string{"kubelet", "kubeadm", "kubectl"} {
		if got := n.get("/usr/local/bin/" + name); got != name+" "+newVersion {
			n.t.Errorf("%s is %q", name, got)
		}
	}
	if n.get("/usr/local/bin/old-only") != "" || n.get("/opt/cni/bin/of-a-pod") == "" {
		n.t.Error("a program that the new list does not have is there, or one that a pod has installed is gone")
	}
	if n.controlPlane {
		for _, name := range kubeadm.StaticPods() {
			if err := n.image().CheckStaticPod(n.root, name, []byte(n.get(kubeadm.Manifests+"/"+name+".yaml")), images(newVersion)); err != nil {
				n.t.Errorf("%s: %v", name, err)
			}
		}
	}
	kept, err := component.ListFile(n.on(component.KeptList)).Load()
	if err != nil || kept == nil || !component.Same(*kept, n.list(newVersion)) {
		n.t.Errorf("the list is %+v, %v", kept, err)
	}
	if !strings.Contains(n.get("/run/muster/containerd/sandbox.toml"), images(newVersion)[versions.Pause].String()) {
		n.t.Error("containerd starts pods with another pause image")
	}
	if config := n.get(kubeletConfig); !strings.Contains(config, "clusterDomain: upgraded.local") || strings.Contains(config, "evil") {
		n.t.Errorf("the kubelet's configuration is %s", config)
	}
	if !n.machine.Running(machine.UnitKubelet) {
		n.t.Error("the kubelet does not run")
	}
	for _, f := range []string{stagedFolder, previousList, nextList, kubeletCopy, machine.KubeadmConfig, kubeadm.PatchesFolder} {
		if _, err := os.Lstat(n.on(f)); err == nil {
			n.t.Errorf("%s is left", f)
		}
	}
	if left, _ := filepath.Glob(n.on(kubeadmFolder) + "/*"); len(left) > 0 {
		n.t.Errorf("left: %q", left)
	}
}

func TestANodeIsUpgraded(t *testing.T) {
	for part, tt := range map[string]struct {
		controlPlane, tags, addons bool
		verb                       string
	}{
		ownerorder.PartFirst: {true, true, false, "kubeadm upgrade apply"},
		ownerorder.PartOnly:  {true, true, true, "kubeadm upgrade apply"},
		ownerorder.PartLast:  {true, false, true, "kubeadm upgrade node"},
		ownerorder.PartNode:  {true, false, false, "kubeadm upgrade node"},
		"worker":             {false, false, false, "kubeadm upgrade node"},
	} {
		t.Run(part, func(t *testing.T) {
			n := newNode(t, tt.controlPlane)
			order := part
			if !tt.controlPlane {
				order = ownerorder.PartNode
			}
			ran := ""
			n.crash = func(what string) error {
				if what == "kubeadm upgrade begins" {
					ran = n.get("/usr/local/bin/kubeadm") + ", " + n.get("/usr/local/bin/kubelet")
					if _, err := os.Stat(n.on(machine.PKIFolder + "/" + clusterca.SignerFile)); (err == nil) != tt.controlPlane {
						t.Errorf("the new controller manager's certificate: %v", err)
					}
					if n.cluster.leased != tt.controlPlane {
						t.Errorf("kubeadm runs, and the lease is held: %t", n.cluster.leased)
					}
				}
				return nil
			}
			out, err := n.run(n.args(order))
			if err != nil {
				t.Fatal(err)
			}
			if out != `{"version":"1.36.1","was":"1.35.4"}` {
				t.Errorf("it reports %s", out)
			}
			if ran != "kubeadm 1.36.1, kubelet 1.35.4" {
				t.Errorf("kubeadm runs with %q", ran)
			}
			n.isNew()
			if (n.cluster.tags != nil) != tt.tags || (n.cluster.addons != nil) != tt.addons || slices.Index(n.machine.Calls(), "restart kubelet.service") < slices.Index(n.machine.Calls(), tt.verb) || !slices.Contains(n.machine.Calls(), tt.verb) {
				t.Errorf("tags %v, add-ons %v, calls %q", n.cluster.tags, n.cluster.addons, n.machine.Calls())
			}
			// Run twice, it changes nothing, but sets the add-ons' images again.
			before, fetched := len(n.machine.Calls()), n.fetched.Load()
			n.cluster.addons = nil
			out, err = n.run(n.args(order))
			if err != nil || out != `{"version":"1.36.1","was":"1.36.1"}` || len(n.machine.Calls()) != before || n.fetched.Load() != fetched || (n.cluster.addons != nil) != tt.addons {
				t.Errorf("again: %s, %v, calls %q", out, err, n.machine.Calls()[before:])
			}
		})
	}
}

// An order whose form is wrong, or that does not fit this machine, changes nothing.
func TestAnOrderThatDoesNotFitIsRefused(t *testing.T) {
	list := func(change func(*versions.List)) func(*node, map[string]string) {
		return func(n *node, args map[string]string) {
			l := n.list(newVersion)
			change(&l)
			b, err := json.Marshal(l)
			if err != nil {
				n.t.Fatal(err)
			}
			args[ownerorder.ArgList] = string(b)
		}
	}
	for name, tt := range map[string]struct {
		worker bool
		change func(*node, map[string]string)
		says   string
	}{
		"no version":           {change: func(_ *node, a map[string]string) { a[ownerorder.ArgVersion] = "" }, says: "none that this bootstrapper supports"},
		"a minor version only": {change: func(_ *node, a map[string]string) { a[ownerorder.ArgVersion] = "1.36" }, says: "none that this bootstrapper supports"},
		"an unknown version":   {change: func(_ *node, a map[string]string) { a[ownerorder.ArgVersion] = "1.99.0" }, says: "none that this bootstrapper supports"},
		"an unknown part":      {change: func(_ *node, a map[string]string) { a[ownerorder.ArgPart] = "all" }, says: "part"},
		"a worker as the first": {worker: true, change: func(_ *node, a map[string]string) {
			a[ownerorder.ArgPart] = ownerorder.PartFirst
		}, says: "this node is a worker"},
		"no list":                    {change: func(_ *node, a map[string]string) { a[ownerorder.ArgList] = "" }, says: "component list"},
		"an image less":              {change: list(func(l *versions.List) { l.Images = l.Images[1:] }), says: "not listed"},
		"an image by tag":            {change: list(func(l *versions.List) { l.Images[0], _, _ = strings.Cut(l.Images[0], "@") }), says: "digest"},
		"a component elsewhere":      {change: list(func(l *versions.List) { l.Components[2].Path = "/etc/passwd" }), says: "is not below"},
		"no kubeadm":                 {change: list(func(l *versions.List) { l.Components = slices.Delete(l.Components, 1, 2) }), says: "no kubeadm"},
		"no kubelet":                 {change: list(func(l *versions.List) { l.Components = l.Components[1:] }), says: "no kubelet"},
		"an older patch":             {change: func(_ *node, a map[string]string) { a[ownerorder.ArgVersion] = "1.35.3" }, says: "this machine's kubelet is 1.35.4"},
		"an older minor version":     {change: func(_ *node, a map[string]string) { a[ownerorder.ArgVersion] = "1.34.4" }, says: "this machine's kubelet is 1.35.4"},
		"two minor versions at once": {change: func(n *node, _ map[string]string) { n.put("/usr/local/bin/kubelet", "kubelet 1.34.9") }, says: "this machine's kubelet is 1.34.9"},
		"a kubeadm that is too old":  {change: func(n *node, _ map[string]string) { n.put("/usr/local/bin/kubeadm", "kubeadm 1.34.9") }, says: "this machine's kubeadm is 1.34.9"},
		"programs of another installer": {change: func(n *node, _ map[string]string) {
			if err := os.Remove(n.on(component.KeptList)); err != nil {
				n.t.Fatal(err)
			}
		}, says: "was not installed by Muster"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, !tt.worker)
			args := n.args(ownerorder.PartNode)
			tt.change(n, args)
			calls := len(n.machine.Calls())
			out, err := n.run(args)
			if err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%s, %v", out, err)
			}
			if len(n.machine.Calls()) != calls || n.fetched.Load() > 0 {
				t.Errorf("it did %q, and fetched %d", n.machine.Calls()[calls:], n.fetched.Load())
			}
			if good := newNode(t, !tt.worker); true {
				if _, err := good.run(good.args(ownerorder.PartNode)); err != nil {
					t.Errorf("repaired: %v", err)
				}
			}
		})
	}
}

// Nothing is replaced before everything is there, and nothing stops while another control plane is not well.
func TestAnUpgradeThatCannotEndDoesNotBegin(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*node, map[string]string)
		repair func(*node)
		says   string
	}{
		"the mirror is away": {func(n *node, _ map[string]string) { n.down.Store(true) }, func(n *node) { n.down.Store(false) }, "can't be fetched"},
		"another content": {func(n *node, a map[string]string) {
			a[ownerorder.ArgList] = strings.Replace(a[ownerorder.ArgList], "/kubectl/1.36.1", "/kubectl/1.36.0", 1)
		}, func(*node) {}, "SHA-256"},
		"another control plane is not well": {func(n *node, _ map[string]string) { n.cluster.unhealthy = []string{"etcd-node2"} }, func(n *node) { n.cluster.unhealthy = nil }, "etcd-node2"},
		"a member of etcd does not run":     {func(n *node, _ map[string]string) { n.etcd = errors.New("etcd: member node3: it does not answer") }, func(n *node) { n.etcd = nil }, "member node3"},
		"an image is not there": {func(n *node, _ map[string]string) {
			n.crash = func(what string) error {
				if what == "an image is pulled" {
					return errors.New("no such image")
				}
				return nil
			}
		}, func(n *node) { n.crash = nil }, "can't be pulled"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, true)
			n.ready = 20 * time.Millisecond
			args := n.args(ownerorder.PartFirst)
			tt.change(n, args)
			if _, err := n.run(args); err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%v", err)
			}
			if n.get("/usr/local/bin/kubeadm") != "kubeadm "+oldVersion || n.get("/usr/local/bin/kubelet") != "kubelet "+oldVersion || slices.Contains(n.machine.Calls(), "kubeadm upgrade apply") || n.cluster.tags != nil {
				t.Errorf("something began: %q", n.machine.Calls())
			}
			n.ready = time.Minute
			tt.repair(n)
			if _, err := n.run(n.args(ownerorder.PartFirst)); err != nil {
				t.Fatalf("repaired: %v", err)
			}
			n.isNew()
		})
	}
}

// After the first program is replaced, nothing is fetched any more.
func TestAllIsFetchedBeforeKubeadmRuns(t *testing.T) {
	n := newNode(t, true)
	n.crash = func(what string) error {
		if what == "kubeadm upgrade begins" {
			n.down.Store(true)
		}
		return nil
	}
	if _, err := n.run(n.args(ownerorder.PartFirst)); err != nil {
		t.Fatal(err)
	}
	n.isNew()
	if got := n.fetched.Load(); got != 3 {
		t.Errorf("%d fetches", got)
	}
}

// A kubeadm that is killed leaves a control plane without a part.
func TestKubeadmRunsToItsEndWithoutTheLease(t *testing.T) {
	n := newNode(t, true)
	n.cluster.loses = true
	if _, err := n.run(n.args(ownerorder.PartFirst)); err != nil {
		t.Fatal(err)
	}
	n.isNew()
}
