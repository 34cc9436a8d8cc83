// Package statecheck compares all files of the state disk that run as root with the cluster's list, before any of them runs (B8).
package statecheck

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	certutil "k8s.io/client-go/util/cert"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/tree"
	"github.com/muster-k8s/muster/internal/versions"
	"github.com/muster-k8s/muster/services/bootstrapper/bootsecret"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/provision"
	"github.com/muster-k8s/muster/services/bootstrapper/upgrade"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// checkedFile exists once the state disk was compared in this boot. Later files, such as those of a CNI plugin's installer, are not compared.
	checkedFile = "/run/muster/state-checked"
	// renewedFile exists once containerd's store was renewed in this boot.
	renewedFile = "/run/muster/store-renewed"
	// csiData is the file beside the mounted folder of a Container Storage Interface volume; the kubelet reads names from it.
	csiData = "vol_data.json"
	// kubeletFlags is read by the kubelet's unit.
	kubeletFlags = machine.KubeletFolder + "/kubeadm-flags.env"
)

// Run compares all files of the state disk that run as root with the cluster's list, before any of them runs (B8): an attacker who had root rights once
// may have left them, and may also have replaced the journal by an earlier one. The list came from a joinservice with the disk key in this boot, or from
// the owner's folder by a recovery, and is kept in memory, because root could have changed everything on the disk.
//
// Disks that are unencrypted, formatted in this boot, or opened by a recovery without a list are not compared. In the last case, containerd's store is
// renewed and oversized files are removed, because that needs no list.
func Run(ctx context.Context, n *provision.Node) error {
	ck := &check{Node: n, copies: maxCopies}
	d, err := component.DesiredFile(ck.On(component.UnlockFile)).Load()
	switch {
	case err != nil:
		return err
	case d == nil && ck.Image.StateDisk.Mode == metadata.DiskLUKS: // a program that follows the disk's paths can have removed it
		return attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "%s is missing, which `bootstrapper unlock` writes. Without it, the state disk can't be compared with the cluster's list, so nothing on it is started. Reboot the machine", component.UnlockFile)
	}
	if d != nil {
		if err := ck.checkFiles(ctx); err != nil { // the other steps read them
			return err
		}
	}
	// The role comes from the metadata, which joinservice has compared with the enrollment. It does not come from the disk: a CA key that an attacker has
	// left must not turn a worker into a control plane.
	meta, err := ck.Metadata()
	controlPlane := err == nil && meta.Role == metadata.RoleControlPlane
	switch { // a machine without a list reports later that it can't read its metadata
	case d == nil:
		return ck.uncompared(ctx, controlPlane, false)
	case d.Uncompared != "":
		ck.Log.InfoContext(ctx, "the state disk is not compared with the cluster's list", "why", d.Uncompared)
		return ck.uncompared(ctx, controlPlane, d.Uncompared == component.UncomparedRecovery)
	case err != nil:
		return err
	}
	s, other, err := ck.software(d)
	if err != nil {
		return err
	}
	mark, err := ck.checkedMark()
	if err != nil {
		return err
	}
	if is, err := os.ReadFile(ck.On(checkedFile)); err == nil && bytes.Equal(is, mark) {
		return nil
	} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := ck.mayHaveAuthority(d, controlPlane); err != nil { // J2: before the disk is changed
		return err
	}
	if err := ck.newest(d, s, other); err != nil { // before programs and pods are changed
		return err
	}
	if d.Recovered {
		if _, err := ck.ownAuthority(); err != nil {
			return err
		}
	}
	if err := ck.checkPrograms(ctx, s, other); err != nil {
		return err
	}
	if err := ck.checkVolumes(ctx); err != nil { // first: the other steps rely on these being folders
		return err
	}
	if err := ck.checkTrees(ctx); err != nil {
		return err
	}
	if !controlPlane {
		if err := ck.checkWorker(ctx); err != nil { // before the steps that take a CA key as the sign of a control plane
			return err
		}
	}
	if err := ck.finishRenewal(ctx, controlPlane); err != nil {
		return err
	}
	lists := []versions.Images{s.Images}
	if other != nil {
		lists = append(lists, other.Images)
	}
	if !d.Adopted || !controlPlane { // an adopted control plane's manifests do not follow Muster's configuration
		if err := ck.checkManifests(ctx, controlPlane, lists); err != nil {
			return err
		}
	}
	if err := ck.putBack(ctx, func() ([]string, error) { return upgrade.PutBack(ck.Root, controlPlane, ck.Kubeadm, lists...) }); err != nil {
		return err
	}
	if err := ck.keepLists(s, other); err != nil {
		return err
	}
	if err := ck.checkAuthorities(ctx, d.Authorities, d.Rotation); err != nil {
		return err
	}
	if d.Recovered {
		ca, err := ck.ownAuthority()
		if err != nil {
			return err
		}
		// The owner's program sends no CA, so the later steps compare with the machine's own. An attacker who was root on a control plane has its key.
		d.Authorities = map[string][]byte{component.CA: ca}
	} else if err := ck.checkStaged(ctx, d.Rotation); err != nil { // a recovery does not include whether a rotation is in progress
		return err
	}
	if err := ck.checkKubelet(ctx, meta, d); err != nil {
		return err
	}
	if controlPlane {
		if err := ck.checkAdministrators(ctx, meta, d); err != nil {
			return err
		}
		if err := ck.checkAuthz(ctx, d); err != nil {
			return err
		}
	}
	if err := ck.prepareContainerd(ctx, true, s.Images[versions.Pause]); err != nil {
		return err
	}
	return machine.WriteFile(ck.On(checkedFile), mark, 0o600, 0o755)
}

