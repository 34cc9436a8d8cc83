package access

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// CheckKubeconfig refuses a kubeconfig that could do anything else on the owner's workstation than connect to the
// endpoint: run a program, read a file, use a proxy, or connect to another host.
func CheckKubeconfig(text []byte, endpoint string) error {
	c, err := clientcmd.Load(text)
	if err != nil {
		return errors.New("the kubeconfig cannot be read") // the cause could quote the key
	}
	if len(c.Clusters) != 1 || len(c.AuthInfos) != 1 || len(c.Contexts) != 1 || c.Contexts[c.CurrentContext] == nil {
		return errors.New("the kubeconfig must have one cluster, one user and one context")
	}
	for _, k := range c.Clusters {
		if k.Server != "https://"+endpoint {
			return fmt.Errorf("the kubeconfig's server is %q, not https://%s", k.Server, endpoint)
		}
		if k.InsecureSkipTLSVerify || len(k.CertificateAuthorityData) == 0 || k.CertificateAuthority != "" {
			return errors.New("the kubeconfig must contain the CA certificate itself, and must not turn off TLS verification")
		}
		if k.ProxyURL != "" || k.TLSServerName != "" {
			return errors.New("the kubeconfig names a proxy or another server")
		}
	}
	for _, u := range c.AuthInfos {
		if len(u.ClientCertificateData) == 0 || len(u.ClientKeyData) == 0 {
			return errors.New("the kubeconfig must contain a client certificate and its key")
		}
		if !plain(u) {
			return errors.New("the kubeconfig must authenticate only by its client certificate: no program, file, token, password or impersonation")
		}
	}
	return nil
}

// CheckClock compares this computer's clock with that of the machine that has just made the kubeconfig's
// certificates. TLS fails between clocks that differ, and its errors do not name the cause.
func CheckClock(text []byte, now time.Time) error {
	c, err := clientcmd.Load(text)
	if err != nil {
		return errors.New("the kubeconfig cannot be read") // the cause could quote the key
	}
	var made [][]byte
	for _, k := range c.Clusters {
		made = append(made, k.CertificateAuthorityData)
	}
	for _, u := range c.AuthInfos {
		made = append(made, u.ClientCertificateData)
	}
	for _, m := range made {
		block, _ := pem.Decode(m)
		if block == nil {
			continue
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil || !now.Before(cert.NotBefore) && !now.After(cert.NotAfter) {
			continue
		}
		err = attest.Refuse(attestv1.Reason_REASON_CLOCK_SKEW, "this computer's clock is at %s, but the certificates that the machine has just issued are valid from %s to %s",
			now.UTC().Format(time.RFC3339), cert.NotBefore.UTC().Format(time.RFC3339), cert.NotAfter.UTC().Format(time.RFC3339))
		return problem.WithRemedy(err, "Check both clocks. If this computer's is wrong, set it and run muster init again. If the machine's is wrong, its certificates have wrong dates: set its clock, reset the machine, and initialize a new cluster with another --directory.")
	}
	return nil
}

func plain(u *clientcmdapi.AuthInfo) bool {
	return u.Exec == nil && u.AuthProvider == nil && u.TokenFile == "" && u.ClientCertificate == "" && u.ClientKey == "" &&
		u.Impersonate == "" && len(u.ImpersonateGroups) == 0 && u.ImpersonateUID == "" && len(u.ImpersonateUserExtra) == 0 &&
		u.Token == "" && u.Username == "" && u.Password == ""
}
