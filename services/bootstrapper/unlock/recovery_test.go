package unlock_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/hex"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	recoverv1 "github.com/muster-k8s/muster/gen/muster/recover/v1"
	"github.com/muster-k8s/muster/gen/muster/recover/v1/recoverv1connect"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/disk"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
	"github.com/muster-k8s/muster/services/bootstrapper/unlock"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
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

// The first key ends both: recovery, and the attempts to rejoin, which recovery can't stop.
func TestTheOwnerOpensAControlPlanesDiskBesideTheTriesToRejoin(t *testing.T) {
	w := newFixture(t)
	w.meta.Role = "control-plane"
	j := w.cluster(w.like(), w.owner)
	j.script(refuses(attestv1.Reason_REASON_API_UNAVAILABLE, 0))
	answered := false
	w.recovery = func(ctx context.Context, id keys.DiskID, try unlock.Try) error {
		if id.String() != diskID {
			t.Errorf("recovery of %s", id)
		}
		if err := try(ctx, parsed(t, wrong), clusterID, component.Desired{}); !errors.Is(err, disk.ErrWrongKey) {
			t.Errorf("a wrong key: %v", err)
		}
		eventually(t, "rejoining continues", func() bool { return j.asked() > 3 })
		if err := try(ctx, parsed(t, right), clusterID, component.Desired{}); err != nil {
			t.Errorf("the right key: %v", err)
		}
		if err := try(ctx, parsed(t, right), clusterID, component.Desired{}); !errors.Is(err, unlock.ErrOpen) {
			t.Errorf("once more: %v", err)
		}
		<-ctx.Done()
		answered = true // a caller waits for its answer
		return nil
	}
	if err := w.boot().end(t); err != nil || w.disk.opens != 1 || !answered {
		t.Errorf("%v, opened %d times, answered %t", err, w.disk.opens, answered)
	}
	if !slices.ContainsFunc(w.lines(), func(l string) bool { return strings.Contains(l, "`muster recover` also opens it") }) {
		t.Errorf("console %q", w.lines())
	}
}

