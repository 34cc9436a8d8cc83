package statecheck

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
	"github.com/muster-k8s/muster/services/bootstrapper/upgrade"
)

const (
	// maxFile bounds files that programs of this machine read as a whole, in bytes. The largest that they write has 512 KiB.
	maxFile = 1 << 20
	// maxCopies bounds the sum of the copies of one comparison, in bytes. A file of holes is as large as any disk, and one of a thousand names takes a
	// thousand times its room once it is copied. Configuration, keys and certificates have some hundred KiB together.
	maxCopies = 32 << 20
)

// readWhole are the places of files that programs of this machine read as a whole.
var readWhole = []string{
	machine.KubernetesFolder, machine.KubeletPKI, machine.KubeletFolder + "/config.yaml", kubeletFlags, upgrade.InstanceConfig, discovery.StateFolder,
}

// anySize are places of files that may be large: those of backups, restores, downloads, and of etcd's data that kubeadm has copied.
var anySize = []string{
	machine.KubernetesFolder + "/tmp/kubeadm-backup-etcd*", discovery.StateFolder + "/restore", discovery.StateFolder + "/upgrade/staged",
}

// fileEndings are endings of files' names. No folder of Kubernetes or Muster has one.
var fileEndings = []string{".conf", ".crt", ".env", ".json", ".key", ".pem", ".pub", ".yaml"}

// onlyFile reports whether only a file can have the path.
func onlyFile(name string) bool {
	if slices.Contains(fileEndings, filepath.Ext(name)) {
		return true
	}
	// Muster's folders have no folders inside.
	in, isMusters := strings.CutPrefix(name, discovery.StateFolder+"/")
	return isMusters && strings.Count(in, "/") == 1 && in != "upgrade/staged"
}

// checkFiles makes sure that files which programs of this machine read or replace are files, and not too large to be read. Otherwise an attacker who was
// root once could leave a file of holes, or a folder in the place of a file, and the programs would fail at each boot. In the folders of Kubernetes and
// the kubelet, an empty file takes its place, which the next steps put right or remove like any other content: a missing file would be one that kubeadm
// still has to write.
func (ck *check) checkFiles(ctx context.Context) error {
	for _, place := range readWhole {
		wrong, err := ck.wrongFiles(place)
		if err != nil {
			return err
		}
		for name, what := range wrong {
			if err := machine.RemoveAll(ck.On(name)); err != nil {
				return err
			}
			done := "removed: "
			if place != discovery.StateFolder && !strings.HasPrefix(name, renewal.Folder+"/") {
				if err := machine.WriteFile(ck.On(name), nil, 0o600, 0o755); err != nil {
					return err
				}
				done = "emptied: "
			}
			ck.found(ctx, name, done+what)
		}
	}
	return nil
}

// wrongFiles returns what is wrong about files at a place, by name.
func (ck *check) wrongFiles(place string) (map[string]string, error) {
	wrong, top := map[string]string{}, ck.On(place)
	err := filepath.WalkDir(top, func(at string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) { // while the machine runs, its programs replace files
			return nil
		}
		if err != nil {
			return err
		}
		name := place + strings.TrimPrefix(at, top)
		switch {
		case d.IsDir() && onlyFile(name):
			wrong[name] = "it was a folder"
			return fs.SkipDir
		case d.IsDir() && slices.ContainsFunc(anySize, func(p string) bool { fits, _ := filepath.Match(p, name); return fits }):
			return fs.SkipDir
		case d.IsDir() || strings.HasPrefix(name, discovery.StateFolder+"/backup/"):
			return nil
		case !d.Type().IsRegular() && place == discovery.StateFolder:
			wrong[name] = "it was no file"
			return nil
		}
		info, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && info.Mode().IsRegular() && info.Size() > maxFile {
			wrong[name] = "it was larger than 1 MiB"
		}
		return err
	})
	return wrong, err
}
