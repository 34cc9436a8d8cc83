package owner

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/muster-k8s/muster/internal/owner/cluster"
	"github.com/muster-k8s/muster/internal/owner/ownerdir"
)

// administrators is kubeadm's group of administrators, for which control planes renew.
const administrators = "kubeadm:cluster-admins"

// RenewKubeconfig gives the kubeconfig of an owner's folder a new key and a new certificate for the same identity, with the one that it has:
// while that is valid. It returns when the new one ends. The old one is replaced once the API server has accepted the new one.
func RenewKubeconfig(ctx context.Context, d *ownerdir.Dir, now time.Time) (time.Time, error) {
	text, err := d.Read(ownerdir.AdminConf)
	if err != nil {
		return time.Time{}, err
	}
	endpoint := d.Cluster().ControlPlaneEndpoint
	if err := checkKubeconfig(text, endpoint); err != nil {
		return time.Time{}, err
	}
	conf, err := clientcmd.Load(text)
	if err != nil {
		return time.Time{}, errors.New("the kubeconfig cannot be read") // the cause could quote the key
	}
	current := conf.Contexts[conf.CurrentContext]
	user, authority := conf.AuthInfos[current.AuthInfo], conf.Clusters[current.Cluster].CertificateAuthorityData
	pair, err := tls.X509KeyPair(user.ClientCertificateData, user.ClientKeyData)
	if err != nil {
		return time.Time{}, errors.New("the kubeconfig's certificate and key do not belong together")
	}
	old := pair.Leaf
	if !now.Before(old.NotAfter) {
		return time.Time{}, withRemedy(fmt.Errorf("the administrator's certificate ended at %s: the cluster accepts nothing from it", old.NotAfter.UTC().Format(time.RFC3339)),
			"Copy /etc/kubernetes/admin.conf from a control plane, which renews its own, to "+d.File(ownerdir.AdminConf)+", mode 0600.")
	}
	if !slices.Equal(old.Subject.Organization, []string{administrators}) {
		return time.Time{}, withRemedy(fmt.Errorf("the kubeconfig is for %s, and control planes renew for the group %s", old.Subject, administrators),
			"Copy /etc/kubernetes/admin.conf from a control plane to "+d.File(ownerdir.AdminConf)+", mode 0600.")
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return time.Time{}, err
	}
	request, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: old.Subject}, key)
	if err != nil {
		return time.Time{}, err
	}
	kube, err := cluster.Connect(text)
	if err != nil {
		return time.Time{}, err
	}
	signed, err := kube.SignAdministrator(ctx, request)
	if err != nil {
		return time.Time{}, withRemedy(err, "Look at journalctl -u muster-renewal on the control planes: one of them has to run, of this version of Muster or a newer one.")
	}
	leaf, err := renewed(signed, key, old, authority, now)
	if err != nil {
		return time.Time{}, fmt.Errorf("what the cluster has signed is not the renewed certificate: %w", err)
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return time.Time{}, err
	}
	user.ClientCertificateData, user.ClientKeyData = signed, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private})
	if text, err = clientcmd.Write(*conf); err != nil {
		return time.Time{}, err
	}
	if err := checkKubeconfig(text, endpoint); err != nil {
		return time.Time{}, err
	}
	if kube, err = cluster.Connect(text); err != nil {
		return time.Time{}, err
	}
	if err := kube.Administers(ctx); err != nil {
		return time.Time{}, fmt.Errorf("the API server does not accept the renewed certificate, so the old one stays: %w", err)
	}
	return leaf.NotAfter, d.Write(ownerdir.AdminConf, text)
}

// renewed returns the certificate in text if it is for the key, the identity and the authority of the old one, and lives longer.
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
	case !leaf.NotAfter.After(old.NotAfter):
		return nil, fmt.Errorf("it ends at %s, no later than the old one", leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	return leaf, nil
}
