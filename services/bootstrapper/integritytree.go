package bootstrapper

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

	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
)

// networkFolder has the configuration of the pods' network. Its plugin writes it anew when its pod starts.
const networkFolder = "/etc/cni/net.d"

// podVolumes are the folders of a pod that outlive a reboot. The kubelet makes the others anew.
var podVolumes = []string{"volumes", "volume-subpaths"}

// checkTrees removes symbolic links from the folders of Kubernetes and the kubelet, and replaces files that have a second hard link by copies. A file could
// otherwise be changed through its other name after the comparison.
func (b *Bootstrapper) checkTrees(ctx context.Context) error {
	pods, err := os.ReadDir(b.on(kubeletFolder + "/pods"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, pod := range pods {
		parts, err := os.ReadDir(filepath.Join(b.on(kubeletFolder+"/pods"), pod.Name())) // a folder: see checkVolumes
		if err != nil {
			return err
		}
		for _, p := range parts {
			if p.Name() == podVolumes[0] || p.Name() == podVolumes[1] {
				continue
			}
			if err := os.RemoveAll(filepath.Join(b.on(kubeletFolder+"/pods"), pod.Name(), p.Name())); err != nil {
				return err
			}
		}
	}
	if err := machine.EmptyDir(b.on(networkFolder)); err != nil {
		return err
	}
	for _, tree := range []string{kubernetesFolder, kubeletFolder, "/var/log/pods"} {
		if err := b.checkTree(ctx, tree); err != nil {
			return err
		}
	}
	return nil
}

// checkTree removes links below a folder, and copies files that have a second name or that others than root may write.
func (b *Bootstrapper) checkTree(ctx context.Context, tree string) error {
	if err := b.wantFolder(ctx, tree); err != nil {
		return err
	}
	top := b.on(tree)
	var wrong []string
	err := filepath.WalkDir(top, func(at string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) && at == top {
			return nil
		}
		if err != nil {
			return err
		}
		name := tree + strings.TrimPrefix(at, top)
		switch {
		case d.IsDir() && (strings.HasPrefix(name, kubeletFolder+"/pods/") && strings.Count(name, "/") > strings.Count(kubeletFolder, "/")+2):
			return fs.SkipDir // volumes are their pods' own: see checkVolumes
		case d.IsDir() || d.Type() == fs.ModeSocket:
			return nil
		case d.Type().IsRegular() && strings.HasPrefix(name, kubeletFolder+"/plugins/"):
			return nil // a driver's own
		case d.Type().IsRegular():
			return b.ownFile(ctx, at, name)
		case d.Type() == fs.ModeSymlink && (name == kubeletClient || name == kubeletServing):
			to, err := os.Readlink(at)
			if err != nil || filepath.Base(to) == to || filepath.Dir(to) == kubeletPKI {
				return err
			}
		}
		wrong = append(wrong, name)
		return nil
	})
	for _, name := range wrong {
		if err := os.Remove(b.on(name)); err != nil {
			return err
		}
		b.found(ctx, name, "removed")
	}
	return err
}

// ownFile replaces a file by a copy if it has a second name, or if others than root may write it.
func (b *Bootstrapper) ownFile(ctx context.Context, at, name string) error {
	info, err := os.Lstat(at)
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
	content, err := os.ReadFile(at)
	if err != nil {
		return err
	}
	if err := machine.WriteFile(at, content, info.Mode().Perm()&^0o022, 0o755); err != nil {
		return err
	}
	b.found(ctx, name, "copied: it had another name, or others could write it")
	return nil
}

// finishRenewal finishes a renewal of certificates that was interrupted, so that the files that it puts in place are compared as well.
func (b *Bootstrapper) finishRenewal(ctx context.Context) error {
	if b.lock.record().Step < journal.StepDone {
		return renewal.Discard(b.cfg.Root) // there is no node whose certificates could be renewed
	}
	if err := b.renewControlPlane(ctx); err != nil {
		b.log.ErrorContext(ctx, "certificates of this control plane have expired and could not be renewed", "err", err)
		if _, serr := os.Stat(b.on(renewal.Folder)); serr == nil { // it would be put in place later
			return err
		}
	}
	return nil
}

// administrators are the kubeconfigs of a control plane, beside the kubelet's.
var administrators = []string{"admin.conf", "super-admin.conf", "controller-manager.conf", "scheduler.conf"}

// checkAdministrators writes kubeconfigs of a control plane anew that have more than a server of the cluster, its authority, and a certificate with its key: a
// user of one can name a program to run, and this machine's services use them (B8). A worker has none.
func (b *Bootstrapper) checkAdministrators(ctx context.Context, meta *metadata.Machine, d *component.Desired) error {
	if meta.Role != metadata.RoleControlPlane {
		files := []string{pkiFolder + "/ca.key", renewal.Folder, renewal.Folder + ".part"}
		for _, name := range administrators {
			files = append(files, kubernetesFolder+"/"+name)
		}
		for _, name := range files {
			if _, err := os.Lstat(b.on(name)); err != nil {
				continue
			}
			if err := os.RemoveAll(b.on(name)); err != nil {
				return err
			}
			b.found(ctx, name, "removed")
		}
		return nil
	}
	local := kubeadm.LocalEndpoint(nodeOf(meta))
	for _, file := range administrators {
		name := kubernetesFolder + "/" + file
		text, err := os.ReadFile(b.on(name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		right, err := administrator(text, local, d)
		if err != nil {
			return err
		}
		if right != nil && sameConnection(text, right) {
			continue
		}
		if err := os.Remove(b.on(name)); err != nil {
			return err
		}
		done := "removed"
		if right != nil {
			if err := machine.WriteFile(b.on(name), right, 0o600, 0o755); err != nil {
				return err
			}
			done = "written anew"
		}
		b.found(ctx, name, done)
	}
	return nil
}

// administrator returns the kubeconfig that has the certificate and key of text, and beside them only the cluster's server and authority; nil if text has no certificate.
func administrator(text []byte, local string, d *component.Desired) ([]byte, error) {
	c, err := clientcmd.Load(text)
	if err != nil {
		return nil, nil //nolint:nilerr // there is nothing in it that could be kept
	}
	current := c.Contexts[c.CurrentContext]
	if current == nil || c.AuthInfos[current.AuthInfo] == nil || len(c.AuthInfos[current.AuthInfo].ClientCertificateData) == 0 {
		return nil, nil
	}
	is := c.AuthInfos[current.AuthInfo]
	server := "https://" + local
	if s := c.Clusters[current.Cluster]; s != nil && s.Server == "https://"+d.Endpoint {
		server = s.Server
	}
	const cluster, user, name = "kubernetes", "user", "user@kubernetes"
	out := clientcmdapi.NewConfig()
	out.Clusters[cluster] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: d.Authorities[component.CA]}
	out.AuthInfos[user] = &clientcmdapi.AuthInfo{ClientCertificateData: is.ClientCertificateData, ClientKeyData: is.ClientKeyData}
	out.Contexts[name] = &clientcmdapi.Context{Cluster: cluster, AuthInfo: user}
	out.CurrentContext = name
	return clientcmd.Write(*out)
}
