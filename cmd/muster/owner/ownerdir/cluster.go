package ownerdir

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/trust/attest"
)

// Stage is the last finished stage of init.
type Stage string

// The stages.
const (
	// StagePrepared: the folder is stored on the disk; nothing was sent.
	StagePrepared Stage = "prepared"
	// StageRequested: a machine was accepted and may hold the secrets. No other machine receives them.
	StageRequested Stage = "requested"
	// StageInitialized: the cluster has one machine.
	StageInitialized Stage = "initialized"
	// StageInstalled: Muster's services run in it.
	StageInstalled Stage = "installed"
)

// Cluster is cluster.json: the parameters and the results of init. It holds no secret.
type Cluster struct {
	// Version of this file's format: 1.
	Version int `json:"version"`
	// Name of the cluster, a DNS label.
	Name string `json:"name"`
	// Endpoint is HOST:PORT of the first machine's init server.
	Endpoint string `json:"endpoint"`
	// KubernetesVersion is the full version without "v".
	KubernetesVersion string `json:"kubernetesVersion"`
	// ControlPlaneEndpoint is HOST:PORT of the API server.
	ControlPlaneEndpoint string `json:"controlPlaneEndpoint"`
	// PodCIDRs, ServiceCIDRs and APIServerSANs are as in InitRequest.
	PodCIDRs      []string `json:"podCIDRs,omitempty"`
	ServiceCIDRs  []string `json:"serviceCIDRs,omitempty"`
	APIServerSANs []string `json:"apiServerSANs,omitempty"`
	// Components are the programs that nodes install.
	Components []versions.Component `json:"components,omitempty"`
	// Images are Kubernetes' own images, by digest.
	Images []string `json:"images,omitempty"`
	// OwnerID is SHA-256 of the owner's public key.
	OwnerID string `json:"ownerID"`

	// Adopted reports that muster install added Muster to an existing cluster.
	Adopted bool `json:"adopted,omitempty"`

	// Stage and the following fields are set in the course of init.
	Stage Stage `json:"stage"`
	// ClusterID is known with the first result, 64 hexadecimal digits.
	ClusterID string `json:"clusterID,omitempty"`
	// Restore is the backup from which the cluster is being restored; nil if there is no restore. During a restore, Stage, Endpoint and FirstMachine
	// are the restore's. The backup's other parameters are stored here only with the result.
	Restore *Restore `json:"restore,omitempty"`
	// Upgrade is the release to which Kubernetes is being upgraded; nil if there is no upgrade.
	Upgrade *clusterinfo.Release `json:"upgrade,omitempty"`
	// EncryptionKeyRotated reports that the key of Secrets in etcd is no longer derived from the root secret.
	EncryptionKeyRotated bool `json:"encryptionKeyRotated,omitempty"`
	// FirstMachine is the machine that was appraised and initialized.
	FirstMachine *Machine `json:"firstMachine,omitempty"`
	// ControlPlanes are the machines that the owner has made control planes, by node name (A7): added by init, enroll, replace and restore, removed
	// by forget. They are never read from the API server: otherwise a writer of enrollments would choose which machine the owner signs. Folders of
	// earlier versions have none.
	ControlPlanes map[string]attest.MachineID `json:"controlPlanes,omitempty"`
	// NodesBefore are the other nodes that an adopted cluster had when the API server was first reached; nil until then. It
	// is never written again, because a node that joins between two runs did not exist before Muster.
	NodesBefore []string `json:"nodesBefore,omitzero"`
}

// Restore is a backup that is being restored.
type Restore struct {
	// SHA256 is that of the file, in 64 hexadecimal digits.
	SHA256 string `json:"sha256"`
	// Epoch is the backup's, which the owner has accepted.
	Epoch uint64 `json:"epoch"`
	// Former is the previous first machine, FormerEndpoint the address of its init server: an abandoned restore puts them back.
	Former         *Machine `json:"former,omitempty"`
	FormerEndpoint string   `json:"formerEndpoint,omitempty"`
	// Asked are the machines that earlier runs of this restore sent a request to, and the present machine with the names that it had before. They may have the cluster's keys.
	Asked []Asked `json:"asked,omitempty"`
	// Ended reports whether a machine has become the first control plane of the restored cluster; then the restore can't be abandoned.
	Ended bool `json:"ended,omitempty"`
	// Listed reports whether the folder's policy lists the restored machine as its only control plane.
	Listed bool `json:"listed,omitempty"`
}

// Asked is a machine that a restore has asked to become the first control plane.
type Asked struct {
	ID       attest.MachineID `json:"id"`
	NodeName string           `json:"nodeName,omitempty"`
}

