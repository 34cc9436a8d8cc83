package renewal

import (
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/cert"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

const admins = "kubeadm:cluster-admins"

func request(t *testing.T, r *x509.CertificateRequest) (*ecdsa.PrivateKey, *certificatesv1.CertificateSigningRequest) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, r, key)
	if err != nil {
		t.Fatal(err)
	}
	return key, &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: "r"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			SignerName: clusterinfo.AdministratorSigner, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
			Username: "kubernetes-admin", Groups: []string{admins, "system:authenticated"},
		},
	}
}

// oneRequest is a cluster with one request.
type oneRequest struct {
	r certificatesv1.CertificateSigningRequest
}

func (k *oneRequest) List(context.Context, metav1.ListOptions) (*certificatesv1.CertificateSigningRequestList, error) {
	return &certificatesv1.CertificateSigningRequestList{Items: []certificatesv1.CertificateSigningRequest{*k.r.DeepCopy()}}, nil
}

func (k *oneRequest) UpdateApproval(_ context.Context, _ string, r *certificatesv1.CertificateSigningRequest, _ metav1.UpdateOptions) (*certificatesv1.CertificateSigningRequest, error) {
	has := func(r *certificatesv1.CertificateSigningRequest, kind certificatesv1.RequestConditionType) bool {
		return slices.ContainsFunc(r.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool { return c.Type == kind })
	}
	if has(r, certificatesv1.CertificateApproved) && has(r, certificatesv1.CertificateDenied) {
		return nil, errors.New("approved and denied: the API server takes no such thing")
	}
	k.r.Status.Conditions = r.Status.Conditions
	return k.r.DeepCopy(), nil
}

func (k *oneRequest) UpdateStatus(_ context.Context, r *certificatesv1.CertificateSigningRequest, _ metav1.UpdateOptions) (*certificatesv1.CertificateSigningRequest, error) {
	k.r.Status.Certificate, k.r.Status.Conditions = r.Status.Certificate, r.Status.Conditions
	return k.r.DeepCopy(), nil
}

