// Package doctor finds faults of a cluster, or of a machine that should join it, and returns remedies. It runs on the
// owner's workstation. It only reads, except that it updates known.json of the owner's folder.
//
// A failed check does not prevent the others. Only checks that need an object which could not be read are left out.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"time"

	releasev1 "helm.sh/helm/v4/pkg/release/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/recovery"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/objects/signedpolicy"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

// Names of the checks, in their order.
const (
	CheckFolder      = "owner's folder"
	CheckPolicy      = "policy"
	CheckKubeconfig  = "administrator's kubeconfig"
	CheckAPI         = "API server"
	CheckClock       = "clock"
	CheckNodeClocks  = "clocks of nodes"
	CheckKinds       = "Muster's kinds"
	CheckChart       = "chart"
	CheckAdmission   = "admission policies"
	CheckObjects     = "chart's objects"
	CheckServices    = "services"
	CheckImages      = "images"
	CheckOwnerKey    = "owner's key"
	CheckRoot        = "root secret"
	CheckDescription = "cluster's description"
	CheckRotation    = "rotation"
	CheckUpgrade     = "upgrade of Kubernetes"
	CheckKnown       = "what was known"
	CheckAccess      = "node access"
	CheckTPMs        = "TPMs"
	CheckAuthorities = "certificate authorities"
	CheckBindings    = "kubeadm's bindings"
	CheckTokens      = "bootstrap tokens"
	CheckPodTokens   = "pods' tokens"
	CheckPods        = "privileged pods"
	CheckJoinservice = "joinservices"
	CheckAudit       = "audit log"
	CheckNodes       = "nodes"
	CheckDisks       = "disks"
)

// Config configures the checks.
type Config struct {
	// Folder is the path of the owner's folder.
	Folder string
	// DialContext opens the connections to joinservices; nil for a [net.Dialer].
	DialContext func(ctx context.Context, network, addr string) (net.Conn, error)
	// Now returns the time; nil: time.Now.
	Now func() time.Time
}

// doctor is one examination.
type doctor struct {
	Config
	checkup.Report
	dir     *ownerdir.Dir
	policy  *attest.Policy // of the folder; nil if it can't be read
	kube    *clusterapi.Client
	release *releasev1.Release
	drill   bool // the cluster is healthy, and the folder is checked
}

func newDoctor(cfg Config) *doctor {
	d := &doctor{Config: cfg}
	if d.Now == nil {
		d.Now = time.Now
	}
	return d
}

// Examine makes all checks.
func Examine(ctx context.Context, cfg Config) *checkup.Report {
	d := newDoctor(cfg)
	if !d.folder() {
		return &d.Report
	}
	defer func() { _ = d.dir.Close() }()
	d.ownPolicy()
	if !d.kubeconfig() || !d.apiServer(ctx) {
		return &d.Report
	}
	d.each(ctx, d.nodeClocks, d.kinds, d.chart, d.services, d.ownerKey, d.known, d.root, d.description, d.access, d.tpms, d.authorities, d.bindings, d.tokens, d.podTokens, d.privilegedPods, d.joinservices, d.auditLog, d.nodes, d.disks)
	return &d.Report
}

// each makes the checks that query the cluster.
func (d *doctor) each(ctx context.Context, checks ...func(context.Context) error) {
	for _, check := range checks {
		if err := check(ctx); err != nil {
			d.Add(CheckAPI, checkup.Fail, "Check the API server: it answered earlier checks.", "%v", err)
			if ctx.Err() != nil {
				break
			}
		}
	}
}

const restoreFolder = "Restore the folder from your copy: its contents can't be recreated."

