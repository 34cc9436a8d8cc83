// Package recovery opens the state disk of a control plane while no joinservice can. It also records the cluster's state; a
// recovery compares the disk with that record.
package recovery

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"

	"connectrpc.com/connect"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/peerdial"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	recoverv1 "github.com/muster-k8s/muster/gen/muster/recover/v1"
	"github.com/muster-k8s/muster/gen/muster/recover/v1/recoverv1connect"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// RecoverConfig configures [Recover].
type RecoverConfig struct {
	// Dir is the owner's folder; nothing in it is changed.
	Dir *ownerdir.Dir
	// Addr is HOST:PORT of the machine's recovery server.
	Addr string
	// Machine is the expected one; nil: the one in the folder, on which the cluster was initialized.
	Machine *attest.MachineID
	// Disk is the disk that the machine must have; nil: the one in the cluster's last known state.
	Disk *keys.DiskID
	// AcceptEpoch is the epoch that the owner has already accepted, for a machine whose disk is an older copy; nil:
	// none.
	AcceptEpoch *uint64
	// ReplaceSoftware makes the machine use the folder's lists of software even if its disk lists other software.
	ReplaceSoftware bool
	// Uncompared makes the machine start without a comparison of its disk: it gets no lists of software (B8).
	Uncompared bool
	// Ask lets the owner decide whether a machine continues with the state of its disk; nil: there is no interactive
	// user.
	Ask func(Revival) (bool, error)
	// Report receives each step.
	Report progress.Reporter
	// DialContext opens TCP connections; nil for a [net.Dialer].
	DialContext func(ctx context.Context, network, addr string) (net.Conn, error)
}

// RecoverSteps is the number of steps that [Recover] reports.
const RecoverSteps = 2

// Recovery is the result.
type Recovery struct {
	// Machine and DiskID identify the disk that is open now.
	Machine string `json:"machine"`
	DiskID  string `json:"diskID"`
	// Already reports that the disk was open before this key was sent.
	Already bool `json:"already"`
	// Revived is set if the disk was already open and is an older copy: the state with which the machine continues.
	Revived *Revival `json:"revived,omitempty"`
}

// Recover sends the key of its disk to a control plane that waits for it, and no secret from which other keys can be
// derived. Before that, it appraises the machine by the folder's policy, on the same connection (A6), and compares the disk
// with the cluster's last known state (J2).
func Recover(ctx context.Context, cfg RecoverConfig) (*Recovery, error) {
	if cfg.Dir == nil || cfg.Addr == "" || cfg.Report == nil {
		return nil, errors.New("recovery.Recover: Dir, Addr and Report are required")
	}
	r := &recoverer{RecoverConfig: cfg}
	if err := r.load(); err != nil {
		return nil, err
	}
	if err := progress.Step(cfg.Report, "verify the machine", func() (string, error) { return r.appraise(ctx) }); err != nil {
		return nil, err
	}
	if r.revival != nil {
		err := progress.Step(cfg.Report, "accept the older copy of its state disk", func() (string, error) { return r.revive(ctx) })
		return &Recovery{Machine: r.Machine.String(), Already: true, Revived: r.revival}, err
	}
	var out *Recovery
	err := progress.Step(cfg.Report, "open its state disk", func() (_ string, err error) {
		if out, err = r.open(ctx); err != nil {
			return "", err
		}
		if out.Already {
			return "disk " + out.DiskID + " was open already", nil
		}
		return "disk " + out.DiskID + " is open", nil
	})
	return out, err
}

type recoverer struct {
	RecoverConfig

	root    *keys.Root
	cluster keys.ClusterID
	key     ed25519.PrivateKey
	known   *ownerdir.Known
	// software lists what the machine compares its disk with (B8); nil for no comparison.
	software *ownerorder.Software
	target   peerdial.Target
	// older is the dial target for a machine whose open disk is an older copy by its TPM counter. revival is the state of
	// that disk; nil while the machine waits for a key.
	older   peerdial.Target
	revival *Revival
	// disk is the disk in the machine's last answer; empty if there was none.
	disk string
	// trying reports that the machine was testing a key in its last answer.
	trying bool
}

