package statecheck

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/internal/tree"
	"github.com/muster-k8s/muster/services/bootstrapper/backups"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/orders"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
	"github.com/muster-k8s/muster/services/bootstrapper/upgrade"
)

const (
	// maxFile bounds files that programs of this machine read as a whole, in bytes. The largest that they write has 512 KiB.
	maxFile = 1 << 20
	// maxEntries bounds a folder that programs of this machine list. The largest that they make has one for each image or pod.
	maxEntries = 10_000
	// maxCopies bounds the sum of the copies of one comparison, in bytes. A sparse file can have any size, and a file with a thousand hard links takes a
	// thousand times its space once the links are copied. Configuration, keys and certificates have some hundred KiB together.
	maxCopies = 32 << 20
	// copyCost is the least that a copy counts, in bytes, because each file is written to the disk separately.
	copyCost = 64 << 10
)

// readWhole are folders of files that programs of this machine read as a whole.
var readWhole = []string{machine.KubernetesFolder, machine.KubeletFolder, discovery.StateFolder}

// anySize are places of files that may be large: those of volumes, drivers, checkpoints of containers, backups, restores, downloads, and of etcd's data that
// kubeadm has copied.
var anySize = []string{
	machine.KubeletFolder + "/pods", machine.KubeletFolder + "/plugins", machine.KubeletFolder + "/checkpoints",
	machine.KubernetesFolder + "/tmp/kubeadm-backup-etcd*", discovery.StateFolder + "/restore", discovery.StateFolder + "/upgrade/staged",
}

// emptied are places where an empty file replaces a wrong one; later steps then correct or remove it. Removing it here would be worse: these steps leave
// missing files to kubeadm, and without a record in image_manager the kubelet lets every pod use an image without its pull secret.
var emptied = []string{
	machine.KubernetesFolder, machine.KubeletPKI, machine.KubeletFolder + "/config.yaml", kubeletFlags, upgrade.InstanceConfig, machine.KubeletFolder + "/image_manager",
}

// folders must be folders: a file in such a place would stop the kubelet or a program of Muster at each boot. Parents come first. The attester's folder is
// not listed, because the initramfs, which reads from it earlier, clears its place.
var folders = []string{
	discovery.StateFolder, discovery.StateFolder + "/backup", discovery.StateFolder + "/orders", discovery.StateFolder + "/renewal",
	discovery.StateFolder + "/restore", discovery.StateFolder + "/rotation", discovery.StateFolder + "/upgrade", discovery.StateFolder + "/upgrade/staged",
	"/var/log/muster", backups.Folder, orders.EvidenceFolder, "/var/log/pods", "/var/log/containers",
	machine.KubernetesFolder, machine.KubernetesFolder + "/tmp", machine.PKIFolder, machine.PKIFolder + "/etcd", networkFolder,
	renewal.Folder, renewal.Folder + "/pki", renewal.Folder + "/pki/etcd",
	machine.KubeletFolder, machine.KubeletPKI, machine.KubeletFolder + "/checkpoints", machine.KubeletFolder + "/device-plugins", machine.KubeletFolder + "/plugins",
	machine.KubeletFolder + "/plugins_registry", machine.KubeletFolder + "/pod-resources", machine.KubeletFolder + "/pods", machine.KubeletFolder + "/image_manager",
	machine.KubeletFolder + "/image_manager/pulled", machine.KubeletFolder + "/image_manager/pulling",
}

// fileEndings are endings of files' names. No folder of Kubernetes or Muster has one.
var fileEndings = []string{".conf", ".crt", ".env", ".json", ".key", ".lock", ".pem", ".pub", ".yaml"}

// onlyFile reports whether the path must be a file.
func onlyFile(name string) bool {
	if slices.Contains(fileEndings, filepath.Ext(name)) {
		return true
	}
	// Muster's folders contain no subfolders, except upgrade/staged.
	in, isMusters := strings.CutPrefix(name, discovery.StateFolder+"/")
	return isMusters && strings.Count(in, "/") == 1 && in != "upgrade/staged"
}

// checkFiles checks the paths that programs of this machine read or replace: files must be regular files of a limited size, and folders must be
// folders with a limited number of entries. Otherwise an attacker who was root once could leave a sparse file, or a folder in the place of a file,
// and the programs would fail at each boot.
func (ck *check) checkFiles(ctx context.Context) error {
	for _, name := range folders {
		if err := ck.wantFolder(ctx, name); err != nil {
			return err
		}
	}
	for _, place := range readWhole {
		err := tree.Walk(ck.On(place), func(at string, d fs.DirEntry) error {
			name := ck.name(at)
			what, err := wrong(at, name, d)
			switch {
			case errors.Is(err, fs.ErrNotExist): // while the machine runs, its programs replace files
				return nil
			case err != nil:
				return err
			case what != "":
				if err := ck.replace(ctx, name, what); err != nil {
					return err
				}
				return skip(d)
			case !d.IsDir():
				return nil
			}
			if err := ck.removeExcess(ctx, at); err != nil {
				return err
			}
			if slices.ContainsFunc(anySize, func(p string) bool { fits, _ := filepath.Match(p, name); return fits }) {
				return fs.SkipDir
			}
			return nil
		}, ck.removeDeep(ctx))
		if err != nil {
			return err
		}
	}
	return nil
}

// skip keeps [tree.Walk] out of an entry that was a folder.
func skip(d fs.DirEntry) error {
	if d.IsDir() {
		return fs.SkipDir
	}
	return nil
}

// wrong returns what is wrong about a file or the place of a file; empty if nothing is.
func wrong(at, name string, d fs.DirEntry) (string, error) {
	inMusters := strings.HasPrefix(name, discovery.StateFolder+"/")
	switch {
	case d.IsDir() && onlyFile(name):
		return "it was a folder", nil
	case d.IsDir() || strings.HasPrefix(name, discovery.StateFolder+"/backup/"):
		return "", nil
	case !d.Type().IsRegular() && inMusters:
		return "it was not a regular file", nil
	}
	info, err := os.Lstat(at)
	if err == nil && info.Mode().IsRegular() && info.Size() > maxFile {
		return "it was larger than 1 MiB", nil
	}
	return "", err
}

// replace removes a wrong file or folder, or puts an empty file in its place.
func (ck *check) replace(ctx context.Context, name, what string) error {
	isIn := func(folder string) bool { return name == folder || strings.HasPrefix(name, folder+"/") }
	if !slices.ContainsFunc(emptied, isIn) || isIn(renewal.Folder) {
		return ck.remove(ctx, name, "removed: "+what)
	}
	if err := errors.Join(tree.RemoveAll(ck.On(name)), machine.WriteFile(ck.On(name), nil, 0o600, 0o755)); err != nil {
		return err
	}
	ck.found(ctx, name, "emptied: "+what)
	return nil
}

// removeExcess removes what a folder has beyond maxEntries.
func (ck *check) removeExcess(ctx context.Context, folder string) error {
	n := 0
	return tree.Each(folder, func(at string, _ fs.DirEntry) error {
		if n++; n <= maxEntries {
			return nil
		}
		return ck.remove(ctx, ck.name(at), "removed: its folder had more than 10,000 entries")
	})
}
