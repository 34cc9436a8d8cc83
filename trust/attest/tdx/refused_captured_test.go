package tdx_test

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/hardwaretest"
	"github.com/muster-k8s/muster/trust/attest/tdx"
)

// capturedVectors are captured quotes with Intel's own collateral.
func capturedVectors(t *testing.T, v *hardwaretest.Intel) (all []hardwaretest.Vector) {
	open := tdx.Rules{Statuses: tdx.Statuses, MinModule: map[uint8]uint8{0: 0, 1: 0}, AnyMRTD: true, RequireAttributes: tdx.AttributeSEPTVEDisable}
	verdict := func(b []byte, c tdx.Collateral, at string, rules tdx.Rules) func(testing.TB) error {
		return func(testing.TB) error {
			q, err := tdx.Signatures(b)
			if err == nil {
				q, err = tdx.Verify(b, q.Data, c, append(tdx.Intel(), v.Root.Cert), day(at))
			}
			if err != nil {
				return err
			}
			return rules.Check(q)
		}
	}
	add := func(name string, want reason, wrong, right func(testing.TB) error) {
		all = append(all, hardwaretest.Vector{Name: name, Want: want, Wrong: wrong, Right: right})
	}
	good := verdict(quote(t, "tdx/v5-td15-google"), march(t), "2026-03-20", open)
	add("captured tdreport-ccel: a TDREPORT in place of a quote", hardware.Malformed, verdict(file(t, "tdx/tdreport-ccel/tdreport.bin"), march(t), "2026-03-20", open), good)

	debug := quote(t, "tdx/v4-debug")
	signatures := func(b []byte) func(testing.TB) error {
		return func(testing.TB) error { _, err := tdx.Signatures(b); return err }
	}
	add("captured v4-debug: debug TD", hardware.Policy, verdict(debug, march(t), "2026-03-20", open), signatures(debug))
	upToDate := open
	upToDate.Statuses = []tdx.Status{tdx.UpToDate}
	add("captured v4-debug: OutOfDate", hardware.TCB, verdict(debug, march(t), "2026-03-20", upToDate), signatures(debug))

	spr := quote(t, "tdx/v4-spr-2023")
	cut := bytes.TrimRight(spr[:48+584+4+4299], "\x00")
	add("captured v4-spr-2023: bytes after its end", hardware.Malformed, signatures(spr), signatures(cut))
	// Its collateral has ended, and the certificate that signed it was not captured: it is signed
	// again, with other dates.
	again := func(path, name string) object {
		var raw map[string]json.RawMessage
		if err := json.Unmarshal(file(t, path), &raw); err != nil {
			t.Fatal(err)
		}
		out := object{}
		if err := json.Unmarshal(raw[name], &out); err != nil {
			t.Fatal(err)
		}
		out["issueDate"], out["nextUpdate"] = hardwaretest.Now.Add(-24*time.Hour), hardwaretest.Now.Add(24*time.Hour)
		return out
	}
	info, enclave := again("tdx/v4-spr-2023/tcbinfo.json", "tcbInfo"), again("tdx/v4-spr-2023/qe_identity.json", "enclaveIdentity")
	mixed := func(info object) tdx.Collateral {
		c := v.Collateral(t, info, enclave)
		c.CRLs = append(c.CRLs, march(t).CRLs...)
		return c
	}
	sprRules := open
	sprRules.RequireAttributes, sprRules.AllowAttributes = 0, tdx.AttributePKS
	lower := again("tdx/v4-spr-2023/tcbinfo.json", "tcbInfo")
	lower["tcbLevels"] = []object{hardwaretest.Level(0, 0, 0, tdx.OutOfDate)}
	add("captured v4-spr-2023: no TCB level matches", hardware.TCB, verdict(cut, mixed(info), "2026-03-20", sprRules), verdict(cut, mixed(lower), "2026-03-20", sprRules))
	add("captured v4-spr-2023: SEPT_VE_DISABLE is not set", hardware.Policy, verdict(cut, mixed(lower), "2026-03-20", open), verdict(cut, mixed(lower), "2026-03-20", sprRules))
	old := march(t)
	old.CRLs = [][]byte{file(t, "tdx/v4-spr-2023/rootcrl.der"), file(t, "tdx/v4-spr-2023/pckcrl.der")}
	add("captured v4-spr-2023: its revocation lists have ended", hardware.Collateral,
		func(testing.TB) error { return tdx.Chain(cut, old, tdx.Intel(), day("2026-03-20")) },
		func(testing.TB) error { return tdx.Chain(cut, old, tdx.Intel(), day("2023-06-20")) })

	noLevel := quote(t, "tdx/v5-no-tcb-level-2026")
	published := phala(t, "tdx/v5-no-tcb-level-2026")
	accepted := mixed(changed(again("tdx/v5-td15-google/tcbinfo.json", "tcbInfo"), "tcbLevels", []object{hardwaretest.Level(0, 0, 0, tdx.OutOfDate)}))
	accepted.QEIdentity, accepted.QEIdentityChain = march(t).QEIdentity, march(t).QEIdentityChain
	add("captured v5-no-tcb-level-2026: no TCB level matches", hardware.TCB, verdict(noLevel, published, "2026-03-01", open), verdict(noLevel, accepted, "2026-03-20", open))

	early := quote(t, "tdx/v4-uptodate-2025")
	fits := verdict(early, phala(t, "tdx/v4-uptodate-2025"), "2025-07-01", open)
	add("captured v4-uptodate-2025 after the end of its collateral", hardware.Collateral, verdict(early, phala(t, "tdx/v4-uptodate-2025"), "2025-08-01", open), fits)
	add("captured v4-uptodate-2025 with the collateral of 2026: no TCB info of its model", hardware.Collateral, verdict(early, march(t), "2026-03-20", open), fits)

	azure := quote(t, "azure/tdx-2024")
	azureInfo := again("tdx/v5-td15-google/tcbinfo.json", "tcbInfo")
	azureInfo["fmspc"], azureInfo["tcbLevels"] = "00806f050000", []object{hardwaretest.Level(0, 0, 0, tdx.OutOfDate)}
	azureRules := open
	azureRules.RequireAttributes = 0
	azureCollateral := mixed(azureInfo)
	azureCollateral.QEIdentity, azureCollateral.QEIdentityChain = march(t).QEIdentity, march(t).QEIdentityChain
	add("captured azure/tdx-2024: SEPT_VE_DISABLE is not set", hardware.Policy, verdict(azure, azureCollateral, "2026-03-20", open), verdict(azure, azureCollateral, "2026-03-20", azureRules))

	live := quote(t, "tdx/v4-live-ccel")
	add("captured v4-live-ccel: report data of zeros", hardware.Binding,
		func(testing.TB) error {
			return hardware.CheckBinding([64]byte(live[48+0x208:]), hardware.ReportData(live[48+0x208:]))
		}, signatures(live))
	cos := quote(t, "tdx/gcp-cos113")
	add("captured gcp-cos113: report data of zeros", hardware.Binding,
		func(testing.TB) error {
			return hardware.CheckBinding([64]byte(cos[48+0x208:]), hardware.ReportData(cos[48+0x208:]))
		}, signatures(cos))
	return all
}

func changed(o object, name string, value any) object { o[name] = value; return o }
