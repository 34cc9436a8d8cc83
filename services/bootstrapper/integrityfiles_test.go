package bootstrapper_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/services/bootstrapper/component"
)

// huge is larger than the memory of any machine that a test needs. The file has no content on the disk.
const huge = 8 << 30

// leave makes a folder with a file in it, or a file of holes.
func (w *fixture) leave(t *testing.T, at string, folder bool) {
	t.Helper()
	if err := os.RemoveAll(filepath.Join(w.root, at)); err != nil {
		t.Fatal(err)
	}
	if folder {
		w.put(t, at+"/deep/inside", "evil")
		return
	}
	w.put(t, at, "")
	if err := os.Truncate(filepath.Join(w.root, at), huge); err != nil {
		t.Fatal(err)
	}
}

// small reports whether there is nothing at the path, or a file that a program can read.
func (w *fixture) small(at string) bool {
	info, err := os.Lstat(filepath.Join(w.root, at))
	return err != nil || info.Mode().IsRegular() && info.Size() < 1<<20
}

// B8: an attacker who was root once must not keep a machine from its owner's orders for ever.
func TestNoFileThatRootLeftKeepsAMachineFromStarting(t *testing.T) {
	for name, tt := range map[string]struct {
		at     string
		folder bool
		twice  bool // it has another name
	}{
		"a huge log with two names":         {at: "var/log/pods/x/0.log", twice: true},
		"a huge static pod":                 {at: "etc/kubernetes/manifests/etcd.yaml"},
		"a huge authority":                  {at: "etc/kubernetes/pki/ca.crt"},
		"a huge authority of etcd":          {at: "etc/kubernetes/pki/etcd/ca.crt"},
		"a huge kubeconfig":                 {at: "etc/kubernetes/kubelet.conf"},
		"a huge administrator's":            {at: "etc/kubernetes/admin.conf"},
		"a huge certificate":                {at: "etc/kubernetes/pki/apiserver.crt"},
		"a huge configuration":              {at: "var/lib/kubelet/config.yaml"},
		"a huge instance configuration":     {at: "var/lib/kubelet/instance-config.yaml"},
		"huge flags":                        {at: "var/lib/kubelet/kubeadm-flags.env"},
		"a huge list":                       {at: "var/lib/muster/components.json"},
		"huge authorities of the attester":  {at: "var/lib/muster/attester/authorities"},
		"a program's place":                 {at: "usr/local/bin/kubeadm", folder: true},
		"an administrator's place":          {at: "etc/kubernetes/admin.conf", folder: true},
		"a kubeconfig's place":              {at: "etc/kubernetes/kubelet.conf", folder: true},
		"an authority's place":              {at: "etc/kubernetes/pki/ca.crt", folder: true},
		"a configuration's place":           {at: "var/lib/kubelet/config.yaml", folder: true},
		"an instance configuration's":       {at: "var/lib/kubelet/instance-config.yaml", folder: true},
		"the flags' place":                  {at: "var/lib/kubelet/kubeadm-flags.env", folder: true},
		"a first kubeconfig's place":        {at: "etc/kubernetes/bootstrap-kubelet.conf", folder: true},
		"the list's place":                  {at: "var/lib/muster/components.json", folder: true},
		"a huge record of a pull":           {at: "var/lib/kubelet/image_manager/pulled/sha256-x"},
		"a huge record of a shutdown":       {at: "var/lib/kubelet/graceful_node_shutdown_state"},
		"a file like a driver's of volumes": {at: "var/lib/kubelet/pods/vol_data.json"},
	} {
		t.Run(name, func(t *testing.T) {
			w := rebooted(t)
			w.leave(t, tt.at, tt.folder)
			if tt.twice {
				link(t, filepath.Join(w.root, tt.at), filepath.Join(w.root, "second"), true)
			}
			w.startAgain(t)
			if !w.small(tt.at) {
				t.Errorf("%s is there", tt.at)
			}
			if !strings.Contains(w.get("run/muster/state-findings"), `"/`+tt.at+`"`) {
				t.Errorf("the findings are %q", w.get("run/muster/state-findings"))
			}
		})
	}
}

// B8: a small file in the place of a folder would end a program at each boot, such as the one that takes the owner's orders.
func TestNoFileIsLeftInThePlaceOfAFolder(t *testing.T) {
	w := rebooted(t)
	folders := []string{
		"var/lib/muster/backup", "var/lib/muster/orders", "var/lib/muster/restore", "var/lib/muster/rotation", "var/lib/muster/upgrade",
		"var/lib/kubelet/image_manager", "var/lib/kubelet/device-plugins", "var/log/muster-backup", "var/log/muster-verify", "etc/kubernetes/tmp",
		"var/lib/kubelet/pod-resources", "etc/kubernetes/muster-renewal",
	}
	for _, at := range folders {
		w.drop(t, at)
		w.put(t, at, "evil")
	}
	w.startAgain(t)
	for _, at := range folders {
		if info, err := os.Lstat(filepath.Join(w.root, at)); err == nil && !info.IsDir() {
			t.Errorf("%s is there", at)
		}
		if !strings.Contains(w.get("run/muster/state-findings"), `"/`+at+`"`) {
			t.Errorf("%s is not among the findings: %q", at, w.get("run/muster/state-findings"))
		}
	}
}

