package bootstrapper

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"net/netip"
	"regexp"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

const (
	maxAttempts = 5 // wrong init secrets that are logged one by one
	maxSANs     = 32
	keySize     = 16 // of an idempotency key
	secretSize  = 32
)

var _ initv1connect.InitServiceHandler = (*Bootstrapper)(nil)

// Init implements [initv1connect.InitServiceHandler]: translate, decide, and tell what
// happens until it ended. The init goes on when the caller goes away.
func (b *Bootstrapper) Init(ctx context.Context, req *initv1.InitRequest, stream *connect.ServerStream[initv1.InitResponse]) error {
	return b.serveOwner(ctx, journal.KindInit, req, stream.Send)
}

// Adopt implements [initv1connect.InitServiceHandler]: as Init, on a machine that is a control plane already.
func (b *Bootstrapper) Adopt(ctx context.Context, req *initv1.AdoptRequest, stream *connect.ServerStream[initv1.AdoptResponse]) error {
	return b.serveOwner(ctx, journal.KindAdopt, req.GetOrder(), func(m *initv1.InitResponse) error {
		return stream.Send(&initv1.AdoptResponse{Event: m})
	})
}

func (b *Bootstrapper) serveOwner(ctx context.Context, kind journal.Kind, req *initv1.InitRequest, send func(*initv1.InitResponse) error) error {
	select {
	case <-b.running:
	case <-ctx.Done():
		return ctx.Err()
	}
	run, err := b.admit(kind, req)
	if err != nil {
		b.metrics.inits.WithLabelValues(attest.ReasonName(rpc.ReasonOf(err))).Inc() // R1
		return err
	}
	if err := run.follow(ctx, send); err != nil {
		return err
	}
	b.sentOnce.Do(func() { close(b.sent) })
	return nil
}

// admit decides who may init: the request first, then the secret, then the lock.
func (b *Bootstrapper) admit(kind journal.Kind, req *initv1.InitRequest) (*initRun, error) {
	meta, err := b.cfg.Metadata()
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "machine metadata: %w", err)
	}
	if meta.InitSecretHash == nil || meta.Role != metadata.RoleControlPlane {
		return nil, attest.Refuse(attestv1.Reason_REASON_INIT_NOT_ALLOWED, "the metadata of %s have no initSecretHash, or not the role %s", meta.Name, metadata.RoleControlPlane)
	}
	if err := b.cfg.Image.KnowsOwner(); err != nil { // as a node it could not believe any joinservice (A7)
		return nil, attest.Refuse(attestv1.Reason_REASON_MACHINE_CONFIG, "image configuration: %w", err)
	}
	order, err := parseInit(kind, req)
	if err != nil {
		return nil, err
	}
	order.meta = meta
	b.initMu.Lock()
	defer b.initMu.Unlock()
	if err := b.checkSecret(req.GetInitSecret(), meta.InitSecretHash); err != nil {
		return nil, err
	}
	if err := b.checkOwner(kind, order.root, req); err != nil { // B10
		return nil, err
	}
	if b.ctx.Err() != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_NOT_READY, "the bootstrapper is stopping")
	}
	if r := b.run; r != nil && !r.failed() {
		if r.order.keyDigest != order.keyDigest || r.order.kind != order.kind {
			return nil, attest.Refuse(attestv1.Reason_REASON_NODE_LOCKED, "%s of this machine is under way, and it is another one", taker(r.order.kind))
		}
		if r.order.digest != order.digest {
			return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "an init with this idempotency key is under way, but with another request")
		}
		return r, nil
	}
	if rec := b.lock.record(); rec.Locked() {
		// The cluster ID is compared once it is derived.
		if err := mayResume(rec, journal.Record{Kind: kind, KeyDigest: order.keyDigest[:], ClusterID: rec.ClusterID}); err != nil {
			return nil, err
		}
	}
	b.run = newInitRun(order, b.log, b.cfg.Console)
	run := b.run
	b.work.Go(func() { b.initialize(b.ctx, run) })
	return run, nil
}

// checkSecret is called with initMu held. The right secret is admitted at any time: it has
// 256 bits, so guesses are hopeless, and a lock would only let strangers keep the owner
// out. The first few wrong ones are logged one by one, later ones are only counted.
func (b *Bootstrapper) checkSecret(secret []byte, want *[32]byte) error {
	got := sha256.Sum256(secret)
	if subtle.ConstantTimeCompare(got[:], want[:]) == 1 {
		return nil
	}
	if b.wrong == maxAttempts {
		return attest.Refuse(attestv1.Reason_REASON_TOO_MANY_ATTEMPTS, "more than %d wrong init secrets", maxAttempts)
	}
	b.wrong++
	b.log.Warn("wrong init secret", "count", b.wrong, "logged_at_most", maxAttempts)
	return attest.Refuse(attestv1.Reason_REASON_INIT_SECRET_INVALID, "wrong init secret %d of %d that are told apart", b.wrong, maxAttempts)
}

