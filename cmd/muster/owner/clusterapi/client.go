// Package clusterapi contains the owner's operations on a running cluster: apply objects, enroll machines, put a
// policy in force, and read the state.
//
// Every operation can be repeated: it recognizes a finished step and changes nothing.
package clusterapi

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/cert"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/apiserver"
)

// Namespace is the namespace of Muster's services.
const Namespace = "muster-system"

// Names of ConfigMap and release.
const (
	release      = "muster"
	fieldManager = "muster"
)

// requestTimeout limits each request: an API server that accepts connections but never answers counts as down.
const requestTimeout = 30 * time.Second

// Client is an administrator's client.
type Client struct {
	kubeconfig []byte
	rest       *rest.Config
	client     client.Client
}

// Connect makes a client from a kubeconfig. It sends no request yet.
func Connect(kubeconfig []byte) (*Client, error) {
	cfg, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig: %w", err)
	}
	cfg.Timeout = requestTimeout
	cfg.QPS = -1                           // the API server's own priority and fairness is the limit; client-go's can return an error of its own just before a context ends
	cfg.UserAgent = fieldManager           // also for writes that do not name a field manager
	cfg.WarningHandler = rest.NoWarnings{} // deprecation warnings about other manifests do not belong in this report
	return newClient(cfg, kubeconfig, maxAnswer)
}

// Authorities returns the certificate authorities that the kubeconfig trusts. During a rotation of the cluster's CA there are two, in any order.
func (c *Client) Authorities() ([]*x509.Certificate, error) {
	certs, err := cert.ParseCertsPEM(c.rest.CAData)
	if err != nil {
		return nil, fmt.Errorf("the cluster's certificate authority: %w", err)
	}
	return certs, nil
}

// newClient returns a client that reads at most the given number of bytes of an answer, and of a list.
func newClient(cfg *rest.Config, kubeconfig []byte, most int64) (*Client, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		v1alpha1.AddToScheme, corev1.AddToScheme, appsv1.AddToScheme, coordinationv1.AddToScheme, certificatesv1.AddToScheme, policyv1.AddToScheme, apiextensionsv1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	cfg.Wrap(apiserver.Only)
	cfg.Wrap(apiserver.Started)
	cfg.Wrap(func(rt http.RoundTripper) http.RoundTripper { return dialed{bounded{rt, most}, cfg.Host} })
	// The mapper queries the cluster at its first use, and again for an unknown kind.
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("kubernetes client: %w", err)
	}
	return &Client{kubeconfig: kubeconfig, rest: cfg, client: paged{c, most}}, nil
}

// NoConnection is returned if no connection to the API server could be made.
type NoConnection struct {
	Server string
	err    error
}

func (n *NoConnection) Error() string { return n.err.Error() }

// Unwrap returns the cause.
func (n *NoConnection) Unwrap() error { return n.err }

// dialed marks errors of connections to the API server, to distinguish them from those of connections to machines.
type dialed struct {
	http.RoundTripper

	server string
}

func (d dialed) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := d.RoundTripper.RoundTrip(r)
	if op, network := errors.AsType[*net.OpError](err); network && op.Op == "dial" {
		err = &NoConnection{d.server, err}
	}
	return resp, err
}

// Server is the API server's address in the kubeconfig.
func (c *Client) Server() string { return c.rest.Host }

// pollEvery is the interval between two checks of a state that will change soon.
const pollEvery = 100 * time.Millisecond

// until calls try until it is done, fails permanently, or ctx ends. After a temporary error it tries again; the error after
// a timeout contains the last one.
func until(ctx context.Context, try func(context.Context) (done bool, err error)) error {
	t := time.NewTicker(pollEvery)
	defer t.Stop()
	var last error
	for {
		done, err := try(ctx)
		switch {
		case err == nil && done:
			return nil
		case err != nil && ctx.Err() != nil: // it contains only the timeout
		case err != nil && !passes(err):
			return err
		case err != nil:
			last = err
		}
		select {
		case <-ctx.Done():
			if last != nil {
				return fmt.Errorf("%w; the last problem was: %w", context.Cause(ctx), last)
			}
			return context.Cause(ctx)
		case <-t.C:
		}
	}
}

// once is [until] for a function that is done when it succeeds.
func once(ctx context.Context, try func(context.Context) error) error {
	return until(ctx, func(ctx context.Context) (bool, error) { err := try(ctx); return err == nil, err })
}

