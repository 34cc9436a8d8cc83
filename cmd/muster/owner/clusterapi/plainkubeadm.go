package clusterapi

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/versions"
)

// approver is the controller that approves kubelets' requests for client certificates in a cluster of plain kubeadm; formerApprover is its older name.
const (
	approver       = "certificatesigningrequest-approving-controller"
	formerApprover = "csrapproving"
)

// ownArgs are the arguments in kubeadm's ClusterConfiguration that only make sense with Muster, by component. Those with other values were not set by
// Muster, and stay. The other arguments of an init also make sense without Muster.
var ownArgs = map[string]map[string]string{
	"apiServer":         {"enable-bootstrap-token-auth": "false", "kubelet-certificate-authority": "/etc/kubernetes/pki/ca.crt"},
	"controllerManager": {"controllers": "*,-" + approver, "cluster-signing-duration": "24h"},
}

// plainCluster returns a ClusterConfiguration (v1beta4, YAML) without [ownArgs], and what it has removed.
func plainCluster(text string) (out string, removed []string, err error) {
	var doc map[string]any
	if err := yaml.Unmarshal([]byte(text), &doc); err != nil {
		return "", nil, err
	}
	for _, component := range slices.Sorted(maps.Keys(ownArgs)) {
		section, _ := doc[component].(map[string]any)
		args, _ := section["extraArgs"].([]any)
		left := slices.DeleteFunc(slices.Clone(args), func(arg any) bool {
			a, _ := arg.(map[string]any)
			name, _ := a["name"].(string)
			value, known := ownArgs[component][name]
			own := known && a["value"] == value
			if own {
				removed = append(removed, component+" --"+name+"="+value)
			}
			return own
		})
		switch {
		case len(left) == len(args):
		case len(left) == 0:
			delete(section, "extraArgs")
		default:
			section["extraArgs"] = left
		}
	}
	if len(removed) == 0 {
		return text, nil, nil
	}
	b, err := yaml.Marshal(doc)
	return string(b), removed, err
}

// plainKubelet returns a KubeletConfiguration (YAML) without serverTLSBootstrap: nothing in plain kubeadm approves requests for serving certificates.
func plainKubelet(text string) (out string, removed []string, err error) {
	var doc map[string]any
	if err := yaml.Unmarshal([]byte(text), &doc); err != nil {
		return "", nil, err
	}
	if on, _ := doc["serverTLSBootstrap"].(bool); !on {
		return text, nil, nil
	}
	delete(doc, "serverTLSBootstrap")
	b, err := yaml.Marshal(doc)
	return string(b), []string{"kubelet serverTLSBootstrap"}, err
}

// PlainConfiguration removes from kubeadm's configuration in the cluster what only makes sense with Muster, so that a later join or upgrade by
// kubeadm does not restore it. It returns the removed settings; with dryRun, it only returns them. A missing ConfigMap is not created.
func (c *Client) PlainConfiguration(ctx context.Context, dryRun bool) (removed []string, err error) {
	for _, m := range []struct {
		name, key string
		plain     func(string) (string, []string, error)
	}{
		{"kubeadm-config", "ClusterConfiguration", plainCluster},
		{"kubelet-config", "kubelet", plainKubelet},
	} {
		var own []string
		err := once(ctx, func(ctx context.Context) error {
			have := &corev1.ConfigMap{}
			if err := c.client.Get(ctx, types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: m.name}, have); Absent(err) {
				return nil
			} else if err != nil {
				return err
			}
			text, found, err := m.plain(have.Data[m.key])
			own = found
			if err != nil || dryRun || len(found) == 0 {
				return err
			}
			have.Data[m.key] = text
			return c.client.Update(ctx, have) // a conflict is tried again
		})
		if err != nil {
			return removed, fmt.Errorf("ConfigMap %s/%s, key %s: %w", metav1.NamespaceSystem, m.name, m.key, err)
		}
		removed = append(removed, own...)
	}
	return removed, nil
}

