package doctor

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/checkup"
)

// attestedAs is an enrollment whose machine attested with that key.
func attestedAs(name, machine, ak string) *v1alpha1.AttestedNode {
	return &v1alpha1.AttestedNode{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       v1alpha1.AttestedNodeSpec{MachineID: strings.Repeat(machine, 64), Role: v1alpha1.RoleWorker},
		Status:     v1alpha1.AttestedNodeStatus{AKName: ak},
	}
}

func TestATPMThatIsTwoMachinesIsFound(t *testing.T) {
	banned := attestedAs("w3", "c", "01")
	banned.Spec.Banned = true
	removed := attestedAs("w2", "a", "01")
	removed.DeletionTimestamp = &metav1.Time{Time: time.Now()}
	for name, tt := range map[string]struct {
		nodes []*v1alpha1.AttestedNode
		want  []string // in the one finding; none: no finding
	}{
		"none":                   {},
		"one machine":            {nodes: []*v1alpha1.AttestedNode{attestedAs("w1", "a", "01")}},
		"two of different TPMs":  {nodes: []*v1alpha1.AttestedNode{attestedAs("w1", "a", "01"), attestedAs("w2", "b", "02")}},
		"two that never came":    {nodes: []*v1alpha1.AttestedNode{attestedAs("w1", "a", ""), attestedAs("w2", "b", "")}},
		"two names of a machine": {[]*v1alpha1.AttestedNode{attestedAs("w2", "a", ""), attestedAs("w1", "a", "01")}, []string{"w1, w2 are enrolled for the same machine", "forget"}},
		"one name is removed":    {nodes: []*v1alpha1.AttestedNode{removed, attestedAs("w1", "a", "01")}},
		"two machines of a TPM":  {[]*v1alpha1.AttestedNode{attestedAs("w2", "b", "01"), attestedAs("w1", "a", "01"), attestedAs("w4", "d", "02")}, []string{"w1, w2 have the same TPM", "2 machine IDs", "forget"}},
		"one of them is banned":  {[]*v1alpha1.AttestedNode{attestedAs("w1", "a", "01"), banned}, []string{"w1, w3 have the same TPM", "is banned"}},
	} {
		t.Run(name, func(t *testing.T) {
			d := &doctor{}
			var all []v1alpha1.AttestedNode
			for _, n := range tt.nodes {
				all = append(all, *n)
			}
			d.oneMachineEach(all)
			if len(d.Findings) != 1 || d.Findings[0].Check != CheckTPMs {
				t.Fatalf("%+v", d.Findings)
			}
			f := d.Findings[0]
			if want := len(tt.want) > 0; want != (f.Level == checkup.Fail) || want == (f.Level == checkup.OK) {
				t.Errorf("%+v", f)
			}
			for _, s := range tt.want {
				if !strings.Contains(f.Detail+f.Remedy, s) {
					t.Errorf("%+v has no %q", f, s)
				}
			}
		})
	}
}
