package tdx

import (
	"crypto/x509"
	"encoding/json"
	"fmt"
	"time"

	"github.com/muster-k8s/muster/trust/attest/hardware"
)

// Ends returns when each part of the collateral ends. It checks no signatures. The error names a part
// that cannot be read. Without any part there are no ends.
func (c Collateral) Ends() ([]hardware.End, error) {
	out, err := hardware.CRLEnds(c.CRLs)
	if err != nil {
		return nil, err
	}
	for i, answer := range c.TCBInfo {
		var info tcbInfo
		body, _, err := split(answer, "tcbInfo")
		if err == nil {
			err = json.Unmarshal(body, &info)
		}
		if err != nil {
			return nil, fmt.Errorf("tcbInfo %d: %w", i, err)
		}
		out = append(out, hardware.End{Name: "TCB info of " + info.FMSPC, Time: info.NextUpdate})
	}
	if len(c.QEIdentity) > 0 {
		var id qeIdentity
		body, _, err := split(c.QEIdentity, "enclaveIdentity")
		if err == nil {
			err = json.Unmarshal(body, &id)
		}
		if err != nil {
			return nil, fmt.Errorf("enclaveIdentity: %w", err)
		}
		out = append(out, hardware.End{Name: "identity of the quoting enclave", Time: id.NextUpdate})
	}
	return out, nil
}

// Check checks that each part is Intel's and valid at now, as far as that is possible without a quote:
// of the authorities for PCKs, whose certificates quotes have, only the dates of their lists. The
// refusal is HARDWARE_COLLATERAL.
func (c Collateral) Check(roots []*x509.Certificate, now time.Time) error {
	if _, err := c.qeIdentity(roots, now); err != nil {
		return err
	}
	if len(c.TCBInfo) == 0 {
		return refuseCollateral("there is no tcbInfo")
	}
	for _, answer := range c.TCBInfo {
		body, err := c.signedBody(answer, "tcbInfo", c.TCBInfoChain, roots, now)
		if err != nil {
			return err
		}
		var info tcbInfo
		if err := json.Unmarshal(body, &info); err != nil {
			return refuseCollateral("Intel's tcbInfo: %w", err)
		}
		if err := info.valid("tcbInfo", now); err != nil {
			return err
		}
	}
	ends, err := hardware.CRLEnds(c.CRLs)
	if err != nil {
		return refuseCollateral("%w", err)
	}
	for _, e := range ends {
		if now.After(e.Time) {
			return refuseCollateral("the %s ended on %s", e.Name, e.Time.UTC())
		}
	}
	return nil
}
