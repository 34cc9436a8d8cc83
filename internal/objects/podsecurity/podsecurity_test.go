package podsecurity_test

import (
	"testing"

	"go.uber.org/goleak"
	apiserverv1 "k8s.io/apiserver/pkg/apis/apiserver/v1"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/objects/podsecurity"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// What the API server makes of it is tested on real ones: cmd/muster/owner/doctor and e2e/controlplane.
func TestTheConfigurationIsOneOfTheAPIServer(t *testing.T) {
	var c apiserverv1.AdmissionConfiguration
	if err := yaml.UnmarshalStrict([]byte(podsecurity.Config), &c); err != nil {
		t.Fatal(err)
	}
	if len(c.Plugins) != 3 || c.Plugins[0].Name != "PodSecurity" || c.Plugins[1].Name != "ResourceQuota" || c.Plugins[2].Name != podsecurity.EventRateLimit {
		t.Fatalf("it configures %+v", c.Plugins)
	}
	var p struct { // of pod-security.admission.config.k8s.io/v1
		APIVersion, Kind string
		Defaults         map[string]string
		Exemptions       struct{ Namespaces []string }
	}
	if err := yaml.UnmarshalStrict(c.Plugins[0].Configuration.Raw, &p); err != nil {
		t.Fatal(err)
	}
	if p.Defaults["enforce"] != "baseline" {
		t.Errorf("defaults %+v", p.Defaults)
	}
	for _, ns := range append(p.Exemptions.Namespaces, "default") {
		if want := ns != "default"; podsecurity.Exempt(ns) != want {
			t.Errorf("%s is exempt: %t, and not in the file", ns, !want)
		}
	}
}
