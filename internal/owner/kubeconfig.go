package owner

import (
	"errors"
	"fmt"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// checkKubeconfig refuses one that would do more on the owner's computer than connect to the
// cluster: run a program, read a file, use a proxy, or talk to anybody at all.
func checkKubeconfig(text []byte, endpoint string) error {
	c, err := clientcmd.Load(text)
	if err != nil {
		return errors.New("the kubeconfig cannot be read") // the cause could quote the key
	}
	if len(c.Clusters) != 1 || len(c.AuthInfos) != 1 || len(c.Contexts) != 1 || c.Contexts[c.CurrentContext] == nil {
		return errors.New("the kubeconfig should have one cluster, one user and one context")
	}
	for _, k := range c.Clusters {
		if k.Server != "https://"+endpoint {
			return fmt.Errorf("the kubeconfig leads to %q, not to https://%s", k.Server, endpoint)
		}
		if k.InsecureSkipTLSVerify || len(k.CertificateAuthorityData) == 0 || k.CertificateAuthority != "" {
			return errors.New("the kubeconfig should carry the cluster's certificate authority")
		}
		if k.ProxyURL != "" || k.TLSServerName != "" {
			return errors.New("the kubeconfig names a proxy or another server")
		}
	}
	for _, u := range c.AuthInfos {
		if len(u.ClientCertificateData) == 0 || len(u.ClientKeyData) == 0 {
			return errors.New("the kubeconfig should carry a client certificate and its key")
		}
		if !plain(u) {
			return errors.New("the kubeconfig runs a program, reads a file or impersonates")
		}
	}
	return nil
}

func plain(u *clientcmdapi.AuthInfo) bool {
	return u.Exec == nil && u.AuthProvider == nil && u.TokenFile == "" && u.ClientCertificate == "" && u.ClientKey == "" &&
		u.Impersonate == "" && len(u.ImpersonateGroups) == 0 && u.ImpersonateUID == "" && len(u.ImpersonateUserExtra) == 0 &&
		u.Token == "" && u.Username == "" && u.Password == ""
}
