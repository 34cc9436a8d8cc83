package upgrade

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterobjects"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
)

// kubeadm's ConfigMap of the cluster, and its key.
const (
	configMap = "kubeadm-config"
	configKey = "ClusterConfiguration"
)

// apiTime is how long a change of the cluster's objects is tried.
const apiTime = 5 * time.Minute

// Connect returns the cluster with the rights of this control plane's admin.conf.
func Connect(root, node string, log *slog.Logger) (Cluster, error) {
	u, err := renewal.ConnectUpgrade(root, node, log)
	if err != nil {
		return nil, err
	}
	return cluster{u, u.API()}, nil
}

type cluster struct {
	renewal.Upgrading
	api kubernetes.Interface
}

// SetTags implements [Cluster].
func (c cluster) SetTags(ctx context.Context, images versions.Images) error {
	maps := c.api.CoreV1().ConfigMaps(metav1.NamespaceSystem)
	return persist(ctx, func(ctx context.Context) error {
		m, err := maps.Get(ctx, configMap, metav1.GetOptions{})
		if err != nil {
			return err
		}
		text, err := kubeadm.SetImages([]byte(m.Data[configKey]), images)
		if err != nil || string(text) == m.Data[configKey] {
			return err
		}
		m.Data[configKey] = string(text)
		_, err = maps.Update(ctx, m, metav1.UpdateOptions{})
		return err
	})
}

// SetAddons implements [Cluster]. A cluster without kube-proxy, or without CoreDNS, has its own instead.
func (c cluster) SetAddons(ctx context.Context, images versions.Images) error {
	return persist(ctx, func(ctx context.Context) error { return c.setAddons(ctx, images) })
}

// persist repeats a step for a while: this control plane's own API server has just been started, and connections to it break.
func persist(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, apiTime)
	defer cancel()
	var final error
	err := clusterobjects.Persist(ctx, func(ctx context.Context) error {
		err := do(ctx)
		if errors.Is(err, errNotKubeadms) {
			final, err = err, nil
		}
		return err
	})
	return cmp.Or(final, err)
}

// errNotKubeadms means that an object is not as kubeadm makes it.
var errNotKubeadms = errors.New("it is not kubeadm's")

func (c cluster) setAddons(ctx context.Context, images versions.Images) error {
	apps := c.api.AppsV1()
	proxy, err := apps.DaemonSets(metav1.NamespaceSystem).Get(ctx, "kube-proxy", metav1.GetOptions{})
	if err == nil {
		var patch []byte
		if patch, err = imagePatch(proxy.Spec.Template.Spec.Containers, "kube-proxy", images[versions.Proxy]); patch != nil {
			_, err = apps.DaemonSets(metav1.NamespaceSystem).Patch(ctx, proxy.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
		}
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("the image of kube-proxy: %w", err)
	}
	dns, err := apps.Deployments(metav1.NamespaceSystem).Get(ctx, "coredns", metav1.GetOptions{})
	if err == nil {
		var patch []byte
		if patch, err = imagePatch(dns.Spec.Template.Spec.Containers, "coredns", images[versions.CoreDNS]); patch != nil {
			_, err = apps.Deployments(metav1.NamespaceSystem).Patch(ctx, dns.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
		}
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("the image of CoreDNS: %w", err)
	}
	return nil
}

// imagePatch returns the patch that sets the image of a container by digest (B9); nil if it has it.
func imagePatch(containers []corev1.Container, name string, image versions.Image) ([]byte, error) {
	i := slices.IndexFunc(containers, func(c corev1.Container) bool { return c.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("there is no container %s: %w; set its image to %s yourself, and order the upgrade again", name, errNotKubeadms, image)
	}
	if containers[i].Image == image.String() {
		return nil, nil
	}
	type object = map[string]any
	return json.Marshal(object{"spec": object{"template": object{"spec": object{"containers": []object{{"name": name, "image": image.String()}}}}}})
}
