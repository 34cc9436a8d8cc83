package tdx

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/muster-k8s/muster/trust/attest/hardware"
)

// Status is Intel's judgement of a TCB level.
type Status string

// The statuses.
const (
	UpToDate                          Status = "UpToDate"
	SWHardeningNeeded                 Status = "SWHardeningNeeded"
	ConfigurationNeeded               Status = "ConfigurationNeeded"
	ConfigurationAndSWHardeningNeeded Status = "ConfigurationAndSWHardeningNeeded"
	OutOfDate                         Status = "OutOfDate"
	OutOfDateConfigurationNeeded      Status = "OutOfDateConfigurationNeeded"
	Revoked                           Status = "Revoked"
)

// Statuses lists those that rules may accept. Revoked is not among them.
var Statuses = []Status{UpToDate, SWHardeningNeeded, ConfigurationNeeded, ConfigurationAndSWHardeningNeeded, OutOfDate, OutOfDateConfigurationNeeded}

// Level is Intel's judgement of one part of the TCB.
type Level struct {
	// Part is "platform", "TDX module" or "quoting enclave"; with "loaded " before it, that of the
	// module that was loaded after the start of the TD.
	Part       string
	Status     Status
	Date       time.Time
	Advisories []string
}

// level returns the first level that fits, as Intel orders them: the highest that the part reaches.
func level(part string, all []tcbLevel, fits func(tcbLevel) bool) (Level, error) {
	i := slices.IndexFunc(all, fits)
	if i < 0 {
		return Level{}, hardware.Refuse(hardware.TCB, "the %s is below every TCB level that Intel supports", part)
	}
	l := Level{part, all[i].Status, all[i].Date, all[i].Advisories}
	if l.Status == Revoked {
		return Level{}, hardware.Refuse(hardware.TCB, "Intel has revoked the TCB of the %s of %s: %s", part, l.Date.Format(time.DateOnly), strings.Join(l.Advisories, " "))
	}
	if !slices.Contains(Statuses, l.Status) {
		return Level{}, refuseCollateral("Intel's status %q of the %s is unknown", l.Status, part)
	}
	return l, nil
}

// reaches reports whether no component of have is below that of the level, from the first one on.
// A level with another number of components fits nothing.
func reaches(have [16]uint8, level []component, first int) bool {
	if len(level) != len(have) {
		return false
	}
	for i, c := range level {
		if c.SVN == nil || i >= first && have[i] < *c.SVN {
			return false
		}
	}
	return true
}

// platform returns the levels of the platform and its TDX module for a TEE_TCB_SVN (Intel, "TDX TCB
// Info", algorithm of the Quote Verification Library).
func (i *tcbInfo) platform(prefix string, p pckExtension, q *Quote, tee [16]byte) ([]Level, error) {
	first := 0
	if tee[1] > 0 { // components 0 and 1 are then the module's, which has levels of its own
		first = 2
	}
	platform, err := level(prefix+"platform", i.Levels, func(l tcbLevel) bool {
		return reaches(p.components, l.TCB.SGX, 0) && l.TCB.PCESVN != nil && p.pceSVN >= *l.TCB.PCESVN && reaches(tee, l.TCB.TDX, first)
	})
	if err != nil {
		return nil, err
	}
	module, levels := i.Module, []Level{platform}
	if tee[1] > 0 {
		id := fmt.Sprintf("TDX_%02X", tee[1])
		n := slices.IndexFunc(i.Modules, func(m moduleIdentity) bool { return strings.EqualFold(m.ID, id) })
		if n < 0 {
			return nil, hardware.Refuse(hardware.TCB, "Intel supports no TDX module %s", svn(tee))
		}
		module = i.Modules[n]
		l, err := level(prefix+"TDX module", module.Levels, func(l tcbLevel) bool {
			return l.TCB.ISVSVN != nil && uint16(tee[0]) >= *l.TCB.ISVSVN
		})
		if err != nil {
			return nil, err
		}
		levels = append(levels, l)
	}
	if string(module.Signer) != string(q.MRSignerSEAM[:]) || !equalUnder(q.SEAMAttributes[:], module.Attributes, module.AttributesMask) {
		return nil, untrusted("the TDX module is not Intel's: its signer is %x, its attributes are %x", q.MRSignerSEAM, q.SEAMAttributes)
	}
	return levels, nil
}

// check checks that a report is that of Intel's quoting enclave (SGX REPORT body), and returns its
// level.
func (i *qeIdentity) check(report []byte) (Level, error) {
	product, isv := binary.LittleEndian.Uint16(report[0x100:]), binary.LittleEndian.Uint16(report[0x102:])
	switch signer := report[0x80:0xA0]; {
	case string(signer) != string(i.Signer):
		return Level{}, untrusted("the quoting enclave is not Intel's: its signer is %x", signer)
	case product != *i.ProductID:
		return Level{}, untrusted("the enclave is not the quoting enclave for TDs: its product is %d, want %d", product, *i.ProductID)
	case !equalUnder(report[0x10:0x14], i.MiscSelect, i.MiscSelectMask):
		return Level{}, untrusted("the quoting enclave's MISCSELECT is %x", report[0x10:0x14])
	case !equalUnder(report[0x30:0x40], i.Attributes, i.AttributesMask):
		return Level{}, untrusted("the quoting enclave's attributes are %x: it may be a debug enclave", report[0x30:0x40])
	}
	return level("quoting enclave", i.Levels, func(l tcbLevel) bool { return l.TCB.ISVSVN != nil && isv >= *l.TCB.ISVSVN })
}
