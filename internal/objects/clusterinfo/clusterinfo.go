// Package clusterinfo is the public description of a cluster: the content of the ConfigMap muster-system/muster-cluster.
// The first machine writes it, the services read it. Nothing in it is secret.
package clusterinfo

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"

	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/trust/keys"
)

// The ConfigMap and its key.
const (
	Namespace = "muster-system"
	ConfigMap = "muster-cluster"
	Key       = "cluster.json"
)

// Names that control planes share, beside the ConfigMap.
const (
	// ControlPlaneLease is the Lease in [Namespace] of the one control plane that joins or restarts its etcd for renewed
	// certificates.
	ControlPlaneLease = "muster-control-plane-join"
	// CertificatesAnnotation is the annotation of a control plane's Node with the certificates that its machine renews: a JSON list.
	CertificatesAnnotation = "muster.dev/control-plane-certificates"
	// EpochMap is the ConfigMap in [Namespace] with the cluster's epoch: `epoch`, a number, `of`, a digest of the policy,
	// enrollments and disks that it was counted for, `rotation`, key, phase and ID of the rotation in progress then, and
	// `history`, the IDs of the last epochs, see [History].
	EpochMap = "muster-epoch"
	// EpochAnnotation is the annotation of a control plane's Node with the newest epoch that its machine knows, as [HistoryEpoch.String] writes it.
	EpochAnnotation = "muster.dev/epoch"
	// NodeUserPrefix and NodeGroup make up the subject of a node's certificates, as Kubernetes' Node authorizer expects
	// it: CN NodeUserPrefix and the node's name, O NodeGroup.
	NodeUserPrefix = "system:node:"
	NodeGroup      = "system:nodes"
	// ControlPlaneLabel is kubeadm's label of control planes' Nodes, where joinservice and kms run. A kubelet may not set
	// it on its own Node.
	ControlPlaneLabel = "node-role.kubernetes.io/control-plane"
	// AdministratorSigner names the signer of certificates for `muster kubeconfig renew`: the control planes' machines.
	AdministratorSigner = "muster.dev/administrator"
)

// Info describes a cluster.
type Info struct {
	// ClusterID is derived from the root secret; 32 bytes.
	ClusterID keys.ClusterID
	// MeasurementSalt is the salt of that derivation; 32 random bytes of init.
	MeasurementSalt [32]byte
	// KubernetesVersion is full and without "v".
	KubernetesVersion string
	// ControlPlaneEndpoint is HOST:PORT of the API server.
	ControlPlaneEndpoint string
	// APIServerSANs are the further names and addresses in the API server's certificate. No machine may have one in its
	// own. It may be empty.
	APIServerSANs []string
	// Components are what a joining machine installs, in that order.
	Components []versions.Component
	// Images are those of Kubernetes, by digest; empty in a cluster that is older than this list, which then admits no
	// machine.
	Images []string
	// Adopted is true if the cluster is older than Muster.
	Adopted bool
	// Next is the release that the cluster is being upgraded to, until all control planes run it: the other fields are those of the
	// release before, with which machines join. Previous is the release before, from then on until all nodes are upgraded. At most
	// one of them is set.
	Next, Previous *Release
	// Rotation is the replacement of a key that is in progress; nil if there is none.
	Rotation *Rotation
}

// Release is the software of the cluster's nodes at one version of Kubernetes.
type Release struct {
	// KubernetesVersion is full and without "v".
	KubernetesVersion string `json:"kubernetesVersion"`
	// Components and Images are as in [Info].
	Components []versions.Component `json:"components"`
	Images     []string             `json:"images"`
}

// List returns the list of software that nodes compare theirs with, in JSON.
func (r Release) List() (string, error) {
	l := versions.NewList(r.Components...)
	l.Images = r.Images
	b, err := json.Marshal(l)
	return string(b), err
}

// Current returns the release with which machines join.
func (i *Info) Current() Release {
	return Release{KubernetesVersion: i.KubernetesVersion, Components: i.Components, Images: i.Images}
}

// Other returns the second release that nodes may run while the cluster is upgraded; nil if there is none.
func (i *Info) Other() *Release {
	if i.Next != nil {
		return i.Next
	}
	return i.Previous
}

