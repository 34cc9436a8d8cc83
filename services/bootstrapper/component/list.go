package component

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
)

// These are the paths of the software that the cluster requires on the machine.
const (
	// KeptList is on the state disk: what was installed last. An attacker with root rights can have changed it.
	KeptList = "/var/lib/muster/components.json"
	// UnlockFile is in memory: what the state disk is compared with in this boot (B8). `bootstrapper unlock` writes it whenever it opens or formats an
	// encrypted disk.
	UnlockFile = "/run/muster/components.json"
)

// A ListFile is the path of a file that has a list.
type ListFile string

// Save writes the list, by rename.
func (f ListFile) Save(list versions.List) error { return save(string(f), list) }

// Load reads the list; nil if the file does not exist.
func (f ListFile) Load() (*versions.List, error) {
	text, err := load(string(f))
	if err != nil || text == nil {
		return nil, err
	}
	list, err := versions.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f, err)
	}
	return &list, nil
}

// Same reports whether two lists name the same software.
func Same(a, b versions.List) bool {
	return slices.Equal(a.Components, b.Components) && slices.Equal(slices.Sorted(slices.Values(a.Images)), slices.Sorted(slices.Values(b.Images)))
}

// Desired is the software that a cluster requires on one of its nodes, and the data by which the node recognizes the cluster.
type Desired struct {
	// Uncompared is why there is nothing to compare the disk with; empty if the other fields are set.
	Uncompared string `json:"uncompared,omitempty"`
	// Recovered means that the list is of the owner's folder, whose recovery opened the disk. There are no Authorities and no Rotation then.
	Recovered bool `json:"recovered,omitempty"`
	// Replace means that the owner has decided that List and Other are newer than what the disk lists as installed.
	Replace bool `json:"replace,omitempty"`
	// List is the required software.
	List versions.List `json:"list"`
	// Other is the software of the second release that nodes may run while the cluster is upgraded; nil if there is none.
	Other *versions.List `json:"other,omitempty"`
	// Adopted means that the cluster existed before Muster.
	Adopted bool `json:"adopted,omitempty"`
	// Endpoint is HOST:PORT of the API servers.
	Endpoint string `json:"endpoint"`
	// Authorities has the content of public files by their path below /etc/kubernetes/pki: [Authorities].
	Authorities map[string][]byte `json:"authorities"`
	// Rotation is of a key that control planes share; nil if none is in progress, or the machine is a worker.
	Rotation *Rotation `json:"rotation,omitempty"`
}

// Rotation is what a control plane may have of a rotation beside what its cluster lists.
type Rotation struct {
	Key clusterinfo.RotatedKey `json:"key"`
	// ID is the new key's; empty: no control plane has reported it.
	ID string `json:"id,omitempty"`
	// Keep are public keys or certificates in PEM: the machine keeps those that it has in [clusterinfo.RotatedKey.PublicFile], and adds none.
	Keep []byte `json:"keep,omitempty"`
}

// Values of [Desired.Uncompared].
const (
	UncomparedNew      = "it was formatted in this boot"
	UncomparedRecovery = "its owner's recovery opened it, without a list of software"
)

// CA is the only one of [Authorities] that every node has: the cluster's certificate authority.
const CA = "ca.crt"

// Authorities returns the names of the public files by which a node of the role recognizes its cluster, in order.
func Authorities(controlPlane bool) []string {
	if !controlPlane {
		return []string{CA}
	}
	return []string{CA, "etcd/ca.crt", "front-proxy-ca.crt", "sa.pub"}
}

// A DesiredFile is the path of a file that has a [Desired].
type DesiredFile string

// Save writes it, by rename.
func (f DesiredFile) Save(d Desired) error { return save(string(f), d) }

// Load reads it; nil if the file does not exist.
func (f DesiredFile) Load() (*Desired, error) {
	text, err := load(string(f))
	if err != nil || text == nil {
		return nil, err
	}
	var d Desired
	if err := json.Unmarshal(text, &d); err != nil {
		return nil, fmt.Errorf("%s: %w", f, err)
	}
	return &d, nil
}

func save(file string, what any) error {
	text, err := json.Marshal(what)
	if err != nil {
		return err
	}
	return machine.WriteFile(file, text, 0o600, 0o700)
}

// load reads a file; nil if it does not exist.
func load(file string) ([]byte, error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return text, err
}
