package statecheck

import (
	"bytes"
	"context"
	"encoding/pem"
	"errors"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/tree"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/rotation"
	"github.com/muster-k8s/muster/trust/attest"
)

// mayHaveAuthority returns ROLE_REFUSED for a machine that got its disk key as a worker, or starts as one, if the disk has a secret of control planes. A
// joinservice compares a worker with its enrollment alone, which an administrator of the API can delete and create again with another role; the key of a
// control plane's disk goes only to a machine that the signed policy lists (A7, J2).
func (ck *check) mayHaveAuthority(d *component.Desired, controlPlane bool) error {
	// The metadata can have changed since the key was requested. The ticket has the public files of the role that was requested.
	if controlPlane && (d.Recovered || len(d.Authorities) == len(component.Authorities(true))) {
		return nil
	}
	name, err := ck.controlPlaneSecret()
	if err != nil || name == "" {
		return err
	}
	return attest.Refuse(attestv1.Reason_REASON_ROLE_REFUSED, "this machine is to be a worker, but its state disk has %s, which only a control plane has: it is a control plane's disk, or somebody who was root on this worker has left that. So nothing on it is started. To make it a worker: `muster forget` its node, erase the disk's first MiB, and let it join. If it is a control plane: find out who has changed its metadata and its enrollment, correct both, list it in the policy, and reboot it", name)
}

// controlPlaneSecret returns the path of a private key, or of etcd's data, that only a control plane has on its disk; empty if there is none. Not each
// control plane has all of them: in an adopted cluster, the CA's key can be elsewhere.
func (ck *check) controlPlaneSecret() (string, error) {
	const etcdData = machine.EtcdFolder + "/member" // has all Secrets of the cluster
	names := []string{etcdData}
	for _, file := range clusterinfo.ControlPlaneFiles() {
		if path.Ext(file) != ".crt" && path.Ext(file) != ".pub" {
			names = append(names, path.Join(machine.PKIFolder, file))
		}
	}
	for _, name := range names {
		f, err := os.Lstat(ck.On(name))
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ELOOP):
		case err != nil:
			return "", err
		case name == etcdData || f.Mode().IsRegular() && f.Size() > 0: // replace has put empty files in the places of others
			return name, nil
		}
	}
	return "", nil
}

// checkStaged removes new keys of rotations that the cluster does not have in progress: an attacker who had root rights once may have left one, so that it
// would be distributed as the new key. Until a control plane has reported the new key, its ID is unknown and each key of that kind stays, because this
// machine may be its creator.
func (ck *check) checkStaged(ctx context.Context, r *component.Rotation) error {
	folder := path.Join(machine.PKIFolder, rotation.Staged)
	if err := ck.wantFolder(ctx, folder); err != nil {
		return err
	}
	return tree.Each(ck.On(folder), func(at string, f fs.DirEntry) error {
		if r != nil && f.Type().IsRegular() {
			kind, id, _ := strings.Cut(f.Name(), ".")
			if kind == string(r.Key) && (id == r.ID || r.ID == "") {
				return nil
			}
		}
		if strings.HasPrefix(f.Name(), machine.TemporaryPrefix) { // a crash can leave it, and no program reads it
			return tree.RemoveAll(at)
		}
		return ck.remove(ctx, path.Join(folder, f.Name()), "removed")
	})
}

// trusted returns the authorities that the kubeconfigs of this machine have to trust: those of ca.crt, which was compared before.
func (ck *check) trusted(d *component.Desired) ([]byte, error) {
	text, err := os.ReadFile(ck.On(path.Join(machine.PKIFolder, component.CA)))
	if errors.Is(err, fs.ErrNotExist) { // kubeadm has not written it yet
		return d.Authorities[component.CA], nil
	}
	return bytes.TrimSpace(text), err
}

// lags reports whether a kubeconfig is right except for its CAs, each of which is the cluster's. While the cluster's CA is rotated, one more or one less
// does not help an attacker.
func lags(kubeconfig, right []byte, d *component.Desired) bool {
	known, _ := blocks(d.Authorities[component.CA])
	if r := d.Rotation; r != nil && r.Key.PublicFile() == component.CA {
		keep, _ := blocks(r.Keep)
		known = append(known, keep...)
	}
	have, rest := blocks(kubelet.Authorities(kubeconfig))
	if len(have) == 0 || len(rest) > 0 || slices.ContainsFunc(have, func(b string) bool { return !slices.Contains(known, b) }) {
		return false
	}
	same, err := kubelet.WithAuthorities(kubeconfig, kubelet.Authorities(right))
	return err == nil && kubelet.SameConnection(same, right)
}

// inOrder returns the wanted keys or certificates in PEM. The machine's order is kept, because its private key belongs to the first of them. Those in keep
// are retained but not added. more reports that the machine has others too, or something that is not PEM.
func inOrder(is, want, keep []byte) (_ []byte, more bool) {
	have, rest := blocks(is)
	wanted, _ := blocks(want)
	kept, _ := blocks(keep)
	if len(wanted) == 0 {
		return want, true
	}
	more = len(rest) > 0 || len(have) == 0
	var out []string
	for _, b := range have {
		if slices.Contains(wanted, b) || slices.Contains(kept, b) {
			out = append(out, b)
		} else {
			more = true
		}
	}
	for _, b := range wanted {
		if !slices.Contains(out, b) {
			out = append(out, b)
		}
	}
	var text []byte
	for _, b := range out {
		text = append(text, b...)
	}
	return text, more
}

// blocks returns the PEM blocks of a file, encoded again, and the text after them.
func blocks(text []byte) (list []string, rest []byte) {
	for {
		block, after := pem.Decode(text)
		if block == nil {
			return list, bytes.TrimSpace(text)
		}
		list, text = append(list, string(pem.EncodeToMemory(block))), after
	}
}
