package ownerorder

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

const machineDomain = "muster machine order v1\x00"

const (
	// MaxMachineOrder bounds the text of an order to a machine, in bytes.
	MaxMachineOrder = 16 << 10
	// MaxMachineLife is the longest time between the signature and the expiry of an order to a machine. A machine
	// whose clock is right refuses an order that was delayed for longer.
	MaxMachineLife = 24 * time.Hour
)

// Action is what a machine is ordered to do. Each action is safe to run twice.
type Action string

// The actions.
const (
	// ActionDoctor runs `bootstrapper doctor` and reports what it found.
	ActionDoctor Action = "doctor"
	// ActionReboot restarts the machine.
	ActionReboot Action = "reboot"
	// ActionReset erases the state disk's header and restarts the machine, which formats the disk and joins as new. A second
	// run on the same disk has the same effect; the next disk has another UUID.
	ActionReset Action = "reset"
	// ActionRemoveEtcdMember has a control plane remove the etcd member of the node [ArgMember]. Run twice it removes nothing.
	ActionRemoveEtcdMember Action = "remove-etcd-member"
	// ActionBackup has a control plane make a backup of the cluster, and reports where it is. Run twice it makes two.
	ActionBackup Action = "backup"
	// ActionUpgradeKubernetes brings a node to another release of Kubernetes. Run twice it finds the node upgraded.
	ActionUpgradeKubernetes Action = "upgrade-kubernetes"
	// ActionRotateKey has a control plane do a phase of the rotation of a key: [ArgKey], [ArgPhase], [ArgID]. It reports the new key's ID and public part. Run
	// twice it finds the phase done.
	ActionRotateKey Action = "rotate-key"
	// ActionVerify has a machine make evidence that is bound to the order, and answer the challenge [ArgCredential], [ArgSecret]. The evidence is in
	// [SignedMachineOrder.EvidenceFile]; the report has the answer in hexadecimal digits. Run twice it makes evidence for the same order.
	ActionVerify Action = "verify"
)

// Arguments of orders.
const (
	// ArgMember is the argument of [ActionRemoveEtcdMember]: the name of a node.
	ArgMember = "member"
	// ArgVersion is an argument of [ActionUpgradeKubernetes]: the release, full and without "v".
	ArgVersion = "version"
	// ArgList is an argument of [ActionUpgradeKubernetes]: the release's list of components and images, which [versions.Parse] reads, in JSON. So the
	// machine has it from its owner, and not from the API.
	ArgList = "list"
	// ArgPart is an argument of [ActionUpgradeKubernetes]: one of the values below.
	ArgPart = "part"
	// ArgKey, ArgPhase and ArgID are the arguments of [ActionRotateKey]: what is rotated (clusterinfo.RotatedKey), the phase (clusterinfo.RotationPhase), and
	// the new key's ID, which is empty if the control plane is to make the key.
	ArgKey   = "key"
	ArgPhase = "phase"
	ArgID    = "id"
)

// Values of [ArgPart]: what the node does for the whole cluster.
const (
	// PartFirst is of the first control plane, which upgrades the cluster's own objects (`kubeadm upgrade apply`).
	PartFirst = "first"
	// PartLast is of the last control plane, which sets the images of kube-proxy and CoreDNS.
	PartLast = "last"
	// PartOnly is of the only control plane: both.
	PartOnly = "only"
	// PartNode is of the others: control planes between, and workers (`kubeadm upgrade node`).
	PartNode = "node"
)

// MachineOrder is an order to one machine. It contains the machine's name, ID and disk. The owner knows the name; the rest
// is from the API, which so cannot get an order signed for a machine with another name. After a reset, a machine no longer
// knows which orders it has executed, but it has another disk.
type MachineOrder struct {
	// Cluster is the cluster's ID in hexadecimal digits, Node the node's name, Disk the UUID of the state disk.
	Cluster string           `json:"cluster"`
	Node    string           `json:"node"`
	Machine attest.MachineID `json:"machine"`
	Disk    string           `json:"disk"`
	Action  Action           `json:"action"`
	// Args are the action's arguments by their names.
	Args map[string]string `json:"args,omitempty"`
	// SignedAt is when the owner signed it. A machine starts no order that was signed earlier than one that it has started.
	SignedAt time.Time `json:"signedAt"`
	// NotAfter is the latest time at which the machine may start it.
	NotAfter time.Time `json:"notAfter"`
}

// Addressee is the machine for which an order is verified.
type Addressee struct {
	Cluster keys.ClusterID
	Node    string
	Machine attest.MachineID
	Disk    string
}

// SignedMachineOrder is the text of an order with a signature, which must not be trusted before
// [SignedMachineOrder.Genuine].
type SignedMachineOrder struct {
	// Text is a [MachineOrder] in JSON: exactly the signed bytes.
	Text      string
	Signature []byte
}

