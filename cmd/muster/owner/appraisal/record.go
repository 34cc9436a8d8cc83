package appraisal

import (
	"time"
)

// Record is what the cluster says of a node's latest attestation. joinservice writes it, and everybody who may write AttestedNodes.
type Record struct {
	// Machine is the machine's ID. Reason is the reason code of its latest verdict, ACCEPTED if it was good.
	Machine string `json:"machine"`
	Reason  string `json:"reason"`
	// Message describes a refusal.
	Message string `json:"message,omitempty"`
	// Time is when it was appraised; nil: never. PolicySerial is the serial of the policy.
	Time         *time.Time `json:"time,omitempty"`
	PolicySerial int64      `json:"policySerial"`
}
