package renewal

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	kubeadmapi "k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm"
	kubeadmconstants "k8s.io/kubernetes/cmd/kubeadm/app/constants"
	certsphase "k8s.io/kubernetes/cmd/kubeadm/app/phases/certs"
	kubeadmrenewal "k8s.io/kubernetes/cmd/kubeadm/app/phases/certs/renewal"
	"k8s.io/kubernetes/cmd/kubeadm/app/util/pkiutil"

	authority "github.com/muster-k8s/muster/services/bootstrapper/clusterca"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// plane is the files of one control plane.
type plane struct {
	root string
	cfg  kubeadmapi.ClusterConfiguration // only its algorithm and validity period are used
	// sync is [machine.Sync].
	sync func(dirs ...string) error
	// step is called with each step that was done; tests end the program there by an error.
	step func(what string) error
}

func (p plane) on(path string) string { return filepath.Join(p.root, path) }

// pending reports whether there is, or may be, an unfinished renewal. A disk error counts as one: otherwise its files would be installed later
// without a comparison (B8).
func (p plane) pending() bool {
	_, err := os.Stat(p.on(Folder))
	return !errors.Is(err, fs.ErrNotExist)
}

// prepare renews all certificates into [Folder], which appears with all of them or not at all.
func (p plane) prepare(now time.Time) error {
	if err := p.checkAuthorities(now); err != nil {
		return err
	}
	part := p.on(Folder + ".part")
	if err := os.RemoveAll(part); err != nil { // left by an earlier attempt
		return err
	}
	if err := os.MkdirAll(filepath.Join(part, "pki", "etcd"), 0o700); err != nil {
		return err
	}
	for _, f := range files {
		was, err := load(p.on(filepath.Join(folder, f.certificate)))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = p.renew(f, was, part, now)
		}
		if err != nil {
			return fmt.Errorf("renew %s: %w", f.name, err)
		}
		if err := p.step("renewed " + f.name); err != nil {
			return err
		}
	}
	if err := p.check(part, now); err != nil {
		return err
	}
	if err := p.sync(part); err != nil {
		return err
	}
	if err := os.Rename(part, p.on(Folder)); err != nil {
		return err
	}
	if err := p.sync(p.on(folder)); err != nil {
		return err
	}
	return p.step("prepared")
}

// renew writes a successor of the certificate was, with a key of its own, below dir, as `kubeadm certs renew` does. That command takes the start time of
// its process for the current time.
func (p plane) renew(f file, was *x509.Certificate, dir string, now time.Time) error {
	ca, key, err := certsphase.LoadCertificateAuthority(p.on(folder), withoutExt(f.ca))
	if err != nil {
		return err
	}
	next, nextKey, err := kubeadmrenewal.NewFileRenewer(ca, key).Renew(&pkiutil.CertConfig{
		Config: certutil.Config{
			CommonName: was.Subject.CommonName, Organization: was.Subject.Organization,
			AltNames: certutil.AltNames{DNSNames: was.DNSNames, IPs: was.IPAddresses}, Usages: was.ExtKeyUsage, NotBefore: now.UTC().Add(-kubeadmconstants.CertificateBackdate),
		},
		NotAfter: now.UTC().Add(lifeOf(p.cfg)), EncryptionAlgorithm: p.cfg.EncryptionAlgorithmType(),
	})
	if err != nil {
		return err
	}
	following, err := p.following(f)
	if err != nil {
		return err
	}
	chain := pkiutil.EncodeCertPEM(next)
	for _, c := range following {
		chain = append(chain, pkiutil.EncodeCertPEM(c)...)
	}
	if f.key != "" {
		if err := pkiutil.WriteCertAndKey(dir, withoutExt(f.certificate), next, nextKey); err != nil {
			return err
		}
		return certutil.WriteCert(filepath.Join(dir, f.certificate), chain)
	}
	c, err := clientcmd.LoadFromFile(p.on(filepath.Join(folder, f.certificate)))
	if err != nil {
		return errors.New("it is no kubeconfig") // the cause could contain the key
	}
	u := c.AuthInfos[c.Contexts[c.CurrentContext].AuthInfo]
	if u.ClientKeyData, err = keyutil.MarshalPrivateKeyToPEM(nextKey); err != nil {
		return err
	}
	u.ClientCertificateData = chain
	if _, trusts, err := p.trusts(c); err != nil {
		return err
	} else if trusts != nil {
		c.Clusters[c.Contexts[c.CurrentContext].Cluster].CertificateAuthorityData = trusts
	}
	return clientcmd.WriteToFile(*c, filepath.Join(dir, f.certificate))
}

