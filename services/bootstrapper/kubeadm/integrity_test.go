package kubeadm

import (
	"strings"
	"testing"

	"github.com/muster-k8s/muster/internal/versions"
)

// etcdPod returns a static pod as kubeadm makes it; the table below changes it.
func etcdPod() string {
	return `apiVersion: v1
kind: Pod
metadata: {name: etcd, namespace: kube-system}
spec:
  hostNetwork: true
  containers:
  - name: etcd
    image: ` + images()[versions.Etcd].String() + `
    command: [etcd, --data-dir=/var/lib/etcd]
    livenessProbe: {httpGet: {path: /livez, port: 2381}}
    volumeMounts: [{name: data, mountPath: /var/lib/etcd}]
  volumes:
  - {name: data, hostPath: {path: /var/lib/etcd, type: DirectoryOrCreate}}
`
}

// B8: each case makes the static pod another one, or gives it more of the machine.
func TestAStaticPodIsAsKubeadmMakesIt(t *testing.T) {
	img := image(t, `{"apiServer":{"extraVolumes":[{"name":"audit","hostPath":"/var/log/audit/","mountPath":"/var/log/audit"}]}}`)
	const field, spec = "    livenessProbe:", "  hostNetwork: true"
	for name, tt := range map[string]struct{ pod, from, to, want string }{
		"as it is": {"etcd", "", "", ""},
		"a folder of the image's": {
			"etcd", "mountPath: /var/lib/etcd}]\n  volumes:\n  - {name: data, hostPath: {path: /var/lib/etcd,", "mountPath: /var/log/audit}]\n  volumes:\n  - {name: data, hostPath: {path: /var/log/audit,", "",
		},
		"a folder at another place": {"etcd", "path: /var/lib/etcd,", "path: /var/log/audit,", "it has the machine's"},
		"another name":              {"evil", "", "", "no such static pod"},
		"kube-proxy":                {"kube-proxy", "", "", "no such static pod"},
		"a static pod's other name": {"kube-apiserver", "", "", "another object"},
		"another kind":              {"etcd", "kind: Pod", "kind: PodTemplate", "another object"},
		"another version":           {"etcd", "apiVersion: v1", "apiVersion: v2", "another object"},
		"another namespace":         {"etcd", "namespace: kube-system", "namespace: default", "another object"},
		"an unknown field":          {"etcd", spec, "  evil: true\n" + spec, "can't be read"},
		"a list of the first kind":  {"etcd", "  containers:", "  initContainers: [{name: x, image: x}]\n  containers:", "other containers"},
		"a list of the second kind": {"etcd", "  containers:", "  ephemeralContainers: [{name: x, image: x}]\n  containers:", "other containers"},
		"a second container":        {"etcd", "  volumes:", "  - {name: x, image: x}\n  volumes:", "other containers"},
		"no digest":                 {"etcd", "@" + images()[versions.Etcd].Digest, "", "its image"},
		"another listed image":      {"etcd", images()[versions.Etcd].String(), images()[versions.Pause].String(), "its image"},
		"no program":                {"etcd", "    command: [etcd, --data-dir=/var/lib/etcd]\n", "", "another program"},
		"another program":           {"etcd", "command: [etcd,", "command: [/bin/etcd,", "another program"},
		"arguments of its own":      {"etcd", field, "    args: [x]\n" + field, "another program"},
		"privileges":                {"etcd", field, "    securityContext: {privileged: true}\n" + field, "privileges"},
		"capabilities":              {"etcd", field, "    securityContext: {capabilities: {add: [SYS_ADMIN]}}\n" + field, "privileges"},
		"fewer capabilities":        {"etcd", field, "    securityContext: {privileged: false, capabilities: {drop: [ALL]}}\n" + field, ""},
		"the machine's processes":   {"etcd", spec, spec + "\n  hostPID: true", "more of the machine"},
		"the machine's memory":      {"etcd", spec, spec + "\n  hostIPC: true", "more of the machine"},
		"a program after the start": {"etcd", field, "    lifecycle: {postStart: {exec: {command: [x]}}}\n" + field, "more of the machine"},
		"a device":                  {"etcd", field, "    volumeDevices: [{name: data, devicePath: /dev/x}]\n" + field, "more of the machine"},
		"a liveness program":        {"etcd", "httpGet: {path: /livez, port: 2381}", "exec: {command: [x]}", "a probe"},
		"a readiness program":       {"etcd", field, "    readinessProbe: {exec: {command: [x]}}\n" + field, "a probe"},
		"a startup program":         {"etcd", field, "    startupProbe: {exec: {command: [x]}}\n" + field, "a probe"},
		"the machine's root":        {"etcd", "path: /var/lib/etcd,", "path: /,", "the machine's"},
		"a folder below one":        {"etcd", "path: /var/lib/etcd,", "path: /var/lib/etcd/x,", "the machine's"},
		"a folder above one":        {"etcd", "path: /var/lib/etcd,", "path: /var/lib/etcd/../..,", "the machine's"},
	} {
		manifest := strings.Replace(etcdPod(), tt.from, tt.to, 1)
		if tt.from != "" && manifest == etcdPod() {
			t.Fatalf("%s: nothing was changed", name)
		}
		err := img.CheckStaticPod("/", tt.pod, []byte(manifest), images())
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: got %v, want %q", name, err, tt.want)
		}
	}
}