// checkOwner verifies the owner's signature for this machine and the request's cluster (B10). The metadata are not measured, and whoever writes them chooses the init secret. Without
// the signature, an attacker could begin a cluster on a machine that attests as accepted, and run programs there as root.
func (b *Bootstrapper) checkOwner(kind journal.Kind, root *keys.Root, req *initv1.InitRequest) error {
	if b.cfg.Image.NoOwnerKey {
		return nil
	}
	signed := ownerorder.Init{Cluster: root.ClusterID([secretSize]byte(req.GetMeasurementSalt())), Machine: b.machineID, Adopt: kind == journal.KindAdopt}
	return signed.Verify(req.GetOwnerSignature(), b.cfg.Image.OwnerKey)
}

// initOrder is a checked request.
type initOrder struct {
	kind              journal.Kind // init or adopt
	keyDigest, digest [32]byte
	root              *keys.Root
	rawRoot, rawSalt  []byte              // for the Secret that the key service reads
	request           *initv1.InitRequest // without secrets
	software          *software
	meta              *metadata.Machine
}

var dnsLabel = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

func invalid(format string, args ...any) error {
	return attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, format, args...)
}

// parseInit checks every field.
func parseInit(kind journal.Kind, req *initv1.InitRequest) (*initOrder, error) {
	if len(req.GetIdempotencyKey()) != keySize {
		return nil, invalid("idempotency_key: want %d bytes, not %d", keySize, len(req.GetIdempotencyKey()))
	}
	if len(req.GetInitSecret()) != secretSize {
		return nil, invalid("init_secret: want %d bytes, not %d", secretSize, len(req.GetInitSecret()))
	}
	root, err := keys.ParseRoot(keys.FirstVersion, req.GetRootSecret(), req.GetSalt())
	if err != nil {
		return nil, invalid("root_secret, salt: %w", err)
	}
	if len(req.GetMeasurementSalt()) != secretSize {
		return nil, invalid("measurement_salt: want %d bytes, not %d", secretSize, len(req.GetMeasurementSalt()))
	}
	if len(req.GetDiskSalt()) != secretSize || keys.DiskSalt(req.GetDiskSalt()) == (keys.DiskSalt{}) {
		return nil, invalid("disk_salt: want %d bytes that are not all zero, not %d", secretSize, len(req.GetDiskSalt()))
	}
	if !dnsLabel.MatchString(req.GetClusterName()) {
		return nil, invalid("cluster_name: want a DNS label of at most 63 characters")
	}
	if v, err := versions.Resolve(req.GetKubernetesVersion()); err != nil || v != req.GetKubernetesVersion() {
		return nil, invalid("kubernetes_version: want a full version without v, of one of %s", strings.Join(versions.Supported(), ", "))
	}
	if err := metadata.CheckHostPort(req.GetControlPlaneEndpoint()); err != nil {
		return nil, invalid("control_plane_endpoint: %w", err)
	}
	if err := checkNetworks(kind, req); err != nil {
		return nil, err
	}
	if len(req.GetApiServerSans()) > maxSANs {
		return nil, invalid("api_server_sans: at most %d, not %d", maxSANs, len(req.GetApiServerSans()))
	}
	for _, s := range req.GetApiServerSans() {
		if !metadata.IsHost(strings.TrimPrefix(s, "*.")) {
			return nil, invalid("api_server_sans: %q is neither a name nor an address", s)
		}
	}
	list, err := parseSoftware(req.GetComponents(), req.GetImages())
	if err != nil {
		return nil, err
	}
	public, _ := proto.Clone(req).(*initv1.InitRequest)
	public.InitSecret, public.RootSecret, public.Salt, public.IdempotencyKey = nil, nil, nil, nil
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(public)
	if err != nil {
		return nil, invalid("%w", err)
	}
	return &initOrder{
		kind: kind, keyDigest: sha256.Sum256(req.GetIdempotencyKey()), digest: sha256.Sum256(b), root: root,
		rawRoot: req.GetRootSecret(), rawSalt: req.GetSalt(), request: public, software: list,
	}, nil
}

// checkNetworks wants the networks that an init is to make, and none of a cluster that has its own.
func checkNetworks(kind journal.Kind, req *initv1.InitRequest) error {
	if kind == journal.KindAdopt {
		if len(req.GetPodCidrs())+len(req.GetServiceCidrs()) > 0 {
			return invalid("pod_cidrs, service_cidrs: a cluster that is adopted has its networks")
		}
		return nil
	}
	if err := checkCIDRs(req.GetPodCidrs()); err != nil {
		return invalid("pod_cidrs: %w", err)
	}
	if err := checkCIDRs(req.GetServiceCidrs()); err != nil {
		return invalid("service_cidrs: %w", err)
	}
	return nil
}

type fieldError string

func (e fieldError) Error() string { return string(e) }

// checkCIDRs wants one or two networks of different families.
func checkCIDRs(list []string) error {
	if len(list) < 1 || len(list) > 2 {
		return fieldError("want one per address family, so one or two")
	}
	var families [2]bool
	for _, s := range list {
		p, err := netip.ParsePrefix(s)
		if err != nil || p.Masked() != p || p.Addr().Is4In6() {
			return fieldError("want networks like 10.244.0.0/16")
		}
		i := 0
		if p.Addr().Is6() {
			i = 1
		}
		if families[i] {
			return fieldError("two networks of one address family")
		}
		families[i] = true
	}
	return nil
}
