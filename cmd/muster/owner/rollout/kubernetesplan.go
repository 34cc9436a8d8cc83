package rollout

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/version"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/lifecycle"
	"github.com/muster-k8s/muster/cmd/muster/owner/orders"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// UpgradeTimeout is how long a node has for its upgrade: [orders.Validity], plus the time for downloads and kubeadm.
	UpgradeTimeout = orders.Validity + 75*time.Minute
	// StableFor is how long an upgraded node must be healthy before the next one starts.
	StableFor = 20 * time.Second
)

// KubernetesConfig configures an upgrade: to which release, and how.
type KubernetesConfig struct {
	Dir *ownerdir.Dir
	// Version is the release; see [versions.Resolve].
	Version string
	// List is the release's list; nil for the list of an unfinished upgrade in the folder.
	List *versions.List
	// Drain and DrainFor are as in [RebootInTurn].
	Drain    clusterapi.DrainOptions
	DrainFor time.Duration
	// Wait is how long each node has; see [UpgradeTimeout]. Stable is [StableFor].
	Wait, Stable time.Duration
	// MaxUnavailable is how many workers are upgraded at once, at least 1.
	MaxUnavailable int
	// Report is called for each step, for several nodes at the same time.
	Report func(node, step string)
}

// KubernetesStage is the progress of a cluster's upgrade.
type KubernetesStage string

// The stages.
const (
	KubernetesBegins        KubernetesStage = "not begun"
	KubernetesControlPlanes KubernetesStage = "control planes"
	KubernetesWorkers       KubernetesStage = "workers"
	KubernetesDone          KubernetesStage = "done"
)

// KubernetesPlan is what an upgrade would do.
type KubernetesPlan struct {
	// From and To are versions, full and without "v".
	From  string          `json:"from"`
	To    string          `json:"to"`
	Stage KubernetesStage `json:"stage"`
	// Nodes are in upgrade order; nodes that are not upgraded are included.
	Nodes []KubernetesNode `json:"nodes"`
	// Problems block the upgrade, Notes do not. Each names a remedy.
	Problems []string `json:"problems"`
	Notes    []string `json:"notes"`
}

// KubernetesNode is a node in a plan.
type KubernetesNode struct {
	Name    string        `json:"name"`
	Role    v1alpha1.Role `json:"role"`
	Kubelet string        `json:"kubelet"`
	// Will describes the planned action, as in "upgraded".
	Will string `json:"will"`
}

// Err returns the problems as an error, or nil.
func (p *KubernetesPlan) Err() error {
	if len(p.Problems) == 0 {
		return nil
	}
	return problem.WithRemedy(fmt.Errorf("the cluster can't be upgraded to Kubernetes %s: %s", p.To, strings.Join(p.Problems, "\n")), "Nothing was changed. Solve these problems, and run the same command again; --dry-run shows what is left.")
}

// kubeUpgrade is an upgrade.
type kubeUpgrade struct {
	KubernetesConfig

	kube    *clusterapi.Client
	key     ed25519.PrivateKey
	public  attest.OwnerKeys
	release clusterinfo.Release
	list    string // of release, as orders have it
	images  versions.Images
	was     *clusterinfo.Info
}

// same reports whether two releases are the same software of the same version.
func same(a, b clusterinfo.Release) bool {
	one, err := a.List()
	two, bad := b.List()
	return err == nil && bad == nil && a.KubernetesVersion == b.KubernetesVersion && one == two
}

func newKubernetes(ctx context.Context, cfg KubernetesConfig) (k *kubeUpgrade, err error) {
	k = &kubeUpgrade{KubernetesConfig: cfg}
	full, err := versions.Resolve(cfg.Version)
	if err != nil {
		return nil, err
	}
	c := cfg.Dir.Cluster()
	switch {
	case cfg.List != nil:
		k.release = clusterinfo.Release{KubernetesVersion: full, Components: cfg.List.Components, Images: cfg.List.Images}
	case c.Upgrade != nil && c.Upgrade.KubernetesVersion == full:
		k.release = *c.Upgrade
	case c.KubernetesVersion == full: // perhaps it is done already
		k.release = clusterinfo.Release{KubernetesVersion: full, Components: c.Components, Images: c.Images}
	default:
		return nil, k.noList(full)
	}
	if k.images, err = versions.ParseImages(k.release.Images); err != nil {
		return nil, err
	}
	for _, program := range []string{"kubeadm", "kubelet"} {
		if !slices.ContainsFunc(k.release.Components, func(c versions.Component) bool { return !c.Extract && path.Base(c.Path) == program }) {
			return nil, problem.WithRemedy(fmt.Errorf("the list of Kubernetes %s has no %s", full, program), "The list must have every component of a node, also unchanged ones: nodes remove what is not listed.")
		}
	}
	if k.list, err = k.release.List(); err != nil {
		return nil, err
	}
	if k.public, err = cfg.Dir.OwnerKeys(); err != nil {
		return nil, err
	}
	if k.key, err = cfg.Dir.OwnerKey(); err != nil {
		return nil, err
	}
	if k.kube, err = access.Connect(cfg.Dir); err != nil {
		return nil, err
	}
	if k.was, err = k.kube.Description(ctx); err != nil {
		return nil, err
	}
	if cfg.List == nil && c.Upgrade == nil && (k.was.Other() != nil || !same(k.was.Current(), k.release)) {
		return nil, k.noList(full) // the folder's list may be from a backup, which is unsigned
	}
	return k, nil
}