// check returns an error if the list is not complete.
func (r *Release) check() error {
	if r == nil {
		return nil
	}
	if v, err := versions.Resolve(r.KubernetesVersion); err != nil || v != r.KubernetesVersion {
		return fmt.Errorf("kubernetesVersion %q: want a supported version with three numbers", r.KubernetesVersion)
	}
	if len(r.Components) == 0 {
		return errors.New("components: there is none")
	}
	_, err := versions.ParseImages(r.Images)
	return err
}

type document struct {
	ClusterID            string               `json:"clusterID"`
	MeasurementSalt      string               `json:"measurementSalt"`
	KubernetesVersion    string               `json:"kubernetesVersion"`
	ControlPlaneEndpoint string               `json:"controlPlaneEndpoint"`
	APIServerSANs        []string             `json:"apiServerSANs,omitempty"`
	Components           []versions.Component `json:"components"`
	Images               []string             `json:"images,omitempty"`
	Adopted              bool                 `json:"adopted,omitempty"`
	Next                 *Release             `json:"next,omitempty"`
	Previous             *Release             `json:"previous,omitempty"`
	Rotation             *Rotation            `json:"rotation,omitempty"`
}

// Parse reads the value of [Key]. Unknown fields are errors, and so are missing ones except apiServerSANs, components and
// images.
func Parse(data []byte) (*Info, error) {
	var d document
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&d); err != nil {
		return nil, fmt.Errorf("%s: %w", Key, err)
	}
	id, err := unhex(d.ClusterID)
	if err != nil {
		return nil, fmt.Errorf("%s: clusterID: %w", Key, err)
	}
	salt, err := unhex(d.MeasurementSalt)
	if err != nil {
		return nil, fmt.Errorf("%s: measurementSalt: %w", Key, err)
	}
	if _, err := versions.Resolve(d.KubernetesVersion); err != nil {
		return nil, fmt.Errorf("%s: kubernetesVersion: %w", Key, err)
	}
	host, port, err := net.SplitHostPort(d.ControlPlaneEndpoint)
	if n, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil || n == 0 || host == "" {
		return nil, fmt.Errorf("%s: controlPlaneEndpoint %q: want HOST:PORT", Key, d.ControlPlaneEndpoint)
	}
	if slices.Contains(d.APIServerSANs, "") {
		return nil, fmt.Errorf("%s: apiServerSANs: one is empty", Key)
	}
	if len(d.Images) > 0 {
		if _, err := versions.ParseImages(d.Images); err != nil {
			return nil, fmt.Errorf("%s: %w", Key, err)
		}
	}
	if d.Next != nil && d.Previous != nil {
		return nil, fmt.Errorf("%s: next and previous: at most one of them", Key)
	}
	if err := d.Next.check(); err != nil {
		return nil, fmt.Errorf("%s: next: %w", Key, err)
	}
	if err := d.Previous.check(); err != nil {
		return nil, fmt.Errorf("%s: previous: %w", Key, err)
	}
	if err := d.Rotation.check(); err != nil {
		return nil, fmt.Errorf("%s: rotation: %w", Key, err)
	}
	return &Info{
		ClusterID: id, MeasurementSalt: salt, KubernetesVersion: d.KubernetesVersion,
		ControlPlaneEndpoint: d.ControlPlaneEndpoint, APIServerSANs: d.APIServerSANs, Components: d.Components, Images: d.Images, Adopted: d.Adopted,
		Next: d.Next, Previous: d.Previous, Rotation: d.Rotation,
	}, nil
}

// Marshal returns what [Parse] reads.
func (i *Info) Marshal() ([]byte, error) {
	return json.Marshal(document{
		ClusterID: i.ClusterID.String(), MeasurementSalt: hex.EncodeToString(i.MeasurementSalt[:]), KubernetesVersion: i.KubernetesVersion,
		ControlPlaneEndpoint: i.ControlPlaneEndpoint, APIServerSANs: i.APIServerSANs, Components: i.Components, Images: i.Images, Adopted: i.Adopted,
		Next: i.Next, Previous: i.Previous, Rotation: i.Rotation,
	})
}

func unhex(s string) ([32]byte, error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != 32 {
		return [32]byte{}, errors.New("want 64 hexadecimal digits")
	}
	return [32]byte(b), nil
}