func TestAnAdministratorsCertificateIsRenewedForItsHolder(t *testing.T) {
	own := pkix.Name{CommonName: "kubernetes-admin", Organization: []string{admins}}
	for name, tt := range map[string]struct {
		ask    x509.CertificateRequest
		change func(*certificatesv1.CertificateSigningRequest)
		want   bool
	}{
		"its holder asks": {ask: x509.CertificateRequest{Subject: own}, want: true},
		"a node asks": {ask: x509.CertificateRequest{Subject: own}, change: func(r *certificatesv1.CertificateSigningRequest) {
			r.Spec.Username, r.Spec.Groups = "system:node:node2", []string{"system:nodes", "system:authenticated"}
		}},
		"a node asks for itself as administrator": {ask: x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:node2", Organization: []string{admins}}}, change: func(r *certificatesv1.CertificateSigningRequest) {
			r.Spec.Username, r.Spec.Groups = "system:node:node2", []string{"system:nodes", "system:authenticated"}
		}},
		"for another name":       {ask: x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:node2", Organization: []string{admins}}}},
		"for a stronger group":   {ask: x509.CertificateRequest{Subject: pkix.Name{CommonName: "kubernetes-admin", Organization: []string{"system:masters"}}}},
		"for one more group":     {ask: x509.CertificateRequest{Subject: pkix.Name{CommonName: "kubernetes-admin", Organization: []string{admins, "system:masters"}}}},
		"for no group":           {ask: x509.CertificateRequest{Subject: pkix.Name{CommonName: "kubernetes-admin"}}},
		"with a further subject": {ask: x509.CertificateRequest{Subject: pkix.Name{CommonName: "kubernetes-admin", Organization: []string{admins}, OrganizationalUnit: []string{"x"}}}},
		"with a server's name":   {ask: x509.CertificateRequest{Subject: own, DNSNames: []string{"kubernetes"}}},
		"for servers too": {ask: x509.CertificateRequest{Subject: own}, change: func(r *certificatesv1.CertificateSigningRequest) {
			r.Spec.Usages = append(r.Spec.Usages, certificatesv1.UsageServerAuth)
		}},
		"of another key": {ask: x509.CertificateRequest{Subject: own}, change: func(r *certificatesv1.CertificateSigningRequest) {
			block, _ := pem.Decode(r.Spec.Request)
			block.Bytes[len(block.Bytes)-1] ^= 1
			r.Spec.Request = pem.EncodeToMemory(block)
		}},
		"with something behind it": {ask: x509.CertificateRequest{Subject: own}, change: func(r *certificatesv1.CertificateSigningRequest) {
			r.Spec.Request = append(r.Spec.Request, r.Spec.Request...)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			root := newControlPlane(t)
			now := at(t, root, 0.5)
			key, r := request(t, &tt.ask)
			if tt.change != nil {
				tt.change(r)
			}
			k := &oneRequest{*r}
			a := administrators{k, Config{Root: root, Kubeadm: image, Now: func() time.Time { return now }, Log: slog.New(slog.DiscardHandler)}}
			for range 2 { // decided once, and then unchanged
				if err := a.sign(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			r = &k.r
			if len(r.Status.Conditions) != 1 {
				t.Fatalf("conditions %v", r.Status.Conditions)
			}
			if !tt.want {
				if len(r.Status.Certificate) > 0 || r.Status.Conditions[0].Type != certificatesv1.CertificateDenied {
					t.Errorf("issued: %v", r.Status.Conditions)
				}
				return
			}
			list, err := cert.ParseCertsPEM(r.Status.Certificate)
			if err != nil {
				t.Fatal(err)
			}
			ca, err := load(filepath.Join(root, folder, clusterCA))
			if err != nil {
				t.Fatal(err)
			}
			c := list[0]
			if err := c.CheckSignatureFrom(ca); err != nil || !key.PublicKey.Equal(c.PublicKey) || c.IsCA || !c.NotAfter.Equal(now.UTC().Add(life).Truncate(time.Second)) {
				t.Errorf("%v: %s, %s, %s", err, c.Subject, c.NotAfter, now)
			}
		})
	}
}

// Neither the client that filed a request for the owner nor its text is trusted: each part of the order is compared with this machine's own data (J9).
func TestAnOwnersOrderIsVerifiedByWhoSigns(t *testing.T) {
	own := pkix.Name{CommonName: ownerorder.Administrator, Organization: []string{ownerorder.Group}}
	public, owner, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	_, other, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	ours := keys.ClusterID{1, 2, 3}
	for name, tt := range map[string]struct {
		ask    x509.CertificateRequest
		order  func(*ownerorder.Order)
		signer ed25519.PrivateKey
		image  func(*Config)
		change func(*certificatesv1.CertificateSigningRequest)
		want   bool
		left   bool // not denied: another control plane may sign it
	}{
		"the owner's order":     {want: true},
		"at its oldest":         {order: func(o *ownerorder.Order) { o.At = o.At.Add(-ownerorder.MaxAge) }, want: true},
		"another owner's order": {signer: other},
		"for another cluster":   {order: func(o *ownerorder.Order) { o.Cluster[0]++ }},
		"too old":               {order: func(o *ownerorder.Order) { o.At = o.At.Add(-ownerorder.MaxAge - time.Second) }, left: true},
		"of the future":         {order: func(o *ownerorder.Order) { o.At = o.At.Add(ownerorder.MaxAhead + time.Second) }, left: true},
		"for another key": {order: func(o *ownerorder.Order) {
			_, r := request(t, &x509.CertificateRequest{Subject: own})
			o.Request = der(r)
		}},
		"for a stronger group": {ask: x509.CertificateRequest{Subject: pkix.Name{CommonName: ownerorder.Administrator, Organization: []string{"system:masters"}}}},
		"for one more group":   {ask: x509.CertificateRequest{Subject: pkix.Name{CommonName: ownerorder.Administrator, Organization: []string{ownerorder.Group, "system:masters"}}}},
		"for a node":           {ask: x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:node2", Organization: []string{"system:nodes"}}}},
		"for another name":     {ask: x509.CertificateRequest{Subject: pkix.Name{CommonName: "another", Organization: []string{ownerorder.Group}}}},
		"with a server's name": {ask: x509.CertificateRequest{Subject: own, DNSNames: []string{"kubernetes"}}},
		"for servers too": {change: func(r *certificatesv1.CertificateSigningRequest) {
			r.Spec.Usages = append(r.Spec.Usages, certificatesv1.UsageServerAuth)
		}},
		"a second time, under another name": {change: func(r *certificatesv1.CertificateSigningRequest) { r.Name += "-2" }},
		"with a changed time": {change: func(r *certificatesv1.CertificateSigningRequest) {
			at, signature, _ := strings.Cut(r.Annotations[ownerorder.Annotation], " ")
			when, err := time.Parse(time.RFC3339, at)
			if err != nil {
				t.Fatal(err)
			}
			r.Annotations[ownerorder.Annotation] = when.Add(time.Second).Format(time.RFC3339) + " " + signature
		}},
		"with nothing in it":             {change: func(r *certificatesv1.CertificateSigningRequest) { r.Annotations[ownerorder.Annotation] = "" }},
		"without it":                     {change: func(r *certificatesv1.CertificateSigningRequest) { r.Annotations = nil }},
		"where the image names no owner": {image: func(c *Config) { c.Owner = nil }, left: true},
		"where the image names another":  {image: func(c *Config) { c.Owner = attest.OwnerKeys{other.Public().(ed25519.PublicKey)} }},
		"filed by an administrator, for him": {want: true, change: func(r *certificatesv1.CertificateSigningRequest) {
			r.Spec.Username, r.Spec.Groups = "kubernetes-admin", []string{admins}
		}},
		"an order of others, filed by an administrator": {signer: other, change: func(r *certificatesv1.CertificateSigningRequest) {
			r.Spec.Username, r.Spec.Groups = "kubernetes-admin", []string{admins}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			root := newControlPlane(t)
			now := at(t, root, 0.5).UTC().Truncate(time.Second)
			if tt.ask.Subject.CommonName == "" {
				tt.ask.Subject = own
			}
			key, r := request(t, &tt.ask)
			r.Spec.Username, r.Spec.Groups = "system:serviceaccount:muster-system:joinservice", []string{"system:serviceaccounts", "system:authenticated"}
			order := ownerorder.Order{Cluster: ours, Request: der(r), At: now}
			if tt.order != nil {
				tt.order(&order)
			}
			if tt.signer == nil {
				tt.signer = owner
			}
			r.Name, r.Annotations = order.Name(), map[string]string{ownerorder.Annotation: order.Sign(tt.signer).Note()}
			if tt.change != nil {
				tt.change(r)
			}
			cfg := Config{Root: root, Kubeadm: image, Cluster: ours, Owner: attest.OwnerKeys{public}, Now: func() time.Time { return now }, Log: slog.New(slog.DiscardHandler)}
			if tt.image != nil {
				tt.image(&cfg)
			}
			k := &oneRequest{*r}
			if err := (administrators{k, cfg}).sign(t.Context()); err != nil {
				t.Fatal(err)
			}
			issued, conditions := k.r.Status.Certificate, k.r.Status.Conditions
			if tt.left {
				if len(issued) > 0 || len(conditions) > 0 {
					t.Errorf("decided: %v", conditions)
				}
				return
			}
			if !tt.want {
				if len(issued) > 0 || len(conditions) != 1 || conditions[0].Type != certificatesv1.CertificateDenied {
					t.Errorf("issued: %v", conditions)
				}
				return
			}
			list, err := cert.ParseCertsPEM(issued)
			if err != nil {
				t.Fatal(err)
			}
			if c := list[0]; !key.PublicKey.Equal(c.PublicKey) || c.Subject.String() != own.String() || c.IsCA || len(c.DNSNames) > 0 {
				t.Errorf("%s for %v", c.Subject, c.PublicKey)
			}
		})
	}
}

// Old undecided requests must not hide why the current order is not signed, and listing ends after a bounded number of pages.
func TestTheOrderOfNowIsLogged(t *testing.T) {
	root := newControlPlane(t)
	now := at(t, root, 0.5).UTC().Truncate(time.Second)
	_, owner, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	pages := &manyRequests{}
	for _, created := range []time.Time{now.Add(-time.Hour), now.Add(-time.Minute)} {
		_, r := request(t, &x509.CertificateRequest{Subject: pkix.Name{CommonName: ownerorder.Administrator, Organization: []string{ownerorder.Group}}})
		order := ownerorder.Order{Cluster: keys.ClusterID{1}, Request: der(r), At: created}
		r.Name, r.CreationTimestamp, r.Annotations = order.Name(), metav1.NewTime(created), map[string]string{ownerorder.Annotation: order.Sign(owner).Note()}
		pages.all = append(pages.all, *r)
	}
	a := administrators{pages, Config{Root: root, Kubeadm: image, Cluster: keys.ClusterID{1}, Now: func() time.Time { return now }, Log: slog.New(slog.NewTextHandler(&log, nil))}}
	if err := a.sign(t.Context()); err != nil {
		t.Fatal(err)
	}
	if text := log.String(); strings.Contains(text, pages.all[0].Name) || strings.Count(text, pages.all[1].Name) != 1 {
		t.Errorf("logged: %s", text)
	}
}

// manyRequests returns one request a page, and ignores decisions.
type manyRequests struct {
	requests

	all []certificatesv1.CertificateSigningRequest
}

func (m *manyRequests) List(_ context.Context, o metav1.ListOptions) (*certificatesv1.CertificateSigningRequestList, error) {
	i := len(o.Continue)
	if o.Limit == 0 || i >= len(m.all) {
		return nil, fmt.Errorf("asked for %d from %d on", o.Limit, i)
	}
	list := &certificatesv1.CertificateSigningRequestList{Items: m.all[i : i+1]}
	if i+1 < len(m.all) {
		list.Continue = strings.Repeat("x", i+1)
	}
	return list, nil
}

// The API server takes no denial beside an approval, so a request that an administrator approved by hand is marked as failed.
func TestWhatIsApprovedAndNoRenewalFails(t *testing.T) {
	root := newControlPlane(t)
	now := at(t, root, 0.5)
	_, r := request(t, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "kubernetes-admin", Organization: []string{"system:masters"}}})
	r.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{condition(certificatesv1.CertificateApproved, "ByHand", "")}
	k := &oneRequest{*r}
	if err := (administrators{k, Config{Root: root, Kubeadm: image, Now: func() time.Time { return now }, Log: slog.New(slog.DiscardHandler)}}).sign(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s := k.r.Status; len(s.Certificate) > 0 || len(s.Conditions) != 2 || s.Conditions[1].Type != certificatesv1.CertificateFailed {
		t.Errorf("%v", s.Conditions)
	}
}

func der(r *certificatesv1.CertificateSigningRequest) []byte {
	block, _ := pem.Decode(r.Spec.Request)
	return block.Bytes
}