type check struct {
	*provision.Node
	copies   int64 // bytes left for copies; see maxCopies
	findings int
}

// checkedMark returns the content of [checkedFile] after the comparison, and of [renewedFile]. It depends on the secret of this boot, so no file from an earlier boot is
// valid.
func (ck *check) checkedMark() ([]byte, error) {
	secret, err := bootsecret.Load(ck.Root)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(append([]byte("muster state disk compared v1\x00"), secret.Expose()...))
	return []byte(hex.EncodeToString(sum[:])), nil
}

// found reports a difference. A boot may compare the disk more than once: a difference that was found before is not counted again.
func (ck *check) found(ctx context.Context, what, done string) {
	if ck.findings++; ck.findings > machine.MaxFindings {
		if ck.findings == machine.MaxFindings+1 {
			ck.Log.ErrorContext(ctx, "the state disk has more findings than are listed", "listed", machine.MaxFindings)
		}
		return
	}
	ck.Log.ErrorContext(ctx, "the state disk differs from the cluster's list: an attacker may have had root rights on this machine", "found", what, "done", done)
	ck.Console.Print(what + " differs from the cluster's list: " + done)
	if err := machine.AddFinding(ck.Root, what, done); err != nil { // the log has the finding
		ck.Log.WarnContext(ctx, "the metrics do not show this finding", "err", err)
	}
}

// software returns the list that the disk is compared with, and during an upgrade the cluster's other list, otherwise nil. The disk's own list only selects
// one of the two.
func (ck *check) software(d *component.Desired) (s, other *component.Software, err error) {
	if s, err = component.ParseSoftware(d.List.Wire(), d.List.Images); err != nil || d.Other == nil {
		return s, nil, err
	}
	if other, err = component.ParseSoftware(d.Other.Wire(), d.Other.Images); err != nil {
		return nil, nil, err
	}
	if kept, err := component.ListFile(ck.On(component.KeptList)).Load(); err == nil && kept != nil && component.Same(*kept, other.List) {
		s, other = other, s
	}
	return s, other, nil
}

