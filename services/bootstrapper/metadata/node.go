package metadata

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

const (
	maxLabels = 32
	maxTaints = 16
	// maxProviderID is the longest provider ID, in bytes.
	maxProviderID = 512
	// PoolLabel is the label of a Node whose metadata name a pool.
	PoolLabel = "muster.dev/pool"
)

// These are the labels of Kubernetes' own that a platform knows, and that a kubelet may set on its own Node.
const (
	LabelRegion       = "topology.kubernetes.io/region"
	LabelZone         = "topology.kubernetes.io/zone"
	LabelInstanceType = "node.kubernetes.io/instance-type"
)

// Taint is a taint of the Node.
type Taint struct {
	Key   string `json:"key"`
	Value string `json:"value,omitempty"`
	// Effect is NoSchedule, PreferNoSchedule or NoExecute.
	Effect string `json:"effect"`
}

// providerID allows the characters of a kubelet's flag in a systemd environment file, and no others.
var providerID = regexp.MustCompile(`^[a-z][a-z0-9-]*://[A-Za-z0-9_.:/-]+$`)

var topology = []string{LabelRegion, LabelZone, LabelInstanceType}

// reserved are domains whose labels and taints have a meaning for Kubernetes or Muster. NodeRestriction refuses most of kubernetes.io to a kubelet; scheduling
// may rely on the others, in particular on node-restriction.kubernetes.io, so metadata, which are not trusted, name none of them.
var reserved = []string{"kubernetes.io", "k8s.io", "muster.dev"}

// node checks the fields for the Node, and copies them into m.
func (f *machineFile) node(m *Machine) error {
	if f.ProviderID != "" && (len(f.ProviderID) > maxProviderID || !providerID.MatchString(f.ProviderID)) {
		return fmt.Errorf("providerID: want PROVIDER://ID of at most %d letters, digits and .:/_-, not %q", maxProviderID, f.ProviderID)
	}
	m.ProviderID = f.ProviderID
	if len(f.Labels) > maxLabels {
		return fmt.Errorf("labels: at most %d, not %d", maxLabels, len(f.Labels))
	}
	m.Labels = maps.Clone(f.Labels)
	for _, k := range slices.Sorted(maps.Keys(f.Labels)) {
		if err := checkLabel(k, f.Labels[k]); err != nil {
			return fmt.Errorf("labels[%q]: %w", k, err)
		}
	}
	if f.Pool != "" {
		if problems := validation.IsValidLabelValue(f.Pool); len(problems) > 0 {
			return fmt.Errorf("pool: want a label's value, not %q", f.Pool)
		}
		if m.Labels == nil {
			m.Labels = map[string]string{}
		}
		m.Labels[PoolLabel] = f.Pool
	}
	if len(f.Taints) > maxTaints {
		return fmt.Errorf("taints: at most %d, not %d", maxTaints, len(f.Taints))
	}
	for i, t := range f.Taints {
		if err := t.check(f.Taints[:i]); err != nil {
			return fmt.Errorf("taints[%d]: %w", i, err)
		}
		m.Taints = append(m.Taints, t)
	}
	return nil
}

func checkLabel(key, value string) error {
	if problems := validation.IsValidLabelValue(value); len(problems) > 0 {
		return fmt.Errorf("want a label's value, not %q", value)
	}
	if slices.Contains(topology, key) {
		return nil
	}
	return checkKey(key)
}

// checkKey refuses keys of reserved domains.
func checkKey(key string) error {
	if problems := validation.IsQualifiedName(key); len(problems) > 0 {
		return errors.New("want NAME or DOMAIN/NAME as key")
	}
	domain, _, ok := strings.Cut(key, "/")
	for _, r := range reserved {
		if ok && (domain == r || strings.HasSuffix(domain, "."+r)) {
			return fmt.Errorf("metadata set no keys of %s, except as labels %s: choose another domain, or have an administrator set it on the Node", r, strings.Join(topology, ", "))
		}
	}
	return nil
}

func (t Taint) check(before []Taint) error {
	if err := checkKey(t.Key); err != nil {
		return fmt.Errorf("key %q: %w", t.Key, err)
	}
	if problems := validation.IsValidLabelValue(t.Value); len(problems) > 0 {
		return fmt.Errorf("value: want a label's value, not %q", t.Value)
	}
	switch t.Effect {
	case "NoSchedule", "PreferNoSchedule", "NoExecute":
	default:
		return fmt.Errorf("effect: want NoSchedule, PreferNoSchedule or NoExecute, not %q", t.Effect)
	}
	if slices.ContainsFunc(before, func(o Taint) bool { return o.Key == t.Key && o.Effect == t.Effect }) {
		return fmt.Errorf("key %q has the effect %s twice", t.Key, t.Effect)
	}
	return nil
}
