//go:build vm

package vm

import (
	"bufio"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/muster-k8s/muster/lab/driver"
)

// The names of the site's name server.
const (
	joinName = "_muster-join._tcp.lab.example."
	cp1Name  = "cp1.lab.example."
)

// A machine without a config medium reads all from a string of its firmware's tables, as libvirt and other hosts set it, and joins through DNS. After that its
// host offers an item of fw_cfg instead, then volumes, as OpenStack, Proxmox and others do. Volumes that pods have written change nothing.
func TestAMachineFindsItsMetadataWhereItsHostHasThem(t *testing.T) {
	w := bringUp(t, func(w *fixture, _ *driver.Up) { w.statePath = "/dev/vdb" })
	asked := w.nameServer(t)

	v := w.worker("node7")
	v.NoMedium, v.Nameservers, v.JoinEndpoints = true, []string{driver.OwnerAddress}, []string{"srv:" + strings.TrimSuffix(joinName, ".")}
	documents, err := v.Documents()
	if err != nil {
		t.Fatal(err)
	}
	documents = strings.Replace(documents, "kind: MachineMetadata\n", "kind: MachineMetadata\npool: lab\nproviderID: lab:///node7\nlabels: {topology.kubernetes.io/zone: z1}\ntaints: [{key: lab.example/t, effect: PreferNoSchedule}]\n", 1)
	v.Hardware.OEMString = "io.systemd.credential.binary:muster.machine=" + base64.StdEncoding.EncodeToString([]byte(documents))
	if _, err := w.AddVM(t.Context(), v); err != nil {
		t.Fatal(err)
	}
	w.says(t, "node7", "its metadata are from credential (credential muster.machine, SMBIOS type 11)", bootTime)
	select {
	case from := <-asked:
		t.Logf("%s has asked the name server", from)
	case <-time.After(joinTime): // includes the formatting of the disk
		t.Fatal("nobody has asked the name server")
	}
	w.acceptFirmware(t, node7)
	boot := w.ready(t, "node7", "")
	const fields = `jsonpath={.metadata.labels.muster\.dev/pool} {.metadata.labels.topology\.kubernetes\.io/zone} {.spec.providerID} {.spec.taints[?(@.key=="lab.example/t")].effect}`
	if out, err := w.Kubectl(t.Context(), "get", "node", "node7", "-o", fields); err != nil || out != "lab z1 lab:///node7 PreferNoSchedule" {
		t.Errorf("the Node has %q, %v", out, err)
	}

	evil := strings.ReplaceAll(documents, "name: node7", "name: evil")
	if evil == documents {
		t.Fatal("nothing was changed")
	}
	credential := filepath.Join(volumeFiles(t, map[string]string{"machine.yaml": documents}), "machine.yaml")
	for _, from := range []struct {
		name, source string
		hardware     driver.Hardware
	}{
		{"an item of fw_cfg", "credential (credential muster.machine, QEMU's fw_cfg)", driver.Hardware{MachineCredential: credential}},
		{"a NoCloud volume", "nocloud (/dev/", driver.Hardware{Disk: noCloud(t, documents)}},
		{"a config drive", "configdrive (/dev/", driver.Hardware{Disk: configDrive(t, documents)}},
		{"a CD, beside a disk that is first in order", "nocloud (/dev/sr0)", driver.Hardware{CD: noCloud(t, documents), Disk: noCloud(t, evil)}},
		{"a credential, beside a disk that has the state disk's name", "credential (credential muster.machine, QEMU's fw_cfg)", driver.Hardware{MachineCredential: credential, FirstDisk: noCloud(t, evil)}},
	} {
		t.Run(from.name, func(t *testing.T) {
			if _, err := w.RebootVM(t.Context(), "node7", driver.Boot{Hardware: &from.hardware}); err != nil {
				t.Fatal(err)
			}
			w.says(t, "node7", "its metadata are from "+from.source, bootTime)
			boot = w.ready(t, "node7", boot)
		})
	}
}

