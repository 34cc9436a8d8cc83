package clusterapi

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// RewriteSecrets makes the API servers encrypt every Secret with the key that they use now: they write an unchanged object only if it is encrypted
// with another key. It first reads all names, and nothing else of the Secrets, because a list with writes between its pages takes longer than etcd
// keeps its revision.
func (c *Client) RewriteSecrets(ctx context.Context) (n int, err error) {
	names, err := c.secretNames(ctx)
	if err != nil {
		return 0, fmt.Errorf("list all Secrets: %w", err)
	}
	for i, name := range names {
		s := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
		s.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
		err := once(ctx, func(ctx context.Context) error {
			return client.IgnoreNotFound(c.client.Patch(ctx, s, client.RawPatch(types.MergePatchType, []byte("{}"))))
		})
		if err != nil {
			return i, fmt.Errorf("write Secret %s/%s again: %w", s.Namespace, s.Name, err)
		}
	}
	return len(names), nil
}

// secretsAtOnce limits the Secrets in memory. That many fit into one answer ([maxAnswer]), whatever tenants have put into them: etcd takes 1.5 MiB of each.
const secretsAtOnce = 100

// secretNames returns the names of all Secrets. Each page has an allowance of its own: tenants could fill one for all pages with their annotations.
func (c *Client) secretNames(ctx context.Context) (names []types.NamespacedName, err error) {
	next := ""
	for range maxPages * pageSize / secretsAtOnce {
		page := &metav1.PartialObjectMetadataList{}
		page.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("SecretList"))
		err := once(ctx, func(ctx context.Context) error {
			return c.client.List(ctx, page, client.Limit(secretsAtOnce), client.Continue(next))
		})
		if s, ok := errors.AsType[*apierrors.StatusError](err); ok && apierrors.IsResourceExpired(err) && s.ErrStatus.Continue != "" {
			next = s.ErrStatus.Continue // the rest, as it is now: what was made meanwhile is encrypted with the new key
			continue
		}
		if err != nil {
			return nil, err
		}
		for i := range page.Items {
			names = append(names, types.NamespacedName{Namespace: page.Items[i].Namespace, Name: page.Items[i].Name})
		}
		if next = page.Continue; next == "" {
			return names, nil
		}
	}
	return nil, fmt.Errorf("the API server has more than %d pages of Secrets", maxPages*pageSize/secretsAtOnce)
}

// TokenSecrets returns the names of the Secrets with a service account's token that was signed by another key than the one with this ID. Such tokens
// do not expire, and no controller recreates them.
func (c *Client) TokenSecrets(ctx context.Context, than string) (names []string, err error) {
	next := ""
	for {
		var list corev1.SecretList
		err := once(ctx, func(ctx context.Context) error {
			return c.client.List(ctx, &list, client.Limit(secretsAtOnce), client.Continue(next), client.MatchingFields{"type": string(corev1.SecretTypeServiceAccountToken)})
		})
		if err != nil {
			return nil, err
		}
		for _, s := range list.Items {
			if token := s.Data[corev1.ServiceAccountTokenKey]; len(token) > 0 && keyOf(token) != than {
				names = append(names, s.Namespace+"/"+s.Name)
			}
		}
		if next = list.Continue; next == "" {
			return names, nil
		}
	}
}

// ReplaceServices deletes Muster's pods, one after another, and waits for each until its replacement is Ready. A new pod has a token of the key that
// the API servers use now.
func (c *Client) ReplaceServices(ctx context.Context, report func(string)) error {
	var before corev1.PodList
	if err := once(ctx, func(ctx context.Context) error {
		return c.client.List(ctx, &before, client.InNamespace(Namespace), partOf)
	}); err != nil {
		return err
	}
	for i := range before.Items {
		old := &before.Items[i]
		report("pod " + old.Name + " is replaced")
		err := once(ctx, func(ctx context.Context) error {
			return client.IgnoreNotFound(c.client.Delete(ctx, old, client.Preconditions{UID: &old.UID}))
		})
		if err == nil {
			err = until(ctx, func(ctx context.Context) (bool, error) { return c.replaced(ctx, old) })
		}
		if err != nil {
			return fmt.Errorf("replace pod %s of %s on %s: %w", old.Name, Namespace, old.Spec.NodeName, err)
		}
	}
	return nil
}

