package clusterapi

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"

	"github.com/pmezard/go-difflib/difflib"
	"helm.sh/helm/v4/pkg/action"
	"helm.sh/helm/v4/pkg/release/common"
	releasev1 "helm.sh/helm/v4/pkg/release/v1"
	"helm.sh/helm/v4/pkg/storage"
	"helm.sh/helm/v4/pkg/storage/driver"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/deploy/charts"
)

// Plan contains the changes that an upgrade will make.
type Plan struct {
	// Revision is the newest one of the release, Status its state.
	Revision int    `json:"revision"`
	Status   string `json:"status"`
	// Chart and App are versions, before and after.
	Chart Change `json:"chart"`
	App   Change `json:"app"`
	// Values that change, with images, by path.
	Values []Change `json:"values"`
	// Definitions are CustomResourceDefinitions, Objects those of the chart.
	Definitions []ObjectChange `json:"definitions"`
	Objects     []ObjectChange `json:"objects"`
}

// Change is one value, before and after; a missing value is empty.
type Change struct {
	Name string `json:"name,omitempty"`
	From string `json:"from"`
	To   string `json:"to"`
}

// ObjectChange is one object with a unified diff in YAML.
type ObjectChange struct {
	Object string `json:"object"`
	Diff   string `json:"diff"`
}

// Empty reports whether the upgrade would change nothing.
func (p *Plan) Empty() bool {
	return p.Status == string(common.StatusDeployed) && p.Chart.From == p.Chart.To && len(p.Values)+len(p.Definitions)+len(p.Objects) == 0
}

// Plan computes the changes of an upgrade to these values, and changes nothing. It returns an error for a value that
// the chart's schema refuses.
func (c *Client) Plan(ctx context.Context, last *releasev1.Release, values map[string]any, definitions []*unstructured.Unstructured, log *slog.Logger) (*Plan, error) {
	next, err := c.render(ctx, last, values, log)
	if err != nil {
		return nil, err
	}
	p := &Plan{
		Revision: last.Version, Status: string(last.Info.Status),
		Chart:  Change{From: last.Chart.Metadata.Version, To: next.Chart.Metadata.Version},
		App:    Change{From: last.Chart.Metadata.AppVersion, To: next.Chart.Metadata.AppVersion},
		Values: changes("", last.Config, values),
	}
	if p.Objects, err = manifestChanges(last.Manifest, next.Manifest); err != nil {
		return nil, err
	}
	if p.Definitions, err = c.definitionChanges(ctx, definitions); err != nil {
		return nil, err
	}
	return p, nil
}

// render lets helm create the next revision in a separate storage. So it works in any state of the release, and does
// not change the cluster's storage.
func (c *Client) render(ctx context.Context, last *releasev1.Release, values map[string]any, log *slog.Logger) (*releasev1.Release, error) {
	chart, err := charts.Muster()
	if err != nil {
		return nil, err
	}
	cfg, err := c.helm(log)
	if err != nil {
		return nil, err
	}
	aside, info := *last, *last.Info
	info.Status = common.StatusDeployed
	aside.Info = &info
	memory := driver.NewMemory()
	memory.SetNamespace(Namespace)
	cfg.Releases = storage.Init(memory)
	if err := cfg.Releases.Create(&aside); err != nil {
		return nil, fmt.Errorf("helm: %w", err)
	}
	upgrade := action.NewUpgrade(cfg)
	upgrade.Namespace, upgrade.ServerSideApply, upgrade.ResetValues = Namespace, "true", true
	upgrade.DryRunStrategy, upgrade.DisableOpenAPIValidation = action.DryRunServer, true // the upgrade validates
	out, err := upgrade.RunWithContext(ctx, release, chart, values)
	if err != nil {
		return nil, fmt.Errorf("helm: %w", err)
	}
	r, ok := out.(*releasev1.Release)
	if !ok {
		return nil, fmt.Errorf("helm gave a %T", out)
	}
	return r, nil
}

// changes compares two trees of values.
func changes(path string, from, to map[string]any) []Change {
	keys := maps.Clone(from)
	if keys == nil {
		keys = map[string]any{}
	}
	maps.Copy(keys, to)
	var out []Change
	for _, k := range slices.Sorted(maps.Keys(keys)) {
		a, isA := from[k].(map[string]any)
		b, isB := to[k].(map[string]any)
		switch {
		case isA && isB, isA && to[k] == nil, isB && from[k] == nil:
			out = append(out, changes(path+k+".", a, b)...)
		case !reflect.DeepEqual(plain(from[k]), plain(to[k])):
			out = append(out, Change{Name: path + k, From: plain(from[k]), To: plain(to[k])})
		}
	}
	return out
}

// plain returns a value in YAML form, so that 1 and 1.0 are equal.
func plain(v any) string {
	if v == nil {
		return ""
	}
	if s, ok := v.(string); ok {
		return s
	}
	return fmt.Sprint(v)
}

// manifestChanges compares the objects of two rendered charts.
func manifestChanges(from, to string) ([]ObjectChange, error) {
	a, err := byName("installed chart", from)
	if err != nil {
		return nil, err
	}
	b, err := byName("new chart", to)
	if err != nil {
		return nil, err
	}
	names := maps.Clone(a)
	maps.Copy(names, b)
	var out []ObjectChange
	for _, name := range slices.Sorted(maps.Keys(names)) {
		d, err := diff(a[name], b[name])
		if err != nil {
			return nil, err
		}
		if d != "" {
			out = append(out, ObjectChange{Object: name, Diff: d})
		}
	}
	return out, nil
}

func byName(what, manifest string) (map[string]map[string]any, error) {
	objects, err := ParseManifests(what, []byte(manifest))
	if err != nil {
		return nil, err
	}
	out := map[string]map[string]any{}
	for _, o := range objects {
		out[describe(o)] = o.Object
	}
	return out, nil
}

// diff returns a unified diff of two objects in YAML; empty if they are the same.
func diff(a, b map[string]any) (string, error) {
	lines := func(o map[string]any) ([]string, error) {
		if o == nil {
			return nil, nil
		}
		text, err := yaml.Marshal(o)
		return difflib.SplitLines(string(text)), err
	}
	before, err := lines(a)
	if err != nil {
		return "", err
	}
	after, err := lines(b)
	if err != nil || slices.Equal(before, after) {
		return "", err
	}
	return difflib.GetUnifiedDiffString(difflib.UnifiedDiff{A: before, B: after, FromFile: "before", ToFile: "after", Context: 3})
}

// DiffJSON returns a unified diff of two JSON objects in YAML; empty if they are the same.
func DiffJSON(a, b []byte) (string, error) {
	var before, after map[string]any
	if err := json.Unmarshal(a, &before); err != nil {
		return "", err
	}
	if err := json.Unmarshal(b, &after); err != nil {
		return "", err
	}
	return diff(before, after)
}

// definitionChanges asks the API server for the result of applying each definition. One that would lose data is
// refused with [ErrIncompatible].
func (c *Client) definitionChanges(ctx context.Context, definitions []*unstructured.Unstructured) ([]ObjectChange, error) {
	var out []ObjectChange
	for _, d := range definitions {
		live, next, err := c.tryDefinition(ctx, d)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", describe(d), err)
		}
		text, err := diff(live, next)
		if err != nil {
			return nil, err
		}
		if text != "" {
			out = append(out, ObjectChange{Object: describe(d), Diff: text})
		}
	}
	slices.SortFunc(out, func(a, b ObjectChange) int { return cmp.Compare(a.Object, b.Object) })
	return out, nil
}
