package joinservice

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/joinservice/certificates"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/joinlease"
	"github.com/muster-k8s/muster/services/joinservice/nodecert"
	"github.com/muster-k8s/muster/services/joinservice/token"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// ticketIDSize is the length of a ticket's ID in bytes.
const ticketIDSize = 16

// joinRequest is a well-formed request. None of its fields identifies the caller (J1).
type joinRequest struct {
	node            string
	role            v1alpha1.Role
	disk            keys.DiskID
	mode            v1alpha1.DiskMode
	client, serving *nodecert.Request
}

func roleName(r joinv1.Role) string {
	switch r {
	case joinv1.Role_ROLE_WORKER:
		return string(v1alpha1.RoleWorker)
	case joinv1.Role_ROLE_CONTROL_PLANE:
		return string(v1alpha1.RoleControlPlane)
	case joinv1.Role_ROLE_UNSPECIFIED:
	}
	return "none"
}

// parse checks the form of a request: REQUEST_INVALID or CSR_INVALID.
func parse(req *joinv1.IssueJoinTicketRequest) (*joinRequest, error) {
	invalid := func(format string, args ...any) (*joinRequest, error) {
		return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, format, args...)
	}
	w := &joinRequest{node: req.GetNodeName(), role: v1alpha1.Role(roleName(req.GetRole()))}
	if !nodecert.IsName(w.node) {
		return invalid("node_name is no DNS label of at most 63 characters")
	}
	if w.role != v1alpha1.RoleWorker && w.role != v1alpha1.RoleControlPlane {
		return invalid("role %d is neither worker nor control plane", req.GetRole())
	}
	switch req.GetDiskMode() {
	case joinv1.DiskMode_DISK_MODE_PLAIN:
		w.mode = v1alpha1.DiskModePlain
	case joinv1.DiskMode_DISK_MODE_LUKS:
		w.mode = v1alpha1.DiskModeLUKS
	case joinv1.DiskMode_DISK_MODE_UNSPECIFIED:
		fallthrough
	default:
		return invalid("disk_mode %d is neither plain nor LUKS", req.GetDiskMode())
	}
	var err error
	if w.disk, err = keys.ParseDiskID(req.GetDiskId()); err != nil {
		return invalid("disk_id: %w", err)
	}
	if w.client, err = nodecert.Parse(nodecert.Client, req.GetKubeletClientCsr()); err != nil {
		return nil, err
	}
	if w.serving, err = nodecert.Parse(nodecert.Serving, req.GetKubeletServingCsr()); err != nil {
		return nil, err
	}
	for _, r := range []*nodecert.Request{w.client, w.serving} {
		if r.Node != w.node {
			return nil, attest.Refuse(attestv1.Reason_REASON_CSR_INVALID, "%s certificate request: it is for node %q, the ticket for %q", r.Kind, r.Node, w.node)
		}
	}
	return w, nil
}

