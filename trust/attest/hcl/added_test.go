package hcl_test

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/hardware"
	"github.com/muster-k8s/muster/trust/attest/hcl"
	"github.com/muster-k8s/muster/trust/attest/snp"
	"github.com/muster-k8s/muster/trust/attest/tdx"
)

// Each captured answer of the metadata service fits its report. One with a changed byte, and that for another report, do not.
func TestWhatTheMetadataServiceAddsIsChecked(t *testing.T) {
	milan, vcek := captured(t, "snp-milan-rv3-live")
	_, genoa := captured(t, "snp-genoa-rv3")
	live, _ := captured(t, "tdx-live")
	var all map[string]json.RawMessage
	if err := json.Unmarshal(file(t, "azure/tdx-live/evidence.json"), &all); err != nil {
		t.Fatal(err)
	}
	quote := bytesOf(t, all["td_quote"])
	changed := bytes.Clone(quote)
	changed[200] ^= 1
	for name, tt := range map[string]struct {
		hcl, added []byte
		now        time.Time
		want       attestv1.Reason
	}{
		"certificate":                    {milan, vcek, march, 0},
		"certificate of another chip":    {milan, genoa, march, hardware.Untrusted},
		"no certificate":                 {milan, []byte("certificate"), march, hardware.Malformed},
		"long certificate":               {milan, make([]byte, snp.MaxCertificate+1), march, hardware.Malformed},
		"certificate in 1990":            {milan, vcek, time.Date(1990, 1, 1, 0, 0, 0, 0, time.UTC), hardware.Untrusted},
		"quote":                          {live, quote, march, 0},
		"changed quote":                  {live, changed, march, hardware.Signature},
		"quote of another machine":       {live, file(t, "azure/tdx-2026-full/td-quote.bin"), march, hardware.Binding},
		"no quote":                       {live, []byte("quote"), march, hardware.Malformed},
		"a certificate in place of that": {live, vcek, march, hardware.Malformed},
	} {
		kind, report, runtime, err := hcl.Split(tt.hcl)
		if err != nil {
			t.Fatal(err)
		}
		err = hcl.CheckAdded(kind, report, runtime, tt.added, snp.AMD(), tdx.Intel(), tt.now)
		if (err == nil) != (tt.want == 0) || err != nil && attest.ReasonOf(err) != tt.want {
			t.Errorf("%s: %v", name, err)
		}
	}
}
