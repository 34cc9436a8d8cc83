package unlock

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/bootsecret"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/console"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/disk"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// search is one machine's attempts to get its key.
type search struct {
	*Unlocker
	id    keys.DiskID
	end   context.CancelFunc // called once the disk is open
	order discovery.Order
	by    string // the last endpoint that answered
	// recovery runs once the metadata define this machine as a control plane.
	recovery sync.WaitGroup
	serving  bool
}

// unlock requests the key until the disk is open, by a joinservice's key or by recovery.
func (u *Unlocker) unlock(ctx context.Context) error {
	id, err := u.cfg.Disk.ID()
	if err != nil {
		return disked(err)
	}
	u.mu.Lock()
	u.disk = id
	u.mu.Unlock()
	searching, stop := context.WithCancel(ctx)
	s := &search{Unlocker: u, id: id, end: stop}
	defer s.recovery.Wait() // it still answers running calls
	defer stop()
	u.cfg.Log.InfoContext(ctx, "the state disk waits for its key", "disk", id.String())
	u.cfg.Console.Print("the state disk has the UUID " + id.String())
	u.cfg.Console.Print("looking for a joinservice to ask for the key of the state disk")
	s.run(searching)
	u.opening.Lock()
	defer u.opening.Unlock()
	if u.open {
		return nil
	}
	return ctx.Err()
}

// run tries until ctx ends, which happens once the disk is open.
func (s *search) run(ctx context.Context) {
	pauses := discovery.NewPauses(s.cfg.Timing.RetryMin, s.cfg.Timing.RetryMax)
	for {
		s.by = ""
		err := s.ask(ctx)
		if err == nil || ctx.Err() != nil {
			return
		}
		wait := pauses.Next(err)
		w := console.Wait{For: "waiting for the key of the state disk", Err: err, By: s.by, Asked: s.order.List(), Was: true, Next: wait}
		if s.serving {
			w.Also = "`muster recover` also opens it"
		}
		s.failed(ctx, w)
		if retry.Wait(ctx, wait) != nil {
			return
		}
	}
}

// ask makes one attempt.
func (s *search) ask(ctx context.Context) error {
	if err := s.identify(ctx); err != nil {
		return err
	}
	meta, err := s.cfg.Metadata()
	if err != nil {
		return attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "machine metadata: %w", err)
	}
	s.serveRecovery(ctx, meta)
	if err := s.order.Update(ctx, meta, nil, s.cfg.Log); err != nil {
		return err
	}
	s.attempts.Begin(s.order.List())
	if len(s.order.List()) == 0 {
		return attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "machine metadata: %w", discovery.ErrNoJoinservice)
	}
	endpoint, first, err := discovery.Race(ctx, s.order.List(), s.cfg.Timing.Stagger, s.cfg.Timing.Dial)
	if err != nil {
		return fmt.Errorf("%w: %w", discovery.ErrUnreachable, err)
	}
	defer first.Close()
	s.by = endpoint
	if err := s.askAt(ctx, endpoint, first, meta); err != nil {
		s.order.Failed(endpoint)
		return fmt.Errorf("%s: %w", endpoint, err)
	}
	return nil
}

// identify reads the machine's ID, for the status.
func (s *search) identify(ctx context.Context) error {
	s.mu.Lock()
	known := s.machine != nil
	s.mu.Unlock()
	if known {
		return nil
	}
	id, err := discovery.MachineID(ctx, s.cfg.TPM)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.machine = &id
	s.mu.Unlock()
	s.cfg.Console.Print("this machine has the ID " + id.String()) // the owner compares it with the one that is signed (A7)
	return nil
}

// askAt requests the key from one joinservice, and tries it.
func (s *search) askAt(ctx context.Context, endpoint string, first net.Conn, meta *metadata.Machine) error {
	client, err := discovery.Open(ctx, discovery.SessionConfig{
		Attester: s.cfg.Attester, Dial: s.cfg.Timing.Dial, Log: s.cfg.Log,
		// The machine's cluster is in the journal on the disk. The cluster in the joinservice's answer is compared with the lock of its own machine.
		Lock: attest.AnyLock(),
		Verification: discovery.Verification{
			OwnerKeys: s.cfg.Image.OwnerKeys, NoOwnerKey: s.cfg.Image.NoOwnerKey, Lowest: s.cfg.Image.LowestPolicySerial, EKRoots: s.cfg.Image.EKRoots, Bank: s.bank, PCRs: s.cfg.TPM, NewVerifier: s.cfg.NewVerifier, Newest: s.memory.Newest,
		},
	}, endpoint, first)
	if err != nil {
		return err
	}
	defer client.Close()
	asking, cancel := context.WithTimeout(ctx, s.cfg.Timing.Ticket)
	defer cancel()
	role := joinv1.Role_ROLE_WORKER
	if meta.Role == metadata.RoleControlPlane {
		role = joinv1.Role_ROLE_CONTROL_PLANE
	}
	secret, err := bootsecret.Load(s.cfg.Root)
	if err != nil {
		return err
	}
	resp, err := client.IssueRejoinTicket(asking, &joinv1.IssueRejoinTicketRequest{NodeName: meta.Name, Role: role, DiskId: s.id.String(), BootSecret: secret.Expose() /* J11 */})
	if err != nil {
		return err
	}
	key, cluster, desired, err := parse(resp, meta.Role == metadata.RoleControlPlane)
	if err != nil {
		return err
	}
	if err := client.Belongs(cluster); err != nil {
		return err
	}
	s.cfg.Log.InfoContext(ctx, "got the key of the state disk", "endpoint", endpoint, "ticket", fmt.Sprintf("%x", resp.GetTicketId()), "cluster", fmt.Sprintf("%x", resp.GetClusterId()))
	return s.use(ctx, key, cluster, desired)
}

