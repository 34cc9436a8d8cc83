// Package podsecurity is the configuration by which the API servers of a cluster refuse pods that would make their creator
// root on a node: the Pod Security Standard "baseline" wherever a namespace's labels name no other.
//
// The API server reads an AdmissionConfiguration (apiserver.config.k8s.io/v1) once, when it starts. That of the plugin
// PodSecurity in it is of pod-security.admission.config.k8s.io/v1.
package podsecurity

import (
	"slices"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// Label is a namespace's label with the standard for its pods.
const Label = "pod-security.kubernetes.io/enforce"

// Exempt reports whether a namespace runs the components of nodes and control planes. Only administrators create pods
// there.
func Exempt(namespace string) bool {
	return slices.Contains([]string{"kube-system", clusterinfo.Namespace}, namespace)
}

// EventRateLimit is the plugin that bounds how many events one user writes. It does not start without its part of [Config].
const EventRateLimit = "EventRateLimit"

// Config is the file. Events stay in etcd for an hour: with the size that admission allows a node (4 KiB) and the rate, one
// node's events take 150 MB in that time. Pods with an affinity or anti-affinity for pods of other namespaces need a
// ResourceQuota with the scope CrossNamespacePodAffinity in their own: one pod with such an anti-affinity keeps the pods of
// another namespace, including Muster's, off every node.
const Config = `apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
- name: PodSecurity
  configuration:
    apiVersion: pod-security.admission.config.k8s.io/v1
    kind: PodSecurityConfiguration
    defaults: {enforce: baseline, enforce-version: latest, audit: baseline, audit-version: latest, warn: baseline, warn-version: latest}
    exemptions: {namespaces: [kube-system, ` + clusterinfo.Namespace + `]}
- name: ResourceQuota
  configuration:
    apiVersion: apiserver.config.k8s.io/v1
    kind: ResourceQuotaConfiguration
    limitedResources:
    - {resource: pods, matchScopes: [{scopeName: CrossNamespacePodAffinity, operator: Exists}]}
- name: ` + EventRateLimit + `
  configuration:
    apiVersion: eventratelimit.admission.k8s.io/v1alpha1
    kind: Configuration
    limits:
    - {type: User, qps: 10, burst: 200, cacheSize: 4096}
`