func (r *recoverer) load() error {
	c := r.Dir.Cluster()
	if r.Machine == nil {
		if c.FirstMachine == nil {
			return problem.WithRemedy(fmt.Errorf("%s records no machine", r.Dir.Path()), "Name the machine by --machine-id, if the cluster was made with a copy of this folder. To give up an unfinished restore: muster restore --abandon.")
		}
		r.Machine = &c.FirstMachine.ID
	}
	_, policy, json, err := policies.FolderPolicy(r.Dir)
	if err != nil {
		return err
	}
	if r.known, err = r.Dir.Known(); err != nil {
		return err
	}
	if err := policies.Current(r.Dir, r.known, policy, json); err != nil {
		return err
	}
	if err := mayRecover(c, policy, *r.Machine); err != nil {
		return err
	}
	if !r.Uncompared {
		if r.software, err = softwareOf(c, r.ReplaceSoftware); err != nil {
			return err
		}
	}
	if r.key, err = r.Dir.OwnerKey(); err != nil {
		return err
	}
	secrets, err := r.Dir.Secrets()
	if err != nil {
		return err
	}
	r.root = keys.NewRoot(secrets.Root, secrets.Salt)
	r.cluster = r.root.ClusterID(secrets.MeasurementSalt)
	// A6: exactly this machine, not locked yet
	r.target = peerdial.Target{
		Addr: r.Addr, Purpose: attest.PurposeMachine, Policy: policy, Locks: []attest.Lock{attest.Unlocked()}, Only: r.Machine, DialContext: r.dial,
	}
	r.older = r.target
	r.older.Locks = []attest.Lock{attest.LockedTo(r.cluster)}
	return nil
}

// mayRecover refuses a machine that the policy does not list as a control plane (A7): the cluster's keys are on its disk. During an init or a
// restore, its machine may not be listed yet.
func mayRecover(c ownerdir.Cluster, policy *attest.Policy, machine attest.MachineID) error {
	begun := c.Stage != ownerdir.StageInstalled && c.FirstMachine != nil && c.FirstMachine.ID == machine
	if begun {
		return nil
	}
	if err := policy.MayServe(machine); err != nil { // A7
		return problem.WithRemedy(err, "Recover a control plane that "+ownerdir.PolicyFile+" of the folder lists. If this one was removed by mistake, add it to controlPlanes there, and increase serial.")
	}
	return nil
}

// softwareOf returns the lists of the folder: during an upgrade of Kubernetes both.
func softwareOf(c ownerdir.Cluster, replace bool) (*ownerorder.Software, error) {
	s := &ownerorder.Software{Endpoint: c.ControlPlaneEndpoint, Adopted: c.Adopted, Replace: replace}
	var err error
	if s.List, err = recoveryList(clusterinfo.Release{Components: c.Components, Images: c.Images}); err != nil || c.Upgrade == nil {
		return s, err
	}
	if s.Other, err = recoveryList(*c.Upgrade); s.Other == s.List {
		s.Other = "" // only workers are left
	}
	return s, err
}

func recoveryList(r clusterinfo.Release) (string, error) {
	text, err := r.List()
	if err == nil {
		_, err = versions.Parse([]byte(text))
	}
	if err == nil && len(text) > ownerorder.MaxList {
		err = fmt.Errorf("it has %d bytes, and a machine accepts at most %d", len(text), ownerorder.MaxList)
	}
	if err != nil {
		return "", problem.WithRemedy(fmt.Errorf("the list of software in the folder: %w", err), "Use the newest copy of the folder. With --uncompared, the machine runs whatever is on its disk, including changes by an attacker.")
	}
	return text, nil
}

// dial connects and reports that; the appraisal of the machine follows.
func (r *recoverer) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	dial := r.DialContext
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}
	c, err := dial(ctx, network, addr)
	if err == nil {
		r.Report.Update("connected: " + addr)
	}
	return c, err
}

func (r *recoverer) appraise(ctx context.Context) (string, error) {
	err := progress.Again(ctx, r.Report, func() error {
		s, err := peerdial.Open(r.target)
		if err != nil {
			return err
		}
		defer func() { _ = s.Close() }()
		_, err = s.Exchange(ctx)
		if rpc.ReasonFrom(err) != attestv1.Reason_REASON_LOCK_FOREIGN {
			return err
		}
		if lerr := r.look(ctx); lerr != nil { // it is locked, possibly to this cluster with an older copy of its disk
			return errors.Join(err, lerr)
		}
		return nil
	})
	if err != nil {
		return "", r.explain(err)
	}
	return "appraised: machine " + r.Machine.String(), nil
}

// open sends the key until the disk is open, or until a final error.
func (r *recoverer) open(ctx context.Context) (*Recovery, error) {
	var out *Recovery
	var gone error
	err := progress.Again(ctx, r.Report, func() error {
		s, err := peerdial.Open(r.target)
		if err != nil {
			return err
		}
		defer func() { _ = s.Close() }()
		if out, err = r.call(ctx, s); err != nil && r.trying && errors.Is(err, syscall.ECONNREFUSED) {
			gone = err
			return nil
		}
		return err
	})
	if gone != nil {
		return nil, problem.WithRemedy(fmt.Errorf("the connection ended while the machine tried the key: %w", gone),
			"The recovery port is closed, so the disk is probably open. Wait for its node (kubectl get nodes); if the machine's console says that it still waits, run the same command again.")
	}
	if err != nil {
		return nil, r.explain(err)
	}
	return out, nil
}

