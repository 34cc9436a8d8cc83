package statecheck

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/muster-k8s/muster/internal/tree"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/provision"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
)

// networkFolder has the configuration of the pods' network. The network plugin writes it again when its pod starts.
const networkFolder = "/etc/cni/net.d"

// podVolumes is the only folder of a pod that is kept; the kubelet recreates the others. One of these, volume-subpaths, has mount points: through a link
// there, the kubelet would mount over another path.
const podVolumes = "volumes"

// checkTrees removes symbolic links from the folders of Kubernetes and the kubelet, and replaces files that have a second hard link by copies. A file could
// otherwise be changed through its other name after the comparison.
func (ck *check) checkTrees(ctx context.Context) error {
	err := eachMatch(ck.On(machine.KubeletFolder), "/pods/*/*", func(at string) error { // pods are folders: see checkVolumes
		if filepath.Base(at) == podVolumes {
			return nil
		}
		return tree.RemoveAll(at)
	})
	if err != nil {
		return err
	}
	if err := tree.Empty(ck.On(networkFolder)); err != nil {
		return err
	}
	for _, top := range programFolders {
		if err := ck.ownFolders(ctx, top); err != nil {
			return err
		}
	}
	for _, top := range []string{machine.KubernetesFolder, machine.KubeletFolder, "/var/log/pods", "/var/lib/muster"} {
		if err := ck.checkTree(ctx, top); err != nil {
			return err
		}
	}
	return nil
}

// programFolders have programs and the network's configuration. Their files are compared elsewhere.
var programFolders = []string{"/usr/local/bin", "/usr/local/lib/muster", "/opt/cni", networkFolder}

// ownFolders makes root the owner of all folders of a tree, and removes other users' write access.
func (ck *check) ownFolders(ctx context.Context, top string) error {
	return tree.Walk(ck.On(top), func(at string, d fs.DirEntry) error {
		if !d.IsDir() {
			return nil
		}
		return ck.ownFolder(ctx, at, ck.name(at))
	}, ck.removeDeep(ctx))
}

// removeDeep returns a function for [tree.Walk] that removes a folder.
func (ck *check) removeDeep(ctx context.Context) func(at string) error {
	return func(at string) error { return ck.remove(ctx, ck.name(at), "removed: it was too deep") }
}

// checkTree removes links below a folder, and replaces files by copies if they have a second hard link, or if users other than root may write them.
func (ck *check) checkTree(ctx context.Context, top string) error {
	if err := ck.wantFolder(ctx, top); err != nil {
		return err
	}
	return tree.Walk(ck.On(top), func(at string, d fs.DirEntry) error {
		name := ck.name(at)
		switch {
		case d.IsDir() && (strings.HasPrefix(name, machine.KubeletFolder+"/pods/") && strings.Count(name, "/") > strings.Count(machine.KubeletFolder, "/")+2):
			return fs.SkipDir // volumes belong to their pods: see checkVolumes
		case d.IsDir():
			return ck.ownFolder(ctx, at, name)
		case d.Type() == fs.ModeSocket:
			return nil
		case d.Type().IsRegular() && strings.HasPrefix(name, machine.KubeletFolder+"/plugins/"):
			return nil // a driver's own folder
		case d.Type().IsRegular():
			return ck.ownFile(ctx, at, name)
		case d.Type() == fs.ModeSymlink && (name == kubelet.ClientFile || name == kubelet.ServingFile):
			to, err := os.Readlink(at)
			if err != nil || filepath.Base(to) == to || filepath.Dir(to) == machine.KubeletPKI {
				return err
			}
		}
		return ck.remove(ctx, name, "removed")
	}, func(at string) error {
		if strings.HasPrefix(ck.name(at), machine.KubeletFolder+"/plugins/") {
			return nil // a driver's own folder can have the content of volumes, which is not compared
		}
		return ck.removeDeep(ctx)(at)
	})
}

// ownFolder makes root the owner of a folder, and removes other users' write access: with it, they could replace files after the comparison. A driver's own
// folder is not changed.
func (ck *check) ownFolder(ctx context.Context, at, name string) error {
	if strings.HasPrefix(name, machine.KubeletFolder+"/plugins/") {
		return nil
	}
	info, err := os.Lstat(at)
	if errors.Is(err, fs.ErrNotExist) { // while the machine runs, its programs replace files
		return nil
	}
	if err != nil {
		return err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("%s: its owner is not known", name)
	}
	if int(stat.Uid) == os.Geteuid() && info.Mode().Perm()&0o022 == 0 {
		return nil
	}
	if err := errors.Join(os.Chown(at, os.Geteuid(), -1), os.Chmod(at, info.Mode().Perm()&^0o022)); err != nil {
		return err
	}
	ck.found(ctx, name, "write access of other users removed")
	return nil
}

