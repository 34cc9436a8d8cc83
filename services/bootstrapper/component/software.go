package component

import (
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/trust/attest"
)

// Software is a checked list of components and images.
type Software struct {
	List       versions.List
	Components []Component
	Images     versions.Images
}

// ParseSoftware checks the list of an owner or a joinservice.
func ParseSoftware(components []*initv1.Component, images []string) (*Software, error) {
	out := &Software{List: versions.FromWire(components, images)}
	var err error
	if out.Components, err = Parse(components); err != nil {
		return nil, err
	}
	if out.Images, err = versions.ParseImages(images); err != nil { // B9
		return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "the cluster's list: %w", err)
	}
	return out, nil
}
