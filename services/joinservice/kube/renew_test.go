package kube

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"math/big"
	"testing"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// J4, J7: what the owner does while the certificate is being signed counts, also where no older one is retired.
func TestABanDuringARenewalKeepsTheCertificate(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		meanwhile func(t *testing.T, n *v1alpha1.AttestedNode)
		want      attestv1.Reason
	}{
		"nothing happens": {func(*testing.T, *v1alpha1.AttestedNode) {}, attestv1.Reason_REASON_ACCEPTED},
		"it is banned": {func(t *testing.T, n *v1alpha1.AttestedNode) {
			t.Helper()
			n.Spec.Banned = true
			if err := shared.Client.Update(t.Context(), n); err != nil {
				t.Fatal(err)
			}
		}, attestv1.Reason_REASON_BANNED},
		"it is forgotten": {func(t *testing.T, n *v1alpha1.AttestedNode) {
			t.Helper()
			if err := shared.Client.Delete(t.Context(), n); err != nil {
				t.Fatal(err)
			}
		}, attestv1.Reason_REASON_BANNED},
	} {
		t.Run(name, func(t *testing.T) {
			shared.Reset(t)
			k, _ := replica(t)
			c := claim(1)
			enrol(t, k, c, "a")
			r, err := k.Renewable(t.Context(), c, ticket("b"))
			if err != nil {
				t.Fatal(err)
			}
			tt.meanwhile(t, shared.Node(t, c.Node))
			got := attestv1.Reason_REASON_ACCEPTED
			if err := r.Vouch(t.Context(), cert); err != nil {
				got = attest.ReasonOf(err)
			}
			if got != tt.want {
				t.Errorf("%s, want %s", got, tt.want)
			}
		})
	}
}
