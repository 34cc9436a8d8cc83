package rotation

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// While the cluster's authority is rotated, a control plane can sign with one that a folder does not know yet: that of another administrator, or that of a
// command that was interrupted. The description is no proof: who can write it can write another authority.
func TestAKubeconfigIsRenewedByTheAuthorityOfARotation(t *testing.T) {
	old, next, evil := ownertest.NewAuthority(t), ownertest.NewAuthority(t), ownertest.NewAuthority(t)
	end := time.Now().Add(20 * time.Hour).Truncate(time.Second)
	for name, tt := range map[string]struct {
		signs ownertest.Authority
		says  *ownertest.Authority // the description
		want  string               // "": renewed
	}{
		"the one that the API server uses": {next, &next, ""},
		"another one":                      {evil, &evil, "has no certificate of the new authority"},
		"none is described":                {next, nil, "no rotation of the cluster's authority is in progress"},
		"another one than is described":    {evil, &next, "unknown authority"},
	} {
		api := &ownertest.APIServer{CA: next, Before: &old, Cross: old.Cross(t, next), Accepts: true}
		api.Answer = func(r *x509.CertificateRequest) ([]byte, string) {
			return ownertest.PEMOf(tt.signs.Client(t, r.Subject, r.PublicKey, end)), ""
		}
		dir := ownertest.Administered(t, api, ownertest.Administrator, end.Add(-time.Hour), []byte("policy\n"))
		info := &clusterinfo.Info{ClusterID: dir.ClusterID(), MeasurementSalt: [32]byte{2}, KubernetesVersion: "1.36.1", ControlPlaneEndpoint: "192.0.2.1:6443"}
		if tt.says != nil {
			sum := sha256.Sum256(tt.says.Cert.Raw)
			info.Rotation = &clusterinfo.Rotation{Key: clusterinfo.ClusterCA, Phase: clusterinfo.RotationUse, ID: hex.EncodeToString(sum[:]), Public: string(ownertest.PEMOf(tt.says.Cert)), Since: time.Now()}
		}
		var err error
		if api.Info, err = info.Marshal(); err != nil {
			t.Fatal(err)
		}
		before, _ := dir.AdminConf(t)
		got, err := access.RenewKubeconfig(t.Context(), access.RenewConfig{Dir: dir.Dir, Now: time.Now, Report: dir.Report(access.RenewSteps)})
		if tt.want != "" {
			if after, _ := dir.AdminConf(t); err == nil || !strings.Contains(err.Error(), tt.want) || after != before {
				t.Errorf("%s: got %v, want %q; changed: %v", name, err, tt.want, after != before)
			}
			continue
		}
		trusted, leaf, _ := trustsNow(t, dir)
		if err != nil || !got.Equal(end) || len(trusted) != 2 || !trusted[0].Equal(next.Cert) || !trusted[1].Equal(old.Cert) || leaf.CheckSignatureFrom(next.Cert) != nil {
			t.Errorf("%s: %v; it trusts %d", name, err, len(trusted))
		}
	}
}

// A control plane that lags behind signs with the old authority: when that is dropped, the folder would be locked out.
func TestTheFolderWaitsForACertificateOfTheNewAuthority(t *testing.T) {
	old, next := ownertest.NewAuthority(t), ownertest.NewAuthority(t)
	end := time.Now().Add(20 * time.Hour).Truncate(time.Second)
	api := &ownertest.APIServer{CA: next, Before: &old, Cross: old.Cross(t, next), Accepts: true, Lags: true}
	api.Answer = func(r *x509.CertificateRequest) ([]byte, string) {
		return ownertest.PEMOf(old.Client(t, r.Subject, r.PublicKey, end)), ""
	}
	dir := ownertest.Administered(t, api, ownertest.Administrator, end.Add(-time.Hour), []byte("policy\n"))
	if err := AdoptAuthority(t.Context(), dir.Dir, next.Cert, true, dir.Report(access.RenewSteps)); err == nil || !strings.Contains(err.Error(), "with the old authority") {
		t.Errorf("%v", err)
	}
	if trusted, _, _ := trustsNow(t, dir); len(trusted) != 2 {
		t.Errorf("it trusts %d", len(trusted))
	}
}
