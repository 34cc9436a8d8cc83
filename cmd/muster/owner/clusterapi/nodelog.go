package clusterapi

import (
	"context"
	"io"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
)

// NodeLog opens a file below /var/log of a node, which its kubelet serves through the API server. The caller has to limit its size, and the
// time by ctx.
func (c *Client) NodeLog(ctx context.Context, node string, path ...string) (io.ReadCloser, error) {
	cfg := rest.CopyConfig(c.rest)
	cfg.Timeout, cfg.APIPath, cfg.WrapTransport = 0, "/api", nil
	cfg.GroupVersion, cfg.NegotiatedSerializer = &corev1.SchemeGroupVersion, scheme.Codecs.WithoutConversion()
	r, err := rest.RESTClientFor(cfg)
	if err != nil {
		return nil, err
	}
	return r.Get().Resource("nodes").Name(node).SubResource("proxy").Suffix(append([]string{"logs"}, path...)...).Stream(ctx)
}