// passes reports whether an error may be temporary: an API server that restarts, an etcd election, a kind whose
// definition is not yet served.
func passes(err error) bool {
	if meta.IsNoMatchError(err) || errors.Is(err, errPending) || errors.Is(err, apiserver.ErrStarting) {
		return true
	}
	if apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err) || apierrors.IsTooManyRequests(err) ||
		apierrors.IsServiceUnavailable(err) || apierrors.IsInternalError(err) || apierrors.IsConflict(err) {
		return true
	}
	if utilnet.IsConnectionRefused(err) || utilnet.IsConnectionReset(err) || utilnet.IsProbableEOF(err) || utilnet.IsTimeout(err) || errors.Is(err, io.ErrUnexpectedEOF) {
		return true
	}
	if _, ok := errors.AsType[*net.OpError](err); ok {
		return true
	}
	// The validation of k8s.io/cli-runtime (resource.ValidateSchema) keeps only the text of the error.
	return strings.Contains(err.Error(), "failed to download openapi")
}

// errPending means that another program still has to act.
var errPending = errors.New("not there yet")

// Answers returns nil as soon as an API server answers, also with a refusal. It returns an error that wraps [tls.CertificateVerificationError] if a
// server with another certificate answers, and one that wraps [apiserver.NodeError] if a kubelet does. Otherwise it returns the last error when ctx ends.
func (c *Client) Answers(ctx context.Context) error {
	d, err := discovery.NewDiscoveryClientForConfig(c.rest)
	if err != nil {
		return err
	}
	for {
		err := d.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
		if err == nil || errors.As(err, new(apierrors.APIStatus)) {
			return nil
		}
		if _, foreign := errors.AsType[*tls.CertificateVerificationError](err); foreign {
			return err
		}
		if _, node := errors.AsType[*apiserver.NodeError](err); node {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pollEvery):
		}
	}
}

// Reachable waits until the API server reports that it is ready. An API server that has just started answers 403 to all
// clients until it has read the RBAC objects; later, /readyz is public.
func (c *Client) Reachable(ctx context.Context) error {
	d, err := discovery.NewDiscoveryClientForConfig(c.rest)
	if err != nil {
		return err
	}
	return once(ctx, func(ctx context.Context) error {
		err := d.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
		if apierrors.IsForbidden(err) {
			return fmt.Errorf("%w: %w", errPending, err)
		}
		return err
	})
}

// Absent reports whether an error means that an object, or its kind, is not in the cluster.
func Absent(err error) bool {
	return err != nil && (apierrors.IsNotFound(err) || meta.IsNoMatchError(err))
}

// Reader reads any object without caches.
func (c *Client) Reader() client.Reader { return c.client }

// Ready checks once whether the API server is ready, and returns the time of its clock, to the second.
func (c *Client) Ready(ctx context.Context) (time.Time, error) {
	code, now, err := c.readyz(ctx)
	if err != nil {
		return time.Time{}, err
	}
	if code != http.StatusOK {
		return time.Time{}, fmt.Errorf("/readyz answers %d %s", code, http.StatusText(code))
	}
	return now, nil
}

// errNoClock is returned for an answer without a time; some proxies remove it.
var errNoClock = errors.New("its answer has no time (header Date); a proxy or load balancer may have removed it")

// readyz asks the API server once whether it is ready. It also returns the time of its clock, to the second, even if it is
// not ready. If the answer has no time, the error is errNoClock.
func (c *Client) readyz(ctx context.Context) (code int, now time.Time, err error) {
	hc, err := rest.HTTPClientFor(c.rest)
	if err != nil {
		return 0, time.Time{}, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(c.rest.Host, "/")+"/readyz", http.NoBody)
	if err != nil {
		return 0, time.Time{}, err
	}
	resp, err := hc.Do(req)
	if err != nil {
		return 0, time.Time{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	if now, err = http.ParseTime(resp.Header.Get("Date")); err != nil {
		err = fmt.Errorf("%s: %w", req.URL, errNoClock)
	}
	return resp.StatusCode, now, err
}

// PodMetrics reads a pod's metrics through the API server, as text (Prometheus exposition format).
func (c *Client) PodMetrics(ctx context.Context, pod string) ([]byte, error) {
	d, err := discovery.NewDiscoveryClientForConfig(c.rest)
	if err != nil {
		return nil, err
	}
	return d.RESTClient().Get().AbsPath("/api/v1/namespaces/" + Namespace + "/pods/" + pod + ":9464/proxy/metrics").Do(ctx).Raw()
}
