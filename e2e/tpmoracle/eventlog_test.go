package tpmoracle

import (
	"bytes"
	"crypto"
	"encoding/hex"
	"testing"

	eventpb "github.com/google/go-eventlog/proto/state"
	"github.com/google/go-eventlog/register"
	"github.com/google/go-eventlog/testdata"
	"github.com/google/go-eventlog/tpmeventlog"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/tpm2/eventlog"
	"github.com/muster-k8s/muster/trust/tpm"
)

// TestRealEventLogs replays logs of real firmware, and has go-eventlog check the resulting values. For one machine
// the values are known independently of both.
func TestRealEventLogs(t *testing.T) {
	for name, tt := range map[string]struct {
		raw      []byte
		legacy   bool // the old format, SHA-1 only
		stricter bool // go-eventlog checks more than PCR values
		pcr4     string
		drivers  int // from outside the firmware
	}{
		"RHEL 8 with Secure Boot":       {raw: testdata.Rhel8EventLog, pcr4: "758a3d35f1b0ff5b135dacd07db0c8132c0ac665d944090d4bf96e66447a245c"},
		"Ubuntu 18.04":                  {raw: testdata.Ubuntu1804AmdSevEventLog},
		"Ubuntu 21.04 without dbx":      {raw: testdata.Ubuntu2104NoDbxEventLog},
		"Ubuntu 21.04, no Secure Boot":  {raw: testdata.Ubuntu2104NoSecureBootEventLog},
		"Container-Optimized OS 85":     {raw: testdata.Cos85AmdSevEventLog},
		"Container-Optimized OS 93":     {raw: testdata.Cos93AmdSevEventLog},
		"Container-Optimized OS 101":    {raw: testdata.Cos101AmdSevEventLog},
		"Arch Linux on a workstation":   {raw: testdata.ArchLinuxWorkstationEventLog, stricter: true, drivers: 1},
		"a laptop":                      {raw: testdata.GlinuxAlexEventLog, stricter: true, drivers: 1},
		"Debian 10 with the old format": {raw: testdata.Debian10EventLog, legacy: true},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := eventlog.Parse(tt.raw, tpm.SHA256)
			if tt.legacy {
				if attest.ReasonOf(err) != attestv1.Reason_REASON_EVIDENCE_MALFORMED {
					t.Errorf("%v, want EVIDENCE_MALFORMED", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			pcrs := l.PCRs()
			if tt.pcr4 != "" && hex.EncodeToString(pcrs[4]) != tt.pcr4 {
				t.Errorf("PCR 4 is %x, want %s", pcrs[4], tt.pcr4)
			}
			got, err := eventlog.Replay(l, pcrs)
			if err != nil {
				t.Fatal(err)
			}
			bank := register.PCRBank{TCGHashAlgo: eventpb.HashAlgo_SHA256}
			for i, v := range pcrs {
				if v != nil {
					bank.PCRs = append(bank.PCRs, register.PCR{Index: i, Digest: v, DigestAlg: crypto.SHA256})
				}
			}
			theirs, err := tpmeventlog.ExtractFirmwareLogState(tt.raw, bank, tpmeventlog.ExtractOpts{})
			if tt.stricter == (err == nil) {
				t.Errorf("go-eventlog: %v", err)
			}
			fw, ferr := got.Firmware()
			if ferr != nil {
				t.Fatal(ferr)
			}
			if on := theirs.GetSecureBoot().GetEnabled(); err == nil && fw.SecureBoot != on {
				t.Errorf("Secure Boot is %v, go-eventlog says %v", fw.SecureBoot, on)
			}
			if len(fw.Drivers) != tt.drivers {
				t.Errorf("%d drivers: %v", len(fw.Drivers), fw.Drivers)
			}
			for i, v := range pcrs {
				if v == nil {
					continue
				}
				changed := pcrs
				changed[i] = bytes.Repeat([]byte{1}, 32)
				if _, err := eventlog.Replay(l, changed); attest.ReasonOf(err) != attestv1.Reason_REASON_EVENTLOG_REPLAY {
					t.Errorf("another value of PCR %d: %v", i, err)
				}
			}
		})
	}
}