// B8: each case sets a field by which the kubelet would run a program, or take pods or orders from another source. Fields of the cluster's own stay.
func TestAKubeletsFieldsAreAsTheyMustBe(t *testing.T) {
	const right = "kind: KubeletConfiguration\nstaticPodPath: /etc/kubernetes/manifests\nclusterDomain: cluster.local\nauthentication:\n  anonymous: {enabled: false}\n  webhook: {enabled: true}\n  x509: {clientCAFile: /etc/kubernetes/pki/ca.crt}\nauthorization: {mode: Webhook}\n"
	img := image(t, "")
	for name, tt := range map[string]struct{ from, to, changed string }{
		"as it is":                            {"", "", ""},
		"what is empty":                       {"kind", "staticPodURL: \"\"\nvolumePluginDir: \"\"\nimageServiceEndpoint: \"\"\npodLogsDir: \"\"\nreadOnlyPort: 0\ncontainerRuntimeEndpoint: \"\"\nkind", ""},
		"the image's runtime":                 {"kind", "containerRuntimeEndpoint: unix:///run/containerd/containerd.sock\nkind", ""},
		"what is the cluster's":               {"cluster.local", "evil.local", ""},
		"pods of another folder":              {"/etc/kubernetes/manifests", "/var/evil", "staticPodPath"},
		"pods of no folder":                   {"staticPodPath: /etc/kubernetes/manifests\n", "", "staticPodPath"},
		"pods of a server":                    {"kind", "staticPodURL: http://evil\nkind", "staticPodURL"},
		"logs in another folder":              {"kind", "podLogsDir: /var/evil\nkind", "podLogsDir"},
		"plugins of another folder":           {"kind", "volumePluginDir: /var/evil\nkind", "volumePluginDir"},
		"another runtime":                     {"kind", "containerRuntimeEndpoint: unix:///var/evil\nkind", "containerRuntimeEndpoint"},
		"images of another runtime":           {"kind", "imageServiceEndpoint: unix:///var/evil\nkind", "imageServiceEndpoint"},
		"orders of unauthenticated clients":   {"anonymous: {enabled: false}", "anonymous: {enabled: true}", "authentication.anonymous.enabled"},
		"a token is not verified":             {"webhook: {enabled: true}", "webhook: {enabled: false}", "authentication.webhook.enabled"},
		"no word of who may give any":         {"authentication:\n  anonymous: {enabled: false}\n  webhook: {enabled: true}\n  x509: {clientCAFile: /etc/kubernetes/pki/ca.crt}\n", "authentication: 1\n", "authentication.anonymous.enabled, authentication.webhook.enabled, authentication.x509.clientCAFile"},
		"orders of whom another signs":        {"pki/ca.crt", "pki/evil.crt", "authentication.x509.clientCAFile"},
		"everything allowed":                  {"mode: Webhook", "mode: AlwaysAllow", "authorization.mode"},
		"a Lease that it renews in time":      {"kind", "nodeLeaseDurationSeconds: 120\nkind", ""},
		"a Lease that it renews too rarely":   {"kind", "nodeLeaseDurationSeconds: 3600\nkind", "nodeLeaseDurationSeconds"},
		"a port that asks for no certificate": {"kind", "readOnlyPort: 10255\nkind", "readOnlyPort"},
	} {
		config := strings.Replace(right, tt.from, tt.to, 1)
		got, changed, err := img.CheckKubelet([]byte(config))
		if err != nil || strings.Join(changed, ", ") != tt.changed {
			t.Errorf("%s: %q was changed, %v, want %q", name, changed, err, tt.changed)
			continue
		}
		for _, evil := range []string{"/var/evil", "http://evil", "AlwaysAllow", "10255", "3600"} {
			if strings.Contains(string(got), evil) {
				t.Errorf("%s: %s", name, got)
			}
		}
		if _, again, err := img.CheckKubelet(got); err != nil || len(again) > 0 {
			t.Errorf("%s: what was put right is changed again: %q, %v", name, again, err)
		}
	}
	for name, config := range map[string]string{"no YAML": "{", "a field twice": right + "staticPodPath: /var/evil\n"} {
		if got, _, err := img.CheckKubelet([]byte(config)); err == nil {
			t.Errorf("%s: got %s, want an error", name, got)
		}
	}
}