func (k *kubeUpgrade) noList(version string) error {
	return problem.WithRemedy(fmt.Errorf("%s has no list for an upgrade to Kubernetes %s", k.Dir.Path(), version), "Give the list with --components; the folder keeps it until the upgrade is complete. Muster does not sign an order for a list from the cluster.")
}

// stage returns the progress of the upgrade. It returns an error if an upgrade with another list is in progress.
func (k *kubeUpgrade) stage(i *clusterinfo.Info) (KubernetesStage, error) {
	now := i.Current()
	to := now
	if i.Next != nil {
		to = *i.Next
	}
	switch {
	case same(to, k.release) && i.Next != nil:
		return KubernetesControlPlanes, nil
	case same(to, k.release) && i.Previous != nil:
		return KubernetesWorkers, nil
	case same(to, k.release):
		return KubernetesDone, nil
	case i.Other() != nil:
		return "", problem.WithRemedy(fmt.Errorf("the cluster is being upgraded to Kubernetes %s with another list", to.KubernetesVersion),
			"Complete that upgrade first: muster upgrade kubernetes "+to.KubernetesVersion+", with the same --components if the folder lacks the list. Before the first node was upgraded, you can cancel it: remove next from cluster.json of the ConfigMap muster-cluster.")
	}
	return KubernetesBegins, nil
}

// mayFollow returns an error if a release can't follow another one.
func mayFollow(from, to string) error {
	a, err := version.ParseSemantic(from)
	if err != nil {
		return fmt.Errorf("%q is no version", problem.Printable(from))
	}
	b, err := version.ParseSemantic(to)
	switch {
	case err != nil:
		return err
	case b.LessThan(a):
		return fmt.Errorf("%s is older than %s, and Kubernetes cannot be downgraded", to, problem.Printable(from))
	case a.Major() != b.Major() || b.Minor() > a.Minor()+1:
		return fmt.Errorf("%s is more than one minor version after %s: upgrade to each one between", to, problem.Printable(from))
	}
	return nil
}

// tag returns the tag of an image's reference; empty if it has none.
func tag(reference string) string {
	reference, _, _ = strings.Cut(reference, "@")
	_, t, _ := strings.Cut(path.Base(reference), ":")
	return t
}