func (d *doctor) folder() bool {
	dir, err := ownerdir.View(d.Folder)
	if err != nil {
		d.Err(CheckFolder, "Name the folder by --directory. The finding says what is wrong with its mode or its files.", err)
		return false
	}
	d.dir = dir
	_, secrets := dir.Secrets()
	_, key := dir.OwnerKey()
	for _, err := range []error{secrets, key} {
		remedy := restoreFolder
		if errors.Is(err, ownerdir.ErrExposed) {
			remedy = "Run that chmod. If another person may have read the file: docs/threat-model.md describes what each secret gives access to; muster rotate owner-key replaces the owner's key."
		}
		if err != nil {
			d.Err(CheckFolder, remedy, err)
		}
	}
	if _, err := dir.Known(); errors.Is(err, ownerdir.ErrUnreadable) {
		d.Err(CheckFolder, recovery.UnreadableRemedy, err)
	} else if err != nil { // a recovery and the checks that need it can't read it, either
		d.Err(CheckFolder, "Use the version of muster that has written it, or a newer one.", err)
	}
	switch c := dir.Cluster(); {
	case c.Restore != nil:
		d.Add(CheckFolder, checkup.Warn, recovery.RestoreRemedy, "%v: it stopped at the stage %s", recovery.ErrRestoring, c.Stage)
	case c.Stage != ownerdir.StageInstalled:
		d.Add(CheckFolder, checkup.Warn, "Run muster init again: it continues where it stopped.", "init is incomplete: it stopped at the stage %s", c.Stage)
	}
	if d.Clean(CheckFolder) {
		d.OK(CheckFolder, "%s is complete, and only you can read it", d.Folder)
	}
	return true
}

func (d *doctor) ownPolicy() {
	text, err := d.dir.Read(ownerdir.PolicyFile)
	if err != nil {
		d.Err(CheckPolicy, restoreFolder, err)
		return
	}
	p, found, err := policyfile.Check(text, d.Now())
	if err != nil {
		d.Err(CheckPolicy, "Correct "+d.dir.File(ownerdir.PolicyFile)+"; muster policy check names the line.", err)
		return
	}
	d.policy = p
	for _, f := range found {
		d.Add(CheckPolicy, checkup.Warn, "If you did not mean it, change it, increase serial, and run muster policy apply.", "%s: %s", f.Field, f.Text)
	}
	if d.Clean(CheckPolicy) {
		d.OK(CheckPolicy, "serial %d", p.Serial())
	}
}

func (d *doctor) kubeconfig() bool {
	kube, err := access.Connect(d.dir)
	if err != nil {
		d.Err(CheckKubeconfig, "Complete muster init, or copy /etc/kubernetes/admin.conf from a control plane to "+d.dir.File(ownerdir.AdminConf)+", mode 0600.", err)
		return false
	}
	ends, err := kube.Ends()
	if err != nil {
		d.Err(CheckKubeconfig, "Copy /etc/kubernetes/admin.conf from a control plane to "+d.dir.File(ownerdir.AdminConf)+", mode 0600.", err)
		return false
	}
	for _, c := range ends {
		switch left := c.Expires.Sub(d.Now()); {
		case left < 0:
			d.Add(CheckKubeconfig, checkup.Fail, clusterapi.RenewRemedy, "the certificate of %s ended on %s", c.Name, c.Expires.UTC().Format(time.DateOnly))
		case left < 30*24*time.Hour:
			d.Add(CheckKubeconfig, checkup.Warn, clusterapi.RenewRemedy, "the certificate of %s ends on %s", c.Name, c.Expires.UTC().Format(time.DateOnly))
		}
	}
	if d.Clean(CheckKubeconfig) {
		d.OK(CheckKubeconfig, "leads to %s", kube.Server())
	}
	d.kube = kube
	return true
}

// A clock difference above warnSkew is a warning. Above failSkew, new certificates are not valid yet, and verdicts are too
// old when they arrive.
const (
	warnSkew = time.Minute
	failSkew = 5 * time.Minute
)

func (d *doctor) apiServer(ctx context.Context) bool {
	began := d.Now()
	theirs, err := d.kube.Ready(ctx)
	if err != nil {
		d.Err(CheckAPI, "Look at the control planes' consoles; with a login, which Muster's image does not have, crictl ps -a there shows kube-apiserver and etcd. If it only can't be reached from here, check the network and controlPlaneEndpoint. "+
			"If all control planes were off at the same time: muster recover (docs/recovery.md). If half of them or more are lost for good: docs/runbooks.md#lost-quorum.", err)
		return false
	}
	d.OK(CheckAPI, "%s is ready", d.kube.Server())
	took := d.Now().Sub(began)
	d.skew(CheckClock, "the API server's clock", theirs.Sub(began.Add(took/2)), took/2+time.Second)
	if d.Clean(CheckClock) {
		d.OK(CheckClock, "the API server's clock agrees with this computer's")
	}
	return true
}

