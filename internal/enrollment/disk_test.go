package enrollment

import (
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

func TestADiskIsOfItsMachineUntilItIsErased(t *testing.T) {
	d := NewDisk("disk1", "m1", keys.NewDiskSalt(), keys.FirstVersion)
	erased := d.DeepCopy()
	erased.Spec.Salt, erased.Spec.Erased = "", true
	for name, tt := range map[string]struct {
		erased   bool
		machines []string
		want     attestv1.Reason
	}{
		"its machine":                      {machines: []string{"m1"}},
		"one of several is its machine":    {machines: []string{"m2", "m1"}},
		"another machine":                  {machines: []string{"m2"}, want: attestv1.Reason_REASON_DISK_MISMATCH},
		"no machine":                       {want: attestv1.Reason_REASON_DISK_MISMATCH},
		"its machine, after it was erased": {erased: true, machines: []string{"m1"}, want: attestv1.Reason_REASON_DISK_ERASED},
		"another one, after it was erased": {erased: true, machines: []string{"m2"}, want: attestv1.Reason_REASON_DISK_ERASED},
	} {
		have := d
		if tt.erased {
			have = erased
		}
		err := CheckDisk(have, "as the caller says", tt.machines...)
		if (err != nil) != (tt.want != 0) || err != nil && attest.ReasonOf(err) != tt.want {
			t.Errorf("%s: %v", name, err)
		}
		if tt.want == attestv1.Reason_REASON_DISK_MISMATCH && !strings.Contains(err.Error(), "disk disk1 is machine m1's, as the caller says; `muster forget --erase --disk disk1`") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
