package unlock_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/disk"
	"github.com/muster-k8s/muster/services/bootstrapper/unlock"
	"github.com/muster-k8s/muster/trust/keys"
)

func parsed(t testing.TB, key []byte) keys.Disk {
	t.Helper()
	k, err := keys.ParseDisk(key)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// What comes first ends both: recovery, and the tries to rejoin, which nothing that recovery does can stop.
func TestTheOwnerOpensAControlPlanesDiskBesideTheTriesToRejoin(t *testing.T) {
	w := newWorld(t)
	w.meta.Role = "control-plane"
	j := w.cluster(w.like(), w.owner)
	j.script(refuses(attestv1.Reason_REASON_API_UNAVAILABLE, 0))
	answered := false
	w.recovery = func(ctx context.Context, id keys.DiskID, try func(context.Context, keys.Disk) error) error {
		if id.String() != diskID {
			t.Errorf("recovery of %s", id)
		}
		if err := try(ctx, parsed(t, wrong)); !errors.Is(err, disk.ErrWrongKey) {
			t.Errorf("a wrong key: %v", err)
		}
		eventually(t, "rejoining goes on", func() bool { return j.asked() > 3 })
		if err := try(ctx, parsed(t, right)); err != nil {
			t.Errorf("the right key: %v", err)
		}
		if err := try(ctx, parsed(t, right)); !errors.Is(err, unlock.ErrOpen) {
			t.Errorf("once more: %v", err)
		}
		<-ctx.Done()
		answered = true // whom it owes an answer
		return nil
	}
	if err := w.boot().end(t); err != nil || w.disk.opens != 1 || !answered {
		t.Errorf("%v, opened %d times, answered %t", err, w.disk.opens, answered)
	}
	if !slices.ContainsFunc(w.lines(), func(l string) bool { return strings.Contains(l, "`muster recover` opens it as well") }) {
		t.Errorf("console %q", w.lines())
	}
}

func TestRecoveryThatEndsOrIsLateChangesNothing(t *testing.T) {
	w := newWorld(t)
	w.meta.Role = "control-plane"
	j := w.cluster(w.like(), w.owner)
	j.script(refuses(attestv1.Reason_REASON_API_UNAVAILABLE, 0))
	w.recovery = func(ctx context.Context, _ keys.DiskID, try func(context.Context, keys.Disk) error) error {
		<-ctx.Done()
		if err := try(context.WithoutCancel(ctx), parsed(t, right)); !errors.Is(err, unlock.ErrOpen) {
			t.Errorf("a key that comes late: %v", err)
		}
		return nil
	}
	r := w.boot()
	eventually(t, "asked", func() bool { return j.asked() > 1 })
	j.script(gives(right))
	if err := r.end(t); err != nil || w.disk.opens != 1 {
		t.Errorf("%v, opened %d times", err, w.disk.opens)
	}

	failing := newWorld(t)
	failing.meta.Role = "control-plane"
	k := failing.cluster(failing.like(), failing.owner)
	k.script(refuses(attestv1.Reason_REASON_API_UNAVAILABLE, 0))
	failing.recovery = func(context.Context, keys.DiskID, func(context.Context, keys.Disk) error) error {
		return errors.New("the port is taken")
	}
	r = failing.boot()
	eventually(t, "asked all the same", func() bool { return k.asked() > 3 })
	k.script(gives(right))
	if err := r.end(t); err != nil {
		t.Error(err)
	}
	if !bytes.Contains(failing.log.Bytes(), []byte("recovery is not served any more")) {
		t.Error("the log does not say that recovery ended")
	}
}

func TestWorkersHaveNoRecovery(t *testing.T) {
	w := newWorld(t)
	j := w.cluster(w.like(), w.owner)
	j.script(refuses(attestv1.Reason_REASON_API_UNAVAILABLE, 0))
	w.recovery = func(context.Context, keys.DiskID, func(context.Context, keys.Disk) error) error {
		t.Error("a worker serves recovery")
		return nil
	}
	r := w.boot()
	eventually(t, "asked", func() bool { return j.asked() > 3 })
	j.script(gives(right))
	if err := r.end(t); err != nil {
		t.Error(err)
	}
}

// Keys that come at the same time are tried one after the other, and the disk is opened once.
func TestManyKeysAtOnceOpenTheDiskOnce(t *testing.T) {
	w := newWorld(t)
	w.meta.Role = "control-plane"
	w.cluster(w.like(), w.owner)
	w.recovery = func(ctx context.Context, _ keys.DiskID, try func(context.Context, keys.Disk) error) error {
		var all sync.WaitGroup
		for i := range 20 {
			all.Go(func() {
				key := right
				if i%2 == 0 {
					key = wrong
				}
				_ = try(ctx, parsed(t, key))
			})
		}
		all.Wait()
		return nil
	}
	if err := w.boot().end(t); err != nil || w.disk.opens != 1 {
		t.Errorf("%v, opened %d times", err, w.disk.opens)
	}
}
