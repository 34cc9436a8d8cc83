package tdx

import (
	"crypto/x509"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
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
		out = append(out, hardware.End{Name: "TCB info of " + strings.ToLower(info.FMSPC), Time: info.NextUpdate, Issued: info.IssueDate, Evaluation: info.Evaluation})
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
		out = append(out, hardware.End{Name: "identity of the quoting enclave", Time: id.NextUpdate, Issued: id.IssueDate, Evaluation: id.Evaluation})
	}
	return out, nil
}

// Models returns the FMSPCs that have a TCB info, in lower-case hexadecimal digits. It checks no
// signatures, and leaves out what cannot be read.
func (c Collateral) Models() (out []string) {
	for _, answer := range c.TCBInfo {
		var info tcbInfo
		if body, _, err := split(answer, "tcbInfo"); err == nil && json.Unmarshal(body, &info) == nil {
			out = append(out, strings.ToLower(info.FMSPC))
		}
	}
	return out
}

// Repeated returns an FMSPC that several TCB infos have, as [Collateral.Models] does; empty if there is none. Quotes
// are verified by the first TCB info of their model, so another one behind it, newer, would only count
// where ages are compared.
func (c Collateral) Repeated() string {
	models := c.Models()
	for i, m := range models {
		if slices.Contains(models[:i], m) {
			return m
		}
	}
	return ""
}

// Check checks that each part is Intel's and valid at now, that no model has two TCB infos, and that no part
// is missing by which quotes of one of the models are checked: authorities are those for PCKs, see
// [PCKAuthorities]. The refusal is HARDWARE_COLLATERAL.
func (c Collateral) Check(roots, authorities []*x509.Certificate, now time.Time) error {
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
		if err := info.check(now); err != nil {
			return err
		}
	}
	if m := c.Repeated(); m != "" {
		return refuseCollateral("there are two tcbInfos of the FMSPC %s", m)
	}
	// Whoever can name a list after an authority must not be able to replace its list.
	known := 0
	for _, issuer := range slices.Concat(roots, authorities) {
		lists := hardware.ListsOf(issuer, c.CRLs)
		if err := hardware.CheckRevoked(lists, issuer, now); err != nil {
			return err
		}
		known += len(lists)
	}
	if known != len(c.CRLs) {
		return refuseCollateral("%d of Intel's %d revocation lists are malformed, or of none of its authorities", len(c.CRLs)-known, len(c.CRLs))
	}
	return nil
}
