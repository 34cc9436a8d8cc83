package bootstrapper

import (
	"crypto/x509"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// Azure's certificates last for a year. When one ends, each verifier refuses the machine, and no one but the cloud renews it.
func TestTheEndOfAPlatformKeysCertificateIsAMetric(t *testing.T) {
	ca := attesttest.NewCA(t)
	for name, tt := range map[string]struct {
		options attesttest.Options
		want    string
	}{
		"a platform key": {attesttest.Options{Platform: &attesttest.Platform{Azure: true, Certificate: func(c *x509.Certificate) {
			c.NotBefore, c.NotAfter = time.Unix(1000, 0), time.Unix(2000, 0)
		}}}, `
# HELP muster_certificate_not_after_timestamp_seconds When a certificate of this machine ends, in seconds since 1970; 0: the file holds none.
# TYPE muster_certificate_not_after_timestamp_seconds gauge
muster_certificate_not_after_timestamp_seconds{certificate="platform-key"} 2000
# HELP muster_certificate_not_before_timestamp_seconds When a certificate of this machine began to be valid, in seconds since 1970.
# TYPE muster_certificate_not_before_timestamp_seconds gauge
muster_certificate_not_before_timestamp_seconds{certificate="platform-key"} 1000
`},
		"an EK certificate": {attesttest.Options{}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var key platformKey
			metrics := kubelet.Collector{Root: t.TempDir(), PlatformKey: key.certificate}
			if n := testutil.CollectAndCount(metrics); n != 0 {
				t.Errorf("%d series before the first evidence", n)
			}
			a := key.watch(attesttest.NewMachine(t, ca, tt.options).Attester(attest.PurposeMachine))
			if _, err := a.Attest(t.Context(), attestv1.Format_FORMAT_TPM2, attest.Binding{1}); err != nil {
				t.Fatal(err)
			}
			if err := testutil.CollectAndCompare(metrics, strings.NewReader(tt.want)); err != nil {
				t.Error(err)
			}
		})
	}
}
