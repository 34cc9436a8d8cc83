// Package kms derives a cluster's keys for authorized callers.
//
// It is the smallest of the services, since it holds the root secret. A caller must show two things that a thief of only
// one of them lacks (K2): a session over which its machine attested that it runs a joinservice, and the token of
// joinservice's service account, issued by Kubernetes to a pod on the same machine. It can only ask for keys of fixed
// purposes, one RPC each (K1).
//
// The root secret is read from its mounted Secret for each call: it is never kept, a rotated Secret is used at once, and a
// missing one is reported (ROOT_SEALED).
package kms

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	kmsv1 "github.com/muster-k8s/muster/gen/muster/kms/v1"
	"github.com/muster-k8s/muster/internal/audit"
	"github.com/muster-k8s/muster/internal/required"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// Identity of the only workload that is served.
const (
	// Audience is the required audience of a caller's token.
	Audience = "muster-kms"
	// Caller is the user name of joinservice's service account.
	Caller = "system:serviceaccount:muster-system:joinservice"
)

// Purposes of keys, as metrics and audit records write them.
const (
	purposeDisk      = "disk"
	purposeClusterID = "cluster-id"
)

// Workload is what Kubernetes reports about a token.
type Workload struct {
	// User is the service account's user name.
	User string
	// Node is the name of the token's pod's node; empty if the token belongs to no pod.
	Node string
}

// Enrolled is the cluster's data on a node.
type Enrolled struct {
	// Machine is the node's machine.
	Machine attest.MachineID
	// Banned machines get nothing.
	Banned bool
	// ControlPlane machines run joinservices, others do not.
	ControlPlane bool
}

// Config lists what a Service needs. All fields are required.
type Config struct {
	// Root returns a version of the root secret, or why it is not available.
	Root func(keys.Version) (*keys.Root, error)
	// Review asks Kubernetes for the workload of a token. Its error is a refusal with WORKLOAD_IDENTITY or API_UNAVAILABLE.
	Review func(ctx context.Context, token string) (Workload, error)
	// Node returns the enrollment of a node; false if there is none.
	Node func(name string) (Enrolled, bool)
	// Appraiser appraises the caller's claims by the policy in force now, which may differ from the one that admitted the
	// caller.
	Appraiser attest.Appraiser
	// Audit keeps the records, those of refusals through RefusalLimits.
	Audit         *audit.Log
	RefusalLimits *audit.RefusalLimits
	Log           *slog.Logger
	Metrics       prometheus.Registerer
}

// Service implements the key service's RPCs.
type Service struct {
	cfg   Config
	calls *prometheus.CounterVec
}

// New returns a Service, or an error that names the missing field of cfg.
func New(cfg Config) (*Service, error) {
	if err := required.Fields("kms.New", cfg); err != nil {
		return nil, err
	}
	calls := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "muster_kms_calls_total", Help: "Calls to the key service by purpose and outcome.",
	}, []string{"purpose", "reason"})
	if err := cfg.Metrics.Register(calls); err != nil {
		return nil, fmt.Errorf("kms: %w", err)
	}
	return &Service{cfg: cfg, calls: calls}, nil
}

// DeriveDiskKey implements the RPC.
func (s *Service) DeriveDiskKey(ctx context.Context, req *kmsv1.DeriveDiskKeyRequest) (*kmsv1.DeriveDiskKeyResponse, error) {
	c := call{purpose: purposeDisk}
	key, err := s.diskKey(ctx, &c, req)
	if err = s.conclude(ctx, c, err); err != nil {
		return nil, err
	}
	return &kmsv1.DeriveDiskKeyResponse{Key: key.Expose(), RootVersion: req.GetRootVersion()}, nil
}

func (s *Service) diskKey(ctx context.Context, c *call, req *kmsv1.DeriveDiskKeyRequest) (keys.Disk, error) {
	if err := s.authorize(ctx, c); err != nil {
		return keys.Disk{}, err
	}
	id, err := keys.ParseDiskID(req.GetDiskId())
	if err != nil {
		return keys.Disk{}, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "disk_id: %w", err)
	}
	c.disk = id.String()
	var salt keys.DiskSalt
	if n := copy(salt[:], req.GetDiskSalt()); n != keys.Size || n != len(req.GetDiskSalt()) || salt == (keys.DiskSalt{}) { // K4
		return keys.Disk{}, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "disk_salt: want %d bytes that are not all zero, not %d", keys.Size, len(req.GetDiskSalt()))
	}
	root, err := s.root(req.GetRootVersion())
	if err != nil {
		return keys.Disk{}, err
	}
	return root.Disk(id, salt) // K1
}

func (s *Service) root(version uint32) (*keys.Root, error) {
	if keys.Version(version) < keys.FirstVersion {
		return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "root_version is 0")
	}
	return s.cfg.Root(keys.Version(version))
}

// DeriveClusterId implements the RPC.
func (s *Service) DeriveClusterId(ctx context.Context, req *kmsv1.DeriveClusterIdRequest) (*kmsv1.DeriveClusterIdResponse, error) {
	c := call{purpose: purposeClusterID}
	id, err := s.clusterID(ctx, &c, req)
	if err = s.conclude(ctx, c, err); err != nil {
		return nil, err
	}
	return &kmsv1.DeriveClusterIdResponse{ClusterId: id[:]}, nil
}

