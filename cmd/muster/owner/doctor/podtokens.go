package doctor

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/checkup"
)

// extendTokens is the API server's argument that extends the lifetime of pods' tokens from the requested hour to a
// year.
const extendTokens = "--service-account-extend-token-expiration" //nolint:gosec // no token is in it

// podTokens checks the arguments of each API server: by default it gives pods tokens that are valid for a year.
func (d *doctor) podTokens(ctx context.Context) error {
	var pods corev1.PodList
	if err := d.kube.Reader().List(ctx, &pods, client.InNamespace("kube-system"), client.MatchingLabels{"component": "kube-apiserver"}); err != nil {
		return err
	}
	for _, p := range pods.Items {
		if !slices.ContainsFunc(p.Spec.Containers, neverExtends) {
			d.Add(CheckPodTokens, checkup.Warn, "Add "+extendTokens+"=false to the API server's arguments on each control plane, see \"Pods' tokens\" in docs/leaving.md.",
				"%s gives pods tokens that are valid for a year: a token stolen from a node works until the pod is deleted", p.Name)
		}
	}
	switch {
	case len(pods.Items) == 0:
		d.Add(CheckPodTokens, checkup.Warn, "Make sure that each API server is started with "+extendTokens+"=false.", "no API server of this cluster is a pod, so the lifetime of pods' tokens is unknown")
	case d.Clean(CheckPodTokens):
		d.OK(CheckPodTokens, "are valid only for the requested time, by the arguments of %d API servers", len(pods.Items))
	}
	return nil
}

// neverExtends reports whether a container's last such argument disables the extension.
func neverExtends(c corev1.Container) bool {
	last := ""
	for _, arg := range slices.Concat(c.Command, c.Args) {
		if arg == extendTokens || len(arg) > len(extendTokens) && arg[:len(extendTokens)+1] == extendTokens+"=" {
			last = arg
		}
	}
	return last == extendTokens+"=false"
}
