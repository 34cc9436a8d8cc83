package kubelet

import (
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/types/known/timestamppb"

	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
)

// certificateFiles are the certificates without which a node can't stay in the cluster, by the value of the label certificate, beside those of package
// renewal. Workers have only the kubelet's.
var certificateFiles = map[string]string{
	"kubelet-client":  ClientFile,
	"kubelet-serving": ServingFile,
	"ca":              machine.PKIFolder + "/ca.crt",
	"front-proxy-ca":  machine.PKIFolder + "/front-proxy-ca.crt",
	"etcd-ca":         machine.PKIFolder + "/etcd/ca.crt",
}

// Collector reads the machine's certificates for each scrape, since the kubelet and kubeadm replace them without notice. A missing file has no series.
type Collector struct {
	// Root is the root of the file system: "/" on a machine.
	Root string
	// PlatformKey returns the certificate of a cloud's platform key; nil if the machine has none, or none is known yet. The function may be left out.
	PlatformKey func() *x509.Certificate
}

var (
	notBeforeDesc = prometheus.NewDesc("muster_certificate_not_before_timestamp_seconds", "When a certificate of this machine began to be valid, in seconds since 1970.", []string{"certificate"}, nil)
	notAfterDesc  = prometheus.NewDesc("muster_certificate_not_after_timestamp_seconds", "When a certificate of this machine ends, in seconds since 1970; 0: the file holds none.", []string{"certificate"}, nil)
)

// Describe implements [prometheus.Collector].
func (c Collector) Describe(out chan<- *prometheus.Desc) {
	out <- notBeforeDesc
	out <- notAfterDesc
}

// Collect implements [prometheus.Collector].
func (c Collector) Collect(out chan<- prometheus.Metric) {
	for name, path := range certificateFiles {
		b, err := os.ReadFile(filepath.Join(c.Root, path))
		if err != nil {
			continue
		}
		notBefore, notAfter := validity(b)
		clear(b) // the kubelet's files have its keys too (K3)
		out <- prometheus.MustNewConstMetric(notBeforeDesc, prometheus.GaugeValue, notBefore, name)
		out <- prometheus.MustNewConstMetric(notAfterDesc, prometheus.GaugeValue, notAfter, name)
	}
	if c.PlatformKey != nil {
		if cert := c.PlatformKey(); cert != nil {
			out <- prometheus.MustNewConstMetric(notBeforeDesc, prometheus.GaugeValue, seconds(cert.NotBefore), "platform-key")
			out <- prometheus.MustNewConstMetric(notAfterDesc, prometheus.GaugeValue, seconds(cert.NotAfter), "platform-key")
		}
	}
	for _, r := range renewal.Read(c.Root) {
		notBefore, notAfter := 0.0, 0.0
		if r.Unreadable == "" {
			notBefore, notAfter = seconds(r.NotBefore), seconds(r.NotAfter)
		}
		out <- prometheus.MustNewConstMetric(notBeforeDesc, prometheus.GaugeValue, notBefore, r.Name)
		out <- prometheus.MustNewConstMetric(notAfterDesc, prometheus.GaugeValue, notAfter, r.Name)
	}
}

// validity returns the times of the first certificate in a PEM file; 0 if there is none.
func validity(file []byte) (notBefore, notAfter float64) {
	if cert := leafOf(file); cert != nil {
		return seconds(cert.NotBefore), seconds(cert.NotAfter)
	}
	return 0, 0
}

// leafOf returns the first certificate in a PEM file; nil if there is none.
func leafOf(file []byte) *x509.Certificate {
	for block, rest := pem.Decode(file); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" {
			clear(block.Bytes)
			continue
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil
		}
		return cert
	}
	return nil
}

// Report returns the machine's report on its kubelet's certificates: when those on its disk expire.
func Report(root string) *joinv1.ReattestRequest {
	end := func(path string) *timestamppb.Timestamp {
		b, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			return nil
		}
		defer clear(b) // K3
		if cert := leafOf(b); cert != nil {
			return timestamppb.New(cert.NotAfter)
		}
		return nil
	}
	return &joinv1.ReattestRequest{KubeletClientExpiresAt: end(ClientFile), KubeletServingExpiresAt: end(ServingFile)}
}

func seconds(t time.Time) float64 { return float64(t.Unix()) }