// ownFile replaces a file by a copy if it has a second hard link, or if users other than root may write it. A file that is too large for a copy is removed.
func (ck *check) ownFile(ctx context.Context, at, name string) error {
	info, err := os.Lstat(at)
	if errors.Is(err, fs.ErrNotExist) { // while the machine runs, its programs replace files
		return nil
	}
	if err != nil {
		return err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("%s: its owner is not known", name)
	}
	if stat.Nlink == 1 && int(stat.Uid) == os.Geteuid() && info.Mode().Perm()&0o022 == 0 {
		return nil
	}
	cost := max(info.Size(), copyCost)
	if cost > ck.copies {
		return ck.remove(ctx, name, "removed: it had a second hard link, or other users could write it, and it is too large for a copy")
	}
	ck.copies -= cost
	content, err := os.ReadFile(at)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := machine.WriteFile(at, content, info.Mode().Perm()&^0o022, 0o755); err != nil {
		return err
	}
	ck.found(ctx, name, "copied: it had a second hard link, or other users could write it")
	return nil
}

// finishRenewal completes an interrupted renewal of certificates, so that its files are also compared.
func (ck *check) finishRenewal(ctx context.Context, controlPlane bool) error {
	if ck.Lock.Record().Step < journal.StepDone {
		return renewal.Discard(ck.Root) // there is no node whose certificates could be renewed
	}
	if controlPlane {
		_, err := os.Stat(ck.On(machine.PKIFolder + "/ca.key"))
		if errors.Is(err, fs.ErrNotExist) { // B8: once the key is back, the renewed files would be installed uncompared
			return renewal.Discard(ck.Root)
		}
		if err != nil {
			return err
		}
	}
	if err := ck.RenewControlPlane(ctx); err != nil {
		ck.Log.ErrorContext(ctx, "certificates of this control plane have expired and could not be renewed", "err", err)
		if _, serr := os.Stat(ck.On(renewal.Folder)); !errors.Is(serr, fs.ErrNotExist) { // it would be installed later, uncompared
			return err
		}
	}
	return nil
}

// administrators are the kubeconfigs of a control plane, beside the kubelet's.
var administrators = []string{"admin.conf", "super-admin.conf", "controller-manager.conf", "scheduler.conf"}

// checkWorker removes what only a control plane has: the CA's key, which other steps and programs take as the sign of a control plane, certificates that
// are to be installed, and kubeconfigs (B8).
func (ck *check) checkWorker(ctx context.Context) error {
	files := []string{machine.PKIFolder + "/ca.key", renewal.Folder, renewal.Folder + ".part"}
	for _, name := range administrators {
		files = append(files, machine.KubernetesFolder+"/"+name)
	}
	for _, name := range files {
		_, err := os.Lstat(ck.On(name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = ck.remove(ctx, name, "removed")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// checkAdministrators rewrites kubeconfigs of a control plane that have more than a server of the cluster, its authority, and a certificate with its
// key: a user entry can name a program to run, and this machine's services use them (B8).
func (ck *check) checkAdministrators(ctx context.Context, meta *metadata.Machine, d *component.Desired) error {
	local := kubeadm.LocalEndpoint(provision.KubeadmNode(meta))
	ca, err := ck.trusted(d)
	if err != nil {
		return err
	}
	for _, file := range administrators {
		name := machine.KubernetesFolder + "/" + file
		text, err := os.ReadFile(ck.On(name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		right, err := administrator(text, local, d.Endpoint, ca)
		if err != nil {
			return err
		}
		if right != nil && kubelet.SameConnection(text, right) {
			continue
		}
		if right != nil && lags(text, right, d) {
			if err := machine.WriteFile(ck.On(name), right, 0o600, 0o755); err != nil {
				return err
			}
			ck.Log.InfoContext(ctx, "the authorities that this control plane trusts are brought up to date", "file", name)
			continue
		}
		if err := os.Remove(ck.On(name)); err != nil {
			return err
		}
		done := "removed"
		if right != nil {
			if err := machine.WriteFile(ck.On(name), right, 0o600, 0o755); err != nil {
				return err
			}
			done = "rewritten"
		}
		ck.found(ctx, name, done)
	}
	return nil
}

// administrator returns a kubeconfig with the certificate and key of text, and otherwise only the cluster's server and CA. It returns nil if text has no
// certificate.
func administrator(text []byte, local, endpoint string, ca []byte) ([]byte, error) {
	c, err := clientcmd.Load(text)
	if err != nil {
		return nil, nil //nolint:nilerr // nothing in it could be kept
	}
	current := c.Contexts[c.CurrentContext]
	if current == nil || c.AuthInfos[current.AuthInfo] == nil || len(c.AuthInfos[current.AuthInfo].ClientCertificateData) == 0 {
		return nil, nil
	}
	is := c.AuthInfos[current.AuthInfo]
	server := "https://" + local
	if s := c.Clusters[current.Cluster]; s != nil && s.Server == "https://"+endpoint {
		server = s.Server
	}
	const cluster, user, name = "kubernetes", "user", "user@kubernetes"
	out := clientcmdapi.NewConfig()
	out.Clusters[cluster] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: ca}
	out.AuthInfos[user] = &clientcmdapi.AuthInfo{ClientCertificateData: is.ClientCertificateData, ClientKeyData: is.ClientKeyData}
	out.Contexts[name] = &clientcmdapi.Context{Cluster: cluster, AuthInfo: user}
	out.CurrentContext = name
	return clientcmd.Write(*out)
}
