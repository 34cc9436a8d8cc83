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
	// RotationTimeout is how long a control plane has for a phase: until its order expires, then for the restarts.
	RotationTimeout = orders.Validity + 35*time.Minute
	// tokensRenewed is after which time kubelets have replaced all tokens of pods: at 80 % of their life, and after 24 hours at the latest.
	tokensRenewed = 24 * time.Hour
	// maxTokenSecrets is how many names of Secrets a plan has.
	maxTokenSecrets = 10
)

// RotationConfig says which key is rotated, and how far.
type RotationConfig struct {
	Dir *ownerdir.Dir
	Key clusterinfo.RotatedKey
	// Finish drops the old key. Early does that also while tokens of pods may be signed with it.
	Finish, Early bool
	// Without are workers that the end of a rotation of the cluster's authority leaves behind.
	Without []string
	// Adopt has the folder's kubeconfig trust a new authority of the cluster; with only, no other one: [AdoptAuthority].
	Adopt func(ctx context.Context, ca *x509.Certificate, only bool) error
	// Wait is how long each control plane has; see [RotationTimeout]. Poll is the pause between two looks at the cluster.
	Wait, Poll time.Duration
	// Report is called for each step.
	Report func(node, step string)
}

// RotationPlan is what a rotation would do.
type RotationPlan struct {
	Key clusterinfo.RotatedKey `json:"key"`
	// Phase is how far the rotation is; empty: not begun.
	Phase clusterinfo.RotationPhase `json:"phase,omitempty"`
	// ID is the new key's; empty: there is none yet.
	ID    string         `json:"id,omitempty"`
	Nodes []RotationNode `json:"nodes"`
	// Problems have to be solved before anything is changed, Notes have not. Each says what to do.
	Problems []string `json:"problems"`
	Notes    []string `json:"notes"`
}

// RotationNode is a control plane in a plan.
type RotationNode struct {
	Name string `json:"name"`
	// Accepts is how many keys it accepts, Uses the ID of the one that it uses; zero if it has not reported.
	Accepts int    `json:"accepts"`
	Uses    string `json:"uses,omitempty"`
	// Has are the phases that it has done.
	Has []clusterinfo.RotationPhase `json:"has"`
}

// Err returns the problems as an error; nil if there are none.
func (p *RotationPlan) Err() error {
	if len(p.Problems) == 0 {
		return nil
	}
	return problem.WithRemedy(fmt.Errorf("the %s can't be rotated: %s", p.Key, strings.Join(p.Problems, "\n")), "Nothing was changed. Solve these problems, and run the same command again; --dry-run shows what is left.")
}

// PlanRotation determines what a rotation would do, and changes nothing.
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
	// now is what the cluster's description says; nil: not begun.
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

// unfit returns why no phase may begin because of a control plane; empty: it may.
func unfit(n *clusterapi.NodeRelease) string {
	if why := rollout.ExcludedReason(n); why != "" {
		return n.Name + " is a control plane, and " + why + "."
	}
	if restarts(n) {
		return n.Problem() + ": wait until they are Ready; if they don't get so, muster doctor --node " + n.Name + " shows why."
	}
	if bad := n.Problem(); bad != "" {
		return bad + ": wait until it is well, repair it (muster doctor --node " + n.Name + "), or remove it (muster forget " + n.Name + ")."
	}
	return ""
}

// restarts reports whether nothing but static pods is not Ready on a control plane: each phase of a rotation restarts them.
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
		refuse("Kubernetes is being upgraded: end that first (muster status shows it).")
	case r.now != nil && r.now.Key != r.Key:
		refuse("the %s is being rotated: end that first (%s).", r.now.Key, r.now.Command())
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
		case r.now != nil && r.now.Key == r.Key && rollout.ExcludedReason(n) == "" && restarts(n): // perhaps because of an order of an earlier run, which was interrupted
			p.Notes = append(p.Notes, fmt.Sprintf("%s: no further control plane is begun before they are, for up to %s.", n.Problem(), wellWithin))
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
			p.Notes = append(p.Notes, fmt.Sprintf("%s accepts %d keys of this kind now. --finish leaves the new one alone: what depends on another one of them stops working then.", n.Name, len(s.Accepts)))
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

// planNodes adds what the nodes say of the cluster's authority.
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
			p.Notes = append(p.Notes, "These nodes do not report which authority they trust, and --finish waits for that: "+problem.Named(names)+". Upgrade their images, or start them.")
		}
	case r.now.Key != r.Key:
	case r.now.Phase == clusterinfo.RotationFinish && slices.ContainsFunc(nodes, func(n clusterapi.NodeRelease) bool {
		return n.ControlPlane && r.now.Reached(clusterinfo.RotationFinish, n.Keys[r.Key])
	}): // it is too late: the old one is dropped
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
		p.Notes = append(p.Notes, "After --finish, tokens that the old key has signed are refused: those of pods that read theirs only at their start, and all that were made by kubectl create token or the TokenRequest API before.")
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
			p.Notes = append(p.Notes, fmt.Sprintf("%d Secrets have a token of the old key, which stops working: %s. Delete and create each again before.", len(names), problem.Printable(strings.Join(names[:min(len(names), maxTokenSecrets)], ", "))))
		}
	case clusterinfo.EncryptionKey:
		p.Notes = append(p.Notes, "--finish writes all Secrets again, then drops the old key. After that, copies of etcd from before can be restored only with the encryption.yaml of their time: backups of Muster have it.")
	case clusterinfo.EtcdCA:
		p.Notes = append(p.Notes, "After --finish, etcd accepts client certificates of the new authority only. Programs of your own that talk to etcd, such as monitoring, need a new certificate and the new etcd/ca.crt before.")
	case clusterinfo.ClusterCA:
		p.Notes = append(p.Notes, "After --finish, API servers and kubelets accept client certificates of the new authority only: other administrators need new kubeconfigs, and programs with certificates of the old one new certificates. Programs that trust the old one alone do not accept API servers any more: restart pods that have read it only at their start. Copy the owner's folder.")
	case clusterinfo.FrontProxyCA:
		p.Notes = append(p.Notes, "After --finish, aggregated API servers accept requests of API servers with the new authority only. Those that read the ConfigMap extension-apiserver-authentication only at their start have to be restarted before.")
	}
	return nil
}

// errMoved means that another program has changed the cluster's description.
var errMoved = errors.New("another program has changed the cluster's description meanwhile")
