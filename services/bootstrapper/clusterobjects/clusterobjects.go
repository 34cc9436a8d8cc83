// Package clusterobjects writes the objects that Muster needs in a new Kubernetes cluster: the useful parts of kubeadm's skipped bootstrap-token phase,
// the root secret for the key service, and the cluster's data for joining machines.
//
// The first machine writes them, once, with kubeadm's administrator credentials. Every object is created or compared, so that a repeated init accepts
// its own objects and never overwrites another root secret.
package clusterobjects

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/muster-k8s/muster/internal/apiserver"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/retry"
)

// These are the names of the written objects; package clusterinfo has the ConfigMap's.
const (
	RootSecret    = "muster-kms-root" //nolint:gosec // the object's name, not its content
	rootKey       = "root"
	saltKey       = "salt"
	kubeProxyRole = "muster:kube-proxy-config"
)

// State is all that is written. Root and Salt are secrets of 32 bytes.
type State struct {
	Info       clusterinfo.Info
	Root, Salt []byte
	// Proxy has kube-proxy's objects, its image by digest (B9).
	Proxy []runtime.Object
}

// requestTimeout bounds one request to the API server.
const requestTimeout = 20 * time.Second

// ErrForeign means that the cluster already has another root secret.
var ErrForeign = errors.New("the cluster already has another root secret")

// Write writes s with an administrator's kubeconfig. It retries while the API server can't be reached, until ctx ends.
func Write(ctx context.Context, kubeconfig []byte, s State) error {
	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return fmt.Errorf("administrator's kubeconfig: %w", err)
	}
	config.Timeout = requestTimeout
	config.UserAgent = "muster-bootstrapper"
	config.ContentType = "application/json"
	config.Wrap(apiserver.Only)
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return err
	}
	defer client.CloseIdleConnections()
	c, err := kubernetes.NewForConfigAndClient(config, client)
	if err != nil {
		return err
	}
	w := writer{c}
	for _, step := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"let the API server use kubelets", w.apiServerMayUseKubelets},
		{"let nodes read kube-proxy's configuration", w.nodesMayReadKubeProxy},
		{"kube-proxy", func(ctx context.Context) error { return w.proxy(ctx, s.Proxy) }},
		{"namespace " + clusterinfo.Namespace, w.namespace},
		{"secret " + RootSecret, func(ctx context.Context) error { return w.rootSecret(ctx, s) }},
		{"config map " + clusterinfo.ConfigMap, func(ctx context.Context) error { return w.clusterConfig(ctx, s.Info) }},
	} {
		if err := Persist(ctx, step.do); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return nil
}

// Persist repeats a step until it succeeds, ctx ends, or the API server would answer the same again.
func Persist(ctx context.Context, do func(context.Context) error) error {
	pause := retry.Backoff{Min: 200 * time.Millisecond, Max: 5 * time.Second}
	for {
		err := do(ctx)
		if err == nil || errors.Is(err, ErrForeign) || final(err) {
			return err
		}
		if werr := retry.Wait(ctx, pause.Next(0)); werr != nil {
			return errors.Join(werr, err)
		}
	}
}

// final reports whether a retry would get the same answer of the API server. Forbidden is not final: the bootstrap RBAC objects appear shortly after the
// API server.
func final(err error) bool {
	return apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || apierrors.IsUnauthorized(err) || apierrors.IsMethodNotSupported(err)
}

type writer struct{ kubernetes.Interface }

// apiServerMayUseKubelets writes a part of the phase that init skips; without it, logs, exec and port-forward fail.
func (w writer) apiServerMayUseKubelets(ctx context.Context) error {
	want := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "kubeadm:apiserver-kubelet-client"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:kubelet-api-admin"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "kube-apiserver-kubelet-client"}},
	}
	api := w.RbacV1().ClusterRoleBindings()
	_, err := api.Create(ctx, want, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	have, err := api.Get(ctx, want.Name, metav1.GetOptions{})
	if err != nil || equality.Semantic.DeepEqual(have.Subjects, want.Subjects) {
		return err
	}
	have.Subjects = want.Subjects
	_, err = api.Update(ctx, have, metav1.UpdateOptions{})
	return err
}

