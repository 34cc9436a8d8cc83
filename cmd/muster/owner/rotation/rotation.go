// Package rotation replaces the keys of a cluster and of its owner.
package rotation

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/orders"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/retry"
)

// wellWithin is how long control planes may take to become healthy before the next one starts, because each one restarts
// static pods.
const wellWithin = 5 * time.Minute

// Rotate replaces a key of the control planes: first all accept a new one, then all use it. With Finish, all drop the old one. It stops at the first
// control plane that fails or is unhealthy. A repeated call continues, because the progress is stored in the cluster.
func Rotate(ctx context.Context, cfg RotationConfig) (*RotationPlan, error) {
	r, err := newRotation(ctx, cfg)
	if err != nil {
		return nil, err
	}
	p, err := r.plan(ctx)
	if err == nil {
		err = p.Err()
	}
	if err != nil {
		return nil, err
	}
	if err := r.run(ctx); err != nil {
		return nil, problem.WithRemedy(err, cmp.Or(problem.Remedy(err), "muster doctor --node NODE shows what is wrong with a control plane.")+" To continue the rotation, run the same command again; until then no control plane can join.")
	}
	p.Phase = ""
	if r.now != nil {
		p.Phase, p.ID = r.now.Phase, r.now.ID
	}
	return p, nil
}

func (r *rotating) run(ctx context.Context) error {
	if err := r.underived(r.now); err != nil { // the rotation may have been started with another copy of the folder
		return err
	}
	if r.Finish {
		return r.finish(ctx)
	}
	if r.now == nil {
		if err := r.move(ctx, &clusterinfo.Rotation{Key: r.Key, Phase: clusterinfo.RotationAccept}); err != nil {
			return err
		}
	}
	if err := r.lost(ctx); err != nil {
		return err
	}
	for {
		next := clusterinfo.RotationUse
		switch r.now.Phase {
		case clusterinfo.RotationAccept:
		case clusterinfo.RotationUse:
			next = clusterinfo.RotationSettled
		case clusterinfo.RotationFinish:
			return problem.WithRemedy(errors.New("the old key is being dropped"), "Continue with --finish.")
		case clusterinfo.RotationSettled:
			back, err := r.rolledBack(ctx)
			if err != nil {
				return err
			}
			if !back {
				return r.adopt(ctx, false)
			}
			continue
		}
		if err := r.inTurn(ctx); err != nil {
			return err
		}
		to := *r.now
		to.Phase = next
		if err := r.move(ctx, &to); err != nil {
			return err
		}
	}
}

// rolledBack returns to the previous phase if a control plane no longer uses the new key, because its disk was rolled back.
// Until it uses the key again, no control plane can join.
func (r *rotating) rolledBack(ctx context.Context) (bool, error) {
	nodes, err := r.controlPlanes(ctx)
	if err != nil {
		return false, err
	}
	i := slices.IndexFunc(nodes, func(n clusterapi.NodeRelease) bool { return !r.now.Reached(clusterinfo.RotationSettled, n.Keys[r.Key]) })
	if i < 0 {
		return false, nil
	}
	r.Report(nodes[i].Name, "no longer uses the new key: it gets the key again")
	to := *r.now
	to.Phase = clusterinfo.RotationUse
	return true, r.move(ctx, &to)
}

// lost restarts the rotation with another key if no control plane has the new one: the control plane that made it was lost before another one had it.
func (r *rotating) lost(ctx context.Context) error {
	if r.now.ID == "" || r.now.Phase != clusterinfo.RotationAccept && r.now.Phase != clusterinfo.RotationUse {
		return nil
	}
	nodes, err := r.controlPlanes(ctx)
	if err != nil || slices.ContainsFunc(nodes, func(n clusterapi.NodeRelease) bool {
		s := n.Keys[r.Key]
		return s.Uses == r.now.ID || slices.Contains(s.Staged, r.now.ID)
	}) {
		return err
	}
	r.Report("cluster", "no control plane has the new key any more: a new one is made")
	return r.move(ctx, &clusterinfo.Rotation{Key: r.Key, Phase: clusterinfo.RotationAccept})
}

