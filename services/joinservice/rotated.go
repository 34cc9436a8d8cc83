package joinservice

import (
	"bytes"
	"context"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/services/joinservice/enroll"
	"github.com/muster-k8s/muster/services/joinservice/nodecert"
	"github.com/muster-k8s/muster/trust/attest"
)

// rotatedFolder is the folder below PKI with the new key of a rotation, as KEY.ID, which the machine's bootstrapper writes.
const rotatedFolder = "muster-rotation"

// GetRotatedKey implements the RPC.
func (s *Service) GetRotatedKey(ctx context.Context, req *joinv1.GetRotatedKeyRequest) (*joinv1.GetRotatedKeyResponse, error) {
	a := &attempt{id: newTicketID(), began: s.now()}
	content, err := s.rotatedKey(ctx, a, req)
	if err != nil {
		s.refuse(ctx, a, "rotated key refused", err)
		return nil, err
	}
	s.cfg.Log.InfoContext(ctx, "a rotation's new key was passed on", "ticket", a.id, "machine", a.record.Machine, "node", a.record.Node, "key", req.GetKey(), "id", req.GetId())
	return &joinv1.GetRotatedKeyResponse{Content: content}, nil
}

// rotatedKey returns the key or a refusal; it does not use the errors of the protocol.
func (s *Service) rotatedKey(ctx context.Context, a *attempt, req *joinv1.GetRotatedKeyRequest) ([]byte, error) {
	peer, ok := attest.PeerFrom(ctx) // J1
	if !ok {
		return nil, attest.Refuse(attestv1.Reason_REASON_PEER_NOT_ATTESTED, "%w", attest.ErrNoPeer)
	}
	a.peer(peer)
	key, id := clusterinfo.RotatedKey(req.GetKey()), req.GetId()
	switch {
	case !nodecert.IsName(req.GetNodeName()):
		return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "node_name is no DNS label of at most 63 characters")
	case !slices.Contains(clusterinfo.RotatedKeys(), key) || !clusterinfo.IsKeyID(id):
		return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "key or id is not that of a key that is rotated")
	}
	a.record.Node, a.record.Role, a.record.Purpose = req.GetNodeName(), string(v1alpha1.RoleControlPlane), string(key)
	renewal, err := s.mayRenew(ctx, a, peer, enroll.Claim{Node: req.GetNodeName()}, req.GetBootSecret())
	s.undoVerdict(ctx, a, peer, err)
	if err != nil {
		return nil, err
	}
	if role := renewal.Role(); role != v1alpha1.RoleControlPlane { // J6
		return nil, attest.Refuse(attestv1.Reason_REASON_ROLE_REFUSED, "node %q is enrolled as %s", req.GetNodeName(), role)
	}
	p, err := s.cfg.Policy.Current()
	if err != nil {
		return nil, err
	}
	if err := p.Policy.MayServe(peer.Machine()); err != nil { // J6: by the owner's signature, not only by an object of the cluster
		return nil, err
	}
	if err := s.limits.rotated.Take(peer.Machine(), a.began); err != nil {
		return nil, err
	}
	files, err := readPKI(s.cfg.PKI, []string{rotatedFolder + "/" + string(key) + "." + id})
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "this control plane has no %s %s: %w", key, id, err)
	}
	if err := fresh(peer.VerifiedAt(), s.now()); err != nil { // J2: the check of the boot may have taken long
		return nil, err
	}
	if err := s.write(a, "rotated key passed on"); err != nil { // J3
		return nil, err
	}
	return files[0].GetContent(), nil
}

// withRotation returns a control plane's public files, and the new key of a rotation that a rebooting machine may also have. This control plane may
// not have accepted the new key yet, but a machine that has must not lose it. The new key comes from an object of the cluster, so it never makes a
// machine add the key: machines accept only the keys in this control plane's own files. In the last phase, these contain only the new key.
func withRotation(files []*joinv1.ControlPlaneFile, r *clusterinfo.Rotation) ([]*joinv1.ControlPlaneFile, *joinv1.KeyRotation) {
	if r == nil {
		return files, nil
	}
	rotation := &joinv1.KeyRotation{Key: string(r.Key), Id: r.ID}
	if r.Key.CheckPublic(r.ID, r.Public) != nil { // there is none, or it is another key's
		return files, rotation
	}
	rotation.Keep = []byte(r.Public)
	if r.Phase != clusterinfo.RotationFinish {
		return files, rotation
	}
	out := slices.Clone(files)
	for i, f := range out {
		if public := strings.TrimSpace(r.Public); f.GetPath() == r.Key.PublicFile() && bytes.Contains(f.GetContent(), []byte(public)) {
			rotation.Keep = f.GetContent() // those who have not dropped the old one yet
			out[i] = &joinv1.ControlPlaneFile{Path: f.GetPath(), Content: []byte(r.Public)}
		}
	}
	return out, rotation
}
