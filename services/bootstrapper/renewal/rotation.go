package renewal

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/retry"
)

const (
	// wellWithin is how long the control planes may take to become healthy before one of them changes its keys.
	wellWithin = 6 * time.Minute
	// publishWithin is how long the state of the keys is tried to be written: this control plane's API server has just restarted.
	publishWithin = 2 * time.Minute
)

// ConnectRotation returns the cluster with the rights of this control plane's admin.conf, like [Connect], for a process beside the renewal.
func ConnectRotation(root, node string, log *slog.Logger) (Cluster, error) {
	c, err := connect(root, node, nil, log)
	if err != nil {
		return nil, err
	}
	c.holder = "rotation/" + node // the renewal on this machine is another holder
	return c, nil
}

// Change runs do, which replaces files that static pods read, while no other control plane joins, renews or restarts (J8), and this machine does not
// renew. Then it restarts the components whose files differ from those that they run with, each when the one before is Ready. With resume, an earlier
// run has started do, so this control plane may be unhealthy.
func (r *Renewer) Change(ctx context.Context, resume bool, do func() error, restart ...string) error {
	unlock, left, err := pause(ctx, r.plane, r.Timing.Poll, resume)
	if err != nil {
		return err
	}
	defer unlock()
	if left { // by Reissue, or by a renewal: what is not in use yet is restarted
		if err := r.plane.place(); err != nil {
			return err
		}
		restart = components
	}
	c, err := r.Connect()
	if err != nil {
		return err
	}
	defer c.Close()
	if err := admitted(ctx, c); err != nil {
		return err
	}
	return c.Exclusively(ctx, func(ctx context.Context) error {
		if err := r.untilWell(ctx, c, resume); err != nil {
			return err
		}
		if err := do(); err != nil {
			return err
		}
		for _, component := range restart {
			annotation, err := r.plane.restart(component)
			if err != nil {
				return err
			}
			if annotation == "" {
				continue
			}
			// The lease is kept until this component runs: a failure here must not be repeated on the next control plane.
			if err := r.untilRuns(ctx, c, component, annotation); err != nil {
				return err
			}
		}
		return r.plane.finish() // what Reissue has left
	})
}

// untilWell waits until the static pods of all control planes are Ready, with resume except those of this one.
func (r *Renewer) untilWell(ctx context.Context, c Cluster, resume bool) error {
	ctx, cancel := context.WithTimeout(ctx, wellWithin)
	defer cancel()
	for {
		bad, err := c.Unhealthy(ctx)
		if resume {
			bad = slices.DeleteFunc(bad, func(pod string) bool {
				return slices.ContainsFunc(components, func(component string) bool { return pod == component+"-"+c.Name() })
			})
		}
		if err == nil && len(bad) == 0 {
			return nil
		}
		if err == nil {
			err = fmt.Errorf("not started, since these are not Ready: %s", strings.Join(bad, ", "))
		}
		if retry.Wait(ctx, r.Timing.Poll) != nil {
			return err
		}
	}
}

// Reissue issues all certificates of an authority with the one on the disk, unless they are right, and puts them in place together, like a renewal: a machine
// that goes down in the middle finishes that at its next boot. The authority's path below pki is given without .crt. It is called by the function that
// [Renewer.Change] runs.
func (r *Renewer) Reissue(authority string) error {
	p := r.plane
	var own []file
	done := true
	for _, f := range files {
		if f.ca != "pki/"+authority+".crt" {
			continue
		}
		if _, err := os.Stat(p.on(filepath.Join(folder, f.certificate))); errors.Is(err, fs.ErrNotExist) {
			continue // not on this machine
		}
		own = append(own, f)
		right, err := p.right(f)
		if err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
		done = done && right
	}
	if len(own) == 0 {
		return fmt.Errorf("no certificate of this control plane is of the authority %s", authority)
	}
	if done { // before a crash
		return nil
	}
	part := p.on(Folder + ".part")
	if err := os.RemoveAll(part); err != nil { // left by an earlier attempt
		return err
	}
	if err := os.MkdirAll(filepath.Join(part, "pki", "etcd"), 0o700); err != nil {
		return err
	}
	for _, f := range own {
		was, err := load(p.on(filepath.Join(folder, f.certificate)))
		if err != nil {
			return err
		}
		if err := p.renew(f, was, part, r.Now()); err != nil {
			return fmt.Errorf("renew %s: %w", f.name, err)
		}
		if _, err := f.verified(part, p.on(folder)); err != nil {
			return fmt.Errorf("the renewed %s: %w", f.name, err)
		}
	}
	if err := p.sync(part); err != nil {
		return err
	}
	if err := os.RemoveAll(p.on(Folder)); err != nil { // Change has moved its files to their places
		return err
	}
	if err := os.Rename(part, p.on(Folder)); err != nil {
		return err
	}
	if err := p.sync(p.on(folder)); err != nil {
		return err
	}
	return p.place()
}

// PublishKeys writes the state of this control plane's keys to its Node.
func (r *Renewer) PublishKeys(ctx context.Context, s clusterinfo.KeyStates) error {
	ctx, cancel := context.WithTimeout(ctx, publishWithin)
	defer cancel()
	for {
		err := r.publishKeys(ctx, s)
		if err == nil || retry.Wait(ctx, r.Timing.Poll) != nil {
			return err
		}
	}
}

func (r *Renewer) publishKeys(ctx context.Context, s clusterinfo.KeyStates) error {
	c, err := r.Connect()
	if err != nil {
		return err
	}
	defer c.Close()
	return c.PublishKeys(ctx, s)
}

// PublishKeys implements [Cluster] with an annotation of the Node.
func (c *cluster) PublishKeys(ctx context.Context, s clusterinfo.KeyStates) error {
	value, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return c.annotate(ctx, clusterinfo.KeysAnnotation, string(value))
}

// Name implements [Cluster].
func (c *cluster) Name() string { return c.node }

// OtherControlPlanes implements [Cluster].
func (c *cluster) OtherControlPlanes(ctx context.Context) (out []netip.Addr, err error) {
	err = pages(ctx, c, "attestednodes", func(list v1alpha1.AttestedNodeList) string {
		for i := range list.Items {
			n := &list.Items[i]
			if n.Name == c.node || n.Spec.Role != v1alpha1.RoleControlPlane || n.ShutOut() {
				continue
			}
			for _, a := range n.Spec.Addresses {
				if ip, err := netip.ParseAddr(a); err == nil {
					out = append(out, ip)
				}
			}
		}
		return list.Continue
	})
	return out, err
}
