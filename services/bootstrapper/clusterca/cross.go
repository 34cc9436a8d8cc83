package clusterca

import (
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/client-go/util/cert"

	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// CrossFile is beside ca.crt while the cluster's authority is rotated: a certificate with the name and key of the new authority, signed by the old one. A
// program that trusts only the old one accepts a certificate of the new one if the cross certificate is sent with it.
const CrossFile = "muster-cross.crt"

// CrossSign returns the cross certificate of another authority. It is valid while both are.
func (a *Authority) CrossSign(next *x509.Certificate) (*x509.Certificate, error) {
	begin, end := next.NotBefore, next.NotAfter
	if begin.Before(a.cert.NotBefore) {
		begin = a.cert.NotBefore
	}
	if end.After(a.cert.NotAfter) {
		end = a.cert.NotAfter
	}
	if !begin.Before(end) {
		return nil, fmt.Errorf("the old authority ended at %s, before the new one begins", a.cert.NotAfter.UTC().Format(time.RFC3339))
	}
	if a.cert.MaxPathLen == 0 && a.cert.MaxPathLenZero { // no client would accept a certificate below the cross certificate
		return nil, errors.New("the cluster's authority may have no other one below it (pathLenConstraint 0; RFC 5280, section 4.2.1.9), so it can't sign for a new one: muster rotate can't replace it")
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		RawSubject: next.RawSubject, NotBefore: begin, NotAfter: end, KeyUsage: next.KeyUsage, BasicConstraintsValid: true, IsCA: true,
		// Authorities of kubeadm have one name, by which this certificate would seem to be self-signed: crypto/x509 would set no identifier of the issuer's
		// key, and OpenSSL finds the issuer by that.
		SubjectKeyId: next.SubjectKeyId, AuthorityKeyId: a.cert.SubjectKeyId,
	}, a.cert, next.PublicKey, a.key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

// MayCross returns an error if the authority of a folder can't sign for another one.
func MayCross(dir string, next *x509.Certificate) error {
	old, err := Load(dir)
	if err != nil || old.cert.Equal(next) {
		return err
	}
	_, err = old.CrossSign(next)
	return err
}

// WriteCross writes [CrossFile] of a folder for an authority that will replace the folder's, with the key that is there.
func WriteCross(dir string, next *x509.Certificate) error {
	old, err := Load(dir)
	if err != nil {
		return err
	}
	list, err := authorities(dir)
	if err != nil {
		return err
	}
	is, err := readCross(dir, next, list)
	if err != nil || is != nil {
		return err
	}
	if old.cert.Equal(next) {
		return fmt.Errorf("%s is missing or damaged, and its signing key is already replaced: reset this control plane, which then joins with the new authority", CrossFile)
	}
	c, err := old.CrossSign(next)
	if err != nil {
		return err
	}
	return machine.WriteFile(filepath.Join(dir, CrossFile), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw}), 0o644, 0o755)
}

// Cross returns the cross certificate for the authority that signs in a folder, the first of ca.crt; nil if there is none, it is another's, or the authority
// that signed it is not trusted any more.
func Cross(dir string) (*x509.Certificate, error) {
	list, err := authorities(dir)
	if err != nil {
		return nil, err
	}
	return readCross(dir, list[0], list)
}

func authorities(dir string) ([]*x509.Certificate, error) {
	text, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	if err != nil {
		return nil, err
	}
	list, err := cert.ParseCertsPEM(text)
	if err != nil {
		return nil, fmt.Errorf("ca.crt: %w", err)
	}
	return list, nil
}

func readCross(dir string, ca *x509.Certificate, trusted []*x509.Certificate) (*x509.Certificate, error) {
	text, err := os.ReadFile(filepath.Join(dir, CrossFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	list, err := cert.ParseCertsPEM(text)
	if err != nil || len(list) != 1 || !Crosses(list[0], ca, trusted) {
		return nil, nil //nolint:nilerr // it is made anew, or not sent
	}
	return list[0], nil
}

// Crosses reports whether a certificate leads from the authority ca to another one of trusted.
func Crosses(c, ca *x509.Certificate, trusted []*x509.Certificate) bool {
	key, ok := c.PublicKey.(interface{ Equal(crypto.PublicKey) bool })
	return ok && key.Equal(ca.PublicKey) && string(c.RawSubject) == string(ca.RawSubject) && slices.ContainsFunc(trusted, func(by *x509.Certificate) bool {
		return !by.Equal(ca) && c.CheckSignatureFrom(by) == nil
	})
}
