package doctor

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/podsecurity"
)

// namesInText is how many namespaces a finding names.
const namesInText = 5

// privilegedPods looks at what the API server does with pods that are as good as root on their node, in namespaces that say nothing of them.
func (d *doctor) privilegedPods(ctx context.Context) error {
	open, unclear, err := d.kube.Privileged(ctx)
	if err != nil {
		return err
	}
	for _, ns := range slices.Sorted(maps.Keys(unclear)) {
		d.Add(CheckPods, checkup.Warn, "Label the namespace "+ns+" if its users are no administrators: kubectl label namespace "+ns+" "+podsecurity.Label+"=baseline.",
			"whether pods that mount their node's root folder are accepted in namespace %s can't be seen, something else refuses the one that is tried: %s", ns, unclear[ns])
		break // one says what is in the way
	}
	if len(open) == 0 && len(unclear) == 0 {
		d.OK(CheckPods, "are refused where no label of the namespace allows them")
		return nil
	}
	if len(open) == 0 {
		return nil
	}
	names := strings.Join(open[:min(len(open), namesInText)], ", ")
	if more := len(open) - namesInText; more > 0 {
		names += fmt.Sprintf(" and %d more", more)
	}
	d.Add(CheckPods, checkup.Warn, "Run kubectl label namespace NAMESPACE "+podsecurity.Label+"=baseline for each whose users are no administrators; privileged, where only administrators create pods.",
		"the API server accepts pods that mount their node's root folder: whoever may create pods in one of these namespaces may be root on every node: %s", names)
	return nil
}
