package initserver

import (
	"crypto/sha256"
	"net/netip"
	"regexp"
	"strings"

	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
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

// initOrder is a checked request.
type initOrder struct {
	kind              journal.Kind // init or adopt
	keyDigest, digest [32]byte
	root              *keys.Root
	rawRoot, rawSalt  []byte              // for the Secret that the key service reads
	request           *initv1.InitRequest // without secrets
	software          *component.Software
	restore           *restoreOrder // nil: the cluster is new
	meta              *metadata.Machine
}

var dnsLabel = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

func invalid(format string, args ...any) error {
	return attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, format, args...)
}

// parseInit checks every field.
func parseInit(kind journal.Kind, req *initv1.InitRequest, from *restoreOrder) (*initOrder, error) {
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
	list, err := component.ParseSoftware(req.GetComponents(), req.GetImages())
	if err != nil {
		return nil, err
	}
	public, _ := proto.Clone(req).(*initv1.InitRequest)
	public.InitSecret, public.RootSecret, public.Salt, public.IdempotencyKey = nil, nil, nil, nil
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(public)
	if err != nil {
		return nil, invalid("%w", err)
	}
	if from != nil { // a repeated request is the same one only with the same backup
		b = append(b, from.sha256[:]...)
	}
	return &initOrder{
		kind: kind, restore: from, keyDigest: sha256.Sum256(req.GetIdempotencyKey()), digest: sha256.Sum256(b), root: root,
		rawRoot: req.GetRootSecret(), rawSalt: req.GetSalt(), request: public, software: list,
	}, nil
}

// checkNetworks requires the networks of a new cluster in an init, and none in an adoption.
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

// checkCIDRs requires one or two networks of different families.
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