// Asked returns the machines that the restore has asked, with all names that they had; none if nothing was sent.
func (c Cluster) Asked() (out []Asked) {
	if c.Restore == nil {
		return nil
	}
	out = slices.Clone(c.Restore.Asked)
	if m := c.FirstMachine; m != nil && !slices.Contains(out, Asked{m.ID, m.NodeName}) {
		out = append(out, Asked{m.ID, m.NodeName})
	}
	return out
}

// Machine is the first machine with the owner's verdict.
type Machine struct {
	ID attest.MachineID `json:"id"`
	// NodeName, DiskID and Addresses are set with the result; in a restore, NodeName is set before anything is sent.
	NodeName  string   `json:"nodeName,omitempty"`
	DiskID    string   `json:"diskID,omitempty"`
	Addresses []string `json:"addresses,omitempty"`
	// DiskSalt is that of the machine's disk, written before anything is sent; empty once the disk was erased (K4).
	DiskSalt string `json:"diskSalt,omitempty"`
	// Verdict is the owner's appraisal before anything was sent.
	Verdict Verdict `json:"verdict"`
}

// Verdict describes the evidence and the policy by which it was accepted.
type Verdict struct {
	Time           string            `json:"time"` // RFC 3339
	PolicySerial   uint64            `json:"policySerial"`
	EvidenceDigest string            `json:"evidenceDigest"`
	PCRs           map[string]string `json:"pcrs"`
	AKName         string            `json:"akName"`
	ResetCount     uint32            `json:"resetCount"`
}

// ControlPlane returns the name of the control plane that this folder records for the machine; empty if there is none.
func (c Cluster) ControlPlane(id attest.MachineID) string {
	for name, machine := range c.ControlPlanes {
		if machine == id {
			return name
		}
	}
	return ""
}

// RecordControlPlane records in cluster.json the machine of the control plane with that name; nil removes the record.
func (d *Dir) RecordControlPlane(name string, id *attest.MachineID) error {
	c := d.Cluster()
	if had, ok := c.ControlPlanes[name]; ok == (id != nil) && (!ok || had == *id) {
		return nil
	}
	if c.ControlPlanes == nil {
		c.ControlPlanes = map[string]attest.MachineID{}
	}
	if id == nil {
		delete(c.ControlPlanes, name)
	} else {
		c.ControlPlanes[name] = *id
	}
	return d.Save(c)
}

func (c Cluster) clone() Cluster {
	b, err := json.Marshal(c)
	if err != nil {
		panic("ownerdir: " + err.Error()) // no field can fail
	}
	out, err := parseCluster(b)
	if err != nil {
		return Cluster{} // only a value that was never saved has no version
	}
	return out
}

func parseCluster(b []byte) (Cluster, error) {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	var c Cluster
	if err := dec.Decode(&c); err != nil {
		return Cluster{}, err
	}
	if c.Version != 1 {
		return Cluster{}, fmt.Errorf("version %d was written by another version of muster; this one reads 1", c.Version)
	}
	return c, nil
}

// differences lists the parameters that differ, by the flags' names.
func (c Cluster) differences(other Cluster) []string {
	var diff []string
	for _, f := range []struct {
		flag string
		a, b any
	}{
		{"the command", c.Adopted, other.Adopted},
		{"--name", c.Name, other.Name},
		{"--endpoint", c.Endpoint, other.Endpoint},
		{"--kubernetes", c.KubernetesVersion, other.KubernetesVersion},
		{"--control-plane-endpoint", c.ControlPlaneEndpoint, other.ControlPlaneEndpoint},
		{"--pod-cidr", c.PodCIDRs, other.PodCIDRs},
		{"--service-cidr", c.ServiceCIDRs, other.ServiceCIDRs},
		{"--api-server-san", slices.Concat(c.APIServerSANs), slices.Concat(other.APIServerSANs)},
		{"--components", slices.Concat(c.Components), slices.Concat(other.Components)},
		{"--components (images)", slices.Concat(c.Images), slices.Concat(other.Images)},
	} {
		if !reflect.DeepEqual(f.a, f.b) {
			diff = append(diff, f.flag)
		}
	}
	return diff
}

// listing returns init's policy for the folder after the first machine is known: it lists that machine as a control plane.
// It returns nil if there is no machine, or if the text is not a policy.
func (c Cluster) listing(policy []byte) []byte {
	if c.FirstMachine == nil {
		return nil
	}
	p, _, err := policyfile.Parse(policy)
	if err != nil {
		return nil
	}
	out, err := policyfile.ListControlPlanes(policy, p.Serial(), []policyfile.ControlPlane{{Machine: c.FirstMachine.ID, Name: c.FirstMachine.NodeName}}, nil)
	if err != nil {
		return nil
	}
	return out
}

func join(flags []string) string { return strings.Join(flags, " and ") }