func (s *Service) clusterID(ctx context.Context, c *call, req *kmsv1.DeriveClusterIdRequest) (keys.ClusterID, error) {
	if err := s.authorize(ctx, c); err != nil {
		return keys.ClusterID{}, err
	}
	salt := req.GetMeasurementSalt()
	if len(salt) != keys.Size {
		return keys.ClusterID{}, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "measurement_salt has %d bytes, want %d", len(salt), keys.Size)
	}
	root, err := s.root(req.GetRootVersion())
	if err != nil {
		return keys.ClusterID{}, err
	}
	return root.ClusterID([keys.Size]byte(salt)), nil // K1
}

// call is the known data of a caller so far, for its record.
type call struct {
	purpose, disk, machine, node string
	appraisal                    attest.Appraisal
}

// authorize enforces K2: an attested machine of the cluster, and joinservice's identity on it.
func (s *Service) authorize(ctx context.Context, c *call) error {
	peer, ok := attest.PeerFrom(ctx)
	if !ok || peer.Purpose() != attest.PurposeJoinservice {
		return attest.Refuse(attestv1.Reason_REASON_PEER_NOT_ATTESTED, "the key service serves attested joinservices only")
	}
	c.machine = peer.Machine().String()
	appraisal, err := s.cfg.Appraiser.Appraise(ctx, peer.Claims())
	if err != nil {
		return err
	}
	c.appraisal = appraisal
	token, err := bearer(ctx)
	if err != nil {
		return err
	}
	w, err := s.cfg.Review(ctx, token)
	if err != nil {
		return err
	}
	if w.User != Caller {
		return attest.Refuse(attestv1.Reason_REASON_WORKLOAD_IDENTITY, "the token is that of %q, want %q", w.User, Caller)
	}
	c.node = w.Node
	n, ok := s.cfg.Node(w.Node)
	switch {
	case w.Node == "":
		return attest.Refuse(attestv1.Reason_REASON_WORKLOAD_IDENTITY, "the token belongs to no pod on a node: mount a projected token into the pod")
	case !ok:
		return attest.Refuse(attestv1.Reason_REASON_WORKLOAD_NODE, "node %q has no AttestedNode", w.Node)
	case n.Banned:
		return attest.Refuse(attestv1.Reason_REASON_BANNED, "node %q is banned", w.Node)
	case !n.ControlPlane:
		return attest.Refuse(attestv1.Reason_REASON_WORKLOAD_NODE, "node %q is no control plane, so it runs no joinservice", w.Node)
	case n.Machine != peer.Machine():
		return attest.Refuse(attestv1.Reason_REASON_WORKLOAD_NODE, "the token's pod runs on node %q, machine %s; attested is machine %s", w.Node, n.Machine, peer.Machine())
	}
	return nil
}

func bearer(ctx context.Context) (string, error) {
	info, ok := connect.CallInfoForHandlerContext(ctx)
	if !ok {
		return "", attest.Refuse(attestv1.Reason_REASON_INTERNAL, "no call information in the context")
	}
	values := info.RequestHeader().Values("Authorization")
	if len(values) != 1 {
		return "", attest.Refuse(attestv1.Reason_REASON_WORKLOAD_IDENTITY, "%d Authorization headers, want one", len(values))
	}
	scheme, token, ok := strings.Cut(values[0], " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") || token == "" || len(token) > 16<<10 {
		return "", attest.Refuse(attestv1.Reason_REASON_WORKLOAD_IDENTITY, "the Authorization header holds no bearer token")
	}
	return token, nil
}

// conclude sets one reason of err everywhere (R1). The record of an answer is stable before the answer is sent (J3).
func (s *Service) conclude(ctx context.Context, c call, err error) error {
	record := audit.Record{
		Service: "kms", Event: "key derived", Purpose: c.purpose, Disk: c.disk, Machine: c.machine, Node: c.node,
		PolicySerial: c.appraisal.PolicySerial, PolicyGeneration: c.appraisal.Generation,
	}
	write := s.cfg.Audit.Write
	if err != nil {
		write = func(r audit.Record) error { return s.cfg.RefusalLimits.Write(r.Machine, r) }
		record.Event, record.Detail = "key refused", err.Error()
	}
	record.Reason = attest.ReasonName(rpc.ReasonOf(err))
	if werr := write(record); werr != nil {
		s.cfg.Log.ErrorContext(ctx, "the audit record cannot be written", "err", werr)
		if err == nil {
			err = attest.Refuse(attestv1.Reason_REASON_AUDIT_UNAVAILABLE, "%w", werr)
		}
	}
	reason := attest.ReasonName(rpc.ReasonOf(err))
	s.calls.WithLabelValues(c.purpose, reason).Inc()
	if err != nil {
		s.cfg.Log.WarnContext(ctx, "key refused", "purpose", c.purpose, "machine", c.machine, "node", c.node, "reason", reason, "err", err)
		return err
	}
	s.cfg.Log.InfoContext(ctx, "key derived", "purpose", c.purpose, "machine", c.machine, "node", c.node, "disk", c.disk)
	return nil
}
