package v1alpha1

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// PolicyName is the name of the one AttestationPolicy that services read.
const PolicyName = "default"

// AttestationPolicy is what the owner of a cluster accepts as evidence. Services read the
// one named "default". A policy whose signature or content is wrong, or whose serial is lower than
// that of the one in force, does not replace a good one; status.reason says so.
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

	// Spec is the policy as its owner signed it.
	Spec AttestationPolicySpec `json:"spec"`
	// Status is what the services made of it.
	Status AttestationPolicyStatus `json:"status,omitempty"`
}

// AttestationPolicySpec is a policy and its signature.
type AttestationPolicySpec struct {
	// Policy is a muster.attest.v1.Policy in protobuf's JSON mapping: the very bytes that were
	// signed, at most 256 KiB.
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

// AttestationPolicyStatus tells whether the policy in spec is the one in force.
type AttestationPolicyStatus struct {
	// Accepted is whether the policy of observedGeneration is in force.
	Accepted bool `json:"accepted"`
	// ObservedGeneration is the metadata.generation that this status speaks of.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Generation is the metadata.generation of the policy in force; 0: none is.
	Generation int64 `json:"generation,omitempty"`
	// Serial is the serial of the policy in force. A lower one is never accepted again.
	//
	// +kubebuilder:validation:Minimum=0
	Serial int64 `json:"serial,omitempty"`
	// PolicyDigest is the SHA-256 of the policy that has this serial, in hexadecimal digits.
	// No other one with this serial is accepted.
	//
	// +kubebuilder:validation:MaxLength=64
	PolicyDigest string `json:"policyDigest,omitempty"`
	// Reason is empty, or the reason code of the refusal, as in POLICY_SIGNATURE.
	Reason string `json:"reason,omitempty"`
	// Message says what is wrong, for people.
	//
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message,omitempty"`
	// Insecure lists the switches that weaken the cluster and are on.
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

// Role is what a node does in its cluster.
//
// +kubebuilder:validation:Enum=worker;control-plane
type Role string

// The roles.
const (
	RoleWorker       Role = "worker"
	RoleControlPlane Role = "control-plane"
)

// DiskMode is how a machine keeps its state.
//
// +kubebuilder:validation:Enum=plain;luks
type DiskMode string

// The disk modes.
const (
	DiskModePlain DiskMode = "plain"
	DiskModeLUKS  DiskMode = "luks"
)

// AttestedNode is the enrollment of one machine: its name is the node's name, which
// belongs to that machine alone from then on (J4). A worker enrolls itself by passing
// attestation; a control plane is enrolled by the owner beforehand. `muster forget`
// frees the name.
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
	// Status is what the machine last proved.
	Status AttestedNodeStatus `json:"status,omitempty"`
}

// AttestedNodeSpec says which machine has the name, and what it may have.
//
// +kubebuilder:validation:XValidation:rule="self.machineID == oldSelf.machineID || (has(oldSelf.banned) && oldSelf.banned)",message="a name belongs to one machine: muster forget frees it, muster replace gives it to another machine"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.diskID) || size(oldSelf.diskID) == 0 || !has(self.diskID) || self.diskID == oldSelf.diskID || (has(oldSelf.banned) && oldSelf.banned)",message="the machine is enrolled with another disk: muster replace changes that"
type AttestedNodeSpec struct {
	// MachineID is the SHA-256 of the SubjectPublicKeyInfo of the machine's endorsement key, in
	// 64 lower-case hexadecimal digits. It never changes, but in a banned enrollment, which
	// no service touches: so `muster replace` gives a name to another machine.
	//
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	MachineID string `json:"machineID"`
	// Role is what the node does. It never changes.
	//
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a node's role does not change"
	Role Role `json:"role"`
	// DiskID is the UUID of the machine's state disk, in the 36-character lower-case form. Empty
	// until the machine's first join if the owner enrolled it.
	//
	// +kubebuilder:validation:Pattern=`^([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})?$`
	DiskID string `json:"diskID,omitempty"`
	// DiskMode is how the machine keeps its state. Empty until its first join if the owner enrolled it.
	DiskMode DiskMode `json:"diskMode,omitempty"`
	// Addresses are the IP addresses that the node may have in its serving certificate. While a ticket is made
	// they are those of before as well.
	//
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=45
	// +listType=set
	Addresses []string `json:"addresses,omitempty"`
	// Banned refuses the machine everything, at once. Its Node and the pods on it are deleted.
	Banned bool `json:"banned,omitempty"`
}

// AttestedNodeStatus is what the machine last proved.
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
	// ResetCount is the TPM's count of resets. It does not go down: a TPM that was
	// cleared needs the owner to enroll the machine anew.
	//
	// +kubebuilder:validation:Minimum=0
	ResetCount *int64 `json:"resetCount,omitempty"`
	// Boot is the machine's latest boot of which evidence was accepted (J11). Without it, the machine's
	// next boot is believed.
	//
	// +optional
	Boot *Boot `json:"boot,omitempty"`
	// Ticket is the latest join ticket.
	Ticket *Ticket `json:"ticket,omitempty"`
	// ReleasedAt is when the machine returned its ticket: its node may not write. Certificate and disk key have left joinservice, so
	// name and disk stay the machine's own until the certificate has expired, 24 hours and 10 minutes unless the owner has set another
	// life; then they are free, unless the owner made the AttestedNode.
	//
	// +optional
	ReleasedAt *metav1.Time `json:"releasedAt,omitempty"`
	// Certificates says when the kubelet's certificates end: those on its disk, as its machine reports with each attestation, and before
	// the first report those that were made for it.
	Certificates *NodeCertificates `json:"certificates,omitempty"`
	// Conditions follow the conventions of the Kubernetes API: Accepted, Enrolled, Revoked, Vanished and Cloned. Nothing but the end of
	// a vanished worker's enrollment is decided on them.
	//
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// Boot is one boot of a machine, as a quote of its TPM and the machine itself say it.
type Boot struct {
	// ResetCount and RestartCount are the TPM's counters (TPM 2.0 Library, Part 2, TPMS_CLOCK_INFO). Together, in this
	// order, they are higher in each later boot.
	//
	// +kubebuilder:validation:Minimum=0
	ResetCount int64 `json:"resetCount"`
	// +kubebuilder:validation:Minimum=0
	RestartCount int64 `json:"restartCount"`
	// Clock is the TPM's clock in milliseconds. It does not go back within a boot.
	//
	// +kubebuilder:validation:Minimum=0
	Clock int64 `json:"clock"`
	// SecretHash is the SHA-256 of the secret that the machine has made for this boot, in hexadecimal digits.
	//
	// +kubebuilder:validation:MaxLength=64
	SecretHash string `json:"secretHash"`
	// Address is where the machine was when it last attested.
	//
	// +kubebuilder:validation:MaxLength=45
	Address string `json:"address,omitempty"`
	// Since is when the first evidence of this boot was verified.
	Since metav1.MicroTime `json:"since"`
	// EarlierEnded says that joinservice has found the machine's boot before this one to have ended. Before that, it gives
	// nothing for this boot: no ticket, no key of a disk and no certificate.
	EarlierEnded bool `json:"earlierEnded,omitempty"`
}

// NodeCertificates are the kubelet's. Nothing is decided on them.
type NodeCertificates struct {
	// ClientExpiresAt is when the one ends that the node shows the API server.
	ClientExpiresAt *metav1.Time `json:"clientExpiresAt,omitempty"`
	// ServingExpiresAt is when the one ends that the API server is shown by the kubelet.
	ServingExpiresAt *metav1.Time `json:"servingExpiresAt,omitempty"`
}

// Verdict is the judgement on one piece of evidence.
type Verdict struct {
	// Accepted is whether the policy accepts the machine.
	Accepted bool `json:"accepted"`
	// Reason is the reason code, as in POLICY_REFUSED; ACCEPTED if it was accepted.
	Reason string `json:"reason"`
	// Time is when the evidence was judged.
	Time metav1.Time `json:"time"`
}

// Ticket is a join ticket that was issued.
type Ticket struct {
	// ID names the ticket: 16 random bytes in hexadecimal digits.
	//
	// +kubebuilder:validation:MaxLength=32
	ID string `json:"id"`
	// IssuedAt is when it was issued.
	IssuedAt metav1.Time `json:"issuedAt"`
	// CertificateID names the ticket's client certificate as the API server does, in
	// authentication.kubernetes.io/credential-id.
	//
	// +kubebuilder:validation:MaxLength=80
	CertificateID string `json:"certificateID,omitempty"`
}

// EnrolledByTicket is an annotation of an AttestedNode that joinservice made for a join ticket. Such a
// worker's enrollment is deleted once its node has vanished for long, and if no node comes of it. Remove the annotation, and it is as
// if the owner had made the AttestedNode.
const EnrolledByTicket = "muster.dev/enrolled-by-ticket"

// AttestationKey is an annotation of an AttestedNode: the TPM name of the attestation key that its machine asked for a ticket with, in hexadecimal
// digits. No other machine may show it (A8).
const AttestationKey = "muster.dev/attestation-key"

// AskedAt is an annotation of an AttestedNode: when its machine last asked for a join ticket (RFC 3339). Until every certificate that may have been issued then has
// expired, name and addresses are no other machine's, whatever came of the ticket (J4).
const AskedAt = "muster.dev/asked-at"

// FormerAddresses is an annotation of an AttestedNode: addresses that its machine gave up by asking for others, each with the
// time at which the last serving certificate for it has expired (ADDRESS=RFC 3339, separated by spaces). Until then no other
// machine may have the address (J4).
const FormerAddresses = "muster.dev/former-addresses"

// Conditions of an AttestedNode that follow from the rest of it and from the list of nodes, for people and for kubectl wait.
const (
	// ConditionAccepted is True if the policy accepted the machine's latest evidence, False if it refused it; the reason is the
	// verdict's reason code.
	ConditionAccepted = "Accepted"
	// ConditionEnrolled is True once the machine was given certificates of the node.
	ConditionEnrolled = "Enrolled"
	// ConditionRevoked is True while the node may not write to the API: its machine is banned, it is being removed, or it has returned its ticket.
	ConditionRevoked = "Revoked"
)

// ConditionVanished is True on an AttestedNode while no sign of life comes from its node.
const ConditionVanished = "Vanished"

// ConditionCloned is True on an AttestedNode once a second machine has shown the TPM of its machine, until the owner has
// decided which one is genuine (J11). The message names both addresses.
const ConditionCloned = "Cloned"

// AttestedNodeList is a list of enrollments.
//
// +kubebuilder:object:root=true
type AttestedNodeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []AttestedNode `json:"items"`
}

