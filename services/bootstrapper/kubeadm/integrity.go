package kubeadm

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	kubeletv1 "k8s.io/kubelet/config/v1beta1"
	v1beta4 "k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm/v1beta4"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/versions"
)

// Manifests is the folder of static pods.
const Manifests = "/etc/kubernetes/manifests"

// hostFolders are the folders of the machine that kubeadm's static pods mount.
var hostFolders = []string{
	"/etc/kubernetes/pki", "/etc/kubernetes/pki/etcd", "/etc/kubernetes/controller-manager.conf", "/etc/kubernetes/scheduler.conf", AuthzFolder, "/var/lib/etcd",
	"/etc/ssl/certs", "/etc/ca-certificates", "/etc/pki", "/etc/pki/ca-trust", "/etc/pki/tls/certs", "/usr/share/ca-certificates", "/usr/local/share/ca-certificates", "/usr/libexec/kubernetes/kubelet-plugins/volume/exec",
}

// CheckStaticPod returns an error unless the manifest is one that kubeadm makes for this image's static pod of that name (B8): one container with the
// listed image, which starts its own program without privileges, and mounts only the folders that it needs. Folders are looked up below root. The values
// of the program's arguments are not checked.
func (i *Image) CheckStaticPod(root, name string, manifest []byte, images versions.Images) error {
	if !slices.Contains(StaticPods(), name) {
		return errors.New("this node has no such static pod")
	}
	var pod corev1.Pod
	if err := asTheKubelet(manifest, &pod); err != nil {
		return fmt.Errorf("it can't be read: %w", err)
	}
	if pod.APIVersion != "v1" || pod.Kind != "Pod" || pod.Name != name || pod.Namespace != "kube-system" {
		return errors.New("it is another object")
	}
	if len(pod.Spec.Containers) != 1 || len(pod.Spec.InitContainers)+len(pod.Spec.EphemeralContainers) > 0 {
		return errors.New("it has other containers than one")
	}
	c := pod.Spec.Containers[0]
	switch {
	case c.Image != images[name].String(): // B9
		return fmt.Errorf("its image is %q, and %s is listed", c.Image, images[name])
	case len(c.Command) == 0 || c.Command[0] != name || len(c.Args) > 0:
		return errors.New("it starts another program")
	case c.SecurityContext != nil && (c.SecurityContext.Privileged != nil && *c.SecurityContext.Privileged || c.SecurityContext.Capabilities != nil && len(c.SecurityContext.Capabilities.Add) > 0):
		return errors.New("it has privileges")
	case pod.Spec.HostPID || pod.Spec.HostIPC || c.Lifecycle != nil || len(c.VolumeDevices) > 0:
		return errors.New("it has more of the machine than kubeadm gives it")
	case len(c.Env)+len(c.EnvFrom) > 0 || c.WorkingDir != "":
		return errors.New("it has an environment")
	case c.LivenessProbe != nil && c.LivenessProbe.Exec != nil, c.ReadinessProbe != nil && c.ReadinessProbe.Exec != nil, c.StartupProbe != nil && c.StartupProbe.Exec != nil:
		return errors.New("it has a probe that runs a program")
	}
	allowed := slices.Concat(hostFolders, i.hostFolders())
	at := i.mountedAt()
	from := map[string]string{}
	for _, v := range pod.Spec.Volumes {
		if v.HostPath == nil {
			return fmt.Errorf("its volume %q is none of the machine's folders", v.Name)
		}
		host := path.Clean(v.HostPath.Path)
		if !slices.Contains(allowed, host) {
			return fmt.Errorf("it has the machine's %q", v.HostPath.Path)
		}
		if err := noLink(root, host); err != nil {
			return err
		}
		from[v.Name] = host
	}
	for _, m := range c.VolumeMounts {
		host := from[m.Name]
		if to := path.Clean(m.MountPath); m.SubPath+m.SubPathExpr != "" || to != host && at[host] != to {
			return fmt.Errorf("it has the machine's %q at %q", host, m.MountPath)
		}
	}
	return nil
}

// asTheKubelet decodes an object as the kubelet does, with case-sensitive names, and refuses fields that the kubelet would ignore.
func asTheKubelet(text []byte, into any) error {
	j, err := yaml.YAMLToJSONStrict(text)
	if err != nil {
		return err
	}
	problems, err := kjson.UnmarshalStrict(j, into)
	return errors.Join(append(problems, err)...)
}

// noLink returns an error if a path of the machine has a link in it: a link on the state disk can lead to any place on the machine. The kubelet creates
// missing folders.
func noLink(root, host string) error {
	top, err := filepath.EvalSymlinks(root)
	if err != nil {
		return err
	}
	got, err := filepath.EvalSymlinks(filepath.Join(top, host))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil && got != filepath.Join(top, host) {
		err = fmt.Errorf("the machine's %q is a link to %q", host, got)
	}
	return err
}

// mountedAt maps folders of the machine to the places where the image mounts them in static pods, if these differ.
func (i *Image) mountedAt() map[string]string {
	out := map[string]string{}
	c := i.cluster
	for _, component := range []v1beta4.ControlPlaneComponent{c.APIServer.ControlPlaneComponent, c.ControllerManager, c.Scheduler} {
		for _, v := range component.ExtraVolumes {
			out[path.Clean(v.HostPath)] = path.Clean(v.MountPath)
		}
	}
	return out
}

