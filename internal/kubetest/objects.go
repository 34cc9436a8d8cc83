package kubetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/crds"
)

// Apply creates the objects of a YAML stream whose kind is one of kinds; without kinds, all.
func (c *Cluster) Apply(ctx context.Context, stream []byte, kinds ...string) error {
	dec := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(stream), 4096)
	for {
		o := &unstructured.Unstructured{}
		if err := dec.Decode(&o.Object); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if len(o.Object) == 0 || len(kinds) > 0 && !slices.Contains(kinds, o.GetKind()) {
			continue
		}
		if err := c.Client.Create(ctx, o); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("create %s %s: %w", o.GetKind(), o.GetName(), err)
		}
	}
}

// InstallCRDs installs Muster's CRDs and waits until they are served.
func (c *Cluster) InstallCRDs(ctx context.Context) error {
	files, err := fs.Glob(crds.FS, "*.yaml")
	if err != nil || len(files) == 0 {
		return fmt.Errorf("no CRDs: %w", err)
	}
	for _, f := range files {
		b, err := crds.FS.ReadFile(f)
		if err != nil {
			return err
		}
		if err := c.Apply(ctx, b); err != nil {
			return err
		}
	}
	return c.until(ctx, func() error {
		for _, kind := range []string{"AttestationPolicyList", "AttestedNodeList", "AttestedDiskList"} {
			l := &unstructured.UnstructuredList{}
			l.SetAPIVersion("muster.dev/v1alpha1")
			l.SetKind(kind)
			if err := c.Client.List(ctx, l); err != nil {
				return err
			}
		}
		return nil
	})
}

// Namespace creates a namespace unless it exists.
func (c *Cluster) Namespace(ctx context.Context, name string) error {
	err := c.Client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	return client.IgnoreAlreadyExists(err)
}

// Pod creates a pod of a service account, and its node, unless they exist. The pod does not run; tokens can be bound to it.
func (c *Cluster) Pod(ctx context.Context, namespace, account, node string) (*corev1.Pod, error) {
	if err := client.IgnoreAlreadyExists(c.Client.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}})); err != nil {
		return nil, err
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: account + "-" + node},
		Spec:       corev1.PodSpec{NodeName: node, ServiceAccountName: account, Containers: []corev1.Container{{Name: "x", Image: "x"}}},
	}
	if err := c.Client.Create(ctx, pod); apierrors.IsAlreadyExists(err) {
		return pod, c.Client.Get(ctx, client.ObjectKeyFromObject(pod), pod)
	} else if err != nil {
		return nil, err
	}
	return pod, nil
}

// Token requests a token of a service account for an audience (empty: the API server's own), bound to
// pod unless that is nil.
func (c *Cluster) Token(ctx context.Context, namespace, account, audience string, pod *corev1.Pod) (string, error) {
	r := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: new(int64(time.Hour / time.Second))}}
	if audience != "" {
		r.Spec.Audiences = []string{audience}
	}
	if pod != nil {
		r.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID}
	}
	sa := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: account}}
	if err := c.Client.SubResource("token").Create(ctx, sa, r); err != nil {
		return "", err
	}
	return r.Status.Token, nil
}

// As returns the configuration of a service account, which has the rights that RBAC gives it.
func (c *Cluster) As(ctx context.Context, namespace, account string) (*rest.Config, error) {
	token, err := c.Token(ctx, namespace, account, "", nil)
	if err != nil {
		return nil, err
	}
	return &rest.Config{Host: c.Admin.Host, BearerToken: token, QPS: -1, TLSClientConfig: rest.TLSClientConfig{CAData: c.Admin.CAData}}, nil
}

// WriteKubeconfig writes a configuration with a bearer token to a file.
func WriteKubeconfig(path string, cfg *rest.Config) error {
	c := clientcmdapi.NewConfig()
	c.Clusters["c"] = &clientcmdapi.Cluster{Server: cfg.Host, CertificateAuthorityData: cfg.CAData}
	c.AuthInfos["u"] = &clientcmdapi.AuthInfo{Token: cfg.BearerToken}
	c.Contexts["x"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	c.CurrentContext = "x"
	return clientcmd.WriteToFile(*c, path)
}

// AsUser returns the configuration of a user with a client certificate, such as a node's.
func (c *Cluster) AsUser(name string, groups ...string) (*rest.Config, error) {
	if _, err := c.pki.user(name, groups...); err != nil {
		return nil, err
	}
	return c.pki.config(name, c.Admin.Host), nil
}

// until repeats f until it succeeds or ctx ends.
func (c *Cluster) until(ctx context.Context, f func() error) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		}
	}
}