func TestRecoveryThatEndsOrIsLateChangesNothing(t *testing.T) {
	w := newFixture(t)
	w.meta.Role = "control-plane"
	j := w.cluster(w.like(), w.owner)
	j.script(refuses(attestv1.Reason_REASON_API_UNAVAILABLE, 0))
	w.recovery = func(ctx context.Context, _ keys.DiskID, try unlock.Try) error {
		<-ctx.Done()
		if err := try(context.WithoutCancel(ctx), parsed(t, right), clusterID, component.Desired{}); !errors.Is(err, unlock.ErrOpen) {
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

	failing := newFixture(t)
	failing.meta.Role = "control-plane"
	k := failing.cluster(failing.like(), failing.owner)
	k.script(refuses(attestv1.Reason_REASON_API_UNAVAILABLE, 0))
	failing.recovery = func(context.Context, keys.DiskID, unlock.Try) error {
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
	w := newFixture(t)
	j := w.cluster(w.like(), w.owner)
	j.script(refuses(attestv1.Reason_REASON_API_UNAVAILABLE, 0))
	w.recovery = func(context.Context, keys.DiskID, unlock.Try) error {
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

// Keys that arrive at the same time are tried one after another, and the disk is opened once.
func TestManyKeysAtOnceOpenTheDiskOnce(t *testing.T) {
	w := newFixture(t)
	w.meta.Role = "control-plane"
	w.cluster(w.like(), w.owner)
	w.recovery = func(ctx context.Context, _ keys.DiskID, try unlock.Try) error {
		var all sync.WaitGroup
		for i := range 20 {
			all.Go(func() {
				key := right
				if i%2 == 0 {
					key = wrong
				}
				_ = try(ctx, parsed(t, key), clusterID, component.Desired{})
			})
		}
		all.Wait()
		return nil
	}
	if err := w.boot().end(t); err != nil || w.disk.opens != 1 {
		t.Errorf("%v, opened %d times", err, w.disk.opens)
	}
}

// This runs the whole process, and the owner's call as `muster recover` makes it.
func TestServeLetsTheOwnerOpenAControlPlanesDisk(t *testing.T) {
	w := newFixture(t)
	w.meta.Role = "control-plane"
	j := w.cluster(w.like(), w.owner)
	j.script(refuses(attestv1.Reason_REASON_API_UNAVAILABLE, 0))
	root, salt := bytes.Repeat([]byte{0xAB}, 32), bytes.Repeat([]byte{0xCD}, 32)
	id, err := keys.ParseDiskID(diskID)
	if err != nil {
		t.Fatal(err)
	}
	key, err := keys.NewRoot([32]byte(root), [32]byte(salt)).Disk(id, keys.DiskSalt{3})
	if err != nil {
		t.Fatal(err)
	}
	w.disk.key = key.Expose()
	done := make(chan error, 1)
	go func() { done <- unlock.Serve(t.Context(), w.config()) }()
	transport, err := atls.NewTransport(atls.ClientConfig{
		Attester: atls.NoAttester, Verifier: attesttest.Verifier(t, w.ca), PeerPurpose: attest.PurposeMachine,
		Appraiser: attesttest.ParsedPolicy(t, w.ca, []*attesttest.Machine{w.machine}).For(attest.Unlocked()),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = transport.Close() }()
	client := recoverv1connect.NewRecoverServiceClient(rpc.HTTPClient(transport), "https://"+w.logged("recover"), rpc.ClientOptions()...)
	cluster := keys.NewRoot([32]byte(root), [32]byte(salt)).ClusterID([32]byte(salt))
	list := versions.NewList(versions.Component{URL: "http://mirror/kubelet", SHA256: strings.Repeat("0", 64), Path: "/usr/local/bin/kubelet", Mode: 0o755})
	list.Images = machinetest.Images().References()
	text, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	software := ownerorder.Software{List: string(text), Endpoint: "192.168.77.1:6443"}
	open := func(key []byte, owner ed25519.PrivateKey) (last recoverv1.State, err error) {
		d, err := client.Describe(t.Context(), &recoverv1.DescribeRequest{})
		if err != nil {
			return 0, err
		}
		stream, err := client.Recover(t.Context(), ownerorder.Recovery{Cluster: cluster, Disk: id, Key: parsed(t, key), Nonce: ownerorder.Nonce(d.GetNonce()), Software: &software}.Wire(owner))
		if err != nil {
			return 0, err
		}
		defer func() { _ = stream.Close() }()
		for stream.Receive() {
			last = stream.Msg().GetState()
		}
		return last, stream.Err()
	}
	if _, err := open(salt, w.owner); rpc.ReasonFrom(err) != attestv1.Reason_REASON_RECOVERY_SECRET_INVALID {
		t.Errorf("a wrong key: %v", err)
	}
	// The maker of this disk has its key, but not the owner's.
	if _, err := open(key.Expose(), ed25519.NewKeyFromSeed(make([]byte, 32))); rpc.ReasonFrom(err) != attestv1.Reason_REASON_OWNER_SIGNATURE {
		t.Errorf("another owner: %v", err)
	}
	before := j.asked()
	eventually(t, "rejoining continues", func() bool { return j.asked() > before })
	if state, err := open(key.Expose(), w.owner); err != nil || state != recoverv1.State_STATE_OPENED {
		t.Errorf("%v, %v", state, err)
	}
	select {
	case err := <-done:
		if err != nil || w.disk.opens != 1 {
			t.Errorf("%v, opened %d times", err, w.disk.opens)
		}
		w.lockedTo(cluster)
		if d, err := w.desired.Load(); err != nil || d == nil || d.Uncompared != "" || !d.Recovered || !component.Same(d.List, list) || d.Endpoint != "192.168.77.1:6443" { // B8
			t.Errorf("the disk is compared with %+v, %v", d, err)
		}
	case <-time.After(patience):
		t.Fatal("it does not end")
	}
	for _, secret := range [][]byte{root, salt, key.Expose()} { // K3
		if bytes.Contains(w.log.Bytes(), []byte(hex.EncodeToString(secret))) {
			t.Error("a secret is on the log")
		}
	}
}
