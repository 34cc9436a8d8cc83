package doctor

import (
	"testing"

	"github.com/muster-k8s/muster/internal/checkup"
)

func TestMissingRecordsAreFoundInMetrics(t *testing.T) {
	for name, tt := range map[string]struct {
		metrics string
		want    checkup.Level
	}{
		"nothing is missing":          {"# TYPE muster_refusals_unrecorded_total counter\nmuster_refusals_unrecorded_total 0\n# TYPE muster_join_tickets_total counter\nmuster_join_tickets_total{role=\"worker\",reason=\"ACCEPTED\"} 3\n", ""},
		"strangers were only counted": {"# TYPE muster_refusals_unrecorded_total counter\nmuster_refusals_unrecorded_total 7\n", checkup.Warn},
		"tickets without a record":    {"# TYPE muster_join_tickets_total counter\nmuster_join_tickets_total{role=\"worker\",reason=\"AUDIT_UNAVAILABLE\"} 1\n", checkup.Fail},
		"no metrics":                  {"<html>", checkup.Warn},
	} {
		d := &doctor{}
		d.auditOf("pod", []byte(tt.metrics))
		if n := len(d.Findings); (n == 1) != (tt.want != "") || n == 1 && (d.Findings[0].Level != tt.want || d.Findings[0].Remedy == "") {
			t.Errorf("%s: %+v", name, d.Findings)
		}
	}
}
