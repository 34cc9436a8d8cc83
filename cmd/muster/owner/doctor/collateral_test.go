package doctor

import (
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestCollateralThatHasEndedIsAFailure(t *testing.T) {
	end := time.Date(2026, 3, 20, 12, 0, 0, 0, time.UTC)
	for name, tt := range map[string]struct {
		now  time.Time
		want int
	}{
		"a second before its end": {end.Add(-time.Second), 0},
		"a second after its end":  {end.Add(time.Second), 1},
	} {
		d := newDoctor(Config{Now: func() time.Time { return tt.now }})
		d.collateral([]attest.CollateralEnd{{Name: "TCB info of 90c06f000000", Time: end}, {Name: "revocation list of ARK-Milan", Time: end.Add(time.Hour)}})
		if got := d.Count(checkup.Fail); got != tt.want || d.Clean(CheckPolicy) != (tt.want == 0) {
			t.Errorf("%s: %+v", name, d.Findings)
		}
		for _, f := range d.Findings {
			if f.Level == checkup.Fail && strings.Count(f.Remedy, "muster collateral apply FILE") != 1 {
				t.Errorf("the remedy is a command that is refused: %s", f.Remedy)
			}
		}
	}
}
