// Package renewal lets nodes live longer than their certificates, which are as short as Kubernetes
// allows: ten minutes. Real kubelets renew when they think fit, five and a half to eight and a half minutes
// after they were given one, so the test takes eleven minutes. Nobody's clock is changed. It is not part of
// `make test`; `make test-renewal` runs it, by its build tag.
//
// Other tests let machines find certificates that have ended: after they were off, and while they run. A control plane's of kubeadm are renewed
// in turn while they live.
package renewal
