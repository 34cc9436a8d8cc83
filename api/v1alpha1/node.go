package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Boot is one boot of a machine, as reported by a quote of its TPM and by the machine itself.
type Boot struct {
	// ResetCount and RestartCount are the TPM's counters (TPM 2.0 Library, Part 2, TPMS_CLOCK_INFO). As a pair,
	// in this order, they are higher in each later boot.
	//
	// +kubebuilder:validation:Minimum=0
	ResetCount int64 `json:"resetCount"`
	// +kubebuilder:validation:Minimum=0
	RestartCount int64 `json:"restartCount"`
	// Clock is the TPM's clock in milliseconds. It does not go back within a boot.
	//
	// +kubebuilder:validation:Minimum=0
	Clock int64 `json:"clock"`
	// SecretHash is the SHA-256 of the secret that the machine made for this boot, in hexadecimal digits.
	//
	// +kubebuilder:validation:MaxLength=64
	SecretHash string `json:"secretHash"`
	// Address is the machine's network address at its last attestation.
	//
	// +kubebuilder:validation:MaxLength=45
	Address string `json:"address,omitempty"`
	// Since is when the first evidence of this boot was verified.
	Since metav1.MicroTime `json:"since"`
	// EarlierEnded reports that joinservice has found that the machine's earlier boot has ended. Until then
	// joinservice issues nothing for this boot: no ticket, no disk key and no certificate.
	EarlierEnded bool `json:"earlierEnded,omitempty"`
	// EarlierSince is the time in since of the boot that was recorded before this one, while earlierEnded is false. It is unset
	// if none was recorded, or if an older version recorded this boot.
	EarlierSince *metav1.MicroTime `json:"earlierSince,omitempty"`
}

// NodeCertificates has the expiry of the kubelet's certificates, for information only.
type NodeCertificates struct {
	// ClientExpiresAt is the expiry of the certificate that the kubelet presents to the API server.
	ClientExpiresAt *metav1.Time `json:"clientExpiresAt,omitempty"`
	// ServingExpiresAt is the expiry of the certificate that the kubelet presents to its clients, such as the
	// API server.
	ServingExpiresAt *metav1.Time `json:"servingExpiresAt,omitempty"`
}