// skew checks a difference, of which slack may be measurement error.
func (d *doctor) skew(check, whose string, diff, slack time.Duration) {
	off := max(0, diff.Abs()-slack).Round(time.Second)
	const remedy = "Set both clocks by NTP: with wrong ones, certificates are not yet or no longer valid and verdicts are too old."
	switch {
	case off > failSkew:
		d.Add(check, checkup.Fail, remedy, "%s differs from this computer's by %s", whose, off)
	case off > warnSkew:
		d.Add(check, checkup.Warn, remedy, "%s differs from this computer's by %s", whose, off)
	}
}

// ownerKey compares the folder's key with the services', and the cluster's policy with both.
func (d *doctor) ownerKey(ctx context.Context) error {
	rotation, err := d.dir.KeyRotation()
	if err != nil {
		return nil //nolint:nilerr // the folder's check has reported it
	}
	public := rotation.Keys()
	const other = "Use the folder of the owner who initialized this cluster. If that folder is lost: docs/operate.md."
	if d.release != nil {
		if !slices.Contains(clusterapi.OwnerKeys(d.release), public.Strings()[0]) { // the one that signs
			d.Add(CheckOwnerKey, checkup.Fail, other, "the services of this cluster accept another owner's key, not the one with which this folder signs")
		}
	}
	p, err := d.kube.Policy(ctx)
	if clusterapi.Absent(err) {
		d.Add(CheckOwnerKey, checkup.Fail, "Run muster policy apply.", "the cluster has no policy, so no machine is admitted")
		return nil
	}
	if err != nil {
		return err
	}
	d.signature(p, public, other)
	d.insecure(clusterapi.Insecure(p))
	if next := rotation.Command(); next != "" {
		d.Add(CheckOwnerKey, checkup.Warn, "Roll out the image for the next step, then run "+next+": with --dry-run it shows which nodes' images have which keys (docs/certificates.md).", "its rotation is unfinished: machines whose image has the old key still accept its signatures")
	}
	if d.Clean(CheckOwnerKey) {
		d.OK(CheckOwnerKey, "the services accept it, and the policy in force is signed with it")
	}
	return nil
}

// known compares the cluster with its last recorded state, and records the present one. A recovery relies on this record,
// and the record shows whether a cluster was restored to an earlier state (B7).
func (d *doctor) known(ctx context.Context) error {
	if d.Failed(CheckFolder) || d.Failed(CheckOwnerKey) {
		return nil // other checks report why
	}
	if d.dir.Cluster().Restore != nil {
		d.Add(CheckKnown, checkup.Fail, recovery.RestoreRemedy, "%v: until it is done, no ban and no salt of a new disk is recorded in %s", recovery.ErrRestoring, d.dir.File(ownerdir.KnownFile))
		return nil // during a restore, the record is that of the lost cluster
	}
	s, err := d.kube.Knowledge(ctx)
	if err != nil {
		return err
	}
	err = recovery.RecordState(ctx, d.dir, d.kube)
	if behind := s.Behind(); behind != "" && !errors.Is(err, recovery.ErrRolledBack) { // also if the state could not be recorded
		d.Add(CheckKnown, checkup.Fail, clusterapi.BehindRemedy, "%s", behind)
	}
	switch {
	case errors.Is(err, recovery.ErrRolledBack):
		d.Err(CheckKnown, clusterapi.BehindRemedy, err)
	case err != nil:
		d.Add(CheckKnown, checkup.Warn, "Make the folder writable, and run muster doctor again.", "%v", err)
	case s.Behind() == "":
		d.OK(CheckKnown, "the cluster's state is not older than the recorded one; %s has the present state", d.dir.File(ownerdir.KnownFile))
	}
	return nil
}

func (d *doctor) signature(p *v1alpha1.AttestationPolicy, public attest.OwnerKeys, other string) {
	inForce, err := signedpolicy.Open(p, public)
	if attest.ReasonOf(err) == attestv1.Reason_REASON_POLICY_INVALID { // signed, and refused by this version
		d.Add(CheckPolicy, checkup.Fail, policies.RefusedPolicyRemedy, "the cluster's policy: %v", err)
		return
	}
	if err != nil {
		d.Add(CheckOwnerKey, checkup.Fail, other, "the cluster's policy: %v", err)
		return
	}
	d.collateral(inForce.CollateralEnds())
	d.folderPolicy(p, inForce.Serial())
	if !p.Status.Accepted || p.Status.ObservedGeneration != p.Generation {
		d.Add(CheckPolicy, checkup.Fail, "Correct it, increase serial, and run muster policy apply.", "the services have not accepted generation %d: %s %s", p.Generation, p.Status.Reason, p.Status.Message)
	}
}

