package v1alpha1

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// PolicyName is the name of the only AttestationPolicy that services read.
const PolicyName = "default"

// AttestationPolicy defines the evidence that the owner of a cluster accepts. Services read the one named
// "default". A policy with a wrong signature or content, or with a lower serial than the one in force, does not
// replace it; status.reason has the cause.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster
// +kubebuilder:printcolumn:name="Accepted",type=boolean,JSONPath=`.status.accepted`
// +kubebuilder:printcolumn:name="Serial",type=integer,JSONPath=`.status.serial`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type AttestationPolicy struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is the policy with its owner's signature.
	Spec AttestationPolicySpec `json:"spec"`
	// Status is the services' result of checking the policy.
	Status AttestationPolicyStatus `json:"status,omitempty"`
}

// AttestationPolicySpec is a policy and its signature.
type AttestationPolicySpec struct {
	// Policy is a muster.attest.v1.Policy in protobuf's JSON mapping: exactly the signed bytes, at most 256
	// KiB.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=262144
	Policy string `json:"policy"`
	// Signature is Ed25519 (RFC 8032) by the owner's key over "muster policy v1", a zero byte
	// and the policy's bytes; 64 bytes, in base64.
	//
	// +kubebuilder:validation:MinLength=88
	// +kubebuilder:validation:MaxLength=88
	// +kubebuilder:validation:Format=byte
	Signature string `json:"signature"`
}

// AttestationPolicyStatus shows whether the policy in spec is the one in force.
type AttestationPolicyStatus struct {
	// Accepted is whether the policy of observedGeneration is in force.
	Accepted bool `json:"accepted"`
	// ObservedGeneration is the metadata.generation that this status describes.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Generation is the metadata.generation of the policy in force; 0: none is.
	Generation int64 `json:"generation,omitempty"`
	// Serial is the serial of the policy in force. A policy with a lower one is never accepted again.
	//
	// +kubebuilder:validation:Minimum=0
	Serial int64 `json:"serial,omitempty"`
	// PolicyDigest is the SHA-256 of the policy with this serial, in hexadecimal digits. No other policy with
	// this serial is accepted.
	//
	// +kubebuilder:validation:MaxLength=64
	PolicyDigest string `json:"policyDigest,omitempty"`
	// Reason is empty, or the reason code of the refusal, such as POLICY_SIGNATURE.
	Reason string `json:"reason,omitempty"`
	// Message describes the error.
	//
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message,omitempty"`
	// Insecure lists the switches that are on and weaken the cluster.
	//
	// +listType=set
	Insecure []string `json:"insecure,omitempty"`
}

// AttestationPolicyList is a list of policies.
//
// +kubebuilder:object:root=true
type AttestationPolicyList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []AttestationPolicy `json:"items"`
}

// Role is the task of a node in its cluster.
//
// +kubebuilder:validation:Enum=worker;control-plane
type Role string

// The roles.
const (
	RoleWorker       Role = "worker"
	RoleControlPlane Role = "control-plane"
)

// DiskMode is how a machine stores its state.
//
// +kubebuilder:validation:Enum=plain;luks
type DiskMode string

// The disk modes.
const (
	DiskModePlain DiskMode = "plain"
	DiskModeLUKS  DiskMode = "luks"
)

// AttestedNode is the enrollment of one machine. Its name is the node's name, which belongs to that machine
// alone from then on (J4). A worker is enrolled when it passes attestation; a control plane must be enrolled by
// the owner beforehand. `muster forget` frees the name.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster
// +kubebuilder:selectablefield:JSONPath=`.spec.banned`
// +kubebuilder:printcolumn:name="Role",type=string,JSONPath=`.spec.role`
// +kubebuilder:printcolumn:name="Machine",type=string,JSONPath=`.spec.machineID`,priority=1
// +kubebuilder:printcolumn:name="Enrolled",type=string,JSONPath=`.status.conditions[?(@.type=="Enrolled")].status`
// +kubebuilder:printcolumn:name="Accepted",type=string,JSONPath=`.status.conditions[?(@.type=="Accepted")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Accepted")].reason`
// +kubebuilder:printcolumn:name="Verdict",type=date,JSONPath=`.status.lastVerdict.time`
// +kubebuilder:printcolumn:name="Revoked",type=string,JSONPath=`.status.conditions[?(@.type=="Revoked")].status`
// +kubebuilder:printcolumn:name="Vanished",type=string,JSONPath=`.status.conditions[?(@.type=="Vanished")].reason`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="size(self.metadata.name) <= 63 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",message="a node name is a DNS label"
type AttestedNode struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is the enrollment.
	Spec AttestedNodeSpec `json:"spec"`
	// Status is the result of the machine's latest attestation.
	Status AttestedNodeStatus `json:"status,omitempty"`
}