func machineInput(text string) []byte { return parts(machineDomain, []byte(text)) }

// Sign returns the order's text with the owner's signature.
func (o MachineOrder) Sign(owner ed25519.PrivateKey) (SignedMachineOrder, error) {
	text, err := json.Marshal(o)
	if err != nil {
		return SignedMachineOrder{}, err
	}
	return SignedMachineOrder{string(text), ed25519.Sign(owner, machineInput(string(text)))}, nil
}

// Genuine returns the order if the owner has signed it for this machine at any time (B11). It refuses with OWNER_SIGNATURE before
// it reads the text, then with REQUEST_INVALID. A nil owner has signed nothing.
func (s SignedMachineOrder) Genuine(owner attest.OwnerKeys, on Addressee) (MachineOrder, error) {
	if len(owner) == 0 {
		return MachineOrder{}, attest.Refuse(attestv1.Reason_REASON_OWNER_SIGNATURE, "the owner's public key is not known here, so no order is accepted")
	}
	if len(s.Text) > MaxMachineOrder || !owner.Verify(machineInput(s.Text), s.Signature) {
		return MachineOrder{}, attest.Refuse(attestv1.Reason_REASON_OWNER_SIGNATURE, "the order is not signed with a key of the owner, or was changed since")
	}
	o, err := ParseMachineOrder(s.Text)
	invalid := func(format string, args ...any) (MachineOrder, error) {
		return MachineOrder{}, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "order: "+format, args...)
	}
	switch {
	case err != nil:
		return invalid("%w", err)
	case o.Cluster != on.Cluster.String():
		return invalid("it is for cluster %s, and this machine is in %s", o.Cluster, on.Cluster)
	case o.Node != on.Node:
		return invalid("it is for node %s, and this is %s", o.Node, on.Node)
	case o.Machine != on.Machine:
		return invalid("it is for machine %s, and this is %s", o.Machine, on.Machine)
	case o.Disk != on.Disk:
		return invalid("it is for a machine with disk %s, and this one has %s", o.Disk, on.Disk)
	}
	return o, nil
}

// Timely returns nil if the order may start now, by the clock of its machine. It refuses with REQUEST_INVALID and CLOCK_SKEW.
func (o MachineOrder) Timely(now time.Time) error {
	switch {
	case !o.NotAfter.After(o.SignedAt) || o.NotAfter.Sub(o.SignedAt) > MaxMachineLife:
		return attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "order: it was signed at %s and is valid until %s: want at most %s", text(o.SignedAt), text(o.NotAfter), MaxMachineLife)
	case now.After(o.NotAfter):
		return attest.Refuse(attestv1.Reason_REASON_CLOCK_SKEW, "the order was valid until %s, and here it is %s", text(o.NotAfter), text(now))
	case o.SignedAt.Sub(now) > MaxAhead:
		return attest.Refuse(attestv1.Reason_REASON_CLOCK_SKEW, "the order was signed at %s by the owner's clock, and here it is %s", text(o.SignedAt), text(now))
	}
	return nil
}

// ParseMachineOrder reads the text of an order; it verifies nothing.
func ParseMachineOrder(text string) (MachineOrder, error) {
	var o MachineOrder
	d := json.NewDecoder(bytes.NewReader([]byte(text)))
	d.DisallowUnknownFields()
	if err := d.Decode(&o); err != nil {
		return MachineOrder{}, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return MachineOrder{}, errors.New("there is something after it")
	}
	return o, nil
}

// Digest identifies an order: the SHA-256 of its text and signature, in hexadecimal digits.
func (s SignedMachineOrder) Digest() string {
	sum := s.sum()
	return hex.EncodeToString(sum[:])
}

func (s SignedMachineOrder) sum() [sha256.Size]byte {
	return sha256.Sum256(slices.Concat([]byte(s.Text), s.Signature))
}

// Note returns the order in the form that an AttestedNode has it: the signature in base64, a space, and the text.
func (s SignedMachineOrder) Note() string {
	return base64.StdEncoding.EncodeToString(s.Signature) + " " + s.Text
}

// ParseMachineNote reads an order from an AttestedNode; it verifies nothing.
func ParseMachineNote(note string) (SignedMachineOrder, error) {
	signature, text, _ := strings.Cut(note, " ")
	b, err := base64.StdEncoding.DecodeString(signature)
	s := SignedMachineOrder{Text: text, Signature: b}
	if err != nil || len(b) != ed25519.SignatureSize || len(text) > MaxMachineOrder || s.Note() != note {
		return SignedMachineOrder{}, fmt.Errorf("an order of %d bytes with a signature of %d", len(text), len(b))
	}
	return s, nil
}
