package access

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/cert"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/ownerorder"
)

// RenewConfig configures [RenewKubeconfig]. All fields except Joinservices and DialContext are required.
type RenewConfig struct {
	// Dir is the owner's folder.
	Dir *ownerdir.Dir
	// Joinservices are HOST:PORT of joinservices that receive the owner's order. If empty, the request goes to the API
	// server while the kubeconfig is valid, and afterwards to joinservices at the folder's addresses.
	Joinservices []string
	// Now is the clock.
	Now func() time.Time
	// Report receives each step.
	Report progress.Reporter
	// DialContext opens connections to joinservices; nil for a [net.Dialer].
	DialContext func(ctx context.Context, network, addr string) (net.Conn, error)
}

// RenewSteps is the number of steps that [RenewKubeconfig] reports.
const RenewSteps = 2

// RenewKubeconfig replaces key and certificate in the kubeconfig of an owner's folder, for the same identity: with
// its certificate while that is valid, after that with an order by the owner's key. It returns the expiry of the new
// certificate. The old one is replaced once the API server has accepted the new one.
func RenewKubeconfig(ctx context.Context, cfg RenewConfig) (time.Time, error) {
	if cfg.Dir == nil || cfg.Now == nil || cfg.Report == nil {
		return time.Time{}, errors.New("access.RenewKubeconfig: Dir, Now and Report are required")
	}
	h, err := ReadHolder(cfg.Dir)
	if err != nil {
		return time.Time{}, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return time.Time{}, err
	}
	request, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: h.Old.Subject}, key)
	if err != nil {
		return time.Time{}, err
	}
	var signed, authorities []byte // authorities: from an attested joinservice
	if len(cfg.Joinservices) == 0 && cfg.Now().Before(h.Old.NotAfter) {
		err = progress.Step(cfg.Report, "renew with the current certificate", func() (_ string, err error) {
			signed, err = h.ask(ctx, request)
			return "", err
		})
	} else {
		err = progress.Step(cfg.Report, "renew by the owner's order", func() (_ string, err error) {
			resp, err := orderCertificate(ctx, cfg, h, request)
			signed, authorities = resp.GetCertificate(), resp.GetCaCertificate()
			return "", err
		})
	}
	if err != nil {
		return time.Time{}, err
	}
	var end time.Time
	err = progress.Step(cfg.Report, "try the new certificate at the API server", func() (_ string, err error) {
		end, err = h.replace(ctx, cfg, signed, key, authorities)
		return "", err
	})
	return end, err
}

// Holder is the identity of the kubeconfig.
type Holder struct {
	Text      []byte
	Conf      *clientcmdapi.Config
	user      *clientcmdapi.AuthInfo
	authority []byte
	Old       *x509.Certificate
}

// ReadHolder reads the identity of the folder's kubeconfig.
func ReadHolder(d *ownerdir.Dir) (*Holder, error) {
	text, err := d.Read(ownerdir.AdminConf)
	if err != nil {
		return nil, err
	}
	if err := CheckKubeconfig(text, d.Cluster().ControlPlaneEndpoint); err != nil {
		return nil, err
	}
	conf, err := clientcmd.Load(text)
	if err != nil {
		return nil, errors.New("the kubeconfig cannot be read") // the cause could quote the key
	}
	current := conf.Contexts[conf.CurrentContext]
	h := &Holder{Text: text, Conf: conf, user: conf.AuthInfos[current.AuthInfo], authority: conf.Clusters[current.Cluster].CertificateAuthorityData}
	pair, err := tls.X509KeyPair(h.user.ClientCertificateData, h.user.ClientKeyData)
	if err != nil {
		return nil, errors.New("the kubeconfig's key does not match its certificate")
	}
	h.Old = pair.Leaf
	if !slices.Equal(h.Old.Subject.Organization, []string{ownerorder.Group}) {
		return nil, problem.WithRemedy(fmt.Errorf("the kubeconfig's user is %s; control planes renew only certificates of group %s", h.Old.Subject, ownerorder.Group),
			"Copy /etc/kubernetes/admin.conf from a control plane to "+d.File(ownerdir.AdminConf)+", mode 0600.")
	}
	return h, nil
}

// ask lets a control plane sign the request. It authenticates by the kubeconfig, which is still valid.
func (h *Holder) ask(ctx context.Context, request []byte) ([]byte, error) {
	kube, err := clusterapi.Connect(h.Text)
	if err != nil {
		return nil, err
	}
	signed, err := kube.SignAdministrator(ctx, request)
	if err != nil {
		return nil, problem.WithRemedy(err, "The unit muster-renewal has to run on a control plane, of this version of Muster or a newer one: `muster doctor --node NODE` examines one. "+checkup.Journal("NODE", "muster-renewal"))
	}
	return signed, nil
}