// AttestedNodeSpec is the machine that has the name, and what the machine is permitted.
//
// +kubebuilder:validation:XValidation:rule="self.machineID == oldSelf.machineID || (has(oldSelf.banned) && oldSelf.banned)",message="a name belongs to one machine: muster forget frees it, muster replace gives it to another machine"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.diskID) || size(oldSelf.diskID) == 0 || (has(self.diskID) && self.diskID == oldSelf.diskID) || (has(oldSelf.banned) && oldSelf.banned)",message="the machine is enrolled with another disk: muster replace changes that"
type AttestedNodeSpec struct {
	// MachineID is the SHA-256 of the SubjectPublicKeyInfo of the machine's endorsement key, in 64 lower-case
	// hexadecimal digits. It never changes, except in a banned enrollment, which no service changes: `muster
	// replace` uses this to give a name to another machine.
	//
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	MachineID string `json:"machineID"`
	// Role is the node's task. It never changes.
	//
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a node's role does not change"
	Role Role `json:"role"`
	// DiskID is the UUID of the machine's state disk, in the 36-character lower-case form. If the owner
	// enrolled the machine, it is empty until the machine's first join.
	//
	// +kubebuilder:validation:Pattern=`^([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})?$`
	DiskID string `json:"diskID,omitempty"`
	// DiskMode is how the machine stores its state. If the owner enrolled the machine, it is empty until its
	// first join.
	DiskMode DiskMode `json:"diskMode,omitempty"`
	// Addresses are the IP addresses that the node may have in its serving certificate. While a ticket is being
	// issued they include the earlier addresses.
	//
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=45
	// +listType=set
	Addresses []string `json:"addresses,omitempty"`
	// Banned makes every service refuse the machine at once. Its Node and the pods on it are deleted.
	Banned bool `json:"banned,omitempty"`
}

// OrderState is how far a machine is with an order.
//
// +kubebuilder:validation:Enum=running;done;failed;refused
type OrderState string

// The states of an order.
const (
	// OrderRunning means that the machine's journal has the order, and that it runs.
	OrderRunning OrderState = "running"
	// OrderDone and OrderFailed are its ends.
	OrderDone   OrderState = "done"
	OrderFailed OrderState = "failed"
	// OrderRefused means that the machine did not begin.
	OrderRefused OrderState = "refused"
)

// OrderReport is a machine's report of an order, for information only.
type OrderReport struct {
	// Digest is the SHA-256 of the order that the report is about, with its signature, in hexadecimal digits.
	//
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	Digest string `json:"digest"`
	// Action is what was ordered, as far as the machine trusts it.
	//
	// +kubebuilder:validation:MaxLength=32
	Action string `json:"action,omitempty"`
	// State is how far it is.
	State OrderState `json:"state"`
	// Message describes what happened.
	//
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message,omitempty"`
	// Output is what the owner asked for, such as the findings of bootstrapper doctor.
	//
	// +kubebuilder:validation:MaxLength=4096
	Output string `json:"output,omitempty"`
	// BeganAt and EndedAt are by the machine's clock.
	BeganAt *metav1.Time `json:"beganAt,omitempty"`
	EndedAt *metav1.Time `json:"endedAt,omitempty"`
}

// CandidateVerdict is what a policy that is not in force says of a machine's latest evidence.
type CandidateVerdict struct {
	// Digest is the SHA-256 of the policy, in hexadecimal digits.
	//
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	Digest string `json:"digest"`
	// Verdict is the result.
	Verdict `json:",inline"`
}

