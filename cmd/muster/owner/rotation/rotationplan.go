package rotation

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/orders"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/rollout"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

const (
	// RotationTimeout is how long a control plane has for a phase: the order's validity, plus the time for the restarts.
	RotationTimeout = orders.Validity + 35*time.Minute
	// tokensRenewed is the time after which kubelets have replaced all tokens of pods: at 80 % of their life, at the latest after 24 hours.
	tokensRenewed = 24 * time.Hour
	// maxTokenSecrets limits the names of Secrets in a plan.
	maxTokenSecrets = 10
)

// RotationConfig configures which key is rotated, and how far.
type RotationConfig struct {
	Dir *ownerdir.Dir
	Key clusterinfo.RotatedKey
	// Finish drops the old key. Early allows that while tokens of pods may still be signed with it.
	Finish, Early bool
	// Without are workers that may keep the old authority of the cluster when a rotation finishes.
	Without []string
	// Adopt makes the folder's kubeconfig trust a new authority of the cluster; with only, no other one: [AdoptAuthority].
	Adopt func(ctx context.Context, ca *x509.Certificate, only bool) error
	// Wait is how long each control plane has; see [RotationTimeout]. Poll is the pause between two reads of the cluster's
	// state.
	Wait, Poll time.Duration
	// Report is called for each step.
	Report func(node, step string)
}

// RotationPlan is what a rotation would do.
type RotationPlan struct {
	Key clusterinfo.RotatedKey `json:"key"`
	// Phase is the progress of the rotation; empty before its start.
	Phase clusterinfo.RotationPhase `json:"phase,omitempty"`
	// ID is the new key's; empty if there is none yet.
	ID    string         `json:"id,omitempty"`
	Nodes []RotationNode `json:"nodes"`
	// Problems block the rotation, Notes do not. Each names a remedy.
	Problems []string `json:"problems"`
	Notes    []string `json:"notes"`
}

// RotationNode is a control plane in a plan.
type RotationNode struct {
	Name string `json:"name"`
	// Accepts is the number of keys that it accepts, Uses the ID of the key in use; zero if it has not reported.
	Accepts int    `json:"accepts"`
	Uses    string `json:"uses,omitempty"`
	// Has lists the phases that it has done.
	Has []clusterinfo.RotationPhase `json:"has"`
}

// Err returns the problems as an error; nil if there are none.
func (p *RotationPlan) Err() error {
	if len(p.Problems) == 0 {
		return nil
	}
	return problem.WithRemedy(fmt.Errorf("the %s can't be rotated: %s", p.Key, strings.Join(p.Problems, "\n")), "Nothing was changed. Solve these problems, and run the same command again; --dry-run shows what is left.")
}

