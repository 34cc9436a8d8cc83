package access

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// A first machine whose clock is hours ahead makes certificates that no other machine can use yet.
func TestAFirstMachineWithAWrongClockIsNamed(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	kubeconfigAt := func(machine time.Time) []byte {
		template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: machine.Add(-5 * time.Minute), NotAfter: machine.Add(24 * time.Hour)}
		der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		c := clientcmdapi.NewConfig()
		c.Clusters["c"] = &clientcmdapi.Cluster{CertificateAuthorityData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
		text, err := clientcmd.Write(*c)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	now := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	for name, tt := range map[string]struct {
		ahead   time.Duration // the machine's clock
		refused bool
	}{
		"the same time": {0, false}, "4 minutes ahead": {4 * time.Minute, false}, "3 hours behind": {-3 * time.Hour, false},
		"3 hours ahead": {3 * time.Hour, true}, "two days behind": {-48 * time.Hour, true},
	} {
		err := CheckClock(kubeconfigAt(now.Add(tt.ahead)), now)
		if (err != nil) != tt.refused || tt.refused && attest.ReasonOf(err) != attestv1.Reason_REASON_CLOCK_SKEW {
			t.Errorf("%s: %v", name, err)
		}
		if tt.refused && (!strings.Contains(err.Error(), "clock is at 2026-11-21T12:00:00Z") || !strings.Contains(problem.Explain(err).Remedy, "Check both clocks")) {
			t.Errorf("%s: %+v", name, problem.Explain(err))
		}
	}
}
