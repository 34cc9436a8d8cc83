package access

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// While the cluster's authority is rotated, admin.conf trusts two of one name.
func TestAKubeconfigIsRenewedByEitherOfTwoAuthorities(t *testing.T) {
	a, b := ownertest.NewAuthority(t), ownertest.NewAuthority(t)
	key := a.Key
	old := a.Client(t, ownertest.Administrator, key.Public(), time.Now().Add(time.Hour))
	for _, by := range []ownertest.Authority{a, b} {
		next := ownertest.PEMOf(by.Client(t, ownertest.Administrator, key.Public(), time.Now().Add(2*time.Hour)))
		for _, both := range [][]byte{slices.Concat(ownertest.PEMOf(a.Cert), ownertest.PEMOf(b.Cert)), slices.Concat(ownertest.PEMOf(b.Cert), ownertest.PEMOf(a.Cert))} {
			if _, err := renewed(next, key, old, both, time.Now()); err != nil {
				t.Error(err)
			}
		}
	}
	if _, err := renewed(ownertest.PEMOf(ownertest.NewAuthority(t).Client(t, ownertest.Administrator, key.Public(), time.Now().Add(2*time.Hour))), key, old, slices.Concat(ownertest.PEMOf(a.Cert), ownertest.PEMOf(b.Cert)), time.Now()); err == nil {
		t.Error("a third authority renews it")
	}
}

func TestAKubeconfigIsRenewedOnlyByItsLike(t *testing.T) {
	soon, later := time.Now().Add(time.Hour).Truncate(time.Second), time.Now().Add(20*time.Hour).Truncate(time.Second)
	for name, tt := range map[string]struct {
		holder  pkix.Name
		answer  func(t *testing.T, ca ownertest.Authority, r *x509.CertificateRequest) ([]byte, string)
		refuses bool   // the API server refuses the renewed certificate
		says    string // "": it is renewed
	}{
		"by the cluster": {answer: func(t *testing.T, ca ownertest.Authority, r *x509.CertificateRequest) ([]byte, string) {
			return ownertest.PEMOf(ca.Client(t, r.Subject, r.PublicKey, later)), ""
		}},
		"denied": {says: "not today", answer: func(*testing.T, ownertest.Authority, *x509.CertificateRequest) ([]byte, string) {
			return nil, "not today"
		}},
		"another authority's": {says: "a CA that the folder does not trust", answer: func(t *testing.T, _ ownertest.Authority, r *x509.CertificateRequest) ([]byte, string) {
			return ownertest.PEMOf(ownertest.NewAuthority(t).Client(t, r.Subject, r.PublicKey, later)), ""
		}},
		"for another key": {says: "another key", answer: func(t *testing.T, ca ownertest.Authority, r *x509.CertificateRequest) ([]byte, string) {
			return ownertest.PEMOf(ca.Client(t, r.Subject, ownertest.NewAuthority(t).Key.Public(), later)), ""
		}},
		"for somebody else": {says: "it is for", answer: func(t *testing.T, ca ownertest.Authority, r *x509.CertificateRequest) ([]byte, string) {
			return ownertest.PEMOf(ca.Client(t, pkix.Name{CommonName: "nobody"}, r.PublicKey, later)), ""
		}},
		"one that ends earlier": {says: "no later", answer: func(t *testing.T, ca ownertest.Authority, r *x509.CertificateRequest) ([]byte, string) {
			return ownertest.PEMOf(ca.Client(t, r.Subject, r.PublicKey, soon.Add(-time.Minute))), ""
		}},
		"one that the API server refuses": {refuses: true, says: "the old one stays", answer: func(t *testing.T, ca ownertest.Authority, r *x509.CertificateRequest) ([]byte, string) {
			return ownertest.PEMOf(ca.Client(t, r.Subject, r.PublicKey, later)), ""
		}},
		"of another group's user": {holder: pkix.Name{CommonName: "kubernetes-admin", Organization: []string{"system:masters"}}, says: "kubeadm:cluster-admins"},
	} {
		t.Run(name, func(t *testing.T) {
			holder := tt.holder
			if holder.CommonName == "" {
				holder = ownertest.Administrator
			}
			ca := ownertest.NewAuthority(t)
			api := &ownertest.APIServer{CA: ca, Accepts: !tt.refuses, Answer: func(r *x509.CertificateRequest) ([]byte, string) { return tt.answer(t, ca, r) }}
			dir := ownertest.Administered(t, api, holder, soon, []byte("policy\n"))
			before, private := dir.AdminConf(t)
			got, err := RenewKubeconfig(t.Context(), RenewConfig{Dir: dir.Dir, Now: time.Now, Report: dir.Report(RenewSteps)})
			after, _ := dir.AdminConf(t)
			if tt.says != "" {
				if err == nil || !strings.Contains(err.Error(), tt.says) {
					t.Errorf("error %v, want one with %q", err, tt.says)
				}
				if after != before {
					t.Error("the old kubeconfig is gone")
				}
				return
			}
			if err != nil || !got.Equal(later) || after == before {
				t.Fatalf("ends at %s, %v", got, err)
			}
			if api.Filed.Spec.SignerName != clusterinfo.AdministratorSigner || !api.Deleted {
				t.Errorf("filed %+v, removed: %v", api.Filed.Spec, api.Deleted)
			}
			if strings.Contains(after, private) || CheckKubeconfig([]byte(after), dir.Cluster().ControlPlaneEndpoint) != nil {
				t.Error("the renewed kubeconfig is not as it should be")
			}
		})
	}
}
