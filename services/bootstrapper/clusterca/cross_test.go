package clusterca_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	"k8s.io/kubernetes/cmd/kubeadm/app/util/pkiutil"

	"github.com/muster-k8s/muster/services/bootstrapper/clusterca"
)

func parse(t *testing.T, text []byte) *x509.Certificate {
	t.Helper()
	list, err := certutil.ParseCertsPEM(text)
	if err != nil {
		t.Fatal(err)
	}
	return list[0]
}

// openssl reports whether OpenSSL finds a way from a certificate of an API server to the trusted ones, by those that are sent with it.
func openssl(t *testing.T, trusted, sent, leaf []byte) bool {
	t.Helper()
	dir := t.TempDir()
	file := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	args := []string{"verify", "-no-CApath", "-no-CAstore", "-purpose", "sslserver", "-CAfile", file("trusted", trusted)}
	if sent != nil {
		args = append(args, "-untrusted", file("sent", sent))
	}
	out, err := exec.CommandContext(t.Context(), "openssl", append(args, file("leaf", leaf))...).CombinedOutput()
	t.Logf("%s", out)
	return err == nil
}

// A client that trusts only the old authority, or only the new one, or both, accepts what the new one has issued. Both have one name, so OpenSSL finds the
// issuer by the identifiers of keys.
func TestACrossCertificateLeadsToTheOldAuthority(t *testing.T) {
	for _, algorithm := range []string{"ECDSA-P256", "RSA-2048"} {
		old, oldKey := authorityOf(t, algorithm)
		next, nextKey := authorityOf(t, algorithm)
		third, _ := authorityOf(t, algorithm)
		a, err := clusterca.Load(folder(t, old, oldKey))
		if err != nil {
			t.Fatal(err)
		}
		cross, err := a.CrossSign(parse(t, next))
		if err != nil {
			t.Fatal(err)
		}
		was, is := parse(t, old), parse(t, next)
		if !bytes.Equal(cross.AuthorityKeyId, was.SubjectKeyId) || !bytes.Equal(cross.SubjectKeyId, is.SubjectKeyId) || bytes.Equal(cross.AuthorityKeyId, cross.SubjectKeyId) || len(cross.AuthorityKeyId) == 0 {
			t.Errorf("issuer's key %x, own key %x; the old authority has %x, the new one %x", cross.AuthorityKeyId, cross.SubjectKeyId, was.SubjectKeyId, is.SubjectKeyId)
		}
		if cross.NotAfter.After(was.NotAfter) || cross.NotBefore.Before(was.NotBefore) || cross.NotAfter.After(is.NotAfter) || cross.NotBefore.Before(is.NotBefore) {
			t.Errorf("valid from %s to %s", cross.NotBefore, cross.NotAfter)
		}
		b, err := clusterca.Load(folder(t, next, nextKey))
		if err != nil {
			t.Fatal(err)
		}
		leaf := serving(t, b)
		sent := pkiutil.EncodeCertPEM(cross)
		for name, tt := range map[string]struct {
			trusted, sent []byte
			want          bool
		}{
			"the old one alone":            {old, sent, true},
			"the new one alone":            {next, sent, true},
			"both":                         {slices.Concat(old, next), sent, true},
			"both, in the other order":     {slices.Concat(next, old), sent, true},
			"the new one, nothing is sent": {next, nil, true},
			"the old one, nothing is sent": {old, nil, false},
			"another one of the name":      {third, sent, false},
		} {
			if got := openssl(t, tt.trusted, tt.sent, leaf); got != tt.want {
				t.Errorf("%s, OpenSSL that trusts %s: %v", algorithm, name, got)
			}
			roots, between := x509.NewCertPool(), x509.NewCertPool()
			roots.AppendCertsFromPEM(tt.trusted)
			between.AppendCertsFromPEM(tt.sent)
			if _, err := parse(t, leaf).Verify(x509.VerifyOptions{Roots: roots, Intermediates: between}); (err == nil) != tt.want {
				t.Errorf("%s, Go that trusts %s: %v", algorithm, name, err)
			}
		}
	}
}