// call makes one call and follows its stream. The transport appraises before it sends the request (A6).
func (r *recoverer) call(ctx context.Context, s *peerdial.Session) (*Recovery, error) {
	client := recoverv1connect.NewRecoverServiceClient(s.Client(), s.URL(), rpc.ClientOptions()...)
	described, err := client.Describe(ctx, &recoverv1.DescribeRequest{})
	if err != nil {
		return nil, err
	}
	disk, err := keys.ParseDiskID(described.GetDiskId())
	if err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "the machine's answer: %w", err)
	}
	nonce, err := ownerorder.ParseNonce(described.GetNonce())
	if err != nil {
		return nil, err
	}
	if err := checkDisk(r.Dir, r.known, *r.Machine, disk, r.Disk); err != nil { // J2
		return nil, err
	}
	salt, err := RecordedSalt(r.Dir, r.known, disk)
	if err != nil {
		return nil, err
	}
	key, err := r.root.Disk(disk, salt)
	if err != nil {
		return nil, err
	}
	stream, err := client.Recover(ctx, ownerorder.Recovery{Cluster: r.cluster, Disk: disk, Key: key, Nonce: nonce, Software: r.software}.Wire(r.key))
	if err != nil {
		return nil, err
	}
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		m := stream.Msg()
		if m.GetDiskId() != disk.String() {
			return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "the machine's answer names another disk than %s", disk)
		}
		r.disk, r.trying = disk.String(), m.GetState() == recoverv1.State_STATE_TRYING
		r.Report.Update(stateText(m.GetState(), r.disk))
		if s := m.GetState(); s == recoverv1.State_STATE_OPENED || s == recoverv1.State_STATE_OPEN_ALREADY {
			return &Recovery{Machine: r.Machine.String(), DiskID: r.disk, Already: s == recoverv1.State_STATE_OPEN_ALREADY}, nil
		}
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	return nil, errors.New("the machine ended the stream without a result")
}

// stateText returns a state with its explanation.
func stateText(s recoverv1.State, disk string) string {
	name := strings.ToLower(strings.TrimPrefix(s.String(), "STATE_"))
	switch s {
	case recoverv1.State_STATE_RECEIVED:
		return name + ": the machine has the key"
	case recoverv1.State_STATE_WAITING:
		return name + ": other callers are before this one"
	case recoverv1.State_STATE_TRYING:
		return name + ": the key of disk " + disk
	case recoverv1.State_STATE_OPENED, recoverv1.State_STATE_OPEN_ALREADY:
		return name + ": disk " + disk
	case recoverv1.State_STATE_UNSPECIFIED:
	}
	return name
}

// explain adds remedies that need to name the owner's files.
func (r *recoverer) explain(err error) error {
	reason := rpc.ReasonFrom(err)
	switch {
	case reason == attestv1.Reason_REASON_POLICY_REFUSED && len(attest.MismatchesOf(err)) == 0:
		return problem.WithRemedy(err, "Check the address. If the machine there is another control plane of this cluster, name it by --machine-id: the last muster recover --drill listed them.")
	case reason == attestv1.Reason_REASON_LOCK_FOREIGN:
		return problem.WithRemedy(err, "This machine is already locked to a cluster (PCR 15), so its state disk is open: it needs no recovery. If it does not become a node, look at its console.")
	case reason == attestv1.Reason_REASON_OWNER_SIGNATURE:
		return problem.WithRemedy(err, r.refusedSignature())
	case errors.Is(err, syscall.ECONNREFUSED):
		return problem.WithRemedy(err, "Nothing waits for a recovery there: the machine is a node, is not a control plane, or has not booted. Its console shows which. The recovery port is 9999.")
	case connect.CodeOf(err) == connect.CodeUnimplemented:
		return problem.WithRemedy(err, "Another program than a machine's recovery server answers there. The recovery port is 9999.")
	}
	return err
}

// refusedSignature returns the remedy for an order whose signature the machine refuses.
func (r *recoverer) refusedSignature() string {
	text := "If the machine has rebooted meanwhile, run the same command again. "
	if r.software != nil {
		text += "If its image is of an earlier version of Muster, it does not know the lists of software: add --uncompared. The disk is then not compared, so what an attacker left there runs. "
	}
	return text + "Otherwise its image has another owner's key than this folder: use the folder of the owner whose key is in the image."
}
