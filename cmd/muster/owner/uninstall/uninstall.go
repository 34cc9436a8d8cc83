// Package uninstall removes Muster from a cluster, which continues as a plain kubeadm cluster.
package uninstall

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/orders"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/trust/attest"
)

// UninstallConfig configures [Uninstall]. Dir, Report and Log are required.
type UninstallConfig struct {
	// Dir is the owner's folder, which is kept; the backup is stored there.
	Dir *ownerdir.Dir
	// Unencrypted are nodes whose state disks are not encrypted, by the owner's statement, if their enrollments do not record it.
	Unencrypted []string
	// LetBackIn accepts that banned machines and revoked certificates may write to the cluster again.
	LetBackIn bool
	// Report receives each step.
	Report progress.Reporter
	// Log receives the output of helm and client-go.
	Log *slog.Logger
}

// UninstallPlan is what an uninstall would do.
type UninstallPlan struct {
	// Steps are the remaining steps in their order; empty if nothing of Muster is left in the cluster.
	Steps []UninstallStep `json:"steps"`
	// Problems block the uninstall, Notes do not. Each names a remedy.
	Problems []problem.Problem `json:"problems"`
	Notes    []string          `json:"notes"`
	// Machines lists the nodes whose machines may still have Muster's units and packages.
	Machines []UninstalledMachine `json:"machines"`
}

// UninstallStep is one step, with its objects.
type UninstallStep struct {
	Name   string `json:"name"`
	Detail string `json:"detail"`
}

// UninstalledMachine is a node whose machine an administrator still has to change, as [UninstallRunbook] shows.
type UninstalledMachine struct {
	Node string        `json:"node"`
	Role v1alpha1.Role `json:"role"`
	// Ready is the Node's condition, which shows that the machine is on.
	Ready bool `json:"ready"`
}

// UninstallRunbook is the section of the documents about the steps on the machines.
const UninstallRunbook = "docs/runbooks.md#uninstall"

// blockControlPlane is the title of its block for control planes.
const blockControlPlane = "uninstall-control-plane"

// Err returns the problems as an error with the reason of the first one; nil if there are none.
func (p *UninstallPlan) Err() error {
	if len(p.Problems) == 0 {
		return nil
	}
	texts := make([]string, 0, len(p.Problems))
	for _, one := range p.Problems {
		texts = append(texts, one.Message+": "+one.Remedy)
	}
	reason := attestv1.Reason(attestv1.Reason_value["REASON_"+p.Problems[0].Reason])
	return problem.WithRemedy(attest.Refuse(reason, "Muster can't be uninstalled yet:\n%s", strings.Join(texts, "\n")), "Nothing was changed. Solve these problems, and run the same command again; --dry-run shows what is left.")
}

// uninstaller is one run.
type uninstaller struct {
	UninstallConfig

	kube        *clusterapi.Client
	definitions []*unstructured.Unstructured
	names       []string // of definitions
	plan        *UninstallPlan
	steps       []uninstallStep // of the plan
}

type uninstallStep struct {
	name string
	// left returns the objects that the step has to change; empty if there are none.
	left func(context.Context) (string, error)
	do   func(context.Context) (string, error)
	// restores is true for a step that only restores what kubeadm has.
	restores bool
}

