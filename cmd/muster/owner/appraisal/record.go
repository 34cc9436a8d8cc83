package appraisal

import (
	"time"
)

// Record is the cluster's record of a node's latest attestation. joinservice and every other writer of AttestedNodes can change it.
type Record struct {
	// Machine is the machine's ID. Reason is the reason code of its latest verdict, ACCEPTED if it was accepted.
	Machine string `json:"machine"`
	Reason  string `json:"reason"`
	// Message describes a refusal.
	Message string `json:"message,omitempty"`
	// Time is when it was appraised; nil if it never was. PolicySerial is the serial of the policy.
	Time         *time.Time `json:"time,omitempty"`
	PolicySerial int64      `json:"policySerial"`
}