// PlanRotation plans a rotation, and changes nothing.
func PlanRotation(ctx context.Context, cfg RotationConfig) (*RotationPlan, error) {
	r, err := newRotation(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return r.plan(ctx)
}

// rotating is a rotation.
type rotating struct {
	RotationConfig

	kube *clusterapi.Client
	info *clusterinfo.Info
	// now is the rotation in the cluster's description; nil before its start.
	now *clusterinfo.Rotation
}

func newRotation(ctx context.Context, cfg RotationConfig) (*rotating, error) {
	if !slices.Contains(clusterinfo.RotatedKeys(), cfg.Key) {
		return nil, fmt.Errorf("key %q is not known", cfg.Key)
	}
	if _, err := access.FolderCluster(cfg.Dir); err != nil { // each order names it
		return nil, err
	}
	kube, err := access.Connect(cfg.Dir)
	if err != nil {
		return nil, err
	}
	info, err := kube.Description(ctx)
	if err != nil {
		return nil, err
	}
	return &rotating{RotationConfig: cfg, kube: kube, info: info, now: info.Rotation}, nil
}

// controlPlanes returns the control planes that have, or should have, the key.
func (r *rotating) controlPlanes(ctx context.Context) ([]clusterapi.NodeRelease, error) {
	ctx, cancel := context.WithTimeout(ctx, r.Wait)
	defer cancel()
	nodes, err := r.kube.Releases(ctx)
	return slices.DeleteFunc(nodes, func(n clusterapi.NodeRelease) bool {
		return !n.ControlPlane || !n.Joined && (!n.Takes() || n.Enrollment.Spec.DiskID == "") // it has not joined yet, or is removed
	}), err
}

// unfit returns why a control plane prevents the start of a phase; empty if it does not.
func unfit(n *clusterapi.NodeRelease) string {
	if why := rollout.ExcludedReason(n); why != "" {
		return n.Name + " is a control plane, and " + why + "."
	}
	if restarts(n) {
		return n.Problem() + ": wait until they are Ready. If they don't become Ready, muster doctor --node " + n.Name + " shows why."
	}
	if bad := n.Problem(); bad != "" {
		return bad + ": wait until it is healthy, repair it (muster doctor --node " + n.Name + "), or remove it (muster forget " + n.Name + ")."
	}
	return ""
}

// restarts reports whether only static pods of a control plane are not Ready: each phase of a rotation restarts them.
func restarts(n *clusterapi.NodeRelease) bool {
	return n.Joined && n.Ready && len(n.Unwell) > 0
}

func (r *rotating) plan(ctx context.Context) (*RotationPlan, error) {
	p := &RotationPlan{Key: r.Key, Nodes: []RotationNode{}, Problems: []string{}, Notes: []string{}}
	refuse := func(format string, args ...any) { p.Problems = append(p.Problems, fmt.Sprintf(format, args...)) }
	if r.now != nil {
		p.Phase, p.ID = r.now.Phase, r.now.ID
	}
	switch {
	case r.info.Other() != nil:
		refuse("Kubernetes is being upgraded: complete that first (muster status shows it).")
	case r.now != nil && r.now.Key != r.Key:
		refuse("the %s is being rotated: complete that first (%s).", r.now.Key, r.now.Command())
	case r.Finish && (r.now == nil || r.now.Phase == clusterinfo.RotationAccept || r.now.Phase == clusterinfo.RotationUse):
		refuse("no rotation of the %s is ready to be finished: run muster rotate %s without --finish first.", r.Key, r.Key)
	}
	nodes, err := r.controlPlanes(ctx)
	if err != nil {
		return nil, err
	}
	if len(nodes) == 0 {
		refuse("no control plane of this cluster is a node. muster status shows the nodes.")
	}
	for i := range nodes {
		n := &nodes[i]
		switch why := unfit(n); {
		case why == "":
		case r.now != nil && r.now.Key == r.Key && rollout.ExcludedReason(n) == "" && restarts(n): // perhaps because of an order of an earlier, interrupted run
			p.Notes = append(p.Notes, fmt.Sprintf("%s: the next control plane starts only after they are, with a limit of %s.", n.Problem(), wellWithin))
		default:
			refuse("%s", why)
		}
		s, reported := n.Keys[r.Key]
		if !reported {
			refuse("%s has not reported a %s: its image is of an earlier version, or the cluster has no such key of Muster's (docs/certificates.md).", n.Name, r.Key)
		}
		row := RotationNode{Name: n.Name, Accepts: len(s.Accepts), Uses: problem.Printable(s.Uses), Has: []clusterinfo.RotationPhase{}}
		for _, phase := range []clusterinfo.RotationPhase{clusterinfo.RotationAccept, clusterinfo.RotationUse, clusterinfo.RotationFinish} {
			if r.now != nil && r.now.Key == r.Key && r.now.Reached(phase, s) {
				row.Has = append(row.Has, phase)
			}
		}
		p.Nodes = append(p.Nodes, row)
		if r.now == nil && len(s.Accepts) > 1 {
			p.Notes = append(p.Notes, fmt.Sprintf("%s accepts %d keys of this kind now. --finish keeps only the new one: clients of the other ones stop working then.", n.Name, len(s.Accepts)))
		}
	}
	if r.Key == clusterinfo.ClusterCA {
		if err := r.planNodes(ctx, p, refuse); err != nil {
			return nil, err
		}
	}
	if r.now != nil && r.now.Key == r.Key && (r.now.Phase == clusterinfo.RotationSettled || r.now.Phase == clusterinfo.RotationFinish) {
		now, err := r.kube.ServerTime(ctx)
		if err != nil {
			return nil, err
		}
		return p, r.consequences(ctx, p, now)
	}
	return p, nil
}

// planNodes adds the nodes' reports about the cluster's authority.
func (r *rotating) planNodes(ctx context.Context, p *RotationPlan, refuse func(string, ...any)) error {
	ctx, cancel := context.WithTimeout(ctx, r.Wait)
	defer cancel()
	nodes, err := r.kube.Releases(ctx)
	if err != nil {
		return err
	}
	now, err := r.kube.ServerTime(ctx)
	if err != nil {
		return err
	}
	switch {
	case r.now == nil:
		if names := silent(nodes); len(names) > 0 {
			p.Notes = append(p.Notes, "These nodes do not report which authority they trust, but --finish requires that: "+problem.Named(names)+". Upgrade their images, or start them.")
		}
	case r.now.Key != r.Key:
	case r.now.Phase == clusterinfo.RotationFinish && slices.ContainsFunc(nodes, func(n clusterapi.NodeRelease) bool {
		return n.ControlPlane && r.now.Reached(clusterinfo.RotationFinish, n.Keys[r.Key])
	}): // too late: the old one is already dropped
	case r.now.Phase != clusterinfo.RotationSettled && r.now.Phase != clusterinfo.RotationFinish:
	case r.Finish:
		r.behind(nodes, now, refuse)
	default:
		r.behind(nodes, now, func(format string, args ...any) {
			p.Notes = append(p.Notes, "Before --finish: "+fmt.Sprintf(format, args...))
		})
	}
	return nil
}

// consequences adds what stops working when the old key is dropped.
func (r *rotating) consequences(ctx context.Context, p *RotationPlan, now time.Time) error {
	switch r.Key {
	case clusterinfo.ServiceAccountKey:
		p.Notes = append(p.Notes, "After --finish, tokens that the old key has signed are refused: tokens of pods that read them only at their start, and all that were made earlier with kubectl create token or the TokenRequest API.")
		if earliest := r.now.Since.Add(tokensRenewed); r.now.Phase == clusterinfo.RotationSettled && now.Before(earliest) {
			text := fmt.Sprintf("kubelets have replaced the tokens of all pods at %s.", earliest.Local().Format(time.DateTime))
			if r.Finish && !r.Early {
				p.Problems = append(p.Problems, text+" Wait until then, or finish with --early: the command restarts Muster's services, and other pods fail to authenticate for up to an hour, or until they are restarted. Those that you restart before keep working.")
			} else {
				p.Notes = append(p.Notes, text)
			}
		}
		names, err := r.kube.TokenSecrets(ctx, r.now.ID)
		if err != nil {
			return err
		}
		if len(names) > 0 {
			p.Notes = append(p.Notes, fmt.Sprintf("%d Secrets have a token of the old key, which stops working: %s. Delete and recreate each one before.", len(names), problem.Printable(strings.Join(names[:min(len(names), maxTokenSecrets)], ", "))))
		}
	case clusterinfo.EncryptionKey:
		p.Notes = append(p.Notes, "--finish writes all Secrets again, then drops the old key. After that, earlier copies of etcd can be restored only with the encryption.yaml of their time, which backups of Muster contain.")
	case clusterinfo.EtcdCA:
		p.Notes = append(p.Notes, "After --finish, etcd accepts client certificates of the new authority only. Programs of your own that talk to etcd, such as monitoring, need a new certificate and the new etcd/ca.crt before.")
	case clusterinfo.ClusterCA:
		p.Notes = append(p.Notes, "After --finish, API servers and kubelets accept client certificates of the new authority only: other administrators need new kubeconfigs, and programs with certificates of the old authority need new ones. Programs that trust only the old authority no longer accept API servers: restart pods that read it only at their start. Copy the owner's folder.")
	case clusterinfo.FrontProxyCA:
		p.Notes = append(p.Notes, "After --finish, aggregated API servers accept requests of API servers with the new authority only. Those that read the ConfigMap extension-apiserver-authentication only at their start have to be restarted before.")
	}
	return nil
}

// errMoved is returned if another program has changed the cluster's description.
var errMoved = errors.New("another program has changed the cluster's description meanwhile")
