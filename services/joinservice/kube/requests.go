package kube

import (
	"slices"
	"strings"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/muster-k8s/muster/internal/service/clusterview"
	"github.com/muster-k8s/muster/services/joinservice/nodecert"
)

// requests is the view of the certificate requests of nodes: those that kubelets filed, by node, and those of tickets. The
// objects lack the request itself, see [clusterview.WatchRequests].
type requests struct {
	now func() time.Time

	mu      sync.Mutex
	follow  func(node string)               // called for each node whose requests are to be checked, or nil
	byNode  map[string]map[string]*kubelets // by kubelets, by name
	filed   map[string]filed                // by joinservices for tickets
	waiting map[string]chan *certificatesv1.CertificateSigningRequest
}

// filed is when a request for a ticket was first seen here, and the label of the minute in which it was filed.
type filed struct {
	window string
	at     time.Time
}

// kubelets is a request that a kubelet filed.
type kubelets struct {
	*certificatesv1.CertificateSigningRequest
	// decided is when a decision was first seen; zero if it is open.
	decided time.Time
	// waits is why it was last found to wait, listed whether its certificate is already in the list.
	waits  string
	listed bool
}

func newRequests() *requests {
	return &requests{
		byNode: map[string]map[string]*kubelets{}, filed: map[string]filed{},
		waiting: map[string]chan *certificatesv1.CertificateSigningRequest{},
	}
}

// await returns a channel that gets the request when it is signed or has failed.
func (r *requests) await(name string) (<-chan *certificatesv1.CertificateSigningRequest, func()) {
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

func (r *requests) set(o *certificatesv1.CertificateSigningRequest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c, ok := r.waiting[o.Name]; ok && concluded(o) {
		select {
		case c <- o:
		default: // it was already sent
		}
	}
	if window := o.Labels[clusterview.TicketWindow]; window != "" && isOurs(o.Name, o.Spec.Username) {
		if _, known := r.filed[o.Name]; !known {
			r.filed[o.Name] = filed{window, r.now()}
		}
	}
	if !isKubelets(o) {
		return
	}
	node := filer(o)
	if r.byNode[node] == nil {
		r.byNode[node] = map[string]*kubelets{}
	}
	have := r.byNode[node][o.Name]
	if have == nil || have.UID != o.UID {
		have = &kubelets{}
		r.byNode[node][o.Name] = have
	}
	have.CertificateSigningRequest = o
	if have.decided.IsZero() && decided(o) {
		have.decided = r.now()
	}
	r.wake(node)
}

func (r *requests) remove(o *certificatesv1.CertificateSigningRequest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.filed, o.Name)
	node := filer(o)
	delete(r.byNode[node], o.Name)
	if len(r.byNode[node]) == 0 {
		delete(r.byNode, node)
	}
}

// of returns the requests of a node's kubelet, the newest first.
func (r *requests) of(node string) []kubelets {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]kubelets, 0, len(r.byNode[node]))
	for _, k := range r.byNode[node] {
		out = append(out, *k)
	}
	slices.SortFunc(out, func(a, b kubelets) int {
		if c := b.CreationTimestamp.Compare(a.CreationTimestamp.Time); c != 0 {
			return c
		}
		return strings.Compare(b.Name, a.Name)
	})
	return out
}

// note changes the stored data of a request, if it still exists.
func (r *requests) note(o kubelets, change func(*kubelets)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if have := r.byNode[filer(o.CertificateSigningRequest)][o.Name]; have != nil && have.UID == o.UID {
		change(have)
	}
}

// windows returns the minutes in which existing requests for tickets were filed, each with when its latest one was first
// seen.
func (r *requests) windows() map[string]time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := map[string]time.Time{}
	for _, f := range r.filed {
		if f.at.After(out[f.window]) {
			out[f.window] = f.at
		}
	}
	return out
}

// look makes f be called for each node whose requests are to be checked from now on, and at once for all nodes with
// requests; nil ends that.
func (r *requests) look(f func(node string)) {
	r.mu.Lock()
	r.follow = f
	r.mu.Unlock()
	r.wakeAll()
}

func (r *requests) wakeAll() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for node := range r.byNode {
		r.wake(node)
	}
}

// wakeOne is for callers that do not hold r.mu.
func (r *requests) wakeOne(node string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.byNode[node]) > 0 {
		r.wake(node)
	}
}

// wake is called with r.mu held.
func (r *requests) wake(node string) {
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
