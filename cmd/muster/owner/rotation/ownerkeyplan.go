package rotation

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"fmt"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/trust/attest"
)

// OwnerKeyStep is a step of the rotation of the owner's key.
type OwnerKeyStep string

// The steps, in their order. Between them, the owner builds images and rolls them out.
const (
	// OwnerKeyPrepare creates the new key in the owner's folder, for images with both keys.
	OwnerKeyPrepare OwnerKeyStep = "prepare"
	// OwnerKeyCommit makes the new key the signing key.
	OwnerKeyCommit OwnerKeyStep = "commit"
	// OwnerKeyFinish ends the acceptance of the old key in the cluster.
	OwnerKeyFinish OwnerKeyStep = "finish"
)

// OwnerKeyServices changes the owner's keys of Muster's services in the cluster; see [ServiceKeys].
type OwnerKeyServices interface {
	// Check returns an error if Accept can't be called now. It changes nothing.
	Check(ctx context.Context, keys attest.OwnerKeys) error
	// Accept makes the services accept these keys and no others, and waits until the services are ready.
	Accept(ctx context.Context, keys attest.OwnerKeys) error
}

// OwnerKeyConfig configures [RotateOwnerKey].
type OwnerKeyConfig struct {
	Dir  *ownerdir.Dir
	Step OwnerKeyStep
	// Key is the new key of [OwnerKeyPrepare]; nil to create one.
	Key ed25519.PrivateKey
	// Services may be nil for [OwnerKeyPrepare].
	Services OwnerKeyServices
	// Report is called for each part of a step.
	Report func(string)
}

// OwnerKeyPlan is what a step of the rotation would do.
type OwnerKeyPlan struct {
	Step OwnerKeyStep `json:"step"`
	// Signs, Next and Previous are public keys in base64, as in [ownerdir.KeyRotation]; empty if there is none.
	Signs    string `json:"signs"`
	Next     string `json:"next,omitempty"`
	Previous string `json:"previous,omitempty"`
	// Nodes are the enrolled nodes that are not shut out, by name; none for [OwnerKeyPrepare].
	Nodes []OwnerKeyNode `json:"nodes"`
	// Problems block the step, Notes do not. Each names a remedy.
	Problems []string `json:"problems"`
	Notes    []string `json:"notes"`

	keys ownerdir.KeyRotation
}

// OwnerKeyNode lists the owner's keys in a node's image, by its last report.
type OwnerKeyNode struct {
	Name string `json:"name"`
	// Keys are in base64; empty if the node has not reported.
	Keys []string `json:"keys"`
	// New and Old report whether Keys has the new key and the old one.
	New bool `json:"new"`
	Old bool `json:"old"`
	// Running reports whether its machine has attested lately.
	Running bool `json:"running"`
}

// Err returns the problems as an error; nil if there are none.
func (p *OwnerKeyPlan) Err() error {
	if len(p.Problems) == 0 {
		return nil
	}
	return problem.WithRemedy(fmt.Errorf("the owner's key can't be rotated (%s): %s", p.Step, strings.Join(p.Problems, "\n")), "Nothing was changed. Solve these problems, and run the same command again; --dry-run shows what is left.")
}

// latest returns the key that signs after the rotation, and the one that it replaces; nil if there is none.
func (p *OwnerKeyPlan) latest() (latest, old ed25519.PublicKey) {
	if p.keys.Next != nil {
		return p.keys.Next, p.keys.Signs
	}
	return p.keys.Signs, p.keys.Previous
}

// ImageKeys returns ownerKeys for the image.yaml of the next image to roll out.
func (p *OwnerKeyPlan) ImageKeys() []string {
	latest, old := p.latest()
	if p.Step != OwnerKeyPrepare || old == nil {
		return attest.OwnerKeys{latest}.Strings()
	}
	return attest.OwnerKeys{old, latest}.Strings()
}

// PlanOwnerKey returns what a step would do, and what prevents it. It changes nothing.
func PlanOwnerKey(ctx context.Context, cfg OwnerKeyConfig) (*OwnerKeyPlan, error) {
	r, err := cfg.Dir.KeyRotation()
	if err != nil {
		return nil, err
	}
	text := base64.StdEncoding.EncodeToString
	p := &OwnerKeyPlan{Step: cfg.Step, Signs: text(r.Signs), Next: text(r.Next), Previous: text(r.Previous), Nodes: []OwnerKeyNode{}, Problems: []string{}, Notes: []string{}, keys: r}
	switch {
	case cfg.Step == OwnerKeyPrepare:
		p.prepare(cfg.Key)
		return p, nil
	case cfg.Step == OwnerKeyCommit && r.Next == nil && r.Previous == nil:
		p.problem("no key is prepared: run muster rotate owner-key --prepare, and roll out an image that has both keys")
		return p, nil
	case cfg.Step == OwnerKeyFinish && r.Next != nil:
		p.problem("the new key does not sign yet: run muster rotate owner-key --commit first")
		return p, nil
	}
	kube, err := access.Connect(cfg.Dir)
	if err != nil {
		return nil, err
	}
	if err := p.cluster(ctx, cfg, kube); err != nil {
		return nil, err
	}
	accept := r.Keys()
	if cfg.Step == OwnerKeyFinish {
		accept = attest.OwnerKeys{r.Signs}
	}
	if err := cfg.Services.Check(ctx, accept); err != nil {
		p.problem("the services can't be changed: %s", problem.Explain(err).Message+". "+problem.Explain(err).Remedy)
	}
	return p, nil
}

