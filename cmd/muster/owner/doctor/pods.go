package doctor

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/objects/podsecurity"
)

// namesInText is the number of namespaces that a finding names.
const namesInText = 5

// privilegedPods checks whether the API server accepts pods that are equivalent to root on their node.
func (d *doctor) privilegedPods(ctx context.Context) error {
	found, err := d.kube.PodSecurity(ctx)
	if err != nil {
		return err
	}
	for _, ns := range slices.Sorted(maps.Keys(found.Unclear)) {
		d.Add(CheckPods, checkup.Warn, "Label the namespace "+ns+" if its users are no administrators: kubectl label namespace "+ns+" "+podsecurity.Label+"=baseline.",
			"can't tell whether pods that mount their node's root folder are accepted in namespace %s: the test pod was refused for another reason: %s", ns, found.Unclear[ns])
		break // one example is enough
	}
	var more string
	if len(found.Allowed) > 0 {
		more += "; namespaces with the label, where only administrators should create pods: " + some(found.Allowed)
	}
	if found.Unasked > 0 {
		more += fmt.Sprintf("; %d namespaces without a label were not checked", found.Unasked)
	}
	switch {
	case len(found.Open) > 0:
		d.Add(CheckPods, checkup.Warn, "Run kubectl label namespace NAMESPACE "+podsecurity.Label+"=baseline for each whose users are no administrators; privileged, where only administrators create pods.",
			"the API server accepts pods that mount their node's root folder: every user who may create pods in one of these namespaces can become root on every node: %s%s", some(found.Open), more)
	case len(found.Unclear) == 0:
		d.OK(CheckPods, "are refused, except where a namespace's label allows them%s", more)
	}
	return nil
}

// some returns the first names of a list.
func some(names []string) string {
	out := strings.Join(names[:min(len(names), namesInText)], ", ")
	if more := len(names) - namesInText; more > 0 {
		out += fmt.Sprintf(" and %d more", more)
	}
	return out
}