// Groups and names as kubeadm's phase bootstrap-token uses them.
const (
	tokenGroup  = "system:bootstrappers:kubeadm:default-node-token"
	clusterInfo = "cluster-info"
	infoSigner  = "kubeadm:bootstrap-signer-clusterinfo"
	getNodes    = "kubeadm:get-nodes"
)

// bootstrapObjects are those of kubeadm's phase bootstrap-token that an init of Muster leaves out: with them, nodes renew their certificates without
// attestation, and the holder of a bootstrap token joins. Tokens are not among them.
func (c *Client) bootstrapObjects() ([]*unstructured.Unstructured, error) {
	binding := func(name, role, group string) *unstructured.Unstructured {
		return object(rbacv1.SchemeGroupVersion.String(), "ClusterRoleBinding", "", name, map[string]any{
			"roleRef":  map[string]any{"apiGroup": rbacv1.GroupName, "kind": "ClusterRole", "name": role},
			"subjects": []any{map[string]any{"apiGroup": rbacv1.GroupName, "kind": "Group", "name": group}},
		})
	}
	rule := func(resource string, names ...any) []any {
		r := map[string]any{"apiGroups": []any{""}, "resources": []any{resource}, "verbs": []any{"get"}}
		if len(names) > 0 {
			r["resourceNames"] = names
		}
		return []any{r}
	}
	admin, err := clientcmd.Load(c.kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig: %w", err)
	}
	current := admin.Contexts[admin.CurrentContext]
	if current == nil || admin.Clusters[current.Cluster] == nil {
		return nil, fmt.Errorf("kubeconfig: it has no cluster in its context %q", admin.CurrentContext)
	}
	// Only address and authority: anonymous users may read it.
	public, err := clientcmd.Write(clientcmdapi.Config{Clusters: map[string]*clientcmdapi.Cluster{
		"": {Server: admin.Clusters[current.Cluster].Server, CertificateAuthorityData: c.rest.CAData},
	}})
	if err != nil {
		return nil, err
	}
	return []*unstructured.Unstructured{
		// The objects that running nodes need come first.
		binding("kubeadm:node-autoapprove-certificate-rotation", "system:certificates.k8s.io:certificatesigningrequests:selfnodeclient", clusterinfo.NodeGroup),
		binding("kubeadm:node-autoapprove-bootstrap", "system:certificates.k8s.io:certificatesigningrequests:nodeclient", tokenGroup),
		binding("kubeadm:kubelet-bootstrap", "system:node-bootstrapper", tokenGroup),
		object(rbacv1.SchemeGroupVersion.String(), "ClusterRole", "", getNodes, map[string]any{"rules": rule("nodes")}),
		binding(getNodes, getNodes, tokenGroup),
		object("v1", "ConfigMap", metav1.NamespacePublic, clusterInfo, map[string]any{"data": map[string]any{"kubeconfig": string(public)}}),
		object(rbacv1.SchemeGroupVersion.String(), "Role", metav1.NamespacePublic, infoSigner, map[string]any{"rules": rule("configmaps", clusterInfo)}),
		object(rbacv1.SchemeGroupVersion.String(), "RoleBinding", metav1.NamespacePublic, infoSigner, map[string]any{
			"roleRef":  map[string]any{"apiGroup": rbacv1.GroupName, "kind": "Role", "name": infoSigner},
			"subjects": []any{map[string]any{"apiGroup": rbacv1.GroupName, "kind": "User", "name": "system:anonymous"}},
		}),
	}, nil
}