// replaced reports whether another pod of the same service is Ready on the node of a pod.
func (c *Client) replaced(ctx context.Context, old *corev1.Pod) (bool, error) {
	const name = "app.kubernetes.io/name"
	var list corev1.PodList
	err := c.client.List(ctx, &list, client.InNamespace(Namespace), client.MatchingLabels{name: old.Labels[name]})
	return slices.ContainsFunc(list.Items, func(p corev1.Pod) bool {
		return p.UID != old.UID && p.Spec.NodeName == old.Spec.NodeName && p.DeletionTimestamp == nil && podReady(&p)
	}), err
}

// keyOf returns the ID of the key that has signed a token, in hexadecimal digits, from its header; empty if the token has none. Kubernetes' key IDs
// are the SHA-256 of the public key, like those of rotations.
func keyOf(token []byte) string {
	head, _, _ := bytes.Cut(token, []byte("."))
	text, err := base64.RawURLEncoding.DecodeString(string(head))
	if err != nil {
		return ""
	}
	var h struct {
		KeyID string `json:"kid"`
	}
	if err := json.Unmarshal(text, &h); err != nil {
		return ""
	}
	id, err := base64.RawURLEncoding.DecodeString(h.KeyID)
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%x", id)
}

// authenticationMap is the ConfigMap from which aggregated API servers and other programs read what the API servers accept.
const authenticationMap = "extension-apiserver-authentication"

// publishedAs maps each authority in [authenticationMap] to its key there.
var publishedAs = map[clusterinfo.RotatedKey]string{
	clusterinfo.FrontProxyCA: "requestheader-client-ca-file",
	clusterinfo.ClusterCA:    "client-ca-file",
}

// DropAuthorities removes from [authenticationMap] all authorities of a kind except keep (PEM), because API servers only add to it. It does nothing
// for other kinds of keys.
func (c *Client) DropAuthorities(ctx context.Context, kind clusterinfo.RotatedKey, but string) error {
	key, published := publishedAs[kind]
	if !published {
		return nil
	}
	return once(ctx, func(ctx context.Context) error {
		m := &corev1.ConfigMap{}
		if err := c.client.Get(ctx, types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: authenticationMap}, m); err != nil {
			return err
		}
		has := slices.Sorted(slices.Values(blocks(m.Data[key])))
		if want := slices.Sorted(slices.Values(blocks(but))); slices.Equal(has, want) {
			return nil
		}
		if m.Data == nil {
			m.Data = map[string]string{}
		}
		m.Data[key] = strings.Join(blocks(but), "")
		return c.client.Update(ctx, m) // a conflict is tried again
	})
}

// SetClusterInfo sets the authorities, in PEM, by which kubeadm discovers the cluster with a token. A cluster that Muster
// has initialized has no such object.
func (c *Client) SetClusterInfo(ctx context.Context, authorities []byte) error {
	return once(ctx, func(ctx context.Context) error {
		m := &corev1.ConfigMap{}
		if err := c.client.Get(ctx, types.NamespacedName{Namespace: metav1.NamespacePublic, Name: clusterInfo}, m); err != nil {
			return client.IgnoreNotFound(err)
		}
		conf, err := clientcmd.Load([]byte(m.Data["kubeconfig"]))
		if err != nil {
			return fmt.Errorf("the kubeconfig of the ConfigMap %s: %w", clusterInfo, err)
		}
		same := true
		for _, cluster := range conf.Clusters {
			same = same && bytes.Equal(cluster.CertificateAuthorityData, authorities)
			cluster.CertificateAuthorityData = authorities
		}
		if same {
			return nil
		}
		text, err := clientcmd.Write(*conf)
		if err != nil {
			return err
		}
		m.Data["kubeconfig"] = string(text)
		return c.client.Update(ctx, m) // a conflict is tried again
	})
}

// blocks returns the blocks of a text in PEM.
func blocks(text string) (out []string) {
	for rest := []byte(text); ; {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			return out
		}
		out = append(out, string(pem.EncodeToMemory(b)))
	}
}
