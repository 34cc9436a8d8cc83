package bootstrapper

import (
	"context"
	"crypto/x509"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// measureQuotes returns an attester that calls a and measures the time that evidence takes in muster_quote_seconds{purpose}.
func measureQuotes(a attest.Attester, p attest.Purpose, h *prometheus.HistogramVec) attest.Attester {
	return measured{a, h.WithLabelValues(string(p))}
}

// newQuoteSeconds returns the histogram for [measureQuotes], registered.
func newQuoteSeconds(r prometheus.Registerer) (*prometheus.HistogramVec, error) {
	h := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "muster_quote_seconds", Help: "Time to make evidence, the wait for the TPM included.",
		Buckets: prometheus.ExponentialBuckets(0.005, 2, 13), // 5 ms to 20 s
	}, []string{"purpose"})
	return h, r.Register(h)
}

type measured struct {
	attest.Attester
	seconds prometheus.Observer
}

func (m measured) Attest(ctx context.Context, f attestv1.Format, b attest.Binding) (*attestv1.Evidence, error) {
	start := time.Now()
	defer func() { m.seconds.Observe(time.Since(start).Seconds()) }()
	return m.Attester.Attest(ctx, f, b)
}

// platformKey keeps the certificate of a cloud's platform key, as the machine's latest evidence has it: it is read from the TPM only then.
type platformKey struct {
	leaf atomic.Pointer[x509.Certificate]
}

// watch returns an attester that calls a.
func (k *platformKey) watch(a attest.Attester) attest.Attester { return watched{a, k} }

// certificate returns nil before the first evidence, and on a machine without a platform key.
func (k *platformKey) certificate() *x509.Certificate { return k.leaf.Load() }

type watched struct {
	attest.Attester
	key *platformKey
}

func (w watched) Attest(ctx context.Context, f attestv1.Format, b attest.Binding) (*attestv1.Evidence, error) {
	ev, err := w.Attester.Attest(ctx, f, b)
	if certs := ev.GetTpm2().GetPlatformKey().GetCertificates(); err == nil && len(certs) > 0 {
		if leaf, err := x509.ParseCertificate(certs[0]); err == nil { // otherwise each verifier refuses it
			w.key.leaf.Store(leaf)
		}
	}
	return ev, err
}
