// Package renewal lets nodes live longer than their certificates, which are as short as Kubernetes
// allows: ten minutes. Real kubelets renew when they think fit, five and a half to eight and a half minutes
// after they were given one, so the test takes eleven minutes. Nobody's clock is changed. It is not part of
// `make test`; `make test-renewal` runs it, by its build tag.
//
// Another test switches machines off, and lets them find certificates that ended meanwhile.
package renewal
