// Package certificates gets certificates of nodes and of the owner signed: those of tickets, and those that kubelets renew
// themselves. It decides on the requests of kubelets.
package certificates

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/access"
	"github.com/muster-k8s/muster/services/joinservice/nodecert"
	"github.com/muster-k8s/muster/services/joinservice/state"
)

// Requests is the view of the certificate requests of nodes: those that kubelets filed, by node, and those of tickets. The
// objects lack the request itself, see [clusterview.WatchRequests].
type Requests struct {
	// Sign bounds the wait for Kubernetes' signer, and twice that is how long a ticket's request is kept. [Watch] sets the
	// default; another value must be set before anything is served.
	Sign  time.Duration
	state *state.State

	mu      sync.Mutex
	follow  func(node string)            // called for each node whose requests are to be checked, or nil
	byNode  map[string]map[string]*Filed // by kubelets, by name
	tickets map[string]ticketRequest     // by joinservices for tickets
	waiting map[string]chan *certificatesv1.CertificateSigningRequest
}

// ticketRequest is when a request for a ticket was first seen here, and the label of the minute in which it was filed.
type ticketRequest struct {
	window string
	at     time.Time
}

// Filed is a request that a kubelet filed.
type Filed struct {
	*certificatesv1.CertificateSigningRequest
	// decided is when a decision was first seen; zero if it is open.
	decided time.Time
	// waits is why it was last found to wait, listed whether its certificate is already in the list.
	waits  string
	listed bool
}

// Watch returns the requests, and registers their informers. After each change of l, waiting requests are checked again:
// one may wait for its certificate to be allowed.
func Watch(s *state.State, l *access.List) (*Requests, error) {
	r := &Requests{
		Sign: signTimeout, state: s, byNode: map[string]map[string]*Filed{}, tickets: map[string]ticketRequest{},
		waiting: map[string]chan *certificatesv1.CertificateSigningRequest{},
	}
	l.OnChange(r.wakeAll)
	return r, errors.Join(
		clusterview.WatchRequests(s.Cluster, signerOf[nodecert.Client], r.set, r.remove),
		clusterview.WatchRequests(s.Cluster, signerOf[nodecert.Serving], r.set, r.remove),
	)
}

// await returns a channel that gets the request when it is signed or has failed.
func (r *Requests) await(name string) (<-chan *certificatesv1.CertificateSigningRequest, func()) {
	c := make(chan *certificatesv1.CertificateSigningRequest, 1)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiting[name] = c
	return c, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.waiting, name)
	}
}

func (r *Requests) set(o *certificatesv1.CertificateSigningRequest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c, ok := r.waiting[o.Name]; ok && concluded(o) {
		select {
		case c <- o:
		default: // it was already sent
		}
	}
	if window := o.Labels[clusterview.TicketWindow]; window != "" && isOurs(o.Name, o.Spec.Username) {
		if _, known := r.tickets[o.Name]; !known {
			r.tickets[o.Name] = ticketRequest{window, r.state.Now()}
		}
	}
	if !isKubelets(o) {
		return
	}
	node := filer(o)
	if r.byNode[node] == nil {
		r.byNode[node] = map[string]*Filed{}
	}
	have := r.byNode[node][o.Name]
	if have == nil || have.UID != o.UID {
		have = &Filed{}
		r.byNode[node][o.Name] = have
	}
	have.CertificateSigningRequest = o
	if have.decided.IsZero() && decided(o) {
		have.decided = r.state.Now()
	}
	r.wake(node)
}

func (r *Requests) remove(o *certificatesv1.CertificateSigningRequest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.tickets, o.Name)
	node := filer(o)
	delete(r.byNode[node], o.Name)
	if len(r.byNode[node]) == 0 {
		delete(r.byNode, node)
	}
}

// FiledBy returns the requests of a node's kubelet, the newest first.
func (r *Requests) FiledBy(node string) []Filed {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]Filed, 0, len(r.byNode[node]))
	for _, k := range r.byNode[node] {
		out = append(out, *k)
	}
	slices.SortFunc(out, func(a, b Filed) int {
		if c := b.CreationTimestamp.Compare(a.CreationTimestamp.Time); c != 0 {
			return c
		}
		return strings.Compare(b.Name, a.Name)
	})
	return out
}

// Delete deletes the requests of a kubelet: the next machine of its name must not get the certificates (J4).
func (r *Requests) Delete(ctx context.Context, asked []Filed) error {
	for _, o := range asked {
		if err := r.state.Cluster.Client.Delete(ctx, o.DeepCopy(), client.Preconditions{UID: &o.UID}); client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
			return clusterview.Unavailable("delete CertificateSigningRequest "+o.Name, err)
		}
	}
	return nil
}

// note changes the stored data of a request, if it still exists.
func (r *Requests) note(o Filed, change func(*Filed)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if have := r.byNode[filer(o.CertificateSigningRequest)][o.Name]; have != nil && have.UID == o.UID {
		change(have)
	}
}

// windows returns the minutes in which existing requests for tickets were filed, each with when its latest one was first
// seen.
func (r *Requests) windows() map[string]time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := map[string]time.Time{}
	for _, f := range r.tickets {
		if f.at.After(out[f.window]) {
			out[f.window] = f.at
		}
	}
	return out
}

// look makes f be called for each node whose requests are to be checked from now on, and at once for all nodes with
// requests; nil ends that.
func (r *Requests) look(f func(node string)) {
	r.mu.Lock()
	r.follow = f
	r.mu.Unlock()
	r.wakeAll()
}

func (r *Requests) wakeAll() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for node := range r.byNode {
		r.wake(node)
	}
}

// wakeOne is for callers that do not hold r.mu.
func (r *Requests) wakeOne(node string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.byNode[node]) > 0 {
		r.wake(node)
	}
}

// wake is called with r.mu held.
func (r *Requests) wake(node string) {
	if r.follow != nil {
		r.follow(node)
	}
}

// filer is the name of the node that filed a request.
func filer(o *certificatesv1.CertificateSigningRequest) string {
	return strings.TrimPrefix(o.Spec.Username, nodecert.UserPrefix)
}

// concluded reports whether the signer has finished with o.
func concluded(o *certificatesv1.CertificateSigningRequest) bool {
	return len(o.Status.Certificate) > 0 || refused(o)
}

// refused reports whether o will never have a certificate.
func refused(o *certificatesv1.CertificateSigningRequest) bool {
	return slices.ContainsFunc(o.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool {
		return c.Type == certificatesv1.CertificateFailed || c.Type == certificatesv1.CertificateDenied
	})
}

// decided reports whether o was approved or denied.
func decided(o *certificatesv1.CertificateSigningRequest) bool {
	return concluded(o) || slices.ContainsFunc(o.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool {
		return c.Type == certificatesv1.CertificateApproved
	})
}

// isKubelets reports whether a node filed o for one of the two node signers.
func isKubelets(o *certificatesv1.CertificateSigningRequest) bool {
	return (o.Spec.SignerName == signerOf[nodecert.Client] || o.Spec.SignerName == signerOf[nodecert.Serving]) &&
		strings.HasPrefix(o.Spec.Username, nodecert.UserPrefix) && slices.Contains(o.Spec.Groups, nodecert.Organization)
}

// isOurs reports whether a joinservice filed the request for a ticket.
func isOurs(name, username string) bool {
	return strings.HasPrefix(name, requestPrefix) && strings.HasPrefix(username, "system:serviceaccount:") && strings.HasSuffix(username, ":joinservice")
}