// B8: systemd reads the file, and the kubelet takes each flag of it.
func TestAKubeletsFlagsAreThoseOfKubeadm(t *testing.T) {
	img := image(t, "")
	for file, want := range map[string]bool{
		string(KubeletFlags(first().ControlPlaneNode)): true,
		string(KubeletFlags(labeled())):                true,
		`KUBELET_KUBEADM_ARGS="--node-labels=a=b,c=d --provider-id=aws:///eu-west-1a/i-0 --register-with-taints=a=b:NoSchedule,c:NoExecute"`: true,
		`KUBELET_KUBEADM_ARGS="--node-labels=a=$(x)"`: false,
		`KUBELET_KUBEADM_ARGS=""`:                     true,
		`KUBELET_KUBEADM_ARGS="--node-ip=192.0.2.1,fd00::1 --hostname-override=n1 --pod-infra-container-image=registry.example/pause@sha256:00"` + "\n": true,
		`KUBELET_KUBEADM_ARGS="--container-runtime-endpoint=unix:///run/containerd/containerd.sock"`:                                                    true,
		`KUBELET_KUBEADM_ARGS="--container-runtime-endpoint=unix:///var/evil"`:                                                                          false,
		`KUBELET_KUBEADM_ARGS="--config=/var/evil"`:                                                                                                     false,
		`KUBELET_KUBEADM_ARGS="--node-ip=192.0.2.1 --image-credential-provider-bin-dir=/var/evil"`:                                                      false,
		`KUBELET_KUBEADM_ARGS="--node-ip 192.0.2.1"`:                                                                                                    false,
		"KUBELET_KUBEADM_ARGS=\"--node-ip=192.0.2.1\"\nLD_PRELOAD=/var/evil\n":                                                                          false,
		"KUBELET_KUBEADM_ARGS=\"--node-ip=192.0.2.1\nLD_PRELOAD=/var/evil\"":                                                                            false,
		`KUBELET_KUBEADM_ARGS="--node-ip=192.0.2.1" "--config=/var/evil"`:                                                                               false,
		`KUBELET_KUBEADM_ARGS="--node-ip=$(x)"`:                                                                                                         false,
		`LD_PRELOAD="--node-ip=192.0.2.1"`:                                                                                                              false,
		"":                                                                                                                                              false,
	} {
		if got := img.CheckKubeletFlags([]byte(file)); got != want {
			t.Errorf("%q: got %t, want %t", file, got, want)
		}
	}
}
