package metadata

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	kubeletapis "k8s.io/kubelet/pkg/apis"
)

const node = machineHead + "name: a\nrole: worker\naddresses: [192.0.2.7]\n"

func TestANodesFieldsAreRead(t *testing.T) {
	m, err := ParseMachine([]byte(node + `providerID: aws:///eu-west-1a/i-0123
pool: gpu
labels: {topology.kubernetes.io/zone: eu-west-1a, example.org/rack: r1, rack: ""}
taints: [{key: example.org/gpu, value: "yes", effect: NoSchedule}, {key: example.org/gpu, effect: NoExecute}]
`))
	if err != nil {
		t.Fatal(err)
	}
	if m.ProviderID != "aws:///eu-west-1a/i-0123" || !maps.Equal(m.Labels, map[string]string{LabelZone: "eu-west-1a", "example.org/rack": "r1", "rack": "", PoolLabel: "gpu"}) ||
		!slices.Equal(m.Taints, []Taint{{"example.org/gpu", "yes", "NoSchedule"}, {Key: "example.org/gpu", Effect: "NoExecute"}}) {
		t.Errorf("%+v", m)
	}
}

func TestANodesFieldsThatAreRefused(t *testing.T) {
	for name, tt := range map[string]struct{ wrong, right, want string }{
		"a label that isolates nodes":     {"labels: {node-restriction.kubernetes.io/pool: a}", "labels: {example.org/pool: a}", "node-restriction.kubernetes.io"},
		"the same, in a domain below":     {"labels: {x.node-restriction.kubernetes.io/pool: a}", "labels: {x.example.org/pool: a}", "kubernetes.io"},
		"a role's label":                  {"labels: {node-role.kubernetes.io/control-plane: ''}", "labels: {example.org/control-plane: ''}", "kubernetes.io"},
		"a label of Kubernetes":           {"labels: {kubernetes.io/hostname: a}", "labels: {kubernetes.io.example/hostname: a}", "kubernetes.io"},
		"a label of a node's":             {"labels: {node.kubernetes.io/other: a}", "labels: {node.kubernetes.io/instance-type: a}", "kubernetes.io"},
		"a label of k8s.io":               {"labels: {csi.k8s.io/x: a}", "labels: {xk8s.io/x: a}", "k8s.io"},
		"a label of Muster":               {"labels: {muster.dev/pool: a}", "pool: a", "muster.dev"},
		"a label that breaks out":         {`labels: {"a=b,c": d}`, `labels: {a: d}`, "key"},
		"a value that breaks out":         {`labels: {a: "b,node-role.kubernetes.io/x=y"}`, `labels: {a: b}`, "value"},
		"a value with a quote":            {`labels: {a: 'b" --root-dir=/x'}`, `labels: {a: b}`, "value"},
		"a value with a line":             {`labels: {a: "b\nc"}`, `labels: {a: b}`, "value"},
		"a long value":                    {"labels: {a: " + strings.Repeat("x", 64) + "}", "labels: {a: " + strings.Repeat("x", 63) + "}", "value"},
		"a pool with a space":             {"pool: a b", "pool: a-b", "pool"},
		"a number as a label":             {"labels: {a: [1]}", "labels: {a: '1'}", "labels"},
		"a provider ID with a quote":      {`providerID: 'aws:///"'`, `providerID: 'aws:///x'`, "providerID"},
		"a provider ID with a space":      {`providerID: 'aws:///x --y'`, `providerID: 'aws:///x--y'`, "providerID"},
		"a provider ID without provider":  {`providerID: '///x'`, `providerID: 'a:///x'`, "providerID"},
		"a long provider ID":              {"providerID: 'a://" + strings.Repeat("x", maxProviderID) + "'", "providerID: 'a://" + strings.Repeat("x", maxProviderID-4) + "'", "providerID"},
		"a taint of Kubernetes":           {"taints: [{key: node.kubernetes.io/unschedulable, effect: NoSchedule}]", "taints: [{key: unschedulable, effect: NoSchedule}]", "taints[0]"},
		"a taint without effect":          {"taints: [{key: a}]", "taints: [{key: a, effect: NoExecute}]", "effect"},
		"a taint of another effect":       {"taints: [{key: a, effect: noschedule}]", "taints: [{key: a, effect: PreferNoSchedule}]", "effect"},
		"a taint's value that breaks out": {`taints: [{key: a, value: "b:NoExecute,c", effect: NoSchedule}]`, "taints: [{key: a, value: b, effect: NoSchedule}]", "value"},
		"a taint twice":                   {"taints: [{key: a, effect: NoExecute}, {key: a, value: b, effect: NoExecute}]", "taints: [{key: a, effect: NoExecute}, {key: a, value: b, effect: NoSchedule}]", "twice"},
		"many labels":                     {"labels: {" + many(maxLabels+1, "l%d: a,") + "}", "labels: {" + many(maxLabels, "l%d: a,") + "}", "labels"},
		"many taints":                     {"taints: [" + many(maxTaints+1, "{key: t%d, effect: NoExecute},") + "]", "taints: [" + many(maxTaints, "{key: t%d, effect: NoExecute},") + "]", "taints"},
	} {
		if m, err := ParseMachine([]byte(node + tt.wrong + "\n")); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %+v, %v, want an error with %q", name, m, err, tt.want)
		}
		if _, err := ParseMachine([]byte(node + tt.right + "\n")); err != nil {
			t.Errorf("%s, corrected: %v", name, err)
		}
	}
}