// PlanUninstall plans an uninstall, and changes nothing.
func PlanUninstall(ctx context.Context, cfg UninstallConfig) (*UninstallPlan, error) {
	u, err := newUninstaller(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return u.plan, nil
}

// Uninstall removes Muster from a cluster, which continues as a plain kubeadm cluster, and returns its plan. While the plan has problems, it refuses
// and changes nothing. A repeated call continues after an interruption.
func Uninstall(ctx context.Context, cfg UninstallConfig) (*UninstallPlan, error) {
	if cfg.Report == nil {
		return nil, errors.New("uninstall.Uninstall: Report is required")
	}
	u, err := newUninstaller(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := u.plan.Err(); err != nil {
		return nil, err
	}
	for _, s := range u.steps {
		if err := progress.Step(u.Report, s.name, func() (string, error) { return s.do(ctx) }); err != nil {
			if problem.Remedy(err) == "" {
				err = problem.WithRemedy(err, "To continue the uninstall, run the same command again.")
			}
			return nil, err
		}
	}
	return u.plan, nil
}

func newUninstaller(ctx context.Context, cfg UninstallConfig) (*uninstaller, error) {
	if cfg.Dir == nil || cfg.Log == nil {
		return nil, errors.New("uninstall.Uninstall: Dir and Log are required")
	}
	u := &uninstaller{UninstallConfig: cfg, plan: &UninstallPlan{Steps: []UninstallStep{}, Problems: []problem.Problem{}, Notes: []string{}, Machines: []UninstalledMachine{}}}
	var err error
	if u.definitions, err = clusterapi.Definitions(); err != nil {
		return nil, err
	}
	for _, d := range u.definitions {
		u.names = append(u.names, d.GetName())
	}
	if u.kube, err = access.Connect(cfg.Dir); err != nil {
		return nil, err
	}
	own := false
	for _, s := range u.order() {
		left, err := s.left(ctx)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
		if left != "" {
			u.steps = append(u.steps, s)
			u.plan.Steps = append(u.plan.Steps, UninstallStep{Name: s.name, Detail: left})
			own = own || !s.restores
		}
	}
	if !own { // without Muster, the administrator decides about missing objects of kubeadm
		u.steps, u.plan.Steps = nil, []UninstallStep{}
	}
	return u, u.look(ctx)
}

// order returns all steps in their order. At each point between two of them nodes can write, and can renew their certificates once the policies are gone:
//   - kubeadm's permissions come before the admission policies go, which until then refuse their use;
//   - the policies go before the chart, with which the permission goes that one of them asks for;
//   - the services stop before an enrollment changes: a joinservice deletes the Node of an enrollment that is being deleted;
//   - the enrollments go before the namespace: while there are any, a repeated call checks the disks.
func (u *uninstaller) order() []uninstallStep {
	kube := u.kube
	count := func(n int, of string) string {
		if n == 0 {
			return ""
		}
		return fmt.Sprintf("%d %s", n, of)
	}
	listed := func(names []string, err error) (string, error) { return strings.Join(names, ", "), err }
	return []uninstallStep{
		{"back up Muster's objects", func(context.Context) (string, error) {
			r, err := kube.Release(u.Log)
			if err != nil || r == nil {
				return "", err
			}
			return "to " + u.Dir.File("backups"), nil
		}, u.backup, false},
		{"restore kubeadm's permissions", func(ctx context.Context) (string, error) { return listed(kube.RestoreBootstrap(ctx, true)) },
			func(ctx context.Context) (string, error) { return listed(kube.RestoreBootstrap(ctx, false)) }, true},
		{"restore kubeadm's configuration", func(ctx context.Context) (string, error) { return listed(kube.PlainConfiguration(ctx, true)) },
			func(ctx context.Context) (string, error) { return listed(kube.PlainConfiguration(ctx, false)) }, true},
		{"remove the admission policies", func(ctx context.Context) (string, error) {
			n, err := kube.AdmissionPolicies(ctx)
			return count(n, "policies and bindings"), err
		}, func(ctx context.Context) (string, error) { return "", kube.RemoveAdmissionPolicies(ctx) }, false},
		{"stop Muster's services", func(ctx context.Context) (string, error) {
			r, err := kube.Release(u.Log)
			if err != nil {
				return "", err
			}
			sets, pods, err := kube.Workloads(ctx)
			if err == nil && r != nil {
				return fmt.Sprintf("release %s, revision %d", r.Name, r.Version), nil
			}
			return count(len(sets)+len(pods), "DaemonSets and pods"), err
		}, func(ctx context.Context) (string, error) { return "", u.stop(ctx) }, false},
		{"remove Muster's definitions", func(ctx context.Context) (string, error) { return listed(kube.Defined(ctx, u.names...)) },
			func(ctx context.Context) (string, error) {
				if err := kube.Unfinalize(ctx); err != nil {
					return "", err
				}
				return "", kube.RemoveDefinitions(ctx, u.names...)
			}, false},
		{"remove Muster's namespace", func(ctx context.Context) (string, error) {
			there, err := kube.HasNamespace(ctx)
			if !there {
				return "", err
			}
			return clusterapi.Namespace + ", with the root secret, which the owner's folder keeps", err
		}, func(ctx context.Context) (string, error) { return "", kube.RemoveNamespace(ctx) }, false},
		{"remove what is left", func(ctx context.Context) (string, error) { return listed(kube.Strays(ctx)) },
			func(ctx context.Context) (string, error) { return "", kube.RemoveStrays(ctx) }, false},
	}
}

func (u *uninstaller) stop(ctx context.Context) error {
	err := u.kube.UninstallChart(ctx, u.Log)
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) { // not Ctrl-C
		return problem.WithRemedy(err, "A pod on a node that is not Ready ends only with its Node: if the machine will not return, kubectl delete node NAME. Then run the command again.")
	}
	return err
}

func (u *uninstaller) backup(ctx context.Context) (string, error) {
	last, err := u.kube.Newest(u.Log)
	if err != nil {
		return "", err
	}
	files, err := u.kube.Backup(ctx, last, u.definitions)
	if err != nil {
		return "", err
	}
	return u.Dir.Backup(time.Now(), files)
}

// look determines the plan's problems, notes and machines.
func (u *uninstaller) look(ctx context.Context) error {
	enrolled, err := u.kube.Enrolled(ctx)
	if err != nil {
		return err
	}
	if len(u.steps) > 0 {
		if err := u.checkControlPlanes(ctx); err != nil {
			return err
		}
		u.checkDisks(enrolled)
		if err := u.checkShutOut(ctx, enrolled); err != nil {
			return err
		}
	}
	release, err := u.kube.Release(u.Log)
	if err != nil {
		return err
	}
	if release != nil { // without Muster's services, no command in progress could complete
		if err := u.checkProgress(ctx, enrolled); err != nil {
			return err
		}
	} else if sets, _, err := u.kube.Workloads(ctx); err != nil || len(sets) > 0 {
		if err != nil {
			return err
		}
		u.problem(attestv1.Reason_REASON_NOT_READY, "helm has no release of Muster, but its DaemonSets are there ("+strings.Join(sets, ", ")+")",
			"another tool has installed the chart, and would install it again: delete it with that tool first, the admission policies before the other objects")
	}
	return u.machines(ctx)
}

func (u *uninstaller) problem(reason attestv1.Reason, message, remedy string) {
	u.plan.Problems = append(u.plan.Problems, problem.Problem{Reason: attest.ReasonName(reason), Message: message, Remedy: remedy})
}

func (u *uninstaller) note(format string, args ...any) {
	u.plan.Notes = append(u.plan.Notes, fmt.Sprintf(format, args...))
}

// checkControlPlanes checks the arguments of static pods, which the API can't change: without an approver, all nodes become NotReady within a day.
func (u *uninstaller) checkControlPlanes(ctx context.Context) error {
	all, err := u.kube.ControlPlaneFlags(ctx)
	if err != nil {
		return err
	}
	var approves, tokens, short, checks []string
	for _, f := range all {
		if !f.Seen || !f.Approves {
			approves = append(approves, f.Node)
		}
		if !f.SignsTokens || !f.TokenAuth {
			tokens = append(tokens, f.Node)
		}
		if f.ShortCertificates {
			short = append(short, f.Node)
		}
		if f.ChecksKubelets {
			checks = append(checks, f.Node)
		}
	}
	if len(all) == 0 {
		u.problem(attestv1.Reason_REASON_MACHINE_CONFIG, "no Node has the label of a control plane, so it is not known who approves node certificates", "set the label node-role.kubernetes.io/control-plane on the control planes' Nodes")
	}
	if len(approves) > 0 {
		u.problem(attestv1.Reason_REASON_MACHINE_CONFIG, "nothing would approve kubelets' certificates, and all nodes would become NotReady within a day: the approving controller of kube-controller-manager is off, or its pod is not in the API, on "+allOf(approves),
			"run the block "+blockControlPlane+" of "+UninstallRunbook+" on each of these control planes, one after another. For one that will not return, run muster forget NAME, and then this command with --let-back-in, since its certificates stay revoked for a day")
	}
	if len(tokens) > 0 {
		u.note("kubeadm join by a token would fail: bootstrap tokens are off on %s. The block %s turns them on", allOf(tokens), blockControlPlane)
	}
	if len(short) > 0 {
		u.note("kubelets' certificates would be valid for 24 hours: a node that is off for longer could not return. The block %s corrects that on %s", blockControlPlane, allOf(short))
	}
	if len(checks) > 0 {
		u.note("the API servers of %s verify kubelets' serving certificates, which nothing approves in plain kubeadm: logs and exec would fail within a day. Run the block %s, or approve these requests with your own program", allOf(checks), blockControlPlane)
	}
	return nil
}

// checkDisks refuses the uninstall while a state disk is encrypted: without kms, nothing could open it at the next boot.
func (u *uninstaller) checkDisks(enrolled []v1alpha1.AttestedNode) {
	var encrypted, unknown []string
	for _, n := range enrolled {
		switch {
		case n.Spec.DiskMode == v1alpha1.DiskModePlain:
		case n.Spec.DiskMode == "" && n.Spec.DiskID == "": // its machine has never joined
		case n.Spec.DiskMode != "":
			encrypted = append(encrypted, n.Name)
		case !slices.Contains(u.Unencrypted, n.Name):
			unknown = append(unknown, n.Name)
		}
	}
	if len(encrypted) > 0 {
		u.problem(attestv1.Reason_REASON_STATE_DISK, "the state disks of "+allOf(encrypted)+" are encrypted, and nothing could open them at the next boot",
			"replace each machine: drain it, run muster forget, and join another one with an unencrypted disk (stateDisk.mode plain in its image, with a login and a writable /etc, which the image of Muster does not have; insecure.allowPlainState in the policy), a control plane only while two others are left")
	}
	if len(unknown) > 0 {
		u.problem(attestv1.Reason_REASON_STATE_DISK, "it is not recorded whether the state disks of "+allOf(unknown)+" are encrypted",
			"if stateDisk.mode is plain in the machine's /etc/muster/image.yaml, add --unencrypted NODE")
	}
}

// checkShutOut refuses the uninstall while a machine is banned or a certificate revoked: plain Kubernetes enforces neither, and renews every node
// certificate that has not expired.
func (u *uninstaller) checkShutOut(ctx context.Context, enrolled []v1alpha1.AttestedNode) error {
	list, err := u.kube.Access(ctx)
	if err != nil {
		return err
	}
	now, err := u.kube.Ready(ctx) // this computer's clock ends no revocation (J4)
	if err != nil {
		return err
	}
	var banned, revoked []string
	for i := range enrolled {
		if enrolled[i].ShutOut() {
			banned = append(banned, enrolled[i].Name)
		}
	}
	for _, name := range list.Nodes() {
		e := list.Entry(name)
		switch {
		case e.Suspended && !slices.Contains(banned, name):
			banned = append(banned, name)
		case e.Revoked != nil && !e.Revoked.Lapsed(now):
			revoked = append(revoked, name+" until "+e.Revoked.Until.UTC().Format(time.RFC3339))
		}
	}
	if u.LetBackIn {
		if len(banned)+len(revoked) > 0 {
			u.note("machines that are shut out may write again, and renew their certificates: %s", allOf(slices.Concat(banned, revoked)))
		}
		return nil
	}
	const accept = ", or accept this: --let-back-in"
	if len(banned) > 0 {
		u.problem(attestv1.Reason_REASON_BANNED, "machines that are banned or being removed could write again, and renew their certificates for good: "+allOf(banned),
			"run muster forget for each, which revokes its certificates for a day, and wait until they end"+accept)
	}
	if len(revoked) > 0 {
		u.problem(attestv1.Reason_REASON_CERTIFICATE_RETIRED, "revoked certificates that have not expired could be used and renewed again: "+allOf(revoked), "wait until then"+accept)
	}
	return nil
}

// checkProgress refuses while the cluster's services or machines execute another command.
func (u *uninstaller) checkProgress(ctx context.Context, enrolled []v1alpha1.AttestedNode) error {
	busy := func(message, remedy string) {
		u.problem(attestv1.Reason_REASON_CONTROL_PLANE_BUSY, message, remedy)
	}
	switch info, err := u.kube.Description(ctx); {
	case err != nil && !clusterapi.Absent(err):
		return err
	case err == nil && info.Other() != nil, u.Dir.Cluster().Upgrade != nil:
		busy("Kubernetes is being upgraded", "muster upgrade kubernetes completes it")
	case err == nil && info.Rotation != nil: // without orders, the old key would stay accepted, or control planes would use different keys
		busy("the "+string(info.Rotation.Key)+" is being rotated", info.Rotation.Command()+" completes it")
	}
	holder, err := u.kube.JoinLeaseHolder(ctx)
	if err != nil {
		return err
	}
	if holder != "" {
		busy("a control plane joins or renews its certificates ("+problem.Printable(holder)+" holds the join lease)", "wait until it is done")
	}
	nodes, err := u.kube.Nodes(ctx)
	if err != nil {
		return err
	}
	var drained []string
	for _, n := range nodes {
		if n.Spec.Unschedulable && n.Annotations[v1alpha1.Returns] != "" { // kubectl uncordon leaves the annotation
			drained = append(drained, n.Name)
		}
	}
	if len(drained) > 0 {
		busy("muster has drained "+allOf(drained)+", and has not made it schedulable again", "run the command that drained it again: muster reboot, rollout reboot or upgrade kubernetes")
	}
	public, err := u.Dir.OwnerKeys()
	if err != nil {
		return err
	}
	for i := range enrolled {
		if s, o := orders.ActiveOrder(u.Dir, public, &enrolled[i], time.Now()); s != nil {
			busy(fmt.Sprintf("%s has an unfinished order %q", enrolled[i].Name, o.Action), "run that command again to wait for it, or wait until the order expires")
		}
	}
	return nil
}

// machines sets the plan's Machines, and adds notes about those that are off.
func (u *uninstaller) machines(ctx context.Context) error {
	nodes, err := u.kube.Nodes(ctx)
	if err != nil {
		return err
	}
	var off []string
	for _, n := range nodes {
		m := UninstalledMachine{Node: n.Name, Role: v1alpha1.RoleWorker, Ready: clusterapi.IsReady(&n)}
		if _, control := n.Labels[clusterinfo.ControlPlaneLabel]; control {
			m.Role = v1alpha1.RoleControlPlane
		}
		if u.plan.Machines = append(u.plan.Machines, m); !m.Ready {
			off = append(off, m.Node)
		}
	}
	if len(off) > 0 && len(u.steps) > 0 {
		u.note("not Ready: %s. Start these machines before, or remove those that will not return (muster forget NAME, then --let-back-in). A machine that is off for a day has no valid certificate when it returns, and nothing renews it: "+
			"after the block uninstall-machine of %s, run kubeadm reset and kubeadm join there", allOf(off), UninstallRunbook)
	}
	return nil
}

// Silence is how long a kubelet may take to renew its Lease, which it does every ten seconds.
const Silence = 30 * time.Second

// Listen corrects the plan's Machines: a machine whose kubelet does not renew its Lease within that time is not Ready, although its Node
// may show Ready for a minute. It returns the names of these machines.
func (p *UninstallPlan) Listen(ctx context.Context, dir *ownerdir.Dir, within time.Duration) ([]string, error) {
	kube, err := access.Connect(dir)
	if err != nil {
		return nil, err
	}
	var ready []string
	for _, m := range p.Machines {
		if m.Ready {
			ready = append(ready, m.Node)
		}
	}
	silent, err := kube.Silent(ctx, ready, within)
	if err != nil {
		return nil, err
	}
	for i := range p.Machines {
		p.Machines[i].Ready = p.Machines[i].Ready && !slices.Contains(silent, p.Machines[i].Node)
	}
	return silent, nil
}

// allOf lists all names, because each machine needs an action.
func allOf(names []string) string { return strings.Join(slices.Sorted(slices.Values(names)), ", ") }