// following returns what is sent after a certificate: the cross certificate, while the cluster's authority is rotated.
func (p plane) following(f file) ([]*x509.Certificate, error) {
	if f.ca != clusterCA {
		return nil, nil
	}
	cross, err := authority.Cross(p.on(pki))
	if err != nil || cross == nil {
		return nil, err
	}
	return []*x509.Certificate{cross}, nil
}

// follow adds the cross certificate to the API server's certificates: kubeadm has issued those of a control plane that has just joined, and knows none. The API
// server reads the files again. What follows them otherwise stays.
func (p plane) follow() error {
	for _, f := range files {
		if f.ca != clusterCA || f.key == "" {
			continue
		}
		path := p.on(filepath.Join(folder, f.certificate))
		chain, err := loadChain(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		following, err := p.following(f)
		if err != nil || len(following) == 0 {
			return err
		}
		if _, err := f.verified(p.on(folder), p.on(folder)); err != nil || slices.EqualFunc(chain[1:], following, (*x509.Certificate).Equal) {
			continue // a rotation or a renewal issues a new one if the authority differs
		}
		text := pkiutil.EncodeCertPEM(chain[0])
		for _, c := range following {
			text = append(text, pkiutil.EncodeCertPEM(c)...)
		}
		if err := machine.WriteFile(path, text, 0o644, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// trusts returns the authorities that a kubeconfig trusts, and those that it has to trust, which are all of ca.crt; nil if it has none of them, and leads to
// something else than the cluster's API servers.
func (p plane) trusts(c *clientcmdapi.Config) (is, right []byte, err error) {
	cluster := c.Clusters[c.Contexts[c.CurrentContext].Cluster]
	if cluster == nil {
		return nil, nil, nil
	}
	all, err := os.ReadFile(p.on(filepath.Join(folder, clusterCA)))
	if err != nil {
		return nil, nil, err
	}
	have, err := certutil.ParseCertsPEM(all)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", clusterCA, err)
	}
	trusted, _ := certutil.ParseCertsPEM(cluster.CertificateAuthorityData) // it may name a file instead
	if !slices.ContainsFunc(trusted, func(t *x509.Certificate) bool { return slices.ContainsFunc(have, t.Equal) }) {
		return cluster.CertificateAuthorityData, nil, nil
	}
	return cluster.CertificateAuthorityData, all, nil
}

// right reports whether a file of this control plane is what the authority on the disk would issue: with its key, the certificates that follow it, and the
// authorities of a kubeconfig.
func (p plane) right(f file) (bool, error) {
	if _, err := f.verified(p.on(folder), p.on(folder)); err != nil {
		return false, nil //nolint:nilerr // it is issued anew
	}
	path := p.on(filepath.Join(folder, f.certificate))
	chain, err := loadChain(path)
	if err != nil {
		return false, err
	}
	following, err := p.following(f)
	if err != nil || !slices.EqualFunc(chain[1:], following, (*x509.Certificate).Equal) {
		return false, err
	}
	if f.key != "" || f.ca != clusterCA {
		return true, nil
	}
	c, err := clientcmd.LoadFromFile(path)
	if err != nil {
		return false, errors.New("it is no kubeconfig") // the cause could contain the key
	}
	is, all, err := p.trusts(c)
	return all == nil || bytes.Equal(bytes.TrimSpace(is), bytes.TrimSpace(all)), err
}

// lifeOf returns the validity period of new certificates.
func lifeOf(cfg kubeadmapi.ClusterConfiguration) time.Duration {
	if cfg.CertificateValidityPeriod != nil {
		return cfg.CertificateValidityPeriod.Duration
	}
	return kubeadmconstants.CertificateValidityPeriod
}

func withoutExt(path string) string { return strings.TrimSuffix(path, filepath.Ext(path)) }

func authorities() []string { return []string{clusterCA, etcdCA, frontProxyCA} }

// checkAuthorities returns an error while an authority is not valid by this machine's clock: certificates that are issued with a wrong clock are of no
// use.
func (p plane) checkAuthorities(now time.Time) error {
	for _, ca := range authorities() {
		c, err := load(p.on(filepath.Join(folder, ca)))
		if err != nil {
			return err
		}
		if now.Before(c.NotBefore) || now.After(c.NotAfter) {
			return fmt.Errorf("%s is valid from %s to %s, but this machine's clock is at %s: nothing is renewed",
				ca, c.NotBefore.UTC().Format(time.RFC3339), c.NotAfter.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
		}
	}
	return nil
}

// check refuses renewed certificates that can't be used: without their key, of another authority than that on the disk, for another subject, or due
// again at once, which would restart the components without end.
func (p plane) check(dir string, now time.Time) error {
	for _, f := range files {
		was, err := load(p.on(filepath.Join(folder, f.certificate)))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		c, err := f.verified(dir, p.on(folder))
		if err != nil {
			return fmt.Errorf("the renewed %s: %w", f.name, err)
		}
		if c.Subject.String() != was.Subject.String() {
			return fmt.Errorf("the renewed %s is for %s, and was for %s", f.name, c.Subject, was.Subject)
		}
		if (Certificate{NotBefore: c.NotBefore, NotAfter: c.NotAfter}).Due(now) {
			return fmt.Errorf("the renewed %s would be valid from %s to %s only: look at certificateValidityPeriod of the image and at the clock", f.name, c.NotBefore.UTC().Format(time.RFC3339), c.NotAfter.UTC().Format(time.RFC3339))
		}
	}
	return nil
}

// verified returns the certificate below dir if it has its key and was signed by the authority below authorities.
func (f file) verified(dir, authorities string) (*x509.Certificate, error) {
	path := filepath.Join(dir, f.certificate)
	c, err := load(path)
	if err != nil {
		return nil, err
	}
	ca, err := load(filepath.Join(authorities, f.ca))
	if err != nil {
		return nil, err
	}
	if err := c.CheckSignatureFrom(ca); err != nil {
		return nil, err
	}
	if f.key != "" {
		_, err = tls.LoadX509KeyPair(path, filepath.Join(dir, f.key))
	} else {
		err = pairOf(path)
	}
	return c, err
}

// pairOf checks that a kubeconfig's certificate has its key.
func pairOf(path string) error {
	c, err := clientcmd.LoadFromFile(path)
	if err != nil {
		return errors.New("it is no kubeconfig") // the cause could contain the key
	}
	u := c.AuthInfos[c.Contexts[c.CurrentContext].AuthInfo]
	_, err = tls.X509KeyPair(u.ClientCertificateData, u.ClientKeyData)
	return err
}

// place moves the prepared files to their places, each by rename. A call after a crash moves the rest.
func (p plane) place() error {
	for _, f := range files {
		for _, name := range []string{f.key, f.certificate} {
			if name == "" {
				continue
			}
			err := os.Rename(p.on(filepath.Join(Folder, name)), p.on(filepath.Join(folder, name)))
			if errors.Is(err, fs.ErrNotExist) {
				continue // moved before, or not used on this machine
			}
			if err != nil {
				return err
			}
			if err := p.step("placed " + name); err != nil {
				return err
			}
		}
	}
	return p.sync(p.on(folder))
}

// finish removes the renewal's folder: all of it is in use.
func (p plane) finish() error {
	if err := os.RemoveAll(p.on(Folder)); err != nil {
		return err
	}
	return p.sync(p.on(folder))
}

// Discard removes an unfinished renewal, for a machine whose certificates are about to be removed.
func Discard(root string) error {
	return errors.Join(os.RemoveAll(filepath.Join(root, Folder)), os.RemoveAll(filepath.Join(root, Folder+".part")))
}
