package renewal

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

const (
	// restarted is the file with the IDs of the bans after which this control plane's API server was restarted. The digest in the API server's
	// annotation covers it.
	restarted         = folder + "/muster-bans.json"
	apiServer         = "kube-apiserver"
	controllerManager = "kube-controller-manager"
	// restartWithin bounds an attempt to restart the API server: certificates that end meanwhile have to be renewed.
	restartWithin = 10 * time.Minute
	// evictedWithin is how long an eviction may take before the API server restarts anyway: a finalizer of a tenant's can hold it for any time. After
	// the end of such an eviction the API server restarts again, since the node could read the held objects meanwhile.
	evictedWithin = 2 * time.Minute
	// heldBack is the suffix of the ID of a ban after which the API server restarted before the eviction had completed.
	heldBack = "/held"
)

// RunStreams restarts this control plane's API server once a banned node is evicted, or its eviction takes long, until ctx ends. It continues after
// failures.
//
// An API server authorizes a watch only when it begins: without a restart, a watch that a node opened before its ban would receive new Secrets without
// end (J10). One control plane after another restarts, by the lease (J8).
func (r *Renewer) RunStreams(ctx context.Context) error {
	pause := retry.Backoff{Min: r.Timing.Sign, Max: r.Timing.RetryMax}
	seen := map[string]time.Time{}
	var wanted time.Time
	for {
		wait := r.Timing.Sign
		now, done, err := r.endStreams(ctx, seen, wanted)
		if now != nil {
			seen = now
		}
		switch {
		case done:
			wanted = time.Time{}
		case wanted.IsZero():
			wanted = r.Now()
		}
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // stopped by its caller
		case err != nil:
			wait = pause.Next(0)
			r.Log.WarnContext(ctx, "watches of banned nodes may continue: the API server is not restarted", "err", err, "again_in", wait.String())
		default:
			pause.Reset()
		}
		if retry.Wait(ctx, wait) != nil {
			return nil //nolint:nilerr // stopped by its caller
		}
	}
}

// endStreams restarts the API server if a node that was seen banned before is evicted, or its eviction is overdue; an enrollment that `muster forget`
// bans is gone by the next check. It returns since when each ban is seen, by its ID, and whether nothing is left to do. wanted is since when a restart
// is due; zero if none was.
func (r *Renewer) endStreams(ctx context.Context, seen map[string]time.Time, wanted time.Time) (map[string]time.Time, bool, error) {
	c, err := r.Connect()
	if err != nil {
		return nil, false, err
	}
	defer c.Close()
	banned, err := c.Banned(ctx)
	if err != nil {
		return nil, false, err
	}
	now := make(map[string]time.Time, len(banned))
	for id := range banned {
		now[id] = r.Now()
		if since, before := seen[id]; before {
			now[id] = since
		}
	}
	known, err := r.plane.restartedFor()
	if err != nil {
		return now, false, err
	}
	var fresh []string
	for id, node := range banned {
		if _, before := seen[id]; !before || slices.Contains(known, id) {
			continue
		}
		gone, err := c.Evicted(ctx, node)
		switch {
		case err != nil:
			return now, false, err
		case gone:
			fresh = append(fresh, id)
		case r.Now().Sub(now[id]) >= evictedWithin && !slices.Contains(known, id+heldBack):
			fresh = append(fresh, id+heldBack)
		}
	}
	due, err := r.plane.unfinished(known)
	if err != nil || len(fresh) == 0 && !due {
		return now, err == nil, err
	}
	for _, id := range known { // lifted bans are removed from the file
		if _, still := banned[strings.TrimSuffix(id, heldBack)]; still {
			fresh = append(fresh, id)
		}
	}
	slices.Sort(fresh)
	err = r.restartAPIServer(ctx, c, fresh, wanted)
	return now, err == nil, err
}

func (r *Renewer) restartAPIServer(ctx context.Context, c Cluster, bans []string, wanted time.Time) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	unlock, err := r.plane.exclusive()
	if err != nil {
		return err
	}
	defer unlock()
	if r.plane.pending() {
		return errors.New("certificates are renewed first")
	}
	ctx, cancel := context.WithTimeout(ctx, restartWithin)
	defer cancel()
	if err := admitted(ctx, c); err != nil {
		return err
	}
	return c.Exclusively(ctx, func(ctx context.Context) error { // J8
		// A component that stays broken does not keep watches open for ever.
		if bad, err := c.Unhealthy(ctx); err != nil || len(bad) > 0 && (wanted.IsZero() || r.Now().Sub(wanted) < restartWithin) {
			return errors.Join(err, fmt.Errorf("not started, since these are not Ready: %s", strings.Join(bad, ", ")))
		}
		r.Log.InfoContext(ctx, "restarting this control plane's API server to end the watches that banned nodes had open", "bans", strings.Join(bans, ", "))
		text, err := json.Marshal(bans)
		if err != nil {
			return err
		}
		if err := machine.WriteFile(r.plane.on(restarted), text, 0o600, 0o700); err != nil {
			return err
		}
		if err := r.plane.step("noted bans"); err != nil {
			return err
		}
		annotation, err := r.plane.restart(apiServer)
		if err != nil || annotation == "" {
			return err
		}
		if err := r.untilRuns(ctx, c, apiServer, annotation); err != nil {
			return err
		}
		r.Log.InfoContext(ctx, "this control plane's API server was restarted: it has no watch of a banned node any more")
		return nil
	})
}

// restartedFor reads the IDs in the file.
func (p plane) restartedFor() ([]string, error) {
	text, err := os.ReadFile(p.on(restarted))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []string
	if err := json.Unmarshal(text, &out); err != nil {
		return nil, fmt.Errorf("%s: %w; remove the file", restarted, err)
	}
	return out, nil
}

// unfinished reports whether the file was written, but the API server was not restarted.
func (p plane) unfinished(known []string) (bool, error) {
	if len(known) == 0 || p.pending() {
		return false, nil
	}
	pod, want, err := p.manifest(apiServer)
	return err == nil && pod != nil && pod.GetAnnotations()[Annotation] != want, err
}
