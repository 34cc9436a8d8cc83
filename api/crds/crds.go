// Package crds contains the CustomResourceDefinitions of Muster's API, which controller-gen
// generates from package v1alpha1.
package crds

import "embed"

// FS holds one YAML file for each CustomResourceDefinition.
//
//go:embed *.yaml
var FS embed.FS