// newest refuses the lists of a recovery if the disk of a node lists other software as installed, or none. The owner's folder may be a copy from before an
// upgrade of Kubernetes; with its list, a control plane would lose its static pods. Root can have changed or deleted the list on the disk, so the owner
// decides. An adopted node without a list is compared: it may never have had one.
func (ck *check) newest(d *component.Desired, lists ...*component.Software) error {
	if !d.Recovered || d.Replace {
		return nil
	}
	kept, err := component.ListFile(ck.On(component.KeptList)).Load()
	if err != nil || kept == nil {
		if d.Adopted || ck.Lock.Record().Step < journal.StepDone {
			return nil
		}
		return attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "the state disk has no readable list of the installed software, so nothing on it is started: root has removed or damaged the list. Reboot the machine and run `muster recover` with the newest copy of the owner's folder and --replace-software")
	}
	if slices.ContainsFunc(lists, func(s *component.Software) bool { return s != nil && component.Same(*kept, s.List) }) {
		return nil
	}
	return attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "the state disk lists other software as installed than the owner's folder, so nothing on it is started. Reboot the machine and run `muster recover` with the newest copy of the folder. If this copy is the newest, root has changed the list on the disk: add --replace-software")
}

// ownAuthority returns the machine's own CA certificates, with which a recovery compares the disk. It refuses a node that has none: a kubeconfig without a
// CA trusts the system's CAs, and with an unreadable one nothing starts.
func (ck *check) ownAuthority() ([]byte, error) {
	isNode := false
	for _, file := range append([]string{path.Base(kubeadm.KubeletConf)}, administrators...) {
		_, err := os.Lstat(ck.On(machine.KubernetesFolder + "/" + file))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		isNode = isNode || err == nil
	}
	var ca []byte
	at := ck.On(path.Join(machine.PKIFolder, component.CA))
	info, err := os.Lstat(at)
	if err == nil && info.Mode().IsRegular() { // the target of a link may have any size
		ca, err = os.ReadFile(at)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	ca = bytes.TrimSpace(ca)
	if _, err := certutil.ParseCertsPEM(ca); isNode && err != nil { // as the API server and the kubelet read it
		return nil, attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "%s/%s has no valid certificate, so the state disk can't be compared. Recover another control plane, then remove this one. If there is no other, restore the cluster from a backup: %w", machine.PKIFolder, component.CA, err)
	}
	return ca, nil
}

// keepLists stores the cluster's list on the disk, for upgrades and for boots without a list, and removes lists that are not the cluster's (B8).
func (ck *check) keepLists(s, other *component.Software) error {
	kept := component.ListFile(ck.On(component.KeptList))
	if list, err := kept.Load(); err != nil || list == nil || !component.Same(*list, s.List) {
		if err := kept.Save(s.List); err != nil {
			return err
		}
	}
	known := []versions.List{s.List}
	if other != nil {
		known = append(known, other.List)
	}
	return upgrade.DropLists(ck.Root, known...)
}

// uncompared does the steps that need no list. recovered reports that a recovery by the owner opened the disk.
func (ck *check) uncompared(ctx context.Context, controlPlane, recovered bool) error {
	if err := ck.putBack(ctx, func() ([]string, error) { return upgrade.PutBackUnlisted(ck.Root, controlPlane, ck.Kubeadm) }); err != nil {
		return err
	}
	pause, err := ck.keptPause()
	if err != nil {
		return err
	}
	return ck.prepareContainerd(ctx, recovered, pause)
}

// putBack puts back what an upgrade had moved away when the machine went down. An upgrade that runs in this boot is left alone.
func (ck *check) putBack(ctx context.Context, put func() ([]string, error)) error {
	if ck.KubeletMayStart() {
		return nil
	}
	files, err := put()
	if len(files) > 0 {
		ck.Log.WarnContext(ctx, "files that an interrupted upgrade of Kubernetes had moved away were put back", "files", strings.Join(files, ", "))
	}
	return err
}

// checkPrograms reinstalls changed programs, and removes unlisted ones. Programs of the other list, left by an interrupted upgrade, are replaced without a
// finding. Its kubeadm stays, because an upgrade installs kubeadm first.
func (ck *check) checkPrograms(ctx context.Context, s, other *component.Software) error {
	in := component.New(ck.Root, ck.Components, ck.Log)
	defer in.Close()
	left := map[string]bool{}
	if other != nil {
		for _, c := range other.Components {
			left[c.Name()] = in.Installed(c)
		}
	}
	for {
		for i, c := range s.Components {
			if left[c.Name()] && path.Base(c.Name()) == "kubeadm" {
				continue
			}
			fetched := false
			err := in.Install(ctx, s.Components[i:i+1], func(text string) {
				if strings.HasPrefix(text, "fetching ") && !left[c.Name()] { // report it before the download, which may fail
					fetched = true
					ck.found(ctx, c.Name(), "will be reinstalled")
				}
			})
			if err != nil {
				return err
			}
			if fetched {
				ck.Log.InfoContext(ctx, "a component was reinstalled", "component", c.Name())
				ck.Console.Print(c.Name() + " was reinstalled")
			}
		}
		removed := false
		err := in.Sweep(s.Components, func(what string) {
			removed = true
			if !left[what] {
				ck.found(ctx, what, "removed")
			}
		})
		if err != nil || !removed {
			return err
		}
		// The removal of a folder that was a link also removed the programs that were installed through it.
	}
}

