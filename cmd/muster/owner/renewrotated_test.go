package owner

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// While the cluster's authority is rotated, a control plane can sign with one that a folder does not know yet: that of another administrator, or that of a
// command that was interrupted. The description is no proof: who can write it can write another authority.
func TestAKubeconfigIsRenewedByTheAuthorityOfARotation(t *testing.T) {
	old, next, evil := newAuthority(t), newAuthority(t), newAuthority(t)
	end := time.Now().Add(20 * time.Hour).Truncate(time.Second)
	for name, tt := range map[string]struct {
		signs authority
		says  *authority // the description
		want  string     // "": renewed
	}{
		"the one that the API server uses": {next, &next, ""},
		"another one":                      {evil, &evil, "has no certificate of the new authority"},
		"none is described":                {next, nil, "no rotation of the cluster's authority is in progress"},
		"another one than is described":    {evil, &next, "unknown authority"},
	} {
		api := &apiServer{ca: next, before: &old, cross: old.cross(t, next), accepts: true}
		api.answer = func(r *x509.CertificateRequest) ([]byte, string) {
			return pemOf(tt.signs.client(t, r.Subject, r.PublicKey, end)), ""
		}
		dir := administered(t, api, administrator, end.Add(-time.Hour), []byte("policy\n"))
		info := &clusterinfo.Info{ClusterID: dir.clusterID(), MeasurementSalt: [32]byte{2}, KubernetesVersion: "1.36.1", ControlPlaneEndpoint: "192.0.2.1:6443"}
		if tt.says != nil {
			sum := sha256.Sum256(tt.says.cert.Raw)
			info.Rotation = &clusterinfo.Rotation{Key: clusterinfo.ClusterCA, Phase: clusterinfo.RotationUse, ID: hex.EncodeToString(sum[:]), Public: string(pemOf(tt.says.cert)), Since: time.Now()}
		}
		var err error
		if api.info, err = info.Marshal(); err != nil {
			t.Fatal(err)
		}
		before, _ := dir.adminConf(t)
		got, err := RenewKubeconfig(t.Context(), RenewConfig{Dir: dir.Dir, Now: time.Now, Report: dir.report(RenewSteps)})
		if tt.want != "" {
			if after, _ := dir.adminConf(t); err == nil || !strings.Contains(err.Error(), tt.want) || after != before {
				t.Errorf("%s: got %v, want %q; changed: %v", name, err, tt.want, after != before)
			}
			continue
		}
		trusted, leaf, _ := dir.trustsNow(t)
		if err != nil || !got.Equal(end) || len(trusted) != 2 || !trusted[0].Equal(next.cert) || !trusted[1].Equal(old.cert) || leaf.CheckSignatureFrom(next.cert) != nil {
			t.Errorf("%s: %v; it trusts %d", name, err, len(trusted))
		}
	}
}

// A control plane that lags behind signs with the old authority: when that is dropped, the folder would be locked out.
func TestTheFolderWaitsForACertificateOfTheNewAuthority(t *testing.T) {
	old, next := newAuthority(t), newAuthority(t)
	end := time.Now().Add(20 * time.Hour).Truncate(time.Second)
	api := &apiServer{ca: next, before: &old, cross: old.cross(t, next), accepts: true, lags: true}
	api.answer = func(r *x509.CertificateRequest) ([]byte, string) {
		return pemOf(old.client(t, r.Subject, r.PublicKey, end)), ""
	}
	dir := administered(t, api, administrator, end.Add(-time.Hour), []byte("policy\n"))
	if err := AdoptAuthority(t.Context(), dir.Dir, next.cert, true, dir.report(RenewSteps)); err == nil || !strings.Contains(err.Error(), "with the old authority") {
		t.Errorf("%v", err)
	}
	if trusted, _, _ := dir.trustsNow(t); len(trusted) != 2 {
		t.Errorf("it trusts %d", len(trusted))
	}
}
