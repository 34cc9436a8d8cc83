// Package atlstest has peers that break the protocol muster-atls/1, for tests of peers that follow
// it.
//
// They act as a network attacker between two honest sides: without a TPM, but able to answer.
package atlstest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"io"
	"math/big"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/atls"
)

// patience bounds one connection of an UnattestedServer.
const patience = 10 * time.Second

// UnattestedServer listens at a free port of 127.0.0.1 as a server that offers evidence, sends
// none, and refuses every client with the verdict. It returns its address, HOST:PORT, and stops
// with the test.
func UnattestedServer(t testing.TB, v *attestv1.Verdict) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{atls.ALPN}, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
	})
	if err != nil {
		t.Fatal(err)
	}
	message := append(frame(t, &attestv1.Frame{Message: &attestv1.Frame_Offer{Offer: &attestv1.Offer{Gives: []attestv1.Format{attestv1.Format_FORMAT_TPM2}}}}),
		frame(t, &attestv1.Frame{Message: &attestv1.Frame_Verdict{Verdict: v}})...)
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { answer(c, message) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		all.Wait()
	})
	return l.Addr().String()
}

func frame(t testing.TB, f *attestv1.Frame) []byte {
	t.Helper()
	body, err := proto.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)
}

// answer sends the message, and waits for the client to close the connection: closing earlier would
// discard the verdict.
func answer(c net.Conn, message []byte) {
	defer c.Close()
	if c.SetDeadline(time.Now().Add(patience)) != nil {
		return
	}
	if _, err := c.Write(message); err == nil {
		_, _ = io.Copy(io.Discard, c)
	}
}