// RestoreBootstrap creates kubeadm's missing objects for joins and renewals, and returns them; with dryRun, it only returns them. Existing ones are
// not changed.
func (c *Client) RestoreBootstrap(ctx context.Context, dryRun bool) (missing []string, err error) {
	all, err := c.bootstrapObjects()
	if err != nil {
		return nil, err
	}
	for _, o := range all {
		made := false
		err := once(ctx, func(ctx context.Context) error {
			have := &unstructured.Unstructured{}
			have.SetGroupVersionKind(o.GroupVersionKind())
			err := c.client.Get(ctx, client.ObjectKeyFromObject(o), have)
			if !apierrors.IsNotFound(err) {
				return err
			}
			made = true
			if dryRun {
				return nil
			}
			return client.IgnoreAlreadyExists(c.client.Create(ctx, o.DeepCopy(), client.FieldOwner(fieldManager)))
		})
		if err != nil {
			return missing, fmt.Errorf("%s: %w", describe(o), err)
		}
		if made {
			missing = append(missing, describe(o))
		}
	}
	return missing, nil
}

// ControlPlaneFlags are the arguments of a control plane's static pods that matter to a cluster without Muster.
type ControlPlaneFlags struct {
	Node string
	// Seen is false if one of the two pods is not in the API; then the other fields are not valid.
	Seen bool
	// Approves reports that its kube-controller-manager approves requests for kubelets' client certificates, SignsTokens that it also signs cluster-info for
	// bootstrap tokens, TokenAuth that its API server accepts them.
	Approves, SignsTokens, TokenAuth bool
	// ShortCertificates reports that it signs certificates for 24 hours, as Muster configures it.
	ShortCertificates bool
	// ChecksKubelets reports that its API server verifies kubelets' serving certificates.
	ChecksKubelets bool
}

// ControlPlaneFlags reads the arguments of all control planes' static pods, sorted by node.
func (c *Client) ControlPlaneFlags(ctx context.Context) (out []ControlPlaneFlags, err error) {
	err = once(ctx, func(ctx context.Context) error {
		out = nil
		var nodes corev1.NodeList
		if err := c.client.List(ctx, &nodes, client.HasLabels{clusterinfo.ControlPlaneLabel}); err != nil {
			return err
		}
		for _, n := range nodes.Items {
			manager, err := c.staticArgs(ctx, versions.ControllerManager, n.Name)
			if err != nil {
				return err
			}
			server, err := c.staticArgs(ctx, versions.APIServer, n.Name)
			if err != nil {
				return err
			}
			f := ControlPlaneFlags{Node: n.Name, Seen: manager != nil && server != nil}
			f.Approves = runs(manager["controllers"], true, approver, formerApprover)
			f.SignsTokens = runs(manager["controllers"], false, "bootstrap-signer-controller", "bootstrapsigner")
			f.TokenAuth = server["enable-bootstrap-token-auth"] == "true"
			f.ShortCertificates = manager["cluster-signing-duration"] == ownArgs["controllerManager"]["cluster-signing-duration"]
			f.ChecksKubelets = server["kubelet-certificate-authority"] != ""
			out = append(out, f)
		}
		slices.SortFunc(out, func(a, b ControlPlaneFlags) int { return strings.Compare(a.Node, b.Node) })
		return nil
	})
	return out, err
}

// staticArgs returns the arguments of a static pod's container; nil if the pod is not in the API.
func (c *Client) staticArgs(ctx context.Context, name, node string) (map[string]string, error) {
	p := &corev1.Pod{}
	if err := c.client.Get(ctx, types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: name + "-" + node}, p); Absent(err) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, container := range p.Spec.Containers {
		if container.Name != name {
			continue
		}
		for _, arg := range slices.Concat(container.Command, container.Args) {
			if key, value, ok := strings.Cut(strings.TrimPrefix(arg, "--"), "="); ok {
				out[key] = value // the last one counts
			}
		}
	}
	return out, nil
}

// runs reports whether kube-controller-manager runs a controller, by its argument controllers. byDefault reports whether *
// and an empty list include it.
func runs(list string, byDefault bool, names ...string) bool {
	items := strings.Split(list, ",")
	has := func(item string) bool { return slices.Contains(items, item) }
	switch {
	case slices.ContainsFunc(names, func(n string) bool { return has("-" + n) }):
		return false
	case slices.ContainsFunc(names, has):
		return true
	}
	return byDefault && (list == "" || has("*"))
}
