package doctor

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/checkup"
)

func TestANodeThatTrustsADroppedAuthorityIsFound(t *testing.T) {
	node := func(banned bool, ids ...string) v1alpha1.AttestedNode {
		return v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "w1"}, Spec: v1alpha1.AttestedNodeSpec{Banned: banned}, Status: v1alpha1.AttestedNodeStatus{Authorities: ids}}
	}
	for name, tt := range map[string]struct {
		node  v1alpha1.AttestedNode
		found bool
	}{
		"of an older version":   {node(false), false},
		"the cluster's":         {node(false, "new"), false},
		"of a rotation":         {node(false, "new", "next"), false},
		"a dropped one":         {node(false, "new", "old"), true},
		"a dropped one alone":   {node(false, "old"), true},
		"a dropped one, banned": {node(true, "old"), false},
	} {
		d := &doctor{}
		d.trustOnly([]v1alpha1.AttestedNode{tt.node}, []string{"new", "next"})
		if len(d.Findings) != 1 || d.Findings[0].Check != CheckAuthorities || tt.found != (d.Findings[0].Level == checkup.Warn) || tt.found && !strings.Contains(d.Findings[0].Detail, "w1 trusts the certificate authority old") {
			t.Errorf("%s: %+v", name, d.Findings)
		}
	}
}
