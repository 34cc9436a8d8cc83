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
	// restarted is the file with the IDs of the bans after which this control plane's API server was restarted. It is part of what the API server's annotation is
	// a digest of.
	restarted = folder + "/muster-bans.json"
	apiServer = "kube-apiserver"
	// restartWithin bounds a try to restart the API server: certificates that end meanwhile have to be renewed.
	restartWithin = 10 * time.Minute
)

// RunStreams restarts this control plane's API server once a banned node is evicted, until ctx ends. No failure ends it.
//
// An API server asks who may watch once, when the watch begins: what a node had open before its ban would be sent new Secrets for as long as it wished (J10). One
// control plane after another restarts, by the lease (J8).
func (r *Renewer) RunStreams(ctx context.Context) error {
	pause := retry.Backoff{Min: r.Timing.Sign, Max: r.Timing.RetryMax}
	seen := map[string]string{}
	var wanted time.Time
	for {
		wait := r.Timing.Sign
		banned, done, err := r.endStreams(ctx, seen, wanted)
		if banned != nil {
			seen = banned
		}
		switch {
		case done:
			wanted = time.Time{}
		case wanted.IsZero():
			wanted = r.Now()
		}
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // it was told to end
		case err != nil:
			wait = pause.Next(0)
			r.Log.WarnContext(ctx, "watches of banned nodes may go on: the API server is not restarted", "err", err, "again_in", wait.String())
		default:
			pause.Reset()
		}
		if retry.Wait(ctx, wait) != nil {
			return nil //nolint:nilerr // it was told to end
		}
	}
}

// endStreams restarts the API server if a node was evicted that was seen banned before; an enrollment that `muster forget` bans is gone by the next look. It returns
// who is banned, by ID of the ban, and whether nothing is left to do. wanted is since when something was; zero: it was not.
func (r *Renewer) endStreams(ctx context.Context, seen map[string]string, wanted time.Time) (map[string]string, bool, error) {
	c, err := r.Connect()
	if err != nil {
		return nil, false, err
	}
	defer c.Close()
	banned, err := c.Banned(ctx)
	if err != nil {
		return nil, false, err
	}
	known, err := r.plane.restartedFor()
	if err != nil {
		return banned, false, err
	}
	var fresh []string
	for id, node := range banned {
		if _, before := seen[id]; !before || slices.Contains(known, id) {
			continue
		}
		gone, err := c.Evicted(ctx, node)
		if err != nil {
			return banned, false, err
		}
		if gone {
			fresh = append(fresh, id)
		}
	}
	due, err := r.plane.unfinished(known)
	if err != nil || len(fresh) == 0 && !due {
		return banned, err == nil, err
	}
	for _, id := range known { // bans that were lifted need no place in the file
		if _, still := banned[id]; still {
			fresh = append(fresh, id)
		}
	}
	slices.Sort(fresh)
	r.Log.InfoContext(ctx, "a banned node is evicted; restarting this control plane's API server to end the watches that it had open", "banned", len(fresh))
	err = r.restartAPIServer(ctx, c, fresh, wanted)
	return banned, err == nil, err
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
		// One that stays broken keeps nobody's watches open.
		if bad, err := c.Unhealthy(ctx); err != nil || len(bad) > 0 && (wanted.IsZero() || r.Now().Sub(wanted) < restartWithin) {
			return errors.Join(err, fmt.Errorf("not begun, since these are not Ready: %s", strings.Join(bad, ", ")))
		}
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
		r.Log.InfoContext(ctx, "this control plane's API server was restarted: no watch of a banned node goes on here")
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

// unfinished reports whether the file was written, and the API server was not restarted.
func (p plane) unfinished(known []string) (bool, error) {
	if len(known) == 0 || p.pending() {
		return false, nil
	}
	pod, want, err := p.manifest(apiServer)
	return err == nil && pod != nil && pod.GetAnnotations()[Annotation] != want, err
}