// hostFolders returns the folders that the image adds to static pods.
func (i *Image) hostFolders() (out []string) {
	c := i.cluster
	for _, component := range []v1beta4.ControlPlaneComponent{c.APIServer.ControlPlaneComponent, c.ControllerManager, c.Scheduler} {
		for _, v := range component.ExtraVolumes {
			out = append(out, path.Clean(v.HostPath))
		}
	}
	out = append(out, values(c.ControllerManager.ExtraArgs, "flex-volume-plugin-dir")...)
	if c.Etcd.Local != nil && c.Etcd.Local.DataDir != "" {
		out = append(out, path.Clean(c.Etcd.Local.DataDir))
	}
	return out
}

// CheckKubelet returns the kubelet's configuration with the right values in all fields that could make the kubelet run programs or take pods or orders
// from another source, or renew its Lease too rarely, and the names of the fields that it has changed (B8). All other fields are the cluster's and stay.
func (i *Image) CheckKubelet(config []byte) (right []byte, changed []string, err error) {
	var have map[string]any
	if err := yaml.UnmarshalStrict(config, &have); err != nil {
		return nil, nil, fmt.Errorf("the kubelet's configuration: %w", err)
	}
	if have == nil { // a power cut can leave an empty file
		return nil, nil, errors.New("the kubelet's configuration is empty")
	}
	text, err := yaml.Marshal(kubeletConfiguration(i))
	if err != nil {
		return nil, nil, err
	}
	var hardened kubeletv1.KubeletConfiguration
	if err := yaml.Unmarshal(text, &hardened); err != nil {
		return nil, nil, err
	}
	no := any(false)
	for _, f := range []struct {
		at   []string
		want any // nil: must not be set
		zero any // equal to not set
	}{
		{[]string{"staticPodPath"}, Manifests, nil},
		{[]string{"staticPodURL"}, nil, ""},
		{[]string{"podLogsDir"}, orNil(hardened.PodLogsDir), ""},
		{[]string{"volumePluginDir"}, orNil(hardened.VolumePluginDir), ""},
		{[]string{"imageServiceEndpoint"}, orNil(hardened.ImageServiceEndpoint), ""},
		{[]string{"authentication", "anonymous", "enabled"}, no, nil},
		{[]string{"authentication", "webhook", "enabled"}, any(true), nil},
		{[]string{"authorization", "mode"}, "Webhook", nil},
		{[]string{"authentication", "x509", "clientCAFile"}, "/etc/kubernetes/pki/ca.crt", nil},
		{[]string{"readOnlyPort"}, nil, float64(0)},
	} {
		if force(have, f.at, f.want, f.zero) {
			changed = append(changed, strings.Join(f.at, "."))
		}
	}
	if socket, ok := have["containerRuntimeEndpoint"]; ok && socket != "" && socket != i.criSocket {
		have["containerRuntimeEndpoint"] = i.criSocket
		changed = append(changed, "containerRuntimeEndpoint")
	}
	// With a longer one, a copy of the machine would get its key while it runs (J11).
	const lease = "nodeLeaseDurationSeconds"
	if seconds, ok := have[lease].(float64); ok && seconds > MaxNodeLease.Seconds() {
		delete(have, lease)
		if n := hardened.NodeLeaseDurationSeconds; n != 0 {
			have[lease] = n
		}
		changed = append(changed, lease)
	}
	right, err = yaml.Marshal(have)
	return right, changed, err
}

// MaxNodeLease is the longest duration of a node's Lease. Its kubelet renews it after a quarter of that, and joinservice watches it for 45 s at most.
const MaxNodeLease = 120 * time.Second

func orNil(s string) any {
	if s == "" {
		return nil
	}
	return s
}

// force sets a field, or removes it, and reports whether that changed anything.
func force(in map[string]any, at []string, want, zero any) bool {
	for _, name := range at[:len(at)-1] {
		next, ok := in[name].(map[string]any)
		if !ok || next == nil {
			next = map[string]any{}
			in[name] = next
		}
		in = next
	}
	last := at[len(at)-1]
	have, ok := in[last]
	switch {
	case ok && have == want, want == nil && (!ok || have == zero):
		return false
	case want == nil:
		delete(in, last)
	default:
		in[last] = want
	}
	return true
}

// kubeletFlag matches the arguments that kubeadm gives to the kubelet, each with its value.
var kubeletFlag = regexp.MustCompile(`^--(node-ip|node-labels|provider-id|hostname-override|pod-infra-container-image|register-with-taints|container-runtime-endpoint)=([A-Za-z0-9_.:/@,=-]*)$`)

// CheckKubeletFlags reports whether the file has only kubeadm's variable, with only arguments that kubeadm writes (B8): systemd would put every other
// variable into the kubelet's environment.
func (i *Image) CheckKubeletFlags(file []byte) bool {
	line, ok := strings.CutPrefix(strings.TrimSuffix(string(file), "\n"), `KUBELET_KUBEADM_ARGS="`)
	line, quoted := strings.CutSuffix(line, `"`)
	if !ok || !quoted {
		return false
	}
	for flag := range strings.SplitSeq(line, " ") {
		m := kubeletFlag.FindStringSubmatch(flag)
		if flag != "" && (m == nil || m[1] == "container-runtime-endpoint" && m[2] != i.criSocket) {
			return false
		}
	}
	return true
}

// KubeletFlags returns a new content of the file. It has no taints: the Node is registered.
func KubeletFlags(n Node) []byte {
	var flags []string
	for _, a := range kubeletArgs(n) {
		flags = append(flags, "--"+a.Name+"="+a.Value)
	}
	return fmt.Appendf(nil, "KUBELET_KUBEADM_ARGS=%q\n", strings.Join(flags, " "))
}