// The old key is there only until the new one replaces it.
func TestTheCrossCertificateIsSignedWhileTheOldKeyIsThere(t *testing.T) {
	old, oldKey := newAuthority(t)
	next, nextKey := newAuthority(t)
	third, thirdKey := newAuthority(t)
	both := slices.Concat(old, next)
	dir := folder(t, both, oldKey)
	file := filepath.Join(dir, clusterca.CrossFile)
	put := func(name string, content []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	foreign, err := clusterca.Load(folder(t, third, thirdKey))
	if err != nil {
		t.Fatal(err)
	}
	wrong, err := foreign.CrossSign(parse(t, next))
	if err != nil {
		t.Fatal(err)
	}
	for name, was := range map[string][]byte{"nothing": nil, "half a file": both[:100], "one of another authority's": pkiutil.EncodeCertPEM(wrong), "the old authority": old, "the new authority": next} {
		if was != nil {
			put(clusterca.CrossFile, was)
		}
		if err := clusterca.WriteCross(dir, parse(t, next)); err != nil {
			t.Errorf("in the place of %s: %v", name, err)
		}
		if text, err := os.ReadFile(file); err != nil || !clusterca.Crosses(parse(t, text), parse(t, next), []*x509.Certificate{parse(t, old)}) {
			t.Errorf("in the place of %s: %v", name, err)
		}
	}
	right, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	// A crash between the two files, and after them.
	put("ca.crt", slices.Concat(next, old))
	for _, key := range [][]byte{oldKey, nextKey} {
		put("ca.key", key)
		if err := clusterca.WriteCross(dir, parse(t, next)); err != nil {
			t.Error(err)
		}
		if text, err := os.ReadFile(file); err != nil || !bytes.Equal(text, right) {
			t.Errorf("it was signed again: %v", err)
		}
		if c, err := clusterca.Cross(dir); err != nil || c == nil {
			t.Errorf("%v, %v", c, err)
		}
	}
	put(clusterca.CrossFile, pkiutil.EncodeCertPEM(wrong))
	if err := clusterca.WriteCross(dir, parse(t, next)); err == nil {
		t.Error("the new authority signs its own cross certificate")
	}
	// What is sent.
	for name, tt := range map[string]struct {
		authorities, cross []byte
		sent               bool
	}{
		"while both are trusted":                  {slices.Concat(next, old), right, true},
		"before the new one signs":                {slices.Concat(old, next), right, false},
		"once the old one is not trusted":         {next, right, false},
		"one that another authority has signed":   {slices.Concat(next, old), pkiutil.EncodeCertPEM(wrong), false},
		"the new authority itself":                {slices.Concat(next, old), next, false},
		"two of them":                             {slices.Concat(next, old), slices.Concat(right, right), false},
		"what is no certificate":                  {slices.Concat(next, old), []byte("x"), false},
		"of an authority that was rotated before": {slices.Concat(third, next), right, false},
	} {
		put("ca.crt", tt.authorities)
		put(clusterca.CrossFile, tt.cross)
		if c, err := clusterca.Cross(dir); err != nil || (c != nil) != tt.sent {
			t.Errorf("%s: %v, %v", name, c, err)
		}
	}
}

func TestAnAuthorityThatHasEndedSignsNoCrossCertificate(t *testing.T) {
	old, oldKey := newAuthority(t)
	a, err := clusterca.Load(folder(t, old, oldKey))
	if err != nil {
		t.Fatal(err)
	}
	next, _ := newAuthority(t)
	was := parse(t, old)
	longer := parse(t, next)
	longer.NotBefore, longer.NotAfter = was.NotBefore.Add(-time.Hour), was.NotAfter.Add(time.Hour)
	if c, err := a.CrossSign(longer); err != nil || !c.NotBefore.Equal(was.NotBefore) || !c.NotAfter.Equal(was.NotAfter) {
		t.Errorf("for a longer one: %+v, %v", c, err)
	}
	later := parse(t, next)
	later.NotBefore = time.Now().Add(48 * time.Hour)
	if _, err := a.CrossSign(later); err == nil {
		t.Error("it is valid at no time")
	}
}

// An adopted cluster's authority can be an intermediate one that may sign no other: clients would accept nothing below its cross certificate.
func TestAnAuthorityThatMaySignForNoOtherIsNotRotated(t *testing.T) {
	next, _ := authorityOf(t, "ECDSA-P256")
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	text, err := keyutil.MarshalPrivateKeyToPEM(key)
	if err != nil {
		t.Fatal(err)
	}
	for length, may := range map[int]bool{-1: true, 0: false, 1: true} {
		c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign, MaxPathLen: length, MaxPathLenZero: length == 0}
		der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		dir := folder(t, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), text)
		if err := clusterca.MayCross(dir, parse(t, next)); (err == nil) != may || err != nil && !strings.Contains(err.Error(), "pathLenConstraint 0") {
			t.Errorf("path length %d: %v", length, err)
		}
		if err := clusterca.MayCross(dir, parse(t, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))); err != nil {
			t.Errorf("path length %d, its own: %v", length, err)
		}
	}
}