// folderPolicy compares the folder's policies with the cluster's: policy.yaml, and the one that was last signed here.
func (d *doctor) folderPolicy(p *v1alpha1.AttestationPolicy, inForce uint64) {
	known, err := d.dir.Known()
	if err != nil {
		return // another check reports it
	}
	last, newest, err := policies.NewestSigned(d.dir, p)
	if err != nil {
		d.Err(CheckPolicy, problem.Remedy(err), err)
		return
	}
	if own, signed, err := policies.SignedPolicy(d.dir); err == nil && string(signed.GetPolicy()) != p.Spec.Policy {
		level, remedy := checkup.Warn, "Run muster policy apply, if you have finished editing it."
		if own.Serial() <= last && string(signed.GetPolicy()) != newest {
			remedy = fmt.Sprintf("With it, a recovery is refused (POLICY_INVALID). Restore %s from your newest copy, or, if you have edited it, set serial to %d or more and run muster policy apply.", d.dir.File(ownerdir.PolicyFile), last+1)
			if d.drill {
				level = checkup.Fail
			}
		}
		d.Add(CheckPolicy, level, remedy, "the folder's policy (serial %d) differs from the cluster's (serial %d)", own.Serial(), inForce)
	}
	if newest != p.Spec.Policy && newest != known.Policy.JSON { // B7; with known.json's, the cluster was restored to an earlier state
		d.Add(CheckPolicy, checkup.Warn, fmt.Sprintf("The command that signed it was interrupted, or its policy was replaced since. Run it again, or put policy.yaml in force with a serial of %d or more: muster policy apply.", last+1),
			"the owner has signed a policy of serial %d, and the cluster has one of serial %d", last, inForce)
	}
}

// insecure reports insecure switches of the policy in force that the folder's policy does not have. Another check warns of the folder's switches.
func (d *doctor) insecure(inForce []string) {
	for _, s := range inForce {
		if s == clusterapi.UnknownSwitches {
			d.Add(CheckPolicy, checkup.Warn, policies.RefusedPolicyRemedy, "which insecure switches are on in the cluster's policy is unknown: this version of muster cannot read it")
			continue
		}
		if d.policy == nil || !slices.Contains(d.policy.Insecure(), s) {
			d.Add(CheckPolicy, checkup.Warn, "If you did not mean it, run muster policy apply with a policy without the switch.", "insecure.%s is on in the policy in force, but not in the folder's", s)
		}
	}
}

// collateral reports expired data of processor vendors in the cluster's policy. The check of the folder's policy warns before the expiry.
func (d *doctor) collateral(ends []attest.CollateralEnd) {
	for _, e := range ends {
		if d.Now().After(e.Time) {
			d.Add(CheckPolicy, checkup.Fail, clusterapi.CollateralRemedy,
				"the %s in the cluster's policy ended at %s UTC: hardware reports that need it are refused with HARDWARE_COLLATERAL", e.Name, e.Time.UTC().Format(time.DateTime))
		}
	}
}

// nodes reports the problems that muster status shows.
func (d *doctor) nodes(ctx context.Context) error {
	s, err := d.kube.Status(ctx, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	ready := 0
	for _, n := range s.Nodes {
		if n.Ready {
			ready++
		}
	}
	for _, a := range s.Attention {
		if kind, _, _ := strings.Cut(a.About, " "); !slices.Contains([]string{"node", "nodes", "waiting", "request"}, kind) {
			continue // another check reports it
		}
		d.Add(CheckNodes, checkup.Warn, a.Remedy, "%s: %s", a.About, a.Problem)
	}
	if d.Clean(CheckNodes) {
		d.OK(CheckNodes, "%d ready, and nothing else needs attention", ready)
	}
	return nil
}

// errNotSame is returned if folder and cluster have different versions of an object.
var errNotSame = errors.New("it is not the one in the owner's folder")

func differs(what string) error { return fmt.Errorf("%s: %w", what, errNotSame) }