// parse returns the values of an answer, or REQUEST_INVALID.
func parse(resp *joinv1.IssueRejoinTicketResponse, controlPlane bool) (keys.Disk, keys.ClusterID, component.Desired, error) {
	refuse := func(format string, args ...any) (keys.Disk, keys.ClusterID, component.Desired, error) {
		return keys.Disk{}, keys.ClusterID{}, component.Desired{}, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "rejoin ticket: "+format, args...)
	}
	if len(resp.GetTicketId()) != 16 || len(resp.GetClusterId()) != len(keys.ClusterID{}) {
		return refuse("its ID has %d bytes, its cluster ID %d", len(resp.GetTicketId()), len(resp.GetClusterId()))
	}
	key, err := keys.ParseDisk(resp.GetDiskKey())
	if err != nil {
		return refuse("%w", err)
	}
	if _, err := component.Parse(resp.GetComponents()); err != nil { // B8
		return refuse("%w", err)
	}
	if _, err := versions.ParseImages(resp.GetImages()); err != nil { // B9
		return refuse("the cluster's list: %w", err)
	}
	var other *versions.List
	if o := resp.GetOther(); o != nil {
		second, err := component.ParseSoftware(o.GetComponents(), o.GetImages()) // B8, B9
		if err != nil {
			return refuse("other: %w", err)
		}
		other = &second.List
	}
	if err := metadata.CheckHostPort(resp.GetControlPlaneEndpoint()); err != nil {
		return refuse("control_plane_endpoint: %w", err)
	}
	authorities, err := parseAuthorities(resp.GetAuthorities(), controlPlane)
	if err != nil {
		return refuse("authorities: %w", err)
	}
	rotation, err := parseRotation(resp.GetRotation(), controlPlane)
	if err != nil {
		return refuse("rotation: %w", err)
	}
	return key, keys.ClusterID(resp.GetClusterId()), component.Desired{
		List: versions.FromWire(resp.GetComponents(), resp.GetImages()), Other: other, Adopted: resp.GetAdopted(), Endpoint: resp.GetControlPlaneEndpoint(), Authorities: authorities, Rotation: rotation,
	}, nil
}

// maxAuthority bounds each of the files, in bytes.
const maxAuthority = 64 << 10

// parseAuthorities requires exactly the files of the machine's role (B4, B8).
func parseAuthorities(files []*joinv1.ControlPlaneFile, controlPlane bool) (map[string][]byte, error) {
	want, out := component.Authorities(controlPlane), map[string][]byte{}
	for _, f := range files {
		if !slices.Contains(want, f.GetPath()) {
			return nil, fmt.Errorf("%q is not one of the files %q", f.GetPath(), want)
		}
		if block, _ := pem.Decode(f.GetContent()); block == nil || len(f.GetContent()) > maxAuthority {
			return nil, fmt.Errorf("%s has %d bytes, want PEM of at most %d", f.GetPath(), len(f.GetContent()), maxAuthority)
		}
		out[f.GetPath()] = f.GetContent()
	}
	if len(files) != len(want) || len(out) != len(want) {
		return nil, fmt.Errorf("%d files, want exactly %q", len(files), want)
	}
	return out, nil
}

// parseRotation requires the form of the protocol (B8). It returns nil if no rotation is in progress.
func parseRotation(w *joinv1.KeyRotation, controlPlane bool) (*component.Rotation, error) {
	if w == nil {
		return nil, nil //nolint:nilnil // there is none
	}
	r := &component.Rotation{Key: clusterinfo.RotatedKey(w.GetKey()), ID: w.GetId(), Keep: w.GetKeep()}
	switch {
	case !controlPlane:
		return nil, errors.New("a worker gets none")
	case !slices.Contains(clusterinfo.RotatedKeys(), r.Key):
		return nil, fmt.Errorf("key %q is not known", w.GetKey())
	case r.ID != "" && !clusterinfo.IsKeyID(r.ID):
		return nil, errors.New("id: want 64 hexadecimal digits")
	case len(r.Keep) > maxAuthority:
		return nil, fmt.Errorf("keep has %d bytes, want at most %d", len(r.Keep), maxAuthority)
	}
	return r, nil
}

// use tries the key of a ticket.
func (s *search) use(ctx context.Context, key keys.Disk, cluster keys.ClusterID, desired component.Desired) error {
	err := s.try(ctx, key, cluster, s.memory.Policy(), desired)
	switch {
	case err == nil:
		s.end()
		return nil
	case errors.Is(err, ErrOpen):
		return nil
	case errors.Is(err, disk.ErrWrongKey):
		return attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "%w: the disk belongs to another cluster than the joinservice, or that cluster has another root secret now. Correct joinEndpoints or the root secret, or erase the disk's first MiB if nothing on it is needed (docs/state-disk.md)", err)
	}
	return disked(err)
}

// serveRecovery starts recovery on a control plane, once.
func (s *search) serveRecovery(ctx context.Context, meta *metadata.Machine) {
	if s.serving || s.cfg.Recovery == nil || meta.Role != metadata.RoleControlPlane {
		return
	}
	s.serving = true
	s.recovery.Go(func() {
		err := s.cfg.Recovery(ctx, s.id, func(ctx context.Context, key keys.Disk, cluster keys.ClusterID, desired component.Desired) error {
			err := s.try(ctx, key, cluster, nil, desired)
			if err == nil {
				s.cfg.Log.InfoContext(ctx, "the state disk was opened by recovery")
				s.end()
			}
			return err
		})
		if err != nil && ctx.Err() == nil { // the machine still rejoins
			s.cfg.Log.ErrorContext(ctx, "recovery is not served any more", "err", err)
		}
	})
}
