package tpmoracle

import (
	"bytes"
	"crypto"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
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

// captured is the folder of more logs; its README has the sources.
const captured = "../../trust/attest/tpm2/eventlog/testdata"

// TestRealEventLogs replays logs of real firmware, and has go-eventlog check the resulting values. For most of Google's
// machines the values are known independently of both (A9).
func TestRealEventLogs(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join(captured, "go-tpm-tools/expected-pcrs.json"))
	if err != nil {
		t.Fatal(err)
	}
	var known map[string]map[string]map[int]string // file, bank, PCR
	if err := json.Unmarshal(raw, &known); err != nil {
		t.Fatal(err)
	}
	var read []string
	for name, tt := range map[string]struct {
		raw      []byte // nil: the file
		file     string // below captured; of raw: its name in expected-pcrs.json
		legacy   bool   // the old format, SHA-1 only
		stricter bool   // go-eventlog checks more than PCR values
		drivers  int    // from outside the firmware
		off      bool   // Secure Boot
		unusable string // why rules over the event log can't accept this machine
	}{
		"RHEL 8 with Secure Boot":       {raw: testdata.Rhel8EventLog, file: "rhel8-uefi.bin"},
		"Ubuntu 18.04":                  {raw: testdata.Ubuntu1804AmdSevEventLog, file: "ubuntu-1804-amd-sev.bin", off: true},
		"Ubuntu 21.04 without dbx":      {raw: testdata.Ubuntu2104NoDbxEventLog, file: "ubuntu-2104-no-dbx.bin", off: true},
		"Ubuntu 21.04, no Secure Boot":  {raw: testdata.Ubuntu2104NoSecureBootEventLog, file: "ubuntu-2104-no-secure-boot.bin", off: true},
		"Container-Optimized OS 85":     {raw: testdata.Cos85AmdSevEventLog, file: "cos-85-amd-sev.bin"},
		"Container-Optimized OS 93":     {raw: testdata.Cos93AmdSevEventLog, file: "cos-93-amd-sev.bin"},
		"Container-Optimized OS 101":    {raw: testdata.Cos101AmdSevEventLog, file: "cos-101-amd-sev.bin"},
		"Arch Linux on a workstation":   {raw: testdata.ArchLinuxWorkstationEventLog, file: "arch-linux-workstation.bin", stricter: true, drivers: 1, off: true},
		"a laptop":                      {raw: testdata.GlinuxAlexEventLog, file: "glinux-alex.bin", stricter: true, drivers: 1, off: true},
		"Debian 10 with the old format": {raw: testdata.Debian10EventLog, file: "debian-10.bin", legacy: true},
		"a confidential node of GKE":    {file: "go-tpm-tools/confidential-gke-debug-251000.bin"},
		"SP 800-155 events":             {file: "go-tpm-tools/eventlogwithsp800155.bin"},
		"Ubuntu 24.04 with SEV-SNP":     {file: "go-tpm-tools/ubuntu-2404-amd-sevsnp.bin", off: true},
		"a server with many drivers":    {file: "go-tpm-tools/gdc-host.bin", stricter: true, unusable: "PCR 7 has 6 events before its separator"},
		"Fedora CoreOS 36":              {file: "go-eventlog/coreos_36_shielded_vm_no_secure_boot.bin", off: true},
		"a PC":                          {file: "go-eventlog/crypto_agile.bin", stricter: true, off: true},
		"a part of a log":               {file: "go-eventlog/sb_cert.bin", stricter: true, unusable: "PCR 0 has no separator"},
		"a VM with Secure Boot":         {file: "keylime/bios-secureboot.bin", drivers: 1},
		"another laptop":                {file: "keylime/bios.bin", stricter: true, drivers: 3, off: true},
		"another VM with Secure Boot":   {file: "keylime/mb_log.bin", drivers: 1},
		"a PC with two drivers":         {file: "tpm2-tools/bootorder.bin", drivers: 2, off: true},
		"a VM with a machine owner key": {file: "tpm2-tools/moklisttrusted.bin", drivers: 1},
		"a server with POST codes":      {file: "tpm2-tools/postcode.bin", stricter: true, drivers: 4},
		"Fedora 37 with systemd-boot":   {file: "tpm2-tools/sd-boot-fedora37.bin", stricter: true, off: true},
	} {
		if tt.raw == nil {
			if tt.raw, err = os.ReadFile(filepath.Join(captured, tt.file)); err != nil {
				t.Fatal(err)
			}
			read = append(read, tt.file)
		}
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
			values, ok := known[filepath.Base(tt.file)]["sha256"]
			if google := tt.raw != nil && !strings.Contains(tt.file, "/") || strings.HasPrefix(tt.file, "go-tpm-tools/"); google != ok || ok && len(values) < 8 {
				t.Fatalf("%d values are known", len(values))
			}
			for i, want := range values {
				if got := hex.EncodeToString(pcrs[i]); got != want {
					t.Errorf("PCR %d is %s, want %s", i, got, want)
				}
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
			if tt.stricter == (err == nil) || err != nil && strings.Contains(err.Error(), "replay") {
				t.Errorf("go-eventlog: %v", err)
			}
			fw, ferr := got.Firmware()
			switch {
			case tt.unusable != "":
				if attest.ReasonOf(ferr) != attestv1.Reason_REASON_EVENTLOG_REPLAY || !strings.Contains(ferr.Error(), tt.unusable) {
					t.Errorf("%v, want EVENTLOG_REPLAY with %q", ferr, tt.unusable)
				}
			case ferr != nil:
				t.Fatal(ferr)
			case fw.SecureBoot == tt.off || err == nil && fw.SecureBoot != theirs.GetSecureBoot().GetEnabled():
				t.Errorf("Secure Boot is %v, go-eventlog says %v", fw.SecureBoot, theirs.GetSecureBoot().GetEnabled())
			case len(fw.Drivers) != tt.drivers:
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
	there, err := filepath.Glob(filepath.Join(captured, "*/*.bin"))
	if err != nil || len(there) != len(read) {
		t.Errorf("%v: of %v only %v are read", err, there, read)
	}
}
