// Package upgrade upgrades a node to another release of Kubernetes by its owner's order.
//
// Each step may be repeated after a crash at any time. Everything is fetched and compared before the first program is replaced. Then kubeadm upgrades the
// node, and only after that the other programs are installed: a node counts as upgraded when its list says so, and its kubelet runs.
package upgrade

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/version"

	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/required"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
)

// The files of an unfinished upgrade.
const (
	folder       = "/var/lib/muster/upgrade"
	stagedFolder = folder + "/staged"
	// previousList is the list that the node had before, nextList the ordered one.
	previousList = folder + "/previous.json"
	nextList     = folder + "/next.json"
	// kubeletCopy is the kubelet's configuration from before kubeadm writes it.
	kubeletCopy = folder + "/kubelet-config.yaml"
)

// Cluster is the part of the API that the upgrade of a control plane uses.
type Cluster interface {
	// Exclusively runs do while this control plane holds the lease, and returns its error. The context of do ends when the lease is lost.
	Exclusively(ctx context.Context, do func(context.Context) error) error
	// Unhealthy lists the static pods of control planes that are not Ready.
	Unhealthy(ctx context.Context) ([]string, error)
	// SetTags writes the listed versions of etcd and CoreDNS into kubeadm's configuration of the cluster.
	SetTags(ctx context.Context, images versions.Images) error
	// SetAddons sets the images of kube-proxy and CoreDNS.
	SetAddons(ctx context.Context, images versions.Images) error
	Close()
}

// Timing are the waits; see [DefaultTiming].
type Timing struct {
	// Poll is the pause between two checks. Ready is how long the control planes, and the kubelet, may take to become
	// healthy.
	Poll, Ready time.Duration
	// Begin is how long everything before kubeadm may take, so that kubeadm is not killed in the middle by the unit's time limit.
	Begin time.Duration
}

// DefaultTiming are the waits of production.
var DefaultTiming = Timing{Poll: time.Second, Ready: 6 * time.Minute, Begin: 10 * time.Minute}

// Config lists what an Upgrader needs. All fields are required.
type Config struct {
	// Root is the root of the file system: "/" on a machine.
	Root string
	// Kubeadm is the image's part of kubeadm's configuration, CRISocket the container runtime's socket.
	Kubeadm   *kubeadm.Image
	CRISocket string
	Machine   machine.Machine
	// Version returns the version of a program in the path of the machine, without "v": [machine.Version].
	Version func(ctx context.Context, program string) (string, error)
	// Healthy returns nil if the kubelet runs: [KubeletHealthy].
	Healthy func(ctx context.Context) error
	// Connect returns the cluster, on a control plane.
	Connect func() (Cluster, error)
	// Etcd returns nil if each member of this control plane's etcd is a voter that runs.
	Etcd       func(ctx context.Context) error
	Components component.Limits
	Timing     Timing
	Log        *slog.Logger
}

// Upgrader upgrades one node.
type Upgrader struct{ Config }

// New returns an Upgrader, or an error that names the missing field of cfg.
func New(cfg Config) (*Upgrader, error) {
	if err := required.Fields("upgrade.New", cfg); err != nil {
		return nil, err
	}
	return &Upgrader{cfg}, nil
}

// Result is the output of the order, in JSON.
type Result struct {
	// Version is what the node runs, Was what its kubelet was before this run.
	Version string `json:"version"`
	Was     string `json:"was"`
}

// release is a checked order.
type release struct {
	version          string
	part             string
	software         *component.Software
	kubeadm, kubelet component.Component
	kept             *versions.List // what is on the machine
	was              string         // the kubelet's version
}

// apply reports whether this node upgrades the cluster's own objects, addons whether it sets the images of kube-proxy and CoreDNS.
func (r *release) apply() bool {
	return r.part == ownerorder.PartFirst || r.part == ownerorder.PartOnly
}

func (r *release) addons() bool {
	return r.part == ownerorder.PartLast || r.part == ownerorder.PartOnly
}

func (u *Upgrader) on(path string) string { return filepath.Join(u.Root, path) }