// move writes the next phase into the cluster's description; nil ends the rotation. If two commands run at once, the second one sees the first one's
// change, and stops.
func (r *rotating) move(ctx context.Context, to *clusterinfo.Rotation) error {
	if err := r.underived(to); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, r.Wait)
	defer cancel()
	if to != nil && (r.now == nil || r.now.Phase != to.Phase) {
		now, err := r.kube.ServerTime(ctx)
		if err != nil {
			return err
		}
		to.Since = now.UTC()
	}
	err := r.kube.Describe(ctx, func(i *clusterinfo.Info) error {
		switch {
		case equal(i.Rotation, to): // an earlier call has written it
			return nil
		case !equal(i.Rotation, r.now) || i.Other() != nil:
			return problem.WithRemedy(errMoved, "This command changed nothing. muster status shows what is in progress.")
		}
		i.Rotation = to
		return nil
	})
	if err == nil {
		r.now = to
	}
	return err
}

// underived records in the folder that Secrets may be encrypted with a key that is not derived from the root secret. It does
// so before an API server uses such a key.
func (r *rotating) underived(phase *clusterinfo.Rotation) error {
	c := r.Dir.Cluster()
	if phase == nil || phase.Key != clusterinfo.EncryptionKey || phase.Phase == clusterinfo.RotationAccept || c.EncryptionKeyRotated {
		return nil
	}
	c.EncryptionKeyRotated = true
	return r.Dir.Save(c)
}

func equal(a, b *clusterinfo.Rotation) bool {
	return a == nil && b == nil || a != nil && b != nil && a.Key == b.Key && a.Phase == b.Phase && a.ID == b.ID
}

// inTurn lets one control plane after another do the present phase. It starts none while one is unhealthy. Before the new key is used, control planes
// that have lost it accept it again: at a reboot before this program has written the key's ID, the machine returns to the keys that the others accept
// (B8).
func (r *rotating) inTurn(ctx context.Context) error {
	phases := []clusterinfo.RotationPhase{r.now.Phase}
	if r.now.Phase == clusterinfo.RotationUse {
		phases = []clusterinfo.RotationPhase{clusterinfo.RotationAccept, clusterinfo.RotationUse}
	}
	for _, phase := range phases {
		if err := r.each(ctx, phase); err != nil {
			return err
		}
	}
	return nil
}

// each lets one control plane after another do a phase that it has not done yet.
func (r *rotating) each(ctx context.Context, phase clusterinfo.RotationPhase) error {
	ordered := map[string]bool{}
	for {
		nodes, err := r.well(ctx)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(nodes, func(n clusterapi.NodeRelease) bool { return !r.now.Reached(phase, n.Keys[r.Key]) })
		if i < 0 {
			return nil
		}
		n := nodes[i].Name
		if ordered[n] {
			return fmt.Errorf("%s has reported the phase %q as done, but its Node shows otherwise", n, phase)
		}
		ordered[n] = true
		if err := r.order(ctx, n, phase); err != nil {
			return fmt.Errorf("%s: %w", n, err)
		}
	}
}

// well waits until all control planes are healthy, and returns them.
func (r *rotating) well(ctx context.Context) ([]clusterapi.NodeRelease, error) {
	ctx, cancel := context.WithTimeout(ctx, wellWithin)
	defer cancel()
	last := ""
	for {
		nodes, err := r.controlPlanes(ctx)
		switch {
		case err != nil && ctx.Err() != nil && last != "":
			return nil, fmt.Errorf("the next control plane was not started: %s", last)
		case err != nil:
			return nil, err
		}
		why := ""
		for i := range nodes {
			why = cmp.Or(why, unfit(&nodes[i]))
		}
		if why == "" && len(nodes) > 0 {
			return nodes, nil
		}
		if why != last && why != "" {
			r.Report("cluster", "waits: "+why)
		}
		last = why
		if retry.Wait(ctx, r.Poll) != nil {
			return nil, fmt.Errorf("the next control plane was not started: %s", cmp.Or(why, "there is none"))
		}
	}
}

