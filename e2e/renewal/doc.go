// Package renewal lets nodes live longer than their certificates, whose lifetime is the minimum of Kubernetes: ten
// minutes. Real kubelets renew on their own schedule, five and a half to eight and a half minutes after they got one,
// so the test takes eleven minutes. No clock is changed. It is not part of `make test`; `make test-renewal` runs it,
// by its build tag.
//
// Other tests let machines find certificates that have ended: after they were off, and while they run. Those that
// kubeadm makes for a control plane are renewed one control plane after another while they are valid.
package renewal