// Run executes an order with these arguments, and returns its output.
func (u *Upgrader) Run(ctx context.Context, args map[string]string) (string, error) {
	r, err := parse(args)
	if err != nil {
		return "", err
	}
	controlPlane, err := renewal.IsControlPlane(u.Root)
	if err != nil {
		return "", err
	}
	if !controlPlane && r.part != ownerorder.PartNode {
		return "", fmt.Errorf("the order is for a control plane (part %q), and this node is a worker", r.part)
	}
	if err := u.permits(ctx, r); err != nil {
		return "", err
	}
	done, err := u.done(ctx, r, controlPlane)
	if err == nil && !done {
		err = u.upgrade(ctx, r, controlPlane)
	}
	if err == nil && r.addons() {
		err = u.withCluster(func(c Cluster) error { return c.SetAddons(ctx, r.software.Images) })
	}
	if err != nil {
		return "", err
	}
	out, err := json.Marshal(Result{r.version, r.was})
	return string(out), err
}

// parse checks the form of an order.
func parse(args map[string]string) (*release, error) {
	r := &release{version: args[ownerorder.ArgVersion], part: args[ownerorder.ArgPart]}
	if v, err := versions.Resolve(r.version); err != nil || v != r.version {
		return nil, errors.Join(fmt.Errorf("the order's version %q is none that this bootstrapper supports: upgrade the machine's image first", r.version), err)
	}
	if !slices.Contains([]string{ownerorder.PartFirst, ownerorder.PartLast, ownerorder.PartOnly, ownerorder.PartNode}, r.part) {
		return nil, fmt.Errorf("the order's part %q is not known here: upgrade the machine's image first", r.part)
	}
	list, err := versions.Parse([]byte(args[ownerorder.ArgList]))
	if err != nil {
		return nil, err
	}
	if r.software, err = component.ParseSoftware(list.Wire(), list.Images); err != nil {
		return nil, err
	}
	for name, at := range map[string]*component.Component{"kubeadm": &r.kubeadm, "kubelet": &r.kubelet} {
		i := slices.IndexFunc(r.software.Components, func(c component.Component) bool { return path.Base(c.Name()) == name })
		if i < 0 {
			return nil, fmt.Errorf("the order's list has no %s among its components", name)
		}
		*at = r.software.Components[i]
	}
	return r, nil
}

// permits returns an error unless the machine's programs may be brought to the release.
func (u *Upgrader) permits(ctx context.Context, r *release) error {
	var err error
	if r.kept, err = component.ListFile(u.on(component.KeptList)).Load(); err != nil {
		return err
	}
	if r.kept == nil {
		return fmt.Errorf("this machine's Kubernetes was not installed by Muster: %s is missing; upgrade it as it was installed, or reset the machine, which then joins as new", component.KeptList)
	}
	want, err := version.ParseGeneric(r.version)
	if err != nil {
		return err
	}
	for _, program := range []string{"kubelet", "kubeadm"} {
		text, err := u.Version(ctx, program)
		if err != nil {
			return err
		}
		if program == "kubelet" {
			r.was = text
		}
		have, err := version.ParseGeneric(text)
		if err != nil {
			return fmt.Errorf("the version of %s: %w", program, err)
		}
		next := want.Major() == have.Major() && (want.Minor() == have.Minor()+1 || want.Minor() == have.Minor() && want.Patch() >= have.Patch())
		if !next {
			return fmt.Errorf("this machine's %s is %s: it can be upgraded to a newer patch of the same minor version, or to the next minor version, and not to %s", program, text, r.version)
		}
	}
	return nil
}

// done reports whether the node is at the release.
func (u *Upgrader) done(ctx context.Context, r *release, controlPlane bool) (bool, error) {
	if there(u.on(previousList)) || r.was != r.version || !component.Same(*r.kept, r.software.List) {
		return false, nil
	}
	pods := !controlPlane || u.checkPods(r) == nil
	v, err := u.Version(ctx, "kubeadm")
	return pods && v == r.version && u.Healthy(ctx) == nil, err
}

func (u *Upgrader) upgrade(ctx context.Context, r *release, controlPlane bool) error {
	previous, err := u.remember(r)
	if err != nil {
		return err
	}
	// The previous list is on the state disk. After a boot, it is the cluster's: see DropLists.
	put, err := PutBack(u.Root, controlPlane, u.Kubeadm, previous.Images, r.software.Images)
	if err != nil {
		return err
	}
	if len(put) > 0 {
		u.Log.WarnContext(ctx, "files that an interrupted upgrade had moved away are back", "files", strings.Join(put, ", "))
	}
	waiting, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	late := fmt.Errorf("it could not start within %s", u.Timing.Begin)
	timer := time.AfterFunc(u.Timing.Begin, func() { giveUp(late) })
	defer timer.Stop()
	begin := func() error {
		if !timer.Stop() {
			return late
		}
		return nil
	}
	in := component.New(u.Root, u.Components, u.Log)
	defer in.Close()
	if err := in.Stage(waiting, u.on(stagedFolder), r.software.Components, u.progress(ctx)); err != nil {
		return err
	}
	if err := u.pull(waiting, r.software.Images, controlPlane); err != nil {
		return err
	}
	if controlPlane {
		err = u.controlPlane(ctx, waiting, begin, r, in)
	} else if err = begin(); err == nil {
		err = u.kubeadm(ctx, r, in)
	}
	if err != nil {
		return err
	}
	return u.finish(ctx, r, in, previous)
}

