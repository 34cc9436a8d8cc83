package charts_test

import (
	"bytes"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/deploy/charts"
)

var update = flag.Bool("update", false, "write testdata/rendered.yaml anew")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const ownerKey = "YQkOxhcpgzUAX4ejzUsSgNYqOQlzmMMqYpxcXcfAUJg="

// values are complete and valid; the digests name no image.
func values() map[string]any {
	return map[string]any{
		"owner":       map[string]any{"publicKeys": []any{ownerKey}},
		"nodeAccess":  map[string]any{"uid": "00000000-0000-0000-0000-000000000000"},
		"joinservice": map[string]any{"image": "registry.example/muster/joinservice@sha256:" + strings.Repeat("1", 64)},
		"kms":         map[string]any{"image": "registry.example/muster/kms@sha256:" + strings.Repeat("2", 64)},
		"podSecurity": map[string]any{"default": "baseline"}, // as muster init sets it
	}
}

// render returns the manifests by template name.
func render(t *testing.T, vals map[string]any) (map[string]string, error) {
	t.Helper()
	c, err := charts.Muster()
	if err != nil {
		t.Fatal(err)
	}
	release := common.ReleaseOptions{Name: "muster", Namespace: "muster-system", Revision: 1, IsInstall: true}
	merged, err := util.ToRenderValues(c, vals, release, common.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	out, err := engine.Render(c, merged)
	if err != nil {
		return nil, err
	}
	maps.DeleteFunc(out, func(name, text string) bool {
		return !strings.HasSuffix(name, ".yaml") || strings.TrimSpace(text) == ""
	})
	return out, nil
}

func mustRender(t *testing.T) map[string]string {
	t.Helper()
	out, err := render(t, values())
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestTheRenderedChartIsTheOneInTestdata(t *testing.T) {
	out := mustRender(t)
	var all bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(out)) {
		fmt.Fprintf(&all, "---\n# Source: %s\n%s\n", name, strings.Trim(out[name], "\n"))
	}
	golden := filepath.Join("testdata", "rendered.yaml")
	if *update {
		if err := os.WriteFile(golden, all.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(all.Bytes(), want) {
		t.Error("the chart renders otherwise than testdata/rendered.yaml; look at the difference after `go test ./deploy/charts -update`")
	}
}

// The additional objects in clusters that Muster did not initialize. The tests of joinservice apply them too.
func TestTheRightsForTokensAreTheOnesInTestdata(t *testing.T) {
	const template = "muster/templates/rbac-tokens.yaml"
	if text, there := mustRender(t)[template]; there {
		t.Errorf("without being asked for:\n%s", text)
	}
	v := values()
	v["joinservice"].(map[string]any)["joinCredential"] = "token"
	out, err := render(t, v)
	if err != nil {
		t.Fatal(err)
	}
	got := []byte("# Source: " + template + "\n" + strings.Trim(out[template], "\n") + "\n")
	golden := filepath.Join("testdata", "rendered-tokens.yaml")
	if *update {
		if err := os.WriteFile(golden, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("the chart renders otherwise than testdata/rendered-tokens.yaml; look at the difference after `go test ./deploy/charts -update`")
	}
}

func TestHelmLintFindsNothing(t *testing.T) {
	l := lint.RunAll("muster", values(), "muster-system")
	for _, m := range l.Messages {
		t.Errorf("%s: %v", m.Path, m.Err)
	}
}

func TestValuesThatTheSchemaRefuses(t *testing.T) {
	for name, change := range map[string]func(map[string]any){
		"an image by tag":                  func(v map[string]any) { v["kms"] = map[string]any{"image": "registry.example/muster/kms:v1"} },
		"no image":                         func(v map[string]any) { delete(v, "joinservice") },
		"no owner's key":                   func(v map[string]any) { delete(v, "owner") },
		"an owner's key of another length": func(v map[string]any) { v["owner"] = map[string]any{"publicKeys": []any{"AAAA"}} },
		"a list without an owner's key":    func(v map[string]any) { v["owner"] = map[string]any{"publicKeys": []any{}} },
		"an owner's key twice":             func(v map[string]any) { v["owner"] = map[string]any{"publicKeys": []any{ownerKey, ownerKey}} },
		"five owner's keys": func(v map[string]any) {
			keys := []any{ownerKey}
			for _, c := range "abcd" {
				keys = append(keys, string(c)+ownerKey[1:])
			}
			v["owner"] = map[string]any{"publicKeys": keys}
		},
		"a value that does not exist":  func(v map[string]any) { v["rootSecret"] = "x" },
		"a secret hidden in a section": func(v map[string]any) { v["owner"].(map[string]any)["rootSecret"] = "x" },
		"an interval without a unit": func(v map[string]any) {
			v["monitoring"] = map[string]any{"podMonitor": map[string]any{"interval": "30"}}
		},
		"a UID that is none":    func(v map[string]any) { v["nodeAccess"] = map[string]any{"uid": "muster-node-access"} },
		"a port that cannot be": func(v map[string]any) { v["joinservice"].(map[string]any)["nodePort"] = 70000 },
	} {
		t.Run(name, func(t *testing.T) {
			v := values()
			change(v)
			if _, err := render(t, v); err == nil {
				t.Error("rendered")
			}
		})
	}
}

// Rendered without a cluster, the chart cannot look for the list of enrolled nodes: the caller has to check it
// before.
func TestWithoutAClusterTheListHasToBeNamed(t *testing.T) {
	v := values()
	delete(v, "nodeAccess")
	if _, err := render(t, v); err == nil || !strings.Contains(err.Error(), "get configmap muster-node-access") {
		t.Errorf("rendered: %v", err)
	}
}

func documents(t *testing.T) []map[string]any {
	t.Helper()
	var docs []map[string]any
	for name, text := range mustRender(t) {
		for _, d := range strings.Split("\n"+text, "\n---\n") {
			var m map[string]any
			if err := yaml.UnmarshalStrict([]byte(d), &m); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if m != nil {
				docs = append(docs, m)
			}
		}
	}
	return docs
}

// decode returns all rendered objects of a kind.
func decode[T any](t *testing.T, kind string) []T {
	t.Helper()
	var found []T
	for _, d := range documents(t) {
		if d["kind"] != kind {
			continue
		}
		b, err := yaml.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		var o T
		if err := yaml.UnmarshalStrict(b, &o); err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		found = append(found, o)
	}
	if len(found) == 0 {
		t.Fatalf("no %s rendered", kind)
	}
	return found
}

// K3: the first machine writes the objects that hold secrets, and no value contains one.
func TestTheChartHoldsNoSecret(t *testing.T) {
	for _, d := range documents(t) {
		if d["kind"] == "Secret" {
			t.Errorf("the chart renders a Secret: %v", d["metadata"])
		}
		name := d["metadata"].(map[string]any)["name"]
		if d["kind"] == "ConfigMap" && (name != "muster-waiting" || d["data"] != nil) {
			t.Errorf("the chart renders ConfigMap %v, which the first machine or joinservice writes", name)
		}
	}
	c, err := charts.Muster()
	if err != nil {
		t.Fatal(err)
	}
	var walk func(path string, v any)
	walk = func(path string, v any) {
		for _, word := range []string{"secret", "password", "token", "private", "salt"} {
			if strings.Contains(strings.ToLower(path), word) {
				t.Errorf("value %s sounds like a secret", path)
			}
		}
		if m, ok := v.(map[string]any); ok {
			for k, w := range m {
				walk(path+"."+k, w)
			}
		}
	}
	walk("", c.Values)
}

func TestPodsHaveTheLeastPrivilege(t *testing.T) {
	for _, ds := range decode[appsv1.DaemonSet](t, "DaemonSet") {
		pod := ds.Spec.Template.Spec
		if pod.HostNetwork || pod.HostPID || pod.HostIPC {
			t.Errorf("%s shares a namespace with its host", ds.Name)
		}
		if _, ok := pod.NodeSelector["node-role.kubernetes.io/control-plane"]; !ok {
			t.Errorf("%s may run on workers", ds.Name)
		}
		if pod.PriorityClassName != "system-node-critical" {
			t.Errorf("%s has priority class %q", ds.Name, pod.PriorityClassName)
		}
		// Only joinservice reads root's files: PKI files and the audit log.
		if nonRoot := pod.SecurityContext.RunAsNonRoot; ds.Name != "muster-joinservice" && (nonRoot == nil || !*nonRoot) {
			t.Errorf("%s runs as root", ds.Name)
		}
		if p := pod.SecurityContext.SeccompProfile; p == nil || p.Type != corev1.SeccompProfileTypeRuntimeDefault {
			t.Errorf("%s runs without the runtime's seccomp profile", ds.Name)
		}
		for _, v := range pod.Volumes {
			if v.HostPath != nil && strings.HasPrefix(v.HostPath.Path, "/run/muster/attest") &&
				v.HostPath.Path != "/run/muster/attest/"+strings.TrimPrefix(ds.Name, "muster-") {
				t.Errorf("%s mounts %s: the socket of another purpose (A5)", ds.Name, v.HostPath.Path)
			}
		}
		for _, c := range pod.Containers {
			checkContainer(t, ds.Name, c)
		}
	}
}

func checkContainer(t *testing.T, name string, c corev1.Container) {
	t.Helper()
	s := c.SecurityContext
	if s == nil || *s.AllowPrivilegeEscalation || *s.Privileged || !*s.ReadOnlyRootFilesystem ||
		!slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || len(s.Capabilities.Add) > 0 {
		t.Errorf("%s: container %s has more than it needs: %v", name, c.Name, s)
	}
	if c.Resources.Limits.Memory().IsZero() {
		t.Errorf("%s: container %s has no memory limit", name, c.Name)
	}
	// Not on a port: a client that reaches it could keep the kubelet from its answer.
	asks := func(p *corev1.Probe, path string) bool {
		return p != nil && p.Exec != nil && slices.Equal(p.Exec.Command, []string{"/probe", path})
	}
	if !asks(c.StartupProbe, "/healthz") || !asks(c.LivenessProbe, "/healthz") || !asks(c.ReadinessProbe, "/readyz") {
		t.Errorf("%s: container %s lacks a probe", name, c.Name)
	}
	for _, e := range c.Env {
		if e.ValueFrom != nil && e.ValueFrom.SecretKeyRef != nil {
			t.Errorf("%s: %s comes from a Secret through the environment (K3)", name, e.Name)
		}
	}
	for _, m := range c.VolumeMounts {
		if !m.ReadOnly && m.Name != "audit" {
			t.Errorf("%s: %s is mounted writable", name, m.MountPath)
		}
	}
}

func TestRolesGrantNoWildcardAndNoSecrets(t *testing.T) {
	var rules []rbacv1.PolicyRule
	for _, r := range decode[rbacv1.ClusterRole](t, "ClusterRole") {
		rules = append(rules, r.Rules...)
	}
	for _, r := range decode[rbacv1.Role](t, "Role") {
		rules = append(rules, r.Rules...)
	}
	for _, r := range rules {
		all := slices.Concat(r.Verbs, r.Resources, r.APIGroups)
		if slices.Contains(all, "*") {
			t.Errorf("a wildcard: %v", r)
		}
		if slices.Contains(r.Resources, "secrets") {
			t.Errorf("secrets are readable: %v", r)
		}
		if slices.Contains(r.Resources, "signers") && len(r.ResourceNames) != 2 {
			t.Errorf("approval for signers %v", r.ResourceNames)
		}
		if slices.Contains(r.Resources, "attestationpolicies") && slices.ContainsFunc(r.Verbs, func(v string) bool { return v != "get" && v != "list" && v != "watch" }) {
			t.Errorf("a service may change its own policy: %v", r)
		}
		if slices.Contains(r.Verbs, "escalate") || slices.Contains(r.Verbs, "bind") || slices.Contains(r.Verbs, "impersonate") {
			t.Errorf("a way up: %v", r)
		}
	}
}

func TestJoinersKeepTheirAddress(t *testing.T) {
	for _, s := range decode[corev1.Service](t, "Service") {
		if s.Spec.Type == corev1.ServiceTypeNodePort && s.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
			t.Errorf("%s: every joiner looks like one address", s.Name)
		}
	}
}