// volumeFiles writes the files of a volume into a folder.
func volumeFiles(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		file := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(content), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func tool(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", name, err, out)
	}
}

// noCloud makes an ISO 9660 volume as cloud-localds does, and fills it to whole sectors of a disk.
func noCloud(t *testing.T, documents string) string {
	t.Helper()
	dir, image := volumeFiles(t, map[string]string{"user-data": documents, "meta-data": "instance-id: i-1\nlocal-hostname: other\n"}), filepath.Join(t.TempDir(), "seed.iso")
	tool(t, "genisoimage", "-quiet", "-output", image, "-volid", "cidata", "-joliet", "-rock", filepath.Join(dir, "user-data"), filepath.Join(dir, "meta-data"))
	return image
}

// configDrive makes a vfat volume, as nova does with config_drive_format=vfat.
func configDrive(t *testing.T, documents string) string {
	t.Helper()
	dir, image := volumeFiles(t, map[string]string{"openstack/latest/user_data": documents, "openstack/latest/meta_data.json": `{"uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223", "hostname": "other"}`}), filepath.Join(t.TempDir(), "drive.img")
	tool(t, "/usr/sbin/mkfs.vfat", "-n", "config-2", "-C", image, "8192")
	tool(t, "mcopy", "-s", "-i", image, filepath.Join(dir, "openstack"), "::")
	return image
}

// nameServer starts the site's name server on the owner's workstation, and returns a channel that gets a client's address.
func (w *fixture) nameServer(t *testing.T) <-chan string {
	t.Helper()
	server, err := w.Command(t.Context(), driver.Owner, onSeat(t, "names", driver.OwnerAddress)...)
	if err != nil {
		t.Fatal(err)
	}
	out, err := server.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	server.Stderr = t.Output()
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	asked, done := make(chan string, 1), make(chan struct{})
	go func() {
		defer close(done)
		for in := bufio.NewScanner(out); in.Scan(); {
			if !strings.HasPrefix(in.Text(), node7+":") {
				continue
			}
			select {
			case asked <- in.Text():
			default: // one is enough
			}
		}
	}()
	t.Cleanup(func() {
		_ = server.Process.Kill()
		<-done
		_ = server.Wait() // killed
	})
	return asked
}

// serveNames answers for the two names of the site, and prints the clients that ask for joinservices. Other names do not exist.
func serveNames(c net.PacketConn) error {
	b := make([]byte, 1500)
	for {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			return err
		}
		out, name, err := nameAnswer(b[:n])
		if err != nil {
			continue // no query
		}
		if _, err := c.WriteTo(out, from); err != nil {
			return err
		}
		if name == joinName {
			fmt.Println(from)
		}
	}
}

func nameAnswer(query []byte) (out []byte, name string, err error) {
	var p dnsmessage.Parser
	h, err := p.Start(query)
	if err != nil {
		return nil, "", err
	}
	q, err := p.Question()
	if err != nil {
		return nil, "", err
	}
	h.Response, h.Authoritative = true, true
	m := dnsmessage.Message{Header: h, Questions: []dnsmessage.Question{q}}
	rh := dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: 60}
	switch name = q.Name.String(); {
	case name == joinName && q.Type == dnsmessage.TypeSRV:
		m.Answers = []dnsmessage.Resource{{Header: rh, Body: &dnsmessage.SRVResource{Priority: 10, Port: 30090, Target: dnsmessage.MustNewName(cp1Name)}}}
	case name == cp1Name && q.Type == dnsmessage.TypeA:
		m.Answers = []dnsmessage.Resource{{Header: rh, Body: &dnsmessage.AResource{A: [4]byte{192, 168, 77, 11}}}}
	case name != joinName && name != cp1Name:
		m.RCode = dnsmessage.RCodeNameError
	}
	out, err = m.Pack()
	return out, name, err
}