// checkManifests removes static pods that kubeadm would not have made with the images of one of the lists.
func (ck *check) checkManifests(ctx context.Context, controlPlane bool, lists []versions.Images) error {
	if err := ck.wantFolder(ctx, kubeadm.Manifests); err != nil {
		return err
	}
	return tree.Each(ck.On(kubeadm.Manifests), func(at string, f fs.DirEntry) error {
		name, _ := strings.CutSuffix(f.Name(), ".yaml")
		problem := errors.New("this node has no such static pod")
		if controlPlane && f.Type().IsRegular() && name != f.Name() {
			text, err := os.ReadFile(at)
			if err != nil {
				return err
			}
			if len(text) == 0 { // a power cut during an upgrade can leave it; the kubelet ignores it, and kubeadm's copy is put back
				return nil
			}
			problem = ck.Kubeadm.ListedPod(ck.Root, name, text, lists...)
		}
		if problem == nil {
			return nil
		}
		return ck.remove(ctx, kubeadm.Manifests+"/"+f.Name(), "removed: "+problem.Error())
	})
}

// remove removes a file or a folder, and reports it.
func (ck *check) remove(ctx context.Context, name, done string) error {
	if err := tree.RemoveAll(ck.On(name)); err != nil {
		return err
	}
	ck.found(ctx, name, done)
	return nil
}

// wantFolder removes a link or a file from the place of a folder.
func (ck *check) wantFolder(ctx context.Context, name string) error {
	info, err := os.Lstat(ck.On(name))
	if errors.Is(err, fs.ErrNotExist) || err == nil && info.IsDir() {
		return nil
	}
	if err != nil {
		return err
	}
	return ck.remove(ctx, name, "removed")
}

// checkAuthorities rewrites the public files by which the node recognizes its cluster if they differ. It does not create missing ones: kubeadm, which
// may still have to write them, fails if they exist. Keys of a rotation in progress that the machine already has are kept.
func (ck *check) checkAuthorities(ctx context.Context, want map[string][]byte, r *component.Rotation) error {
	for _, folder := range []string{machine.PKIFolder, path.Join(machine.PKIFolder, "etcd")} {
		if err := ck.wantFolder(ctx, folder); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		file := path.Join(machine.PKIFolder, name)
		var keep []byte
		if r != nil && name == r.Key.PublicFile() {
			keep = r.Keep
		}
		info, err := os.Lstat(ck.On(file))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if info.Mode().IsRegular() {
			is, err := os.ReadFile(ck.On(file))
			if err != nil {
				return err
			}
			if bytes.Equal(bytes.TrimSpace(is), bytes.TrimSpace(want[name])) {
				continue
			}
			merged, more := inOrder(is, want[name], keep)
			if !more && bytes.Equal(is, merged) {
				continue
			}
			if !more {
				// The file lacks a key that a rotation added, or has another order. Neither helps an attacker, so it is no finding.
				if err := machine.WriteFile(ck.On(file), merged, 0o644, 0o755); err != nil {
					return err
				}
				ck.Log.InfoContext(ctx, "the public keys of the cluster are brought up to date", "file", file)
				continue
			}
			want[name] = merged
		}
		if err := tree.RemoveAll(ck.On(file)); err != nil {
			return err
		}
		if err := machine.WriteFile(ck.On(file), want[name], 0o644, 0o755); err != nil {
			return err
		}
		ck.found(ctx, file, "rewritten")
	}
	return nil
}
