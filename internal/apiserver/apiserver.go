// Package apiserver checks answers of an API server: that they do not come from a kubelet, and that a refusal does not come from one that is starting.
package apiserver

import (
	"fmt"
	"net/http"
	"slices"

	utilnet "k8s.io/apimachinery/pkg/util/net"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// NodeError is returned for an answer of a node. The cluster's authority signs the serving certificates of kubelets too, and those have addresses of the
// node. So an attacker on the network who forwards a connection for a control plane's address to its kubelet passes the client's verification. A kubelet
// answers 404 to paths that it does not know, which a client would take for an object that does not exist.
type NodeError struct {
	// Host is the address that the client asked, Node the name in the certificate.
	Host, Node string
}

func (e *NodeError) Error() string {
	return fmt.Sprintf("%s answered with the certificate of the kubelet %q, not with that of the API server", e.Host, e.Node)
}

// Only returns a transport that fails with a [NodeError] if the server's certificate has the organization of nodes (system:nodes), see
// [k8s.io/client-go/rest.Config.Wrap]. The request was sent then, so it protects no bearer token.
func Only(rt http.RoundTripper) http.RoundTripper { return only{rt} }

type only struct{ http.RoundTripper }

func (o only) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := o.RoundTripper.RoundTrip(r)
	if err != nil || resp.TLS == nil || len(resp.TLS.PeerCertificates) == 0 {
		return resp, err
	}
	if subject := resp.TLS.PeerCertificates[0].Subject; slices.Contains(subject.Organization, clusterinfo.NodeGroup) {
		_ = resp.Body.Close()
		return nil, &NodeError{Host: r.URL.Host, Node: subject.CommonName}
	}
	return resp, nil
}

// CloseIdleConnections is called by [http.Client.CloseIdleConnections].
func (o only) CloseIdleConnections() { utilnet.CloseIdleConnectionsFor(o.RoundTripper) }