// AttestedDisk says whose a state disk is: its name is the disk's UUID, in the 36-character lower-case form.
// joinservice makes it before the disk's key leaves for the first time, and gives the key to no other machine
// (J2). It outlives enrollments, and no service changes or deletes it. `muster replace --tpm` gives it to
// another machine. `muster forget --erase` deletes its salt, without which the key can't be derived any more (K4); so does
// deleting it, but then whichever machine enrolls the UUID next has the disk, with another key.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster
// +kubebuilder:printcolumn:name="Machine",type=string,JSONPath=`.spec.machineID`
// +kubebuilder:printcolumn:name="Erased",type=boolean,JSONPath=`.spec.erased`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.matches('^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$')",message="the name is the disk's UUID in lower case"
type AttestedDisk struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec says whose it is.
	Spec AttestedDiskSpec `json:"spec"`
}

// AttestedDiskSpec names the one machine that the disk's key is given to, and what the key follows from beside the root secret.
//
// +kubebuilder:validation:XValidation:rule="has(self.salt) != (has(self.erased) && self.erased)",message="a disk has its salt, or is erased"
// +kubebuilder:validation:XValidation:rule="!has(self.salt) || has(oldSelf.salt) && self.salt == oldSelf.salt",message="a disk's salt stays as it is; `muster forget --erase` deletes it for good"
// +kubebuilder:validation:XValidation:rule="self.rootVersion == oldSelf.rootVersion",message="the version of the root secret is part of the disk's key, so it stays as it is"
type AttestedDiskSpec struct {
	// MachineID is the SHA-256 of the SubjectPublicKeyInfo of the machine's endorsement key, in
	// 64 lower-case hexadecimal digits.
	//
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	MachineID string `json:"machineID"`
	// Salt is what the disk's key depends on beside the root secret and the UUID: 32 random bytes in 64 lower-case hexadecimal
	// digits. It is no secret. It is written once, and can be deleted, but not changed (K4).
	//
	// +optional
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	Salt string `json:"salt,omitempty"`
	// RootVersion is that of the root secret that the key follows from.
	//
	// +kubebuilder:validation:Minimum=1
	RootVersion int32 `json:"rootVersion"`
	// Erased says that the salt was deleted, so that the key can't be derived any more: nobody gets it, and nobody enrolls the
	// disk (K4). It can't be taken back.
	//
	// +optional
	Erased bool `json:"erased,omitempty"`
}

// AttestedDiskList is a list of disks.
//
// +kubebuilder:object:root=true
type AttestedDiskList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []AttestedDisk `json:"items"`
}

// RetireCertificates is the finalizer of an AttestedNode: an enrollment that is deleted stays until joinservice has taken from
// its machine what it was given (J4). Its certificates so far write nothing any more, and its Node is gone.
const RetireCertificates = "muster.dev/retire-certificates"

// KeepNode is an annotation of an AttestedNode that `muster replace` has banned: joinservice leaves its Node, which the name's
// next machine takes over with labels and taints.
const KeepNode = "muster.dev/keep-node"

// ShutOut says whether the machine gets nothing: it is banned, or its enrollment is being deleted.
func (n *AttestedNode) ShutOut() bool { return n.Spec.Banned || n.Leaving() }

// Leaving says whether the enrollment is being deleted.
func (n *AttestedNode) Leaving() bool { return !n.DeletionTimestamp.IsZero() }

// Retires says whether the enrollment outlives its deletion until the certificates are retired.
func (n *AttestedNode) Retires() bool { return slices.Contains(n.Finalizers, RetireCertificates) }