// nodesMayReadKubeProxy lets nodes read the third of the ConfigMaps that kubeadm join reads; kubeadm lets them read the other two. Without it a join
// waits for seven attempts.
func (w writer) nodesMayReadKubeProxy(ctx context.Context) error {
	role := &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Name: kubeProxyRole, Namespace: metav1.NamespaceSystem},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"configmaps"}, ResourceNames: []string{"kube-proxy"}, Verbs: []string{"get"}}},
	}
	if _, err := w.RbacV1().Roles(role.Namespace).Create(ctx, role, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	binding := &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: kubeProxyRole, Namespace: metav1.NamespaceSystem},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: kubeProxyRole},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: clusterinfo.NodeGroup}},
	}
	_, err := w.RbacV1().RoleBindings(binding.Namespace).Create(ctx, binding, metav1.CreateOptions{})
	return ifNew(err)
}

// proxy writes the objects of kubeadm's kube-proxy phase.
func (w writer) proxy(ctx context.Context, objects []runtime.Object) error {
	for _, o := range objects {
		var err error
		switch o := o.DeepCopyObject().(type) {
		case *corev1.ServiceAccount:
			err = put(ctx, w.CoreV1().ServiceAccounts(o.Namespace), o)
		case *corev1.ConfigMap:
			err = put(ctx, w.CoreV1().ConfigMaps(o.Namespace), o)
		case *rbacv1.ClusterRoleBinding:
			err = put(ctx, w.RbacV1().ClusterRoleBindings(), o)
		case *rbacv1.Role:
			err = put(ctx, w.RbacV1().Roles(o.Namespace), o)
		case *rbacv1.RoleBinding:
			err = put(ctx, w.RbacV1().RoleBindings(o.Namespace), o)
		case *appsv1.DaemonSet:
			err = put(ctx, w.AppsV1().DaemonSets(o.Namespace), o)
		default:
			err = fmt.Errorf("an object that kube-proxy does not have: %T", o)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// put creates an object, or updates an existing one to the same content.
func put[T metav1.Object](ctx context.Context, api interface {
	Create(ctx context.Context, o T, options metav1.CreateOptions) (T, error)
	Get(ctx context.Context, name string, options metav1.GetOptions) (T, error)
	Update(ctx context.Context, o T, options metav1.UpdateOptions) (T, error)
}, o T,
) error {
	_, err := api.Create(ctx, o, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	have, err := api.Get(ctx, o.GetName(), metav1.GetOptions{})
	if err != nil {
		return err
	}
	o.SetResourceVersion(have.GetResourceVersion())
	_, err = api.Update(ctx, o, metav1.UpdateOptions{})
	return err
}

func (w writer) namespace(ctx context.Context) error {
	_, err := w.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: clusterinfo.Namespace}}, metav1.CreateOptions{})
	return ifNew(err)
}

// rootSecret writes the root secret to the only place on a machine that has it (K3), and never overwrites it: every disk's key depends on it.
func (w writer) rootSecret(ctx context.Context, s State) error {
	immutable := true
	api := w.CoreV1().Secrets(clusterinfo.Namespace)
	_, err := api.Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: RootSecret, Namespace: clusterinfo.Namespace},
		Type:       corev1.SecretTypeOpaque,
		Immutable:  &immutable,
		Data:       map[string][]byte{rootKey: s.Root, saltKey: s.Salt},
	}, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	have, err := api.Get(ctx, RootSecret, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if subtle.ConstantTimeCompare(have.Data[rootKey], s.Root)&subtle.ConstantTimeCompare(have.Data[saltKey], s.Salt) != 1 {
		return ErrForeign
	}
	return nil
}

func (w writer) clusterConfig(ctx context.Context, info clusterinfo.Info) error {
	b, err := info.Marshal()
	if err != nil {
		return err
	}
	api := w.CoreV1().ConfigMaps(clusterinfo.Namespace)
	want := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: clusterinfo.ConfigMap, Namespace: clusterinfo.Namespace},
		Data:       map[string]string{clusterinfo.Key: string(b)},
	}
	_, err = api.Create(ctx, want, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	have, err := api.Get(ctx, want.Name, metav1.GetOptions{})
	if err != nil || equality.Semantic.DeepEqual(have.Data, want.Data) {
		return err
	}
	have.Data = want.Data
	_, err = api.Update(ctx, have, metav1.UpdateOptions{})
	return err
}

func ifNew(err error) error {
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}
