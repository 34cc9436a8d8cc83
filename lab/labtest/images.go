package labtest

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/muster-k8s/muster/internal/versions"
)

// RunsListed returns nil once each pod of Kubernetes names the listed digest and runs it (B9), on a cluster with the given
// numbers of control planes and nodes.
func (c *Cluster) RunsListed(ctx context.Context, listed versions.Images, planes, nodes int) error {
	out, err := c.Kubectl(ctx, "-n", "kube-system", "get", "pods", "-o", `jsonpath={range .items[*]}{.spec.containers[0].name}|{.spec.containers[0].image}|{.status.containerStatuses[0].imageID}|{.status.containerStatuses[0].ready}{"\n"}{end}`)
	if err != nil {
		return err
	}
	seen := map[string]int{}
	for line := range strings.Lines(out) {
		f := strings.Split(strings.TrimSpace(line), "|")
		image, ours := listed[f[0]]
		if !ours || len(f) != 4 {
			continue
		}
		if !strings.HasSuffix(f[1], "@"+image.Digest) || !strings.HasSuffix(f[2], image.Digest) || f[3] != "true" {
			err = errors.Join(err, fmt.Errorf("%s: %q, want %s", f[0], f, image))
		}
		seen[f[0]]++
	}
	for name, want := range map[string]int{versions.Etcd: planes, versions.APIServer: planes, versions.ControllerManager: planes, versions.Scheduler: planes, versions.Proxy: nodes} {
		if seen[name] != want {
			err = errors.Join(err, fmt.Errorf("%d pods of %s, want %d", seen[name], name, want))
		}
	}
	if seen[versions.CoreDNS] == 0 {
		err = errors.Join(err, errors.New("no pod of CoreDNS"))
	}
	return err
}