// A file in the place of a folder, or a folder in that of the lock, would end the renewal of a control plane's certificates, and keep a staged one, and so the
// machine, from its place at each boot.
func TestNothingInThePlacesOfARenewalKeepsAMachineFromStarting(t *testing.T) {
	const staged, lock = "etc/kubernetes/muster-renewal", "etc/kubernetes/.muster-renewal.lock"
	for _, at := range []string{staged, staged + "/pki", staged + "/pki/etcd", lock} {
		w := rebooted(t)
		if at == lock {
			w.put(t, staged+"/pki/apiserver.crt", "staged")
			w.drop(t, lock)
			w.put(t, lock+"/inside", "evil")
		} else {
			w.drop(t, at)
			w.put(t, at, "evil")
		}
		w.startAgain(t)
		if info, err := os.Lstat(filepath.Join(w.root, at)); err == nil && info.IsDir() == (at == lock) {
			t.Errorf("%s is there", at)
		}
		if !strings.Contains(w.get("run/muster/state-findings"), `"/`+at+`"`) {
			t.Errorf("%s is not among the findings: %q", at, w.get("run/muster/state-findings"))
		}
	}
}

// B8: the kernel allows other names and paths than programs expect.
func TestNoNameOrDepthOfAFolderEndsTheComparison(t *testing.T) {
	w := rebooted(t)
	for _, at := range []string{"opt/cni/bin/\xff", "usr/local/bin/\xfe", "usr/local/lib/muster/\xff", "etc/kubernetes/\xff"} {
		w.put(t, at+"/deep/inside", "evil")
	}
	long := strings.Repeat("x", 250)
	deep := []string{"opt/cni/bin", "etc/kubernetes", "var/lib/muster", "var/lib/kubelet", "var/log/pods"}
	for _, at := range deep {
		folder, err := os.OpenRoot(w.root)
		if err == nil {
			err = folder.MkdirAll(at+strings.Repeat("/"+long, 20), 0o755)
		}
		if err := errors.Join(err, folder.Close()); err != nil {
			t.Fatal(err)
		}
	}
	w.startAgain(t)
	for _, at := range deep {
		if err := filepath.WalkDir(filepath.Join(w.root, at), func(_ string, _ fs.DirEntry, err error) error { return err }); err != nil {
			t.Errorf("other programs can't walk %s: %v", at, err)
		}
	}
	for _, gone := range []string{"opt/cni/bin/\xff/deep/inside", "usr/local/bin/\xfe/deep/inside", "usr/local/lib/muster/\xff/deep/inside"} {
		if w.exists(gone) {
			t.Errorf("%s is there", gone)
		}
	}
}

// B8: the memory and time of a comparison must not depend on how many names root has left.
func TestManyFilesThatRootLeftAreFewFindings(t *testing.T) {
	w := rebooted(t)
	const many, most = 1200, 1000
	for i := range many {
		w.put(t, fmt.Sprintf("usr/local/bin/evil-%d", i), "")
	}
	w.startAgain(t)
	if left, err := os.ReadDir(filepath.Join(w.root, "usr/local/bin")); err != nil || len(left) > 100 {
		t.Errorf("%d files are left, %v", len(left), err)
	}
	if n := strings.Count(w.get("run/muster/state-findings"), "\n"); n != most {
		t.Errorf("%d findings, want %d", n, most)
	}
	if n := strings.Count(w.logged.String(), tampered); n != most || !strings.Contains(w.logged.String(), "more findings") {
		t.Errorf("%d findings in the log, want %d", n, most)
	}
}

// Programs that list these folders later, such as the kubelet, would take the machine's memory.
func TestFoldersOfTheMachineHaveFewEntries(t *testing.T) {
	w := rebooted(t)
	const folder, most = "var/lib/kubelet/image_manager/pulled/", 10_000
	w.put(t, folder+"first", "evil")
	for i := range most {
		if err := os.Symlink("first", filepath.Join(w.root, folder, fmt.Sprint(i))); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(w.root, folder, "folder"), 0o755); err != nil {
		t.Fatal(err)
	}
	w.startAgain(t)
	if f := w.get("run/muster/state-findings"); strings.Count(f, "its folder had more than 10,000 entries") != 2 {
		t.Errorf("the findings are %.1000q", f)
	}
}

