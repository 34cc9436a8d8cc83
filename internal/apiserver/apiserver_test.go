package apiserver

import (
	"crypto/x509/pkix"
	"errors"
	"testing"

	"go.uber.org/goleak"
	"k8s.io/client-go/rest"

	"github.com/muster-k8s/muster/internal/kubetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestAKubeletIsNotTakenForTheAPIServer(t *testing.T) {
	for name, tt := range map[string]struct {
		subject pkix.Name
		node    bool
	}{
		"API server": {pkix.Name{CommonName: "kube-apiserver"}, false},
		"kubelet":    {pkix.Name{CommonName: "system:node:cp1", Organization: []string{"system:nodes"}}, true},
	} {
		config := kubetest.Forwarded(t, tt.subject)
		config.Wrap(Only)
		client, err := rest.HTTPClientFor(config)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Get(config.Host)
		if err == nil {
			_ = resp.Body.Close()
		}
		if e, node := errors.AsType[*NodeError](err); node != tt.node || node && e.Node != tt.subject.CommonName || !node && err != nil {
			t.Errorf("%s: %v", name, err)
		}
		client.CloseIdleConnections()
	}
}
