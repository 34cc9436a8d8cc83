// Package token makes the bootstrap tokens of tickets, where kubeadm discovers the cluster by one, and deletes each when
// its node is Ready.
package token

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/objects/jointoken"
	"github.com/muster-k8s/muster/internal/service/clusterview"
)

// tokenSecret is the length of a token's secret half, in characters.
const tokenSecret = 16

// Token is a bootstrap token. It prints as its type's name (K3).
type Token struct{ id, secret string }

// String keeps the secret out of logs.
func (Token) String() string { return "token.Token[secret]" }

// GoString does the same for %#v.
func (t Token) GoString() string { return t.String() }

// Expose returns the token in the form that kubeadm needs: ID.SECRET.
func (t Token) Expose() string { return t.id + "." + t.secret }

const tokenAlphabet = "abcdefghijklmnopqrstuvwxyz234567" // 32 of the 36 characters that a token may have: no bias

func spell(b []byte) string {
	out := make([]byte, len(b))
	for i, v := range b {
		out[i] = tokenAlphabet[v%32]
	}
	return string(out)
}

// tokenID follows from the ticket, so that each replica can delete the token without stored state, and without the right to
// list or read Secrets.
func tokenID(ticket string) string {
	sum := sha256.Sum256([]byte("muster/v1/token-id\x00" + ticket))
	return spell(sum[:6])
}

// Issuer makes and deletes tokens.
type Issuer struct {
	cluster *clusterview.Cluster
	log     *slog.Logger
}

// NewIssuer returns an Issuer.
func NewIssuer(c *clusterview.Cluster, log *slog.Logger) *Issuer { return &Issuer{c, log} }

// Issue creates a ticket's bootstrap token: a Secret of Kubernetes' bootstrap-token type, which Kubernetes deletes after
// [jointoken.Life]. Errors are refusals.
func (k *Issuer) Issue(ctx context.Context, ticket string) (Token, error) {
	b := make([]byte, tokenSecret)
	_, _ = rand.Read(b) // never fails
	t := Token{id: tokenID(ticket), secret: spell(b)}
	o := tokenObject(t.id)
	o.Type = corev1.SecretTypeBootstrapToken
	o.StringData = map[string]string{
		"token-id": t.id, "token-secret": t.secret, "description": "Muster's join ticket " + ticket,
		"usage-bootstrap-authentication": "true", "usage-bootstrap-signing": "true",
		jointoken.GroupsKey: jointoken.Group, jointoken.ExpirationKey: time.Now().Add(jointoken.Life).UTC().Format(time.RFC3339),
	}
	if err := k.cluster.Client.Create(ctx, o); err != nil {
		return Token{}, clusterview.Unavailable("create a bootstrap token", err)
	}
	return t, nil
}

func tokenObject(id string) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: jointoken.Namespace, Name: "bootstrap-token-" + id}}
}

// Drop deletes a ticket's token, if it exists. It also works after ctx has ended; a failure is only logged, since the token
// expires.
func (k *Issuer) Drop(ctx context.Context, ticket string) {
	ctx, cancel := clusterview.Outlive(ctx)
	defer cancel()
	if err := client.IgnoreNotFound(k.cluster.Client.Delete(ctx, tokenObject(tokenID(ticket)))); err != nil {
		k.log.WarnContext(ctx, "a ticket's token could not be deleted; it ends by itself", "ticket", ticket, "within", jointoken.Life.String(), "err", err)
	}
}

// Sweeper deletes the token of a ticket when its node is Ready. Each replica does so: the one that issued it may no longer
// run.
type Sweeper struct {
	issuer *Issuer
	mu     sync.Mutex
	due    map[string]bool      // tickets whose token is deleted next
	seen   map[string]time.Time // tickets that were processed, and when they were issued
	nodes  map[string]time.Time // since when a node is Ready
	kick   chan struct{}
}

// NewSweeper returns a Sweeper. Call it before the informers run.
func (k *Issuer) NewSweeper() (*Sweeper, error) {
	s := &Sweeper{issuer: k, due: map[string]bool{}, seen: map[string]time.Time{}, nodes: map[string]time.Time{}, kick: make(chan struct{}, 1)}
	if err := clusterview.Watch(k.cluster, s.setNode, s.removeNode); err != nil {
		return nil, err
	}
	return s, clusterview.Watch(k.cluster, s.setEnrollment, func(*v1alpha1.AttestedNode) {})
}

func (s *Sweeper) setNode(n *corev1.Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.nodes, n.Name)
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
			s.nodes[n.Name] = c.LastTransitionTime.Time
		}
	}
	if own := s.issuer.cluster.Nodes.ByName(n.Name); own != nil {
		s.look(own)
	}
}

func (s *Sweeper) removeNode(n *corev1.Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.nodes, n.Name)
}

func (s *Sweeper) setEnrollment(n *v1alpha1.AttestedNode) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.look(n)
}

// look must be called with mu held. A node that was Ready before its ticket has not used the token yet.
func (s *Sweeper) look(n *v1alpha1.AttestedNode) {
	t := n.Status.Ticket
	since, ready := s.nodes[n.Name]
	if t == nil || !ready || since.Before(t.IssuedAt.Time) || time.Since(t.IssuedAt.Time) > jointoken.Life {
		return
	}
	for id, at := range s.seen {
		if time.Since(at) > jointoken.Life {
			delete(s.seen, id)
		}
	}
	if _, done := s.seen[t.ID]; done {
		return
	}
	s.seen[t.ID], s.due[t.ID] = t.IssuedAt.Time, true
	select {
	case s.kick <- struct{}{}:
	default: // it is already awake
	}
}

// Serve deletes tokens until ctx ends.
func (s *Sweeper) Serve(ctx context.Context) error {
	for {
		s.mu.Lock()
		due := s.due
		s.due = map[string]bool{}
		s.mu.Unlock()
		for ticket := range due {
			s.issuer.Drop(ctx, ticket)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-s.kick:
		}
	}
}

// Credential is what a ticket contains for `kubeadm join` to discover its cluster.
type Credential string

// The join credentials.
const (
	// CredentialCertificate is the kubelet's own certificate, which every ticket has. The default.
	CredentialCertificate Credential = "certificate"
	// CredentialToken is an additional bootstrap token, for clusters that Muster did not initialize.
	CredentialToken Credential = jointoken.Credential
)

// ParseCredential parses one.
func ParseCredential(s string) (Credential, error) {
	switch c := Credential(s); c {
	case CredentialCertificate, CredentialToken:
		return c, nil
	}
	return "", fmt.Errorf("join credential %q: want %s or %s", s, CredentialCertificate, CredentialToken)
}