// B8: the authority of the cluster is on the machine again, and its kubelet trusts it.
func TestAFileThatIsTooLargeIsPutRight(t *testing.T) {
	for _, at := range []string{"etc/kubernetes/pki/ca.crt", "etc/kubernetes/kubelet.conf", "var/lib/kubelet/kubeadm-flags.env"} {
		for _, folder := range []bool{false, true} {
			w := rebooted(t)
			want := strings.TrimSpace(w.get(at))
			w.leave(t, at, folder)
			w.startAgain(t)
			if !w.small(at) || strings.TrimSpace(w.get(at)) != want {
				t.Errorf("%s is %.1000q, want %q", at, w.get(at), want)
			}
		}
	}
}

// The owner's recovery must bring the machine up, too. Without a list, nothing else is compared.
func TestNoFileThatRootLeftKeepsAMachineFromItsRecovery(t *testing.T) {
	for _, at := range []string{"var/lib/muster/components.json", "var/lib/kubelet/config.yaml"} {
		w := rebooted(t)
		w.desires(t, func(d *component.Desired) { *d = component.Desired{Uncompared: component.UncomparedRecovery} })
		w.put(t, "etc/kubernetes/manifests/evil.yaml", "evil")
		w.leave(t, at, false)
		w.startAgain(t)
		if !w.small(at) || !w.exists("etc/kubernetes/manifests/evil.yaml") {
			t.Errorf("%s is there, or something is compared", at)
		}
	}
}

// A folder in the place of a kubeconfig would keep a staged one, and the machine, from its place at each boot.
func TestAFolderDoesNotKeepARenewalFromItsPlace(t *testing.T) {
	w := rebooted(t)
	staged := w.get("etc/kubernetes/admin.conf")
	w.leave(t, "etc/kubernetes/admin.conf", true)
	w.put(t, "etc/kubernetes/muster-renewal/admin.conf", staged)
	w.put(t, "etc/kubernetes/muster-renewal/pki/apiserver.crt/inside", "evil")
	w.startAgain(t)
	if w.get("etc/kubernetes/admin.conf") != staged || w.exists("etc/kubernetes/muster-renewal/admin.conf") {
		t.Errorf("admin.conf is %q", w.get("etc/kubernetes/admin.conf"))
	}
	if w.exists("etc/kubernetes/pki/apiserver.crt") {
		t.Error("a folder was put in place")
	}
}

// Copies of a file with many names would fill the disk, and the machine would fail at each boot.
func TestCopiesOfFilesWithSecondNamesAreFew(t *testing.T) {
	w := rebooted(t)
	const names, size = 10, 5 << 20 // more than half of them do not fit
	first := filepath.Join(w.root, "var/log/pods/x/0.log")
	w.put(t, "var/log/pods/x/0.log", strings.Repeat("x", size))
	for n := range names {
		if err := os.Link(first, first+strings.Repeat("x", n+1)); err != nil {
			t.Fatal(err)
		}
	}
	w.startAgain(t)
	left, err := os.ReadDir(filepath.Dir(first))
	if err != nil || len(left) == 0 || len(left)*size > 40<<20 {
		t.Errorf("%d files are left, %v", len(left), err)
	}
}

// Each copy is written to the disk by itself, however small it is.
func TestCopiesOfEmptyFilesAreFew(t *testing.T) {
	w := rebooted(t)
	first := filepath.Join(w.root, "var/log/pods/x/0.log")
	w.put(t, "var/log/pods/x/0.log", "")
	for n := range 700 {
		if err := os.Link(first, fmt.Sprint(first, n)); err != nil {
			t.Fatal(err)
		}
	}
	w.startAgain(t)
	left, err := os.ReadDir(filepath.Dir(first))
	if err != nil || len(left) == 0 || len(left) > 600 {
		t.Errorf("%d files are left, %v", len(left), err)
	}
}

// A marker that is a folder would end the rotation of the cluster's keys on this machine for good.
func TestMarkersThatAreFoldersAreRemoved(t *testing.T) {
	w := rebooted(t)
	const muster = "var/lib/muster/"
	markers := []string{muster + "renewal/authorities-begun", muster + "rotation/begun", muster + "rotation/made", muster + "backup/lock", muster + "backup/etcd.snapshot"}
	for _, at := range markers {
		w.leave(t, at, true)
	}
	if err := os.Symlink("/nonexistent", filepath.Join(w.root, muster+"rotation/result")); err != nil {
		t.Fatal(err)
	}
	const kept, staged = muster + "backup/.kept", muster + "upgrade/staged/kubelet"
	w.leave(t, kept, false) // a backup may be large
	w.leave(t, staged, false)
	w.startAgain(t)
	for _, at := range append(markers, muster+"rotation/result") {
		if _, err := os.Lstat(filepath.Join(w.root, at)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is there: %v", at, err)
		}
	}
	if !w.exists(kept) || !w.exists(staged) {
		t.Error("a file that may be large is removed")
	}
	if n := strings.Count(w.get("run/muster/state-findings"), "\n"); n != len(markers)+1 {
		t.Errorf("%d findings: %s", n, w.get("run/muster/state-findings"))
	}
}
