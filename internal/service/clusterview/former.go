package clusterview

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
)

// Former returns the addresses that an enrollment's machine released, and until when each is blocked for others. It ignores
// invalid text: only joinservice and the owner write the annotation.
func Former(n *v1alpha1.AttestedNode) map[string]time.Time {
	out := map[string]time.Time{}
	for _, word := range strings.Fields(n.Annotations[v1alpha1.FormerAddresses]) {
		address, text, _ := strings.Cut(word, "=")
		if until, err := time.Parse(time.RFC3339, text); err == nil {
			out[address] = until
		}
	}
	return out
}

// SetFormer writes what [Former] reads, without expired entries.
func SetFormer(n *v1alpha1.AttestedNode, former map[string]time.Time, now time.Time) {
	var words []string
	for _, address := range slices.Sorted(maps.Keys(former)) {
		if until := former[address]; until.After(now) {
			words = append(words, address+"="+until.UTC().Format(time.RFC3339))
		}
	}
	if len(words) == 0 {
		delete(n.Annotations, v1alpha1.FormerAddresses)
		return
	}
	if n.Annotations == nil {
		n.Annotations = map[string]string{}
	}
	n.Annotations[v1alpha1.FormerAddresses] = strings.Join(words, " ")
}