// PlanKubernetes determines what an upgrade would do, and changes nothing.
func PlanKubernetes(ctx context.Context, cfg KubernetesConfig) (*KubernetesPlan, error) {
	k, err := newKubernetes(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return k.plan(ctx)
}

func (k *kubeUpgrade) plan(ctx context.Context) (*KubernetesPlan, error) {
	stage, err := k.stage(k.was)
	if err != nil {
		return nil, err
	}
	p := &KubernetesPlan{From: k.was.KubernetesVersion, To: k.release.KubernetesVersion, Stage: stage, Nodes: []KubernetesNode{}, Problems: []string{}, Notes: []string{}}
	if k.was.Previous != nil {
		p.From = k.was.Previous.KubernetesVersion
	}
	refuse := func(format string, args ...any) { p.Problems = append(p.Problems, fmt.Sprintf(format, args...)) }
	if stage == KubernetesBegins {
		k.checkCluster(refuse)
		k.checkList(refuse)
	}
	nodes, err := k.nodes(ctx)
	if err != nil {
		return nil, err
	}
	for i := range nodes {
		k.planNode(ctx, p, nodes, &nodes[i], refuse)
	}
	if !slices.ContainsFunc(nodes, func(n clusterapi.NodeRelease) bool { return n.ControlPlane && n.Joined && n.Takes() }) {
		refuse("no control plane of this cluster is both enrolled and a node, so the upgrade has no first node. muster status shows the nodes.")
	}
	return p, nil
}

// checkCluster checks the cluster's description.
func (k *kubeUpgrade) checkCluster(refuse func(string, ...any)) {
	from, to := k.was.KubernetesVersion, k.release.KubernetesVersion
	if full, err := versions.Resolve(from); err != nil || full != from {
		refuse("the cluster's description has the version %s of Kubernetes: write the full version into cluster.json of the ConfigMap muster-cluster.", from)
	}
	if from == to {
		refuse("The cluster already runs Kubernetes %s with another list. A list can change only together with a newer version.", to)
	} else if err := mayFollow(from, to); err != nil {
		refuse("Kubernetes: %v.", err)
	}
	if r := k.was.Rotation; !r.Joins() {
		refuse("the %s is being rotated: complete that first (%s).", r.Key, r.Command())
	}
	if len(k.was.Components) == 0 || len(k.was.Images) == 0 {
		refuse("the cluster has no list of its current release, which machines need to join or restart during the upgrade: write components and images of Kubernetes %s (muster components pin) into cluster.json of the ConfigMap muster-cluster.", from)
	}
}

// ExcludedReason returns why a node is left out; empty if it is not.
func ExcludedReason(n *clusterapi.NodeRelease) string {
	switch {
	case n.Enrollment == nil:
		return "it has no AttestedNode and takes no orders: upgrade it with kubeadm yourself, or have its machine join by Muster"
	case n.Enrollment.ShutOut():
		return "it is banned or being removed. To use it again, run muster reset " + n.Name + ": the machine joins as new"
	case !n.Joined && n.Enrollment.Spec.DiskID == "":
		return "its machine has not joined yet"
	}
	return ""
}

// planNode adds one node to the plan.
func (k *kubeUpgrade) planNode(ctx context.Context, p *KubernetesPlan, nodes []clusterapi.NodeRelease, n *clusterapi.NodeRelease, refuse func(string, ...any)) {
	role, begins := v1alpha1.RoleWorker, p.Stage == KubernetesBegins
	if n.ControlPlane {
		role = v1alpha1.RoleControlPlane
	}
	row := KubernetesNode{Name: n.Name, Role: role, Kubelet: problem.Printable(n.Kubelet), Will: "has it"}
	defer func() { p.Nodes = append(p.Nodes, row) }()
	if n.Joined && !k.runs(n) {
		if err := mayFollow(n.Kubelet, k.release.KubernetesVersion); err != nil {
			refuse("the kubelet of %s: %v.", n.Name, err)
		}
	}
	why := ExcludedReason(n)
	switch {
	case why != "" && n.ControlPlane && n.Joined:
		row.Will = "left out"
		refuse("%s is a control plane, and %s.", n.Name, why)
		return
	case why != "":
		row.Will = "left out"
		p.Notes = append(p.Notes, n.Name+" is left out: "+why+".")
		return
	case !n.Joined:
		row.Will = "awaited"
		text := n.Name + " is joining or has lost its Node: wait until muster status shows it Ready, or remove it (muster forget " + n.Name + ")."
		if n.ControlPlane {
			refuse("%s", text)
		} else {
			p.Notes = append(p.Notes, text+" The upgrade does not complete before that.")
		}
		return
	}
	if n.ControlPlane {
		k.checkControlPlane(n, refuse)
	}
	if bad := n.Problem(); bad != "" && begins {
		refuse("%s: repair it (muster doctor --node %s), or remove it (muster forget %s).", bad, n.Name, n.Name)
	} else if bad != "" {
		p.Notes = append(p.Notes, bad+": if it still has the old release, it is upgraded first; otherwise the upgrade stops until it is healthy (muster doctor --node "+n.Name+").")
	}
	if !k.incomplete(n) {
		return
	}
	row.Will = "upgraded"
	if n.ControlPlane {
		row.Will = "upgraded (part: " + k.part(n, nodes) + ")"
	}
	if k.unfinished(n) != nil {
		row.Will = "waited for: its order is unfinished"
		return
	}
	if _, err := orders.Sign(k.Dir, n.Enrollment, ownerorder.ActionUpgradeKubernetes, k.args(ownerorder.PartFirst), time.Now(), k.key); err != nil { // it is not sent
		refuse("%s: %v. Shorter URLs make an order shorter.", n.Name, err)
	}
	if err := k.kube.Undrainable(ctx, n.Name, k.Drain); err != nil && n.Ready {
		how := "--force and --delete-emptydir-data drain these pods too; data that exist only on the node are lost."
		if _, is := errors.AsType[*clusterapi.BudgetError](err); is {
			how = lifecycle.BudgetRemedy
		}
		refuse("%s can't be drained: %v. %s", n.Name, err, how)
	}
}

// checkControlPlane compares the images of a control plane's static pods with the release.
func (k *kubeUpgrade) checkControlPlane(n *clusterapi.NodeRelease, refuse func(string, ...any)) {
	for _, c := range []struct {
		name, to string
		check    func(from, to string) error
	}{
		{versions.APIServer, k.release.KubernetesVersion, mayFollow},
		{versions.Etcd, k.images[versions.Etcd].Tag, notOlder},
	} {
		image, there := n.Images[c.name]
		if !there || strings.HasSuffix(image, "@"+k.images[c.name].Digest) {
			continue // a missing pod is reported as not Ready
		}
		if err := c.check(tag(image), c.to); err != nil {
			refuse("%s on %s (version from the image's tag): %v.", c.name, n.Name, err)
		}
	}
}

// notOlder returns an error if an image's tag is not that of the same version or a newer one.
func notOlder(from, to string) error {
	a, err := version.ParseSemantic(from)
	b, bad := version.ParseSemantic(to)
	switch {
	case err != nil || bad != nil:
		return fmt.Errorf("%q and %q can't be compared: both images need tags such as 3.6.5-0", problem.Printable(from), to)
	case b.LessThan(a):
		return fmt.Errorf("%s is older than %s, which has written its data", to, problem.Printable(from))
	}
	return nil
}

// runs reports whether a node already runs the new release.
func (k *kubeUpgrade) runs(n *clusterapi.NodeRelease) bool {
	return n.Runs(k.release.KubernetesVersion, k.images)
}

// incomplete reports whether something is left to do on a node.
func (k *kubeUpgrade) incomplete(n *clusterapi.NodeRelease) bool {
	return n.Takes() && n.Joined && (!k.runs(n) || k.unfinished(n) != nil || k.failed(n) || n.Returns && n.Unschedulable)
}

// failed reports whether the latest order to upgrade to this release failed. Such a node is incomplete although its kubelet
// may be new, so the remaining steps are repeated.
func (k *kubeUpgrade) failed(n *clusterapi.NodeRelease) bool {
	s, err := ownerorder.ParseMachineNote(n.Enrollment.Annotations[v1alpha1.OwnerOrder])
	r := n.Enrollment.Status.Order
	if err != nil || r == nil || r.Digest != s.Digest() || r.State != v1alpha1.OrderFailed {
		return false
	}
	o, err := ownerorder.ParseMachineOrder(s.Text)
	return err == nil && k.is(o)
}

// is reports whether an order upgrades to this release.
func (k *kubeUpgrade) is(o ownerorder.MachineOrder) bool {
	return o.Action == ownerorder.ActionUpgradeKubernetes && maps.Equal(o.Args, k.args(o.Args[ownerorder.ArgPart]))
}

// unfinished returns the arguments of the order to upgrade to this release that a node has not yet executed; nil if there is none.
func (k *kubeUpgrade) unfinished(n *clusterapi.NodeRelease) map[string]string {
	if !n.Takes() {
		return nil
	}
	s, o := orders.ActiveOrder(k.Dir, k.public, n.Enrollment, time.Now())
	if s == nil || !k.is(o) {
		return nil
	}
	return o.Args
}

func (k *kubeUpgrade) args(part string) map[string]string {
	return map[string]string{ownerorder.ArgVersion: k.release.KubernetesVersion, ownerorder.ArgList: k.list, ownerorder.ArgPart: part}
}

// part returns the cluster-wide share of the upgrade that this node does: kubeadm upgrade apply, or the add-ons.
func (k *kubeUpgrade) part(n *clusterapi.NodeRelease, nodes []clusterapi.NodeRelease) string {
	others, done := 0, 0
	for i := range nodes {
		if o := &nodes[i]; o.ControlPlane && o.Joined && o.Takes() && o.Name != n.Name {
			others++
			if k.runs(o) {
				done++
			}
		}
	}
	switch {
	case !n.ControlPlane:
		return ownerorder.PartNode
	case others == 0:
		return ownerorder.PartOnly
	case done == 0:
		return ownerorder.PartFirst
	case done == others:
		return ownerorder.PartLast
	}
	return ownerorder.PartNode
}

// sort puts nodes into the order in which they are upgraded: control planes first, and within each role, nodes that an earlier run started or that
// are unhealthy.
func (k *kubeUpgrade) sort(nodes []clusterapi.NodeRelease) {
	rank := func(n *clusterapi.NodeRelease) (r int) {
		if !n.ControlPlane {
			r += 2
		}
		begun := n.Kubelet == "v"+k.release.KubernetesVersion && !k.runs(n) || n.Returns || n.Problem() != "" || k.unfinished(n) != nil
		for name, image := range n.Images {
			// Every static pod except etcd changes with each release.
			begun = begun || name != versions.Etcd && !k.runs(n) && strings.HasSuffix(image, "@"+k.images[name].Digest)
		}
		if !begun {
			r++
		}
		return r
	}
	slices.SortStableFunc(nodes, func(a, b clusterapi.NodeRelease) int { return rank(&a) - rank(&b) })
}
