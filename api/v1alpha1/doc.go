// Package v1alpha1 has the Go types of Muster's objects in the Kubernetes API: the evidence that the owner
// accepts (AttestationPolicy), the machine of a node (AttestedNode), and the machine of a state disk
// (AttestedDisk). All are cluster-scoped, and every change to them is a compare-and-swap on resourceVersion.
//
// Deep copies and the schemas in api/crds are generated from the comments here.
//
// +kubebuilder:object:generate=true
// +groupName=muster.dev
package v1alpha1

//go:generate ../../bin/dev/controller-gen object crd paths=. output:crd:dir=../crds

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion is the API group and version of this package's types.
var GroupVersion = schema.GroupVersion{Group: "muster.dev", Version: "v1alpha1"}

// AddToScheme registers this package's types.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &AttestationPolicy{}, &AttestationPolicyList{}, &AttestedNode{}, &AttestedNodeList{}, &AttestedDisk{}, &AttestedDiskList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
