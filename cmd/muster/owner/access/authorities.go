package access

import (
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/cert"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
)

// Authorities returns the cluster's CAs that a folder knows: those that admin.conf trusts, then former CAs, which are needed to verify older backups.
func Authorities(d *ownerdir.Dir) ([]*x509.Certificate, error) {
	kube, err := Connect(d)
	if err != nil {
		return nil, err
	}
	out, err := kube.Authorities()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.File(ownerdir.AdminConf), err)
	}
	former, err := FormerAuthorities(d)
	return append(out, former...), err
}

// FormerAuthorities returns the CAs of the cluster that the folder trusted earlier.
func FormerAuthorities(d *ownerdir.Dir) ([]*x509.Certificate, error) {
	text, err := d.Read(ownerdir.FormerAuthorities)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	list, err := cert.ParseCertsPEM(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.File(ownerdir.FormerAuthorities), err)
	}
	return list, nil
}

// WriteAdminConf replaces the folder's kubeconfig. CAs that only the old one trusts are kept in [ownerdir.FormerAuthorities].
func WriteAdminConf(d *ownerdir.Dir, text []byte) error {
	was, err := d.Read(ownerdir.AdminConf)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	list, err := FormerAuthorities(d)
	if err != nil {
		return err
	}
	known, now, next := len(list), TrustedBy(was), TrustedBy(text)
	for _, ca := range now {
		if !slices.ContainsFunc(slices.Concat(next, list), ca.Equal) {
			list = append(list, ca)
		}
	}
	if len(list) > known {
		former, err := cert.EncodeCertificates(list...)
		if err != nil {
			return err
		}
		if err := d.Write(ownerdir.FormerAuthorities, former); err != nil { // written first, so that an interruption loses no CA
			return err
		}
	}
	return d.Write(ownerdir.AdminConf, text)
}

// TrustedBy returns the CAs of a kubeconfig; nil if it has none, or can't be read.
func TrustedBy(kubeconfig []byte) (out []*x509.Certificate) {
	conf, err := clientcmd.Load(kubeconfig)
	if err != nil {
		return nil
	}
	for _, c := range conf.Clusters {
		list, err := cert.ParseCertsPEM(c.CertificateAuthorityData)
		if err == nil {
			out = append(out, list...)
		}
	}
	return out
}