// issueTicket returns a ticket or a refusal; it does not use the errors of the protocol. Everything up to the enrollment is
// without side effects.
func (s *Service) issueTicket(ctx context.Context, a *attempt, req *joinv1.IssueJoinTicketRequest) (*ticket, error) {
	peer, ok := attest.PeerFrom(ctx) // J1
	if !ok {
		return nil, attest.Refuse(attestv1.Reason_REASON_PEER_NOT_ATTESTED, "%w", attest.ErrNoPeer)
	}
	a.peer(peer)
	// A key must be given to the machine as it is now, not as it was a while ago.
	if err := fresh(peer.VerifiedAt(), a.began); err != nil { // J2
		return nil, err
	}
	done := s.stage("decide")
	w, claim, err := s.decide(ctx, a, peer, req)
	if err != nil {
		return nil, err
	}
	info, err := s.cfg.Cluster()
	if err != nil {
		return nil, err
	}
	files, err := s.controlPlaneFiles(w.role)
	if err != nil {
		return nil, err
	}
	ca, err := s.cfg.CA()
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_INTERNAL, "%w", err)
	}
	if claim, err = s.cfg.Enrollments.AwaitPreviousBootEnd(ctx, claim); err != nil { // J11
		return nil, err
	}
	done()

	done = s.stage("wait")
	end, err := s.limits.granting.Begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	done()

	done = s.stage("disk_key")
	if err := fresh(peer.VerifiedAt(), s.now()); err != nil { // J2: the wait may have taken long
		return nil, err
	}
	lease, err := s.joinLease(ctx, a, claim)
	if err != nil {
		return nil, err
	}
	if err := s.limits.tickets.Take(peer.Machine(), a.began); err != nil {
		return nil, err
	}
	if err := s.confirmCluster(ctx, info); err != nil {
		return nil, err
	}
	salt, err := s.cfg.Enrollments.SaltOrNew(ctx, claim)
	if err != nil {
		return nil, err
	}
	disk, err := s.cfg.Keys.Disk(ctx, w.disk, salt)
	if err != nil {
		return nil, err
	}
	done()

	// Side effects start here, after the record that announces them is stable.
	if err := s.write(a, "ticket decided"); err != nil {
		return nil, err
	}
	t := &ticket{id: a.id, disk: disk, salt: salt, info: info, ca: ca, files: files}
	if lease != nil {
		_, t.cross = s.nodeAuthorities(ctx)
		done = s.stage("lease")
		if err := lease.Take(ctx); err != nil { // J8: before any other write
			return nil, err
		}
		done()
		t.lease, t.controlPlanes = joinlease.Life, s.cfg.Enrollments.OtherControlPlaneAddresses(w.node)
	}
	if err := s.admit(ctx, a, t, w, claim, peer); err != nil {
		if lease != nil {
			lease.Release(ctx)
		}
		return nil, err
	}
	return t, nil
}

// admit enrolls the machine, gets its certificates signed, claims the disk for it and completes its ticket.
func (s *Service) admit(ctx context.Context, a *attempt, t *ticket, w *joinRequest, claim enroll.Claim, peer attest.Peer) error {
	done := s.stage("enroll")
	enrolled, err := s.cfg.Enrollments.Enroll(ctx, claim)
	if err != nil {
		return err
	}
	// The enrollment comes first: a machine has one at a time, so it can't collect disks.
	if err := s.cfg.Enrollments.AssignDisk(ctx, claim, t.salt); err != nil { // J2: before certificates are requested, and long before the key is sent
		return err
	}
	done()
	if err = s.finish(ctx, a, t, w, claim, enrolled, statusOf(a, peer)); err == nil {
		err = s.cfg.Enrollments.RecheckDisk(ctx, claim, t.salt) // K4: after all steps that take time
	}
	if err == nil {
		err = s.stillAccepted(ctx, a, s.cfg.Appraiser, peer, w.role, w.permitted) // J2, J6
	}
	if err != nil && t.token != nil {
		s.cfg.Tokens.Drop(ctx, t.id)
	}
	return err
}

// confirmCluster asks the key service, once for each content of muster-cluster, whether the root secret leads to the
// cluster ID there. If only the ID was changed, this would be detected without it, since no service's PCR 15 fits then.
// With it, a root, salt and ID that do not belong together are detected before a machine locks itself to them.
func (s *Service) confirmCluster(ctx context.Context, info *clusterinfo.Info) error {
	type content struct {
		id   keys.ClusterID
		salt [32]byte
	}
	seen := content{info.ClusterID, info.MeasurementSalt}
	if s.confirmed.Load() == seen {
		return nil
	}
	id, err := s.cfg.Keys.ClusterID(ctx, info.MeasurementSalt)
	if err != nil {
		return err
	}
	if id != info.ClusterID {
		return attest.Refuse(attestv1.Reason_REASON_INTERNAL, "the ConfigMap muster-cluster names cluster %s, but the root secret leads to %s: restore its clusterID and measurementSalt", info.ClusterID, id)
	}
	s.confirmed.Store(seen)
	return nil
}