// order makes a control plane do a phase.
func (r *rotating) order(ctx context.Context, node string, phase clusterinfo.RotationPhase) error {
	ctx, cancel := context.WithTimeout(ctx, r.Wait)
	defer cancel()
	args := map[string]string{ownerorder.ArgKey: string(r.Key), ownerorder.ArgPhase: string(phase), ownerorder.ArgID: r.now.ID}
	report, err := orders.Execute(ctx, r.Dir, node, ownerorder.ActionRotateKey, args, func(s string) { r.Report(node, s) })
	if err != nil {
		return err
	}
	r.Report(node, string(phase)+": done")
	if r.now.ID != "" {
		return nil
	}
	// It has made the key. The others get an order with its ID, and fetch the key with that ID from a control plane that the owner's policy lists.
	// They find no key for a forged ID, and refuse the public part of another key.
	var made struct{ ID, Public string }
	if err := json.Unmarshal([]byte(report.Output), &made); err != nil || !clusterinfo.IsKeyID(made.ID) {
		return fmt.Errorf("it reports no ID of a new key: %q", report.Output)
	}
	to := *r.now
	if to.ID = made.ID; r.Key.PublicFile() != "" {
		if err := r.Key.CheckPublic(made.ID, made.Public); err != nil {
			return problem.WithRemedy(fmt.Errorf("its report about its new key is wrong: %w", err), "Root on "+node+", or a writer of AttestedNodes' status, has changed the report. Find out who (docs/threat-model.md).")
		}
		to.Public = made.Public
	}
	return r.move(ctx, &to)
}

// finish makes the control planes drop the old key.
func (r *rotating) finish(ctx context.Context) error {
	if r.now.Phase == clusterinfo.RotationSettled {
		to := *r.now
		to.Phase = clusterinfo.RotationFinish
		// One that has joined since must also use the new key.
		nodes, err := r.well(ctx)
		if err != nil {
			return err
		}
		for i := range nodes {
			if !r.now.Reached(clusterinfo.RotationSettled, nodes[i].Keys[r.Key]) {
				return problem.WithRemedy(fmt.Errorf("%s does not use the new key", nodes[i].Name), "Repeat muster rotate "+string(r.Key)+" without --finish: it makes the node use the key.")
			}
		}
		if err := r.adopt(ctx, false); err != nil { // the old certificate is refused afterwards
			return err
		}
		if r.Key == clusterinfo.ServiceAccountKey && r.Early { // with a token of the old key, joinservice could not record that a machine has finished
			if err := r.replaceServices(ctx); err != nil {
				return err
			}
		}
		if err := r.move(ctx, &to); err != nil {
			return err
		}
	}
	if r.Key == clusterinfo.EncryptionKey {
		r.Report("cluster", "all Secrets are written again")
		n, err := r.kube.RewriteSecrets(ctx)
		if err != nil {
			return err
		}
		r.Report("cluster", fmt.Sprintf("%d Secrets are encrypted with the new key", n))
	}
	if err := r.inTurn(ctx); err != nil {
		return err
	}
	if err := r.kube.DropAuthorities(ctx, r.Key, r.now.Public); err != nil {
		return err
	}
	if err := r.adopt(ctx, true); err != nil {
		return err
	}
	return r.move(ctx, nil)
}

// replaceServices gives Muster's services tokens of the new key.
func (r *rotating) replaceServices(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, r.Wait)
	defer cancel()
	return r.kube.ReplaceServices(ctx, func(s string) { r.Report("cluster", s) })
}