// AttestedNodeStatus is the result of the machine's latest attestation.
type AttestedNodeStatus struct {
	// LastVerdict is the verdict on the machine's latest evidence.
	LastVerdict *Verdict `json:"lastVerdict,omitempty"`
	// PolicyGeneration is the metadata.generation of the policy that was applied.
	PolicyGeneration int64 `json:"policyGeneration,omitempty"`
	// PolicySerial is the serial of the policy that was applied.
	//
	// +kubebuilder:validation:Minimum=0
	PolicySerial int64 `json:"policySerial,omitempty"`
	// EvidenceDigest is the SHA-256 of the evidence, in hexadecimal digits.
	//
	// +kubebuilder:validation:MaxLength=64
	EvidenceDigest string `json:"evidenceDigest,omitempty"`
	// PCRs are the quoted values by PCR number, in hexadecimal digits.
	//
	// +kubebuilder:validation:MaxProperties=24
	PCRs map[string]string `json:"pcrs,omitempty"`
	// AKName is the TPM name of the attestation key, in hexadecimal digits.
	//
	// +kubebuilder:validation:MaxLength=136
	AKName string `json:"akName,omitempty"`
	// EKPublic is the SubjectPublicKeyInfo of the endorsement key in DER (RFC 5280, section 4.1.2.7), in base64. Its
	// SHA-256 is the machine ID. With it and AKName `muster verify NODE` can challenge the TPM.
	//
	// +kubebuilder:validation:MaxLength=512
	EKPublic string `json:"ekPublic,omitempty"`
	// ResetCount is the TPM's count of resets. It never decreases: if a machine's TPM was cleared, the owner
	// must enroll the machine again.
	//
	// +kubebuilder:validation:Minimum=0
	ResetCount *int64 `json:"resetCount,omitempty"`
	// Boot is the machine's latest boot with accepted evidence (J11). If it is unset, the machine's next boot
	// is accepted as the latest.
	//
	// +optional
	Boot *Boot `json:"boot,omitempty"`
	// Ticket is the latest join ticket.
	Ticket *Ticket `json:"ticket,omitempty"`
	// ReleasedAt is when the machine returned its ticket. Its node may not write to the API any more. Because
	// certificate and disk key have left joinservice, name and disk stay reserved for the machine until the
	// certificate has expired: 24 hours and 10 minutes, unless the owner has set another lifetime. Then they
	// are free, unless the owner made the AttestedNode.
	//
	// +optional
	ReleasedAt *metav1.Time `json:"releasedAt,omitempty"`
	// Certificates has the expiry of the kubelet's certificates: those on its disk, which the machine reports
	// with each attestation, and before the first report those that were issued for it.
	Certificates *NodeCertificates `json:"certificates,omitempty"`
	// Candidate is the verdict of the policy in the annotation muster.dev/candidate on the latest evidence; unset
	// without one. It is for the owner's information, and decides nothing.
	//
	// +optional
	Candidate *CandidateVerdict `json:"candidate,omitempty"`
	// Order is what the machine says of the latest order that it has begun or refused.
	//
	// +optional
	Order *OrderReport `json:"order,omitempty"`
	// OwnerKeys are the owner's public keys in the machine's image, each 32 bytes in base64, as the machine reports
	// them. It is for the owner's information, and decides nothing in the cluster.
	//
	// +listType=set
	// +kubebuilder:validation:MaxItems=4
	// +kubebuilder:validation:items:MaxLength=44
	// +optional
	OwnerKeys []string `json:"ownerKeys,omitempty"`
	// Authorities are the cluster's certificate authorities that the node trusts, as the machine reports them: the
	// SHA-256 of each certificate in hexadecimal digits, the first one of its ca.crt first. A machine that is under
	// foreign control can report any.
	//
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=4
	// +kubebuilder:validation:items:MaxLength=64
	// +optional
	Authorities []string `json:"authorities,omitempty"`
	// KubeletAuthorities are the authorities that have issued the kubelet's certificates, in the same form.
	//
	// +listType=set
	// +kubebuilder:validation:MaxItems=2
	// +kubebuilder:validation:items:MaxLength=64
	// +optional
	KubeletAuthorities []string `json:"kubeletAuthorities,omitempty"`
	// Conditions follow the conventions of the Kubernetes API: Accepted, Enrolled, Revoked, Vanished and
	// Cloned. They are for information: only the end of a vanished worker's enrollment depends on one.
	//
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// Verdict is the result of appraising one piece of evidence.
type Verdict struct {
	// Accepted is whether the policy accepts the machine.
	Accepted bool `json:"accepted"`
	// Reason is the reason code, such as POLICY_REFUSED; ACCEPTED if the policy accepts the machine.
	Reason string `json:"reason"`
	// Time is when the evidence was appraised.
	Time metav1.Time `json:"time"`
	// Message describes a refusal, such as the PCR that differs.
	//
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message,omitempty"`
}

// Ticket is an issued join ticket.
type Ticket struct {
	// ID identifies the ticket: 16 random bytes in hexadecimal digits.
	//
	// +kubebuilder:validation:MaxLength=32
	ID string `json:"id"`
	// IssuedAt is when it was issued.
	IssuedAt metav1.Time `json:"issuedAt"`
	// CertificateID is the API server's ID of the ticket's client certificate, in
	// authentication.kubernetes.io/credential-id.
	//
	// +kubebuilder:validation:MaxLength=80
	CertificateID string `json:"certificateID,omitempty"`
}

// EnrolledByTicket is an annotation of an AttestedNode that joinservice made for a join ticket. Such a worker's
// enrollment is deleted if no node joins with the ticket, and after its node has vanished for a long time.
// Without the annotation the AttestedNode is treated as one that the owner made.
const EnrolledByTicket = "muster.dev/enrolled-by-ticket"

// AttestationKey is an annotation of an AttestedNode: the TPM name of the attestation key with which its
// machine requested a ticket, in hexadecimal digits. No other machine may present that key (A8).
const AttestationKey = "muster.dev/attestation-key"

// AskedAt is an annotation of an AttestedNode: when its machine last requested a join ticket (RFC 3339). Until
// every certificate that may have been issued then has expired, no other machine gets the name and the
// addresses, even if the request failed (J4).
const AskedAt = "muster.dev/asked-at"

// OwnerOrder is an annotation of an AttestedNode: the owner's latest order to the machine, which gets it with its
// next attestation. It is the signature in base64, a space, and the signed text in JSON. The machine executes only
// what the owner's key has signed for it (B11). It is no field of the spec: an order does not change the
// enrollment's generation, by which an older copy of the cluster is detected (B7).
const OwnerOrder = "muster.dev/order"

// Returns is an annotation of a Node that a command of the owner's has drained and will let take pods again at its end, also if it is interrupted and
// repeated. Its value is the kernel's ID of the boot in which the node was drained, or "true" if that is not known.
const Returns = "muster.dev/returns"

// PolicyCandidate is an annotation of the AttestationPolicy: a policy that its owner may put in force later, as
// the signature in base64, a space, and the text. Each machine that attests is also appraised by it, which
// changes nothing but [AttestedNodeStatus.Candidate].
const PolicyCandidate = "muster.dev/candidate"

// FormerAddresses is an annotation of an AttestedNode: addresses that its machine gave up by requesting others,
// each with the time at which the last serving certificate for it expires (ADDRESS=RFC 3339, separated by
// spaces). Until then no other machine may have the address (J4).
const FormerAddresses = "muster.dev/former-addresses"

// Conditions of an AttestedNode that are derived from its other fields and from the list of nodes, for display
// and for kubectl wait.
const (
	// ConditionAccepted is True if the policy accepted the machine's latest evidence, and False if it refused
	// it; the reason is the verdict's reason code.
	ConditionAccepted = "Accepted"
	// ConditionEnrolled is True once the machine has received the node's certificates.
	ConditionEnrolled = "Enrolled"
	// ConditionRevoked is True while the node may not write to the API: its machine is banned, it is being
	// removed, or it has returned its ticket, or its certificates were revoked and it has got none since.
	ConditionRevoked = "Revoked"
)

// ConditionVanished is True on an AttestedNode while its node shows no sign of life.
const ConditionVanished = "Vanished"

// ConditionCloned is True on an AttestedNode once a second machine has attested with the same TPM state, until
// the owner has decided which one is genuine (J11). The message has both addresses.
const ConditionCloned = "Cloned"

// AttestedNodeList is a list of enrollments.
//
// +kubebuilder:object:root=true
type AttestedNodeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []AttestedNode `json:"items"`
}

// RevokeCertificates is the finalizer of an AttestedNode. A deleted enrollment stays until joinservice has
// revoked what its machine was given (J4): its certificates can write nothing any more, and its Node is gone.
const RevokeCertificates = "muster.dev/revoke-certificates"

// KeepNode is an annotation of an AttestedNode that `muster replace` has banned: joinservice keeps its Node,
// with labels and taints, for the next machine of that name.
const KeepNode = "muster.dev/keep-node"

// Removing is an annotation of an AttestedNode that `muster forget` or `muster reset` has banned. `muster ban` removes it: those commands then do not
// delete the enrollment, with which the ban would end.
const Removing = "muster.dev/removing"

// ShutOut reports whether the machine gets nothing: it is banned, or its enrollment is being deleted.
func (n *AttestedNode) ShutOut() bool { return n.Spec.Banned || n.Leaving() }

// Leaving reports whether the enrollment is being deleted.
func (n *AttestedNode) Leaving() bool { return !n.DeletionTimestamp.IsZero() }

// Revokes reports whether the deleted enrollment stays until its certificates are revoked.
func (n *AttestedNode) Revokes() bool { return slices.Contains(n.Finalizers, RevokeCertificates) }