// decide compares the request with the policy and with all known enrollments.
func (s *Service) decide(ctx context.Context, a *attempt, peer attest.Peer, req *joinv1.IssueJoinTicketRequest) (*joinRequest, enroll.Claim, error) {
	none := enroll.Claim{}
	a.record.Role = roleName(req.GetRole())
	if nodecert.IsName(req.GetNodeName()) {
		a.record.Node = req.GetNodeName()
	}
	appraisal, err := s.cfg.Appraiser.Appraise(ctx, peer.Claims())
	if err != nil {
		return nil, none, err
	}
	a.record.PolicySerial, a.record.PolicyGeneration = appraisal.PolicySerial, appraisal.Generation
	a.record.Image, a.record.Class = appraisal.Image, appraisal.Class
	w, err := parse(req)
	if err != nil {
		return nil, none, err
	}
	a.record.Disk = w.disk.String()
	p, err := s.cfg.Policy.Current()
	if err != nil {
		return nil, none, err
	}
	if err := w.permitted(p.Policy); err != nil {
		return nil, none, err
	}
	boot, err := bootOf(ctx, peer, req.GetBootSecret())
	if err != nil {
		return nil, none, err
	}
	claim := enroll.Claim{
		Machine: peer.Machine(), Node: w.node, Role: w.role, Disk: w.disk.String(), DiskMode: w.mode, // J1: the peer's
		Addresses: w.serving.Addresses, Boot: boot,
		AK: hex.EncodeToString(peer.Claims().AKName()),
	}
	if err := s.cfg.Enrollments.Check(ctx, claim); err != nil {
		return nil, none, err
	}
	if err := machineListed(p.Policy, w.role, peer.Machine()); err != nil { // J6
		return nil, none, err
	}
	return w, claim, nil
}

// permitted returns ROLE_REFUSED, PLAIN_STATE_REFUSED or ADDRESS_REFUSED unless the policy permits what the machine asks for.
func (w *joinRequest) permitted(p *attest.Policy) error {
	if err := roleListed(p, w.role); err != nil {
		return err
	}
	if w.mode == v1alpha1.DiskModePlain && !p.AllowsPlainState() {
		return attest.Refuse(attestv1.Reason_REASON_PLAIN_STATE_REFUSED, "the machine's state is not encrypted")
	}
	for _, ip := range w.serving.Addresses {
		if !p.AllowsAddress(ip) {
			return attest.Refuse(attestv1.Reason_REASON_ADDRESS_REFUSED, "address %s is in none of the policy's nodeCidrs", ip)
		}
	}
	return nil
}

// finish gets the certificates signed and the ticket recorded.
func (s *Service) finish(ctx context.Context, a *attempt, t *ticket, w *joinRequest, claim enroll.Claim, e *enroll.PendingTicket, status v1alpha1.AttestedNodeStatus) error {
	done := s.stage("certificates")
	both, issueCtx := errgroup.WithContext(ctx)
	both.Go(func() (err error) { t.client, err = s.cfg.Certificates.Issue(issueCtx, w.client); return err }) // J5: for keys that never leave the machine
	both.Go(func() (err error) { t.serving, err = s.cfg.Certificates.Issue(issueCtx, w.serving); return err })
	if err := both.Wait(); err != nil {
		return err
	}
	if s.cfg.Credential == token.CredentialToken {
		issued, err := s.cfg.Tokens.Issue(ctx, t.id)
		if err != nil {
			return err
		}
		t.token = &issued
	}
	if err := e.Record(ctx, claim, status, t.client.Leaf, t.serving.Leaf); err != nil { // J4, J11
		return err
	}
	done()
	a.record.Serials = []string{t.client.Leaf.SerialNumber.Text(16), t.serving.Leaf.SerialNumber.Text(16)}
	done = s.stage("audit")
	if err := s.write(a, "ticket issued"); err != nil { // J3
		return err
	}
	done()
	return nil
}

func (s *Service) stage(name string) func() {
	start := time.Now()
	return func() { s.stages.WithLabelValues(name).Observe(time.Since(start).Seconds()) }
}

