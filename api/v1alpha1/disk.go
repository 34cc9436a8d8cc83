package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// AttestedDisk assigns a state disk to a machine. Its name is the disk's UUID, in the 36-character lower-case
// form. joinservice makes it before it sends the disk's key for the first time, and sends the key to no other
// machine (J2). It remains when an enrollment ends, and no service changes or deletes it. `muster replace
// --tpm` assigns it to another machine. `muster forget --erase` deletes its salt, without which the key cannot
// be derived any more (K4). If the AttestedDisk itself is deleted, the key is lost as well, but the next
// machine that enrolls the UUID gets the disk, with another key.
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

	// Spec is the machine and the inputs of the disk's key.
	Spec AttestedDiskSpec `json:"spec"`
}

// AttestedDiskSpec is the one machine that gets the disk's key, and the inputs of the key beside the root
// secret.
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
	// Salt is an input of the disk's key, beside the root secret and the UUID: 32 random bytes in 64 lower-case
	// hexadecimal digits. It is not secret. It is written once, and can be deleted, but not changed (K4).
	//
	// +optional
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	Salt string `json:"salt,omitempty"`
	// RootVersion is the version of the root secret that the key is derived from.
	//
	// +kubebuilder:validation:Minimum=1
	RootVersion int32 `json:"rootVersion"`
	// Erased means that the salt was deleted, so the key cannot be derived any more: no machine gets it, and no
	// machine can enroll the disk (K4). No update undoes it.
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
