// Command probe checks whether a service in its own pod is alive or ready. It is in the images of joinservice and kms, for
// the probes of their pods; see deploy/charts/muster.
//
//	probe /healthz
//	probe /readyz
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/muster-k8s/muster/internal/probe"
)

func main() {
	if err := probe.Ask(context.Background(), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}