// statusOf returns the AttestedNode's data about the ticket's evidence.
func statusOf(a *attempt, peer attest.Peer) v1alpha1.AttestedNodeStatus {
	claims := peer.Claims()
	out := v1alpha1.AttestedNodeStatus{
		LastVerdict:      new(verdictOf(nil, peer.VerifiedAt())),
		PolicyGeneration: a.record.PolicyGeneration,
		PolicySerial:     int64(a.record.PolicySerial), // the store accepts none above MaxInt64
		EvidenceDigest:   a.record.Evidence,
		PCRs:             map[string]string{},
		AKName:           hex.EncodeToString(claims.AKName()),
		EKPublic:         base64.StdEncoding.EncodeToString(claims.EKPublic()),
		Ticket:           &v1alpha1.Ticket{ID: a.id, IssuedAt: metav1.NewTime(a.began)},
	}
	for i := range attest.LockPCR + 1 {
		if v := claims.PCR(i); v != nil {
			out.PCRs[strconv.Itoa(i)] = hex.EncodeToString(v)
		}
	}
	return out
}

// controlPlaneFiles reads the PKI files of a control plane; a worker gets none (J6). The caller has checked that the
// machine is an enrolled control plane.
func (s *Service) controlPlaneFiles(role v1alpha1.Role) ([]*joinv1.ControlPlaneFile, error) {
	if role != v1alpha1.RoleControlPlane {
		return nil, nil
	}
	files, err := readPKI(s.cfg.PKI, controlPlaneFiles)
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_INTERNAL, "%w", fmt.Errorf("control plane's files: %w", err))
	}
	return files, nil
}

// authorities returns the public files by which a node of the role recognizes its cluster.
func (s *Service) authorities(role v1alpha1.Role) ([]*joinv1.ControlPlaneFile, error) {
	if role == v1alpha1.RoleControlPlane {
		files, err := readPKI(s.cfg.PKI, authorities)
		if err != nil {
			return nil, attest.Refuse(attestv1.Reason_REASON_INTERNAL, "%w", fmt.Errorf("control plane's authorities: %w", err))
		}
		return files, nil
	}
	ca, err := s.cfg.CA()
	if err != nil {
		return nil, err
	}
	return []*joinv1.ControlPlaneFile{{Path: caFile, Content: ca}}, nil
}

func newTicketID() string {
	b := make([]byte, ticketIDSize)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b)
}

// ticket is the answer to a machine that joins.
type ticket struct {
	id              string
	disk            keys.Disk
	salt            enroll.Salt
	info            *clusterinfo.Info
	ca, cross       []byte // cross is for a control plane, while the authority is rotated
	client, serving certificates.Certificate
	files           []*joinv1.ControlPlaneFile
	token           *token.Token  // nil: the certificate is used instead
	lease           time.Duration // of a control plane's Lease; 0 for a worker
	controlPlanes   []string      // the others
}

func (t *ticket) toWire() *joinv1.IssueJoinTicketResponse {
	id, _ := hex.DecodeString(t.id) // generated here, so valid hex
	expires := t.client.Leaf.NotAfter
	if t.serving.Leaf.NotAfter.Before(expires) {
		expires = t.serving.Leaf.NotAfter
	}
	out := &joinv1.IssueJoinTicketResponse{
		TicketId: id, DiskKey: t.disk.Expose(), ClusterId: t.info.ClusterID[:],
		KubernetesVersion: t.info.KubernetesVersion, ControlPlaneEndpoint: t.info.ControlPlaneEndpoint, CaCertificate: t.ca,
		KubeletClientCertificate: t.client.PEM, KubeletServingCertificate: t.serving.PEM,
		Components: versions.NewList(t.info.Components...).Wire(), ControlPlaneFiles: t.files, ExpiresAt: timestamppb.New(expires),
		ControlPlaneAddresses: t.controlPlanes, Images: t.info.Images, CrossCertificate: t.cross,
	}
	if t.token != nil {
		out.BootstrapToken = t.token.Expose()
	}
	if t.lease > 0 {
		out.LeaseLifetime = durationpb.New(t.lease)
	}
	return out
}
