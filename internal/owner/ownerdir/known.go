package ownerdir

import (
	"bytes"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// Known is known.json: what the cluster said when a command last talked to it. A recovery is judged by it, when there is no cluster to ask. It
// holds no secret.
type Known struct {
	// Version of this file's meaning: 1.
	Version int `json:"version"`
	// Policy is the cluster's with the highest serial, as the owner signed it.
	Policy KnownPolicy `json:"policy"`
	// Nodes are the enrollments by name.
	Nodes map[string]KnownNode `json:"nodes"`
	// Bans are the banned enrollments: the generation that each had, by its UID. They stay when an enrollment goes.
	Bans map[string]int64 `json:"bans,omitempty"`
	// Erased are the disks whose salt was deleted (K4). They stay, so that a cluster that has one's salt again is noticed.
	Erased []string `json:"erased,omitempty"`
}

// KnownPolicy is a signed policy.
type KnownPolicy struct {
	JSON      string `json:"json"`
	Signature []byte `json:"signature"`
}

// KnownNode is one enrollment.
type KnownNode struct {
	MachineID string    `json:"machineID"`
	Role      string    `json:"role"`
	Banned    bool      `json:"banned,omitempty"`
	Disk      KnownDisk `json:"disk"`
}

// KnownDisk is a state disk.
type KnownDisk struct {
	// ID is the disk's UUID; empty: the enrollment names none.
	ID string `json:"id,omitempty"`
	// Salt and RootVersion are what its key follows from beside the root secret; empty: there is none.
	Salt        string `json:"salt,omitempty"`
	RootVersion int32  `json:"rootVersion,omitempty"`
}

// Open verifies the owner's signature and returns the policy. It refuses with POLICY_SIGNATURE or POLICY_INVALID.
func (p KnownPolicy) Open(owner ed25519.PublicKey) (*attest.Policy, error) {
	return attest.OpenPolicy(owner, &attestv1.SignedPolicy{Policy: []byte(p.JSON), Signature: p.Signature})
}

// OfMachine returns the enrollment of a machine.
func (k *Known) OfMachine(id attest.MachineID) (name string, n KnownNode, ok bool) {
	for name, n := range k.Nodes {
		if n.MachineID == id.String() {
			return name, n, true
		}
	}
	return "", KnownNode{}, false
}

// Known reads known.json. It is empty, with Version 0, if no command has talked to the cluster yet.
func (d *Dir) Known() (*Known, error) {
	b, err := d.Read(KnownFile)
	if errors.Is(err, fs.ErrNotExist) {
		return &Known{}, nil
	}
	if err != nil {
		return nil, err
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	var k Known
	if err := dec.Decode(&k); err != nil {
		return nil, fmt.Errorf("%s: %w", d.File(KnownFile), err)
	}
	if k.Version != 1 {
		return nil, fmt.Errorf("%s: version %d was written by another version of muster; this one reads 1", d.File(KnownFile), k.Version)
	}
	return &k, nil
}

// Remember writes known.json, also into a folder that is open to read: it takes the folder's lock for that long.
func (d *Dir) Remember(k *Known) error {
	k.Version = 1
	b, err := json.MarshalIndent(k, "", "  ")
	if err != nil {
		return err
	}
	if d.sync == nil {
		writable, err := Open(d.path)
		if err != nil {
			return err
		}
		defer func() { _ = writable.Close() }()
		d = writable
	}
	return d.Write(KnownFile, append(b, '\n'))
}

// Older lists what is older in seen than in k: a cluster that says this was set back.
func (k *Known) Older(seen *Known, generations map[string]int64, owner ed25519.PublicKey) ([]string, error) {
	if k.Version == 0 {
		return nil, nil
	}
	var out []string
	had, err := k.Policy.Open(owner)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", KnownFile, err)
	}
	var serial uint64
	if p, err := seen.Policy.Open(owner); err == nil {
		serial = p.Serial()
	}
	if serial < had.Serial() {
		out = append(out, fmt.Sprintf("its policy has the serial %d, and had %d", serial, had.Serial()))
	}
	for uid, had := range k.Bans {
		if now, ok := generations[uid]; ok && now < had {
			out = append(out, fmt.Sprintf("the enrollment %s has the generation %d, and was banned with generation %d", uid, now, had))
		}
	}
	return out, nil
}

// Keep returns seen with the bans of k that it does not have.
func (k *Known) Keep(seen *Known) *Known {
	out := *seen
	out.Version, out.Bans = 1, maps.Clone(k.Bans)
	if out.Bans == nil {
		out.Bans = map[string]int64{}
	}
	for uid, generation := range seen.Bans {
		out.Bans[uid] = max(out.Bans[uid], generation)
	}
	for _, disk := range k.Erased {
		out.erase(disk)
	}
	return &out
}

// erase forgets a disk's salt and notes that it was erased (K4).
func (k *Known) erase(disk string) {
	for name, n := range k.Nodes {
		if n.Disk.ID == disk {
			n.Disk.Salt, n.Disk.RootVersion = "", 0
			k.Nodes[name] = n
		}
	}
	if !slices.Contains(k.Erased, disk) {
		k.Erased = slices.Sorted(slices.Values(append(slices.Clone(k.Erased), disk)))
	}
}

// EraseDisk deletes a disk's salt from known.json and cluster.json (K4). It returns the files below the folder that have it still.
func (d *Dir) EraseDisk(disk string) (left []string, err error) {
	k, err := d.Known()
	if err != nil {
		return nil, err
	}
	if k.Version != 0 {
		k.erase(disk)
		if err := d.Remember(k); err != nil {
			return nil, err
		}
	}
	if c := d.Cluster(); c.FirstMachine != nil && c.FirstMachine.DiskID == disk && c.FirstMachine.DiskSalt != "" {
		c.FirstMachine.DiskSalt = ""
		if err := d.Save(c); err != nil {
			return nil, err
		}
	}
	backups, err := filepath.Glob(filepath.Join(d.File(backupFolder), "*", "*.yaml"))
	if err != nil {
		return nil, err
	}
	for _, file := range backups {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		if bytes.Contains(text, []byte("name: "+disk)) {
			left = append(left, file)
		}
	}
	return left, nil
}