func (u *Upgrader) progress(ctx context.Context) func(string) {
	return func(text string) { u.Log.InfoContext(ctx, "components", "at", text) }
}

// remember keeps the previous and the new list until the upgrade is complete.
func (u *Upgrader) remember(r *release) (*component.Software, error) {
	file := component.ListFile(u.on(previousList))
	list, err := file.Load()
	if err != nil || list == nil { // not of an earlier attempt
		list = r.kept
		if err := file.Save(*list); err != nil {
			return nil, err
		}
	}
	if err := component.ListFile(u.on(nextList)).Save(r.software.List); err != nil {
		return nil, err
	}
	return component.ParseSoftware(list.Wire(), list.Images)
}

// pull makes the container runtime have all images before anything stops (B9).
func (u *Upgrader) pull(ctx context.Context, images versions.Images, controlPlane bool) error {
	names := []string{versions.Pause, versions.Proxy}
	if controlPlane {
		names = append(names, kubeadm.StaticPods()...)
	}
	for _, name := range names {
		if err := component.Pull(ctx, u.Machine, u.CRISocket, images[name].String(), u.Components.Pause, u.Log); err != nil {
			return err
		}
	}
	return nil
}

func (u *Upgrader) withCluster(do func(Cluster) error) error {
	c, err := u.Connect()
	if err != nil {
		return err
	}
	defer c.Close()
	return do(c)
}

// finish installs the other programs and starts the kubelet with them.
func (u *Upgrader) finish(ctx context.Context, r *release, in *component.Installer, previous *component.Software) error {
	// First: from here on the machine is compared with the new list after a restart (B8).
	if err := component.ListFile(u.on(component.KeptList)).Save(r.software.List); err != nil {
		return err
	}
	if err := in.Install(ctx, r.software.Components, u.progress(ctx)); err != nil {
		return err
	}
	removed, err := in.Remove(previous.Components, r.software.Components)
	if err != nil {
		return err
	}
	if len(removed) > 0 {
		u.Log.InfoContext(ctx, "components that the new list does not have are removed", "files", strings.Join(removed, ", "))
	}
	if err := component.PinSandbox(ctx, u.Root, u.Machine, r.software.Images[versions.Pause]); err != nil {
		return err
	}
	if err := u.isVersion(ctx, "kubelet", r.version); err != nil {
		return err
	}
	if err := u.Machine.Unit(ctx, "restart", machine.UnitKubelet); err != nil {
		return err
	}
	if err := u.await(ctx, "the kubelet does not run since it was upgraded", u.Healthy); err != nil {
		return err
	}
	if err := u.forgetCopies(); err != nil {
		return err
	}
	for _, f := range []string{stagedFolder, kubeletCopy, nextList, previousList} { // the last one ends the upgrade
		if err := os.RemoveAll(u.on(f)); err != nil {
			return err
		}
	}
	return nil
}

// isVersion returns an error unless a program in the machine's path has the version.
func (u *Upgrader) isVersion(ctx context.Context, program, want string) error {
	have, err := u.Version(ctx, program)
	if err == nil && have != want {
		err = fmt.Errorf("the %s in this machine's path is %s after the list's %s was installed: the list has another version, or the image has a %s of its own", program, have, want, program)
	}
	return err
}

// await waits until check returns nil.
func (u *Upgrader) await(ctx context.Context, what string, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, u.Timing.Ready)
	defer cancel()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		if retry.Wait(ctx, u.Timing.Poll) != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
}

// forgetCopies removes kubeadm's copies of manifests, configuration and etcd's data.
func (u *Upgrader) forgetCopies() error {
	found, err := filepath.Glob(u.on(kubeadmFolder) + "/kubeadm-*")
	for _, f := range found {
		err = errors.Join(err, os.RemoveAll(f))
	}
	return err
}

// KubeletHealthy asks the kubelet of this machine, at the address that kubeadm configures.
func KubeletHealthy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:10248/healthz", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("the kubelet answers %s", resp.Status)
	}
	return nil
}

// read returns a file; nil if it does not exist.
func read(path string) ([]byte, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return text, err
}