// trustPresentCA makes the kubeconfig trust the CA that has issued the new certificate. The CA comes from an attested joinservice, or, while the CA is
// rotated, from the cluster's description, if an API server presents a cross certificate by a CA that the kubeconfig trusts.
func (h *Holder) trustPresentCA(ctx context.Context, authorities []byte) error {
	var list []*x509.Certificate
	var err error
	if len(authorities) > 0 {
		list, err = cert.ParseCertsPEM(authorities)
	} else {
		list, err = h.rotated(ctx)
	}
	if err != nil {
		return err
	}
	if h.authority, err = cert.EncodeCertificates(list...); err != nil {
		return err
	}
	h.Conf.Clusters[h.Conf.Contexts[h.Conf.CurrentContext].Cluster].CertificateAuthorityData = h.authority
	return nil
}

// rotated returns the new CA of the rotation in progress, and those that the kubeconfig trusts.
func (h *Holder) rotated(ctx context.Context) ([]*x509.Certificate, error) {
	kube, err := clusterapi.Connect(h.Text)
	if err != nil {
		return nil, err
	}
	info, err := kube.Description(ctx)
	if err != nil {
		return nil, err
	}
	if info.Rotation == nil || info.Rotation.Key != clusterinfo.ClusterCA || info.Rotation.Public == "" {
		return nil, errors.New("no rotation of the cluster's authority is in progress")
	}
	next, err := cert.ParseCertsPEM([]byte(info.Rotation.Public))
	if err != nil {
		return nil, err
	}
	trusted := TrustedBy(h.Text)
	return append(next[:1], trusted...), VerifyCrossCertificate(ctx, h.Conf.Clusters[h.Conf.Contexts[h.Conf.CurrentContext].Cluster].Server, trusted, next[0])
}

// replace writes the kubeconfig with the renewed certificate, once the API server has accepted it.
func (h *Holder) replace(ctx context.Context, cfg RenewConfig, signed []byte, key *ecdsa.PrivateKey, authorities []byte) (time.Time, error) {
	leaf, err := renewed(signed, key, h.Old, h.authority, cfg.Now())
	if _, foreign := errors.AsType[x509.UnknownAuthorityError](err); foreign {
		if err := h.trustPresentCA(ctx, authorities); err != nil {
			return time.Time{}, fmt.Errorf("the renewed certificate is from a CA that the folder does not trust, and that CA could not be verified: %w", err)
		}
		leaf, err = renewed(signed, key, h.Old, h.authority, cfg.Now())
	}
	if err != nil {
		return time.Time{}, fmt.Errorf("the cluster did not return the requested certificate: %w", err)
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return time.Time{}, err
	}
	h.user.ClientCertificateData, h.user.ClientKeyData = signed, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private})
	text, err := clientcmd.Write(*h.Conf)
	if err != nil {
		return time.Time{}, err
	}
	if err := CheckKubeconfig(text, cfg.Dir.Cluster().ControlPlaneEndpoint); err != nil {
		return time.Time{}, err
	}
	kube, err := clusterapi.Connect(text)
	if err != nil {
		return time.Time{}, err
	}
	if err := kube.Administers(ctx); err != nil {
		return time.Time{}, fmt.Errorf("the API server does not accept the renewed certificate, so the old one stays: %w", err)
	}
	return leaf.NotAfter, WriteAdminConf(cfg.Dir, text)
}

// renewed returns the certificate in text if it is for the key, has the identity of the old one, is from authority, and
// expires later.
func renewed(text []byte, key *ecdsa.PrivateKey, old *x509.Certificate, authority []byte, now time.Time) (*x509.Certificate, error) {
	block, rest := pem.Decode(text)
	if block == nil || block.Type != "CERTIFICATE" || len(rest) > 0 {
		return nil, errors.New("it is not one certificate in PEM")
	}
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority)
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, CurrentTime: now}); err != nil {
		return nil, err
	}
	switch {
	case !key.PublicKey.Equal(leaf.PublicKey):
		return nil, errors.New("it is for another key")
	case leaf.Subject.String() != old.Subject.String():
		return nil, fmt.Errorf("it is for %s", leaf.Subject)
	case !leaf.NotAfter.After(old.NotAfter) && bytes.Equal(leaf.AuthorityKeyId, old.AuthorityKeyId): // a certificate of a new CA may expire earlier
		return nil, fmt.Errorf("it expires at %s, no later than the old one", leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	return leaf, nil
}

// Trust writes the kubeconfig with these CAs.
func (h *Holder) Trust(d *ownerdir.Dir, list []*x509.Certificate) error {
	text, err := cert.EncodeCertificates(list...)
	if err != nil {
		return err
	}
	h.Conf.Clusters[h.Conf.Contexts[h.Conf.CurrentContext].Cluster].CertificateAuthorityData = text
	if text, err = clientcmd.Write(*h.Conf); err != nil {
		return err
	}
	return WriteAdminConf(d, text)
}