func (p *OwnerKeyPlan) problem(format string, args ...any) {
	p.Problems = append(p.Problems, fmt.Sprintf(format, args...))
}

func (p *OwnerKeyPlan) note(format string, args ...any) {
	p.Notes = append(p.Notes, fmt.Sprintf(format, args...))
}

func (p *OwnerKeyPlan) prepare(given ed25519.PrivateKey) {
	switch {
	case p.keys.Previous != nil:
		p.problem("the last rotation is not finished: run muster rotate owner-key --finish first")
	case p.keys.Next != nil && given != nil && !bytes.Equal(p.keys.Next, access.PublicOf(given)):
		p.problem("another key is prepared already. If no image has it, remove owner-next.key from the folder")
	case given != nil && bytes.Equal(p.keys.Signs, access.PublicOf(given)):
		p.problem("the given key is already the signing key")
	}
}

// cluster compares the rotation with the cluster's policy and its nodes.
func (p *OwnerKeyPlan) cluster(ctx context.Context, cfg OwnerKeyConfig, kube *clusterapi.Client) error {
	have, err := kube.Policy(ctx)
	if err != nil {
		return err
	}
	opened, err := policies.OpenPolicy(have, p.keys.Keys())
	if err != nil {
		return fmt.Errorf("the cluster's policy: %w", err)
	}
	latest, old := p.latest()
	signed := bytes.Equal(opened.Signer(), latest)
	switch {
	case cfg.Step == OwnerKeyFinish && !signed:
		p.problem("the policy in force is not signed with the new key: run muster rotate owner-key --commit again")
	case cfg.Step == OwnerKeyCommit && !signed:
		if _, err := resigned(cfg.Dir, have); err != nil {
			p.problem("%s. %s", err, problem.Remedy(err))
		}
	}
	all, err := kube.Enrollments(ctx)
	if err != nil {
		return err
	}
	signs, err := policies.ReadSigns(ctx, kube)
	if err != nil {
		return err
	}
	for i := range all {
		if !all[i].ShutOut() {
			p.node(&all[i], latest, old, signs)
		}
	}
	none, unknown := policies.NoneAttests(all, signs.Now), []string(nil)
	slices.SortFunc(p.Nodes, func(a, b OwnerKeyNode) int { return strings.Compare(a.Name, b.Name) })
	for _, n := range p.Nodes {
		switch {
		case n.New && n.Old && p.Step == OwnerKeyFinish:
			p.note("%s has an image that still accepts the old key: a holder of that key can sign orders and policies for it until it restarts with an image that has only the new key.", n.Name)
		case n.New:
		case none:
			unknown = append(unknown, n.Name)
		case !n.Running:
			p.note("%s has not attested lately, and has not reported that its image has the new key. If the image lacks it, the machine refuses the cluster from now on, and has to boot another image.", n.Name)
		case len(n.Keys) == 0:
			p.problem("%s has not reported the owner's keys in its image: its image is older than this muster or has none (insecure.noOwnerKey). Roll out an image that has the new key", n.Name)
		default:
			p.problem("the image of %s does not have the new key, so it would refuse the cluster's policy: roll out an image that has it (muster rollout status, muster rollout reboot)", n.Name)
		}
	}
	if len(unknown) > 0 {
		p.problem("%s, so it is not known which nodes run. These have not reported that their images have the new key: %s. %s Remove nodes that will not return: muster forget NODE", policies.NoneHasAttested, problem.Named(unknown), policies.WhyNoneAttests)
	}
	return nil
}

func (p *OwnerKeyPlan) node(n *v1alpha1.AttestedNode, latest, old ed25519.PublicKey, signs policies.Signs) {
	out := OwnerKeyNode{Name: n.Name, Keys: []string{}, Running: signs.Running(n)}
	if keys, err := attest.ParseOwnerKeys(n.Status.OwnerKeys); err == nil {
		out.Keys, out.New, out.Old = keys.Strings(), keys.Has(latest), old != nil && keys.Has(old)
	}
	p.Nodes = append(p.Nodes, out)
}