func many(n int, format string) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, format, i)
	}
	return b.String()
}

// A kubelet may set each label that metadata may set (NodeRestriction): one that it may not set would keep the Node out of the cluster.
func TestAKubeletMaySetTheLabelsOfMetadata(t *testing.T) {
	if LabelRegion != corev1.LabelTopologyRegion || LabelZone != corev1.LabelTopologyZone || LabelInstanceType != corev1.LabelInstanceTypeStable {
		t.Error("the labels have other names than those of Kubernetes")
	}
	for _, l := range topology {
		if !kubeletapis.IsKubeletLabel(l) {
			t.Errorf("a kubelet may not set %s", l)
		}
	}
	for _, l := range []string{"x.kubernetes.io/a", "k8s.io/a", corev1.LabelNamespaceNodeRestriction + "/a"} {
		if checkLabel(l, "") == nil {
			t.Errorf("metadata set %s", l)
		}
	}
}

func TestADocumentWinsOverItsPlatform(t *testing.T) {
	p := Platform{Hostname: "Web-1.example.org", Addresses: []string{"", "192.0.2.8", "192.0.2.8", "169.254.1.1", "fe80::1", "2001:db8::1", "::ffff:192.0.2.9", "x"}, ProviderID: "a://b", Region: "r", Zone: "z", InstanceType: "t"}
	s := Source{Provider: ProviderAWS, From: "x"}
	file, m, err := Complete([]byte(machineHead+"role: worker\n"), p, s)
	if err != nil {
		t.Fatal(err)
	}
	if m.Name != "web-1" || fmt.Sprint(m.Addresses) != "[192.0.2.8 2001:db8::1]" || m.ProviderID != "a://b" || len(m.Labels) != 3 ||
		!slices.Equal(m.Source.Platform, []string{"name", "addresses", "providerID", LabelRegion, LabelZone, LabelInstanceType}) {
		t.Errorf("%+v, %+v", m, m.Source)
	}
	if again, err := ParseMachine(file); err != nil || again.Source.String() != m.Source.String() || !strings.Contains(again.Source.String(), "aws (x), which gave name, addresses") {
		t.Errorf("%+v, %v", again, err)
	}
	_, m, err = Complete([]byte(node+"providerID: c://d\nlabels: {topology.kubernetes.io/region: s, topology.kubernetes.io/zone: v, node.kubernetes.io/instance-type: u}\n"), p, s)
	if err != nil || m.Name != "a" || fmt.Sprint(m.Addresses) != "[192.0.2.7]" || m.ProviderID != "c://d" || m.Labels[LabelRegion] != "s" || m.Labels[LabelZone] != "v" || m.Labels[LabelInstanceType] != "u" || len(m.Source.Platform) > 0 {
		t.Errorf("%+v, %v", m, err)
	}
	if _, _, err = Complete(file, p, s); err == nil || !strings.Contains(err.Error(), "source:") {
		t.Errorf("a document that names its source: %v", err)
	}
	for want, missing := range map[string]Platform{
		`name: want`: {Addresses: []string{"192.0.2.8"}}, `addresses: want`: {Hostname: "a"},
		`host name "a b.example" does not`: {Hostname: "a b.example", Addresses: []string{"192.0.2.8"}}, `["127.0.0.1" "x"]: write addresses`: {Hostname: "a", Addresses: []string{"127.0.0.1", "x"}},
	} {
		if _, m, err := Complete([]byte(machineHead+"role: worker\n"), missing, s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v of %+v: %v", m, missing, err)
		}
	}
	if _, _, err := Complete([]byte(machineHead+"name: a\naddresses: [192.0.2.7]\n"), p, s); err == nil || !strings.Contains(err.Error(), "role") {
		t.Errorf("a platform gave a role: %v", err)
	}
}

func TestTheFirstFileThatExistsIsRead(t *testing.T) {
	dir := t.TempDir()
	first, second := filepath.Join(dir, "first"), filepath.Join(dir, "second")
	if _, err := LoadMachine(first, second); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), first) {
		t.Error(err)
	}
	if err := os.WriteFile(second, []byte(node), 0o600); err != nil {
		t.Fatal(err)
	}
	if m, err := LoadMachine(first, second); err != nil || m.Name != "a" {
		t.Errorf("%+v, %v", m, err)
	}
	if err := os.WriteFile(first, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadMachine(first, second); err == nil || !strings.Contains(err.Error(), first) {
		t.Errorf("a malformed first file: %v", err)
	}
}

func FuzzMachine(f *testing.F) {
	f.Add([]byte(node + "labels: {a: b}\ntaints: [{key: a, effect: NoExecute}]\nproviderID: a://b\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := ParseMachine(b)
		if err != nil {
			return
		}
		// These become flags in a file that systemd reads.
		for _, s := range append(slices.Collect(maps.Values(m.Labels)), m.ProviderID, m.Name) {
			if strings.ContainsAny(s, " \"'\\\n$,=") {
				t.Errorf("%q", s)
			}
		}
	})
}
