package crash

import (
	"bytes"
	"context"
	"crypto"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/machine/machinetest"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// newEnroller is a joinservice that records machines with their disks, and gives each disk its own key (J2).
func newEnroller(t *testing.T, b *bench) *joinservice {
	t.Helper()
	j := newJoinservice(t, b)
	j.root, j.enrolled = keys.NewRoot([32]byte{1}, [32]byte{2}), map[attest.MachineID]*joinv1.IssueJoinTicketRequest{}
	return j
}

// enroll records the machine, and returns its disk's key. It is called with the mutex held.
func (j *joinservice) enroll(ctx context.Context, req *joinv1.IssueJoinTicketRequest) ([]byte, error) {
	peer, ok := attest.PeerFrom(ctx)
	if !ok {
		return nil, attest.Refuse(attestv1.Reason_REASON_PEER_NOT_ATTESTED, "%w", attest.ErrNoPeer)
	}
	if e := j.enrolled[peer.Machine()]; e != nil {
		if err := sameNode(e.GetNodeName(), e.GetDiskId(), e.GetRole(), req.GetNodeName(), req.GetDiskId(), req.GetRole()); err != nil {
			return nil, err
		}
	}
	j.enrolled[peer.Machine()] = req
	return j.keyOf(req.GetDiskId())
}

func sameNode(name, disk string, role joinv1.Role, claimedName, claimedDisk string, claimedRole joinv1.Role) error {
	switch {
	case name != claimedName:
		return attest.Refuse(attestv1.Reason_REASON_NAME_MISMATCH, "enrolled as %s", name)
	case disk != claimedDisk:
		return attest.Refuse(attestv1.Reason_REASON_DISK_MISMATCH, "enrolled with disk %s", disk)
	case role != claimedRole:
		return attest.Refuse(attestv1.Reason_REASON_ROLE_REFUSED, "enrolled as %s", role)
	}
	return nil
}

func (j *joinservice) keyOf(disk string) ([]byte, error) {
	id, err := keys.ParseDiskID(disk)
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "disk_id: %w", err)
	}
	key, err := j.root.Disk(id, keys.DiskSalt{3})
	if err != nil {
		return nil, err
	}
	return key.Expose(), nil
}

// IssueRejoinTicket implements [joinv1connect.JoinServiceHandler].
func (j *joinservice) IssueRejoinTicket(ctx context.Context, req *joinv1.IssueRejoinTicketRequest) (*joinv1.IssueRejoinTicketResponse, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	peer, ok := attest.PeerFrom(ctx)
	if !ok || j.root == nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_PEER_NOT_ATTESTED, "%w", attest.ErrNoPeer)
	}
	if !bytes.Equal(peer.Claims().PCR(attest.LockPCR), make([]byte, crypto.SHA256.Size())) {
		return nil, attest.Refuse(attestv1.Reason_REASON_LOCK_FOREIGN, "a machine that runs has its disk open")
	}
	e := j.enrolled[peer.Machine()]
	if e == nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "not enrolled")
	}
	if err := sameNode(e.GetNodeName(), e.GetDiskId(), e.GetRole(), req.GetNodeName(), req.GetDiskId(), req.GetRole()); err != nil {
		return nil, err
	}
	key, err := j.keyOf(req.GetDiskId())
	if err != nil {
		return nil, err
	}
	j.rejoins++
	resp := &joinv1.IssueRejoinTicketResponse{
		TicketId: bytes.Repeat([]byte{8}, 16), DiskKey: key, ClusterId: joinCluster[:], Components: j.components(), Images: machinetest.Images().References(), ControlPlaneEndpoint: "192.168.77.1:6443",
	}
	for _, name := range component.Authorities(req.GetRole() == joinv1.Role_ROLE_CONTROL_PLANE) {
		resp.Authorities = append(resp.Authorities, j.file(name))
	}
	return resp, nil
}

// forget ends the enrollments of all machines.
func (j *joinservice) forget() {
	j.mu.Lock()
	defer j.mu.Unlock()
	clear(j.enrolled)
}
