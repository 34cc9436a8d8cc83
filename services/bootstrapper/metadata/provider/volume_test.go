package provider

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/internal/image/layout"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

func image(t testing.TB, name string) []byte {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// disk shows a machine a disk with this content.
func disk(t *testing.T, m Machine, name string, content []byte) {
	t.Helper()
	place(t, m.Dev, name, string(content))
	place(t, m.Sys, "class/block/"+name+"/dev", "")
}

func volumeOf(t *testing.T, m Machine, name, file string) {
	t.Helper()
	disk(t, m, name, image(t, file))
}

func machine(t *testing.T) Machine {
	t.Helper()
	return Machine{Sys: t.TempDir(), Dev: t.TempDir(), Disks: true}
}

// A pod with a PersistentVolume of mode Block writes it as it likes, and it can stay attached while its node restarts.
func TestUsersOfAClusterChangeNothingByAVolume(t *testing.T) {
	here := func(t *testing.T, s metadata.Sources, m Machine) (*Found, error) {
		t.Helper()
		local, disks, _ := m.Choose(s)
		f, err := m.Find(t.Context(), local)
		if errors.Is(err, ErrAbsent) && len(disks) > 0 {
			m.Disks = true
			f, err = m.Find(t.Context(), disks)
		}
		return f, err
	}
	m := machine(t)
	m.Disks = false
	for _, name := range []string{"sdb", "sdc"} { // two of one label would be an error
		volumeOf(t, m, name, "nocloud-genisoimage.iso.gz")
		place(t, m.Sys, "class/block/"+name+"/device/type", "0\n")
	}
	volumeOf(t, m, "sr0", "nocloud-xorriso.iso.gz")
	place(t, m.Sys, "class/block/sr0/device/type", "5\n")
	if f, err := here(t, metadata.Sources{}, m); err != nil || f.From != m.Dev+"/sr0" {
		t.Errorf("beside a CD: %+v, %v", f, err)
	}
	if err := os.RemoveAll(m.Sys + "/class/block/sr0"); err != nil {
		t.Fatal(err)
	}
	if f, err := here(t, metadata.Sources{}, m); err == nil || !strings.Contains(err.Error(), "both have the label") {
		t.Errorf("without it: %+v, %v", f, err)
	}
	m.Credentials = t.TempDir()
	place(t, m.Credentials, credentialName, document)
	if f, err := here(t, metadata.Sources{}, m); err != nil || f.Provider != metadata.ProviderCredential {
		t.Errorf("beside a credential: %+v, %v", f, err)
	}
	m.Credentials = ""
	place(t, m.Sys, "class/dmi/id/sys_vendor", "Amazon EC2\n")
	if f, err := here(t, metadata.Sources{}, m); !errors.Is(err, ErrAbsent) {
		t.Errorf("in a cloud: %+v, %v", f, err)
	}
	// An image that names the provider wants it there, too.
	if f, err := here(t, metadata.Sources{Providers: []string{metadata.ProviderNoCloud, metadata.ProviderAWS}}, m); err == nil || !strings.Contains(err.Error(), "both have the label") {
		t.Errorf("in a cloud, named by the image: %+v, %v", f, err)
	}
}

func TestNoCloudVolumesAreRead(t *testing.T) {
	for _, file := range []string{"nocloud-genisoimage.iso.gz", "nocloud-xorriso.iso.gz", "nocloud-rock-only.iso.gz"} {
		m := machine(t)
		volumeOf(t, m, "sr0", file)
		got, err := complete(t, m, metadata.ProviderNoCloud)
		if err != nil || got.Name != "test-nocloud-v1" || got.Addresses[0].String() != "192.0.2.7" || got.JoinEndpoints[0] != "srv:_muster-join._tcp.example.org" || got.Source.From != m.Dev+"/sr0" {
			t.Errorf("%s: %+v, %v", file, got, err)
		}
	}
	m := machine(t)
	volumeOf(t, m, "sr0", "nocloud-joliet-only.iso.gz")
	if _, err := complete(t, m, metadata.ProviderNoCloud); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "user-data") || !strings.Contains(err.Error(), "-rock") || !strings.Contains(err.Error(), "no user data") {
		t.Errorf("a volume without Rock Ridge: %v", err)
	}
}

func TestADeviceThatCannotBeReadIsNamed(t *testing.T) {
	m := machine(t)
	place(t, m.Sys, "class/block/sdb/dev", "")
	if err := os.Symlink("/proc/self/mem", m.Dev+"/sdb"); err != nil { // its first page can't be read: EIO
		t.Fatal(err)
	}
	if _, err := complete(t, m, metadata.ProviderNoCloud); !errors.Is(err, ErrAbsent) || !strings.Contains(err.Error(), m.Dev+"/sdb") {
		t.Errorf("%v", err)
	}
	volumeOf(t, m, "sr0", "nocloud-xorriso.iso.gz")
	if _, err := complete(t, m, metadata.ProviderNoCloud); err != nil {
		t.Errorf("beside a volume: %v", err)
	}
}

func TestAHybridImageIsOneVolume(t *testing.T) {
	m := machine(t)
	volumeOf(t, m, "sda", "nocloud-xorriso.iso.gz")
	volumeOf(t, m, "sda1", "nocloud-xorriso.iso.gz")
	if _, err := complete(t, m, metadata.ProviderNoCloud); err == nil || !strings.Contains(err.Error(), "both have the label") {
		t.Errorf("two volumes: %v", err)
	}
	place(t, m.Sys, "class/block/sda1/start", "0\n")
	if got, err := complete(t, m, metadata.ProviderNoCloud); err != nil || got.Source.From != m.Dev+"/sda" {
		t.Errorf("a partition that is the whole disk: %+v, %v", got, err)
	}
}

func TestConfigDrivesAreRead(t *testing.T) {
	m := machine(t)
	volumeOf(t, m, "vdc", "configdrive-genisoimage.iso.gz")
	got, err := complete(t, m, metadata.ProviderConfigDrive)
	if err == nil || !strings.Contains(err.Error(), "name:") { // KubeVirt's captured host name has "_"
		t.Errorf("%+v, %v", got, err)
	}
	b := bytes.Replace(image(t, "configdrive-genisoimage.iso.gz"), []byte("test_instance-kubevirt.foo.cloud"), []byte("test-instance-kubevirt.foo.cloud"), 1)
	disk(t, m, "vdc", b)
	got, err = complete(t, m, metadata.ProviderConfigDrive)
	if err != nil || got.Name != "test-instance-kubevirt" || got.Addresses[0].String() != "10.0.151.35" || got.ProviderID != "openstack:///5d307ca9-b3ef-428c-8861-06e72d69f223" || got.Labels[metadata.LabelInstanceType] != "m1.small" {
		t.Errorf("%+v, %v", got, err)
	}
}

// A vfat volume is mounted by the kernel, which needs root: here its files are in a folder.
func TestVfatVolumesAreMountedAndUnmounted(t *testing.T) {
	for label, provider := range map[string]string{layout.ConfigLabel: metadata.ProviderMedium, "cidata": metadata.ProviderNoCloud, "CIDATA": metadata.ProviderNoCloud, "config-2": metadata.ProviderConfigDrive} {
		m := machine(t)
		files, mounted := t.TempDir(), 0
		m.Mount = func(device string) (string, func(), error) {
			if device != m.Dev+"/vdb" {
				t.Errorf("%s is mounted", device)
			}
			mounted++
			return files, func() { mounted-- }, nil
		}
		disk(t, m, "vdb", nil)
		if err := os.Truncate(m.Dev+"/vdb", 2<<20); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.CommandContext(t.Context(), "/usr/sbin/mkfs.vfat", "-n", label, m.Dev+"/vdb").CombinedOutput(); err != nil {
			t.Fatalf("mkfs.vfat: %v: %s", err, out)
		}
		if _, err := complete(t, m, provider); !errors.Is(err, fs.ErrNotExist) || mounted != 0 {
			t.Errorf("%s, empty: %v, mounted %d times", label, err, mounted)
		}
		whole := document + "name: a\naddresses: [192.0.2.7]\n"
		place(t, files, "user-data", whole)
		place(t, files, layout.MetadataFile, whole)
		place(t, files, "openstack/latest/user_data", whole)
		place(t, files, "openstack/latest/meta_data.json", "{}")
		if got, err := complete(t, m, provider); err != nil || got.Name != "a" || mounted != 0 {
			t.Errorf("%s: %+v, %v, mounted %d times", label, got, err, mounted)
		}
		for _, name := range []string{"user-data", layout.MetadataFile, "openstack/latest/user_data"} {
			if err := os.Remove(filepath.Join(files, name)); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink("/etc/hostname", filepath.Join(files, name)); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := complete(t, m, provider); err == nil {
			t.Errorf("%s, with a link out of the volume: %+v", label, got)
		}
	}
}

func TestTheMediumHasTwoFilesOfBoundedSize(t *testing.T) {
	m := machine(t)
	files := t.TempDir()
	m.Mount = func(string) (string, func(), error) { return files, func() {}, nil }
	b := make([]byte, 512)
	copy(b[43:], layout.ConfigLabel+"FAT12   ")
	b[510], b[511] = 0x55, 0xaa
	disk(t, m, "vdb", b)
	place(t, files, layout.MetadataFile, document)
	f, err := m.Find(t.Context(), []string{metadata.ProviderMedium})
	if err != nil || string(f.Document) != document || f.Network != nil {
		t.Fatalf("%+v, %v", f, err)
	}
	place(t, files, layout.NetworkFile, "kind: MachineNetwork\n")
	if f, err = m.Find(t.Context(), []string{metadata.ProviderMedium}); err != nil || string(f.Network) != "kind: MachineNetwork\n" {
		t.Fatalf("%+v, %v", f, err)
	}
	place(t, files, layout.NetworkFile, strings.Repeat("#", maxMedium+1))
	if _, err := m.Find(t.Context(), []string{metadata.ProviderMedium}); err == nil || !strings.Contains(err.Error(), "longer") {
		t.Errorf("%v", err)
	}
}

// Tools add keys of their own to meta-data.
func TestNoCloudsHostName(t *testing.T) {
	for text, want := range map[string]string{"": "", "instance-id: i-1\n": "", "dsmode: [a]\nlocal-hostname: a.example # b\n": "a.example", "local-hostname: 12\n": "12"} {
		if got, err := localHostname([]byte(text)); err != nil || got != want {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
	for text, want := range map[string]string{
		"local-hostname: [a]\n": "want text", "local-hostname: &a a\n": "anchors", "a": "want fields", "local-hostname: a\n---\nlocal-hostname: b\n": "one YAML document", "local-hostname: a\nlocal-hostname: b\n": "already set",
	} {
		if got, err := localHostname([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %q, %v, want %q", text, got, err, want)
		}
	}
}

func TestTwoVolumesOfOneLabelAreRefused(t *testing.T) {
	m := machine(t)
	volumeOf(t, m, "vdb", "nocloud-genisoimage.iso.gz")
	volumeOf(t, m, "vdc", "nocloud-xorriso.iso.gz")
	if _, err := complete(t, m, metadata.ProviderNoCloud); err == nil || !strings.Contains(err.Error(), "both") {
		t.Errorf("%v", err)
	}
	if err := os.RemoveAll(m.Sys + "/class/block/vdc"); err != nil {
		t.Fatal(err)
	}
	if _, err := complete(t, m, metadata.ProviderNoCloud); err != nil {
		t.Error(err)
	}
}

// at returns where a file's directory record begins: its ISO name is once in the image, 33 bytes after that.
func at(t *testing.T, b []byte, name string) int {
	t.Helper()
	i := bytes.Index(b, []byte(name))
	if i < 0 {
		t.Fatalf("no record of %s", name)
	}
	return i - 33
}

func TestMalformedISOVolumesAreRefused(t *testing.T) {
	good := image(t, "nocloud-rock-only.iso.gz")
	const primaryAt, rootAt = firstDescriptor * isoSector, firstDescriptor*isoSector + 156
	record := at(t, good, "USER_DAT")
	folder := int(good[rootAt+2]) * isoSector
	if record < folder || record > folder+isoSector {
		t.Fatalf("the record is at %d, and the folder at %d", record, folder)
	}
	for name, tt := range map[string]struct {
		at   int
		put  []byte
		want error
	}{
		"another block size":           {primaryAt + 128, []byte{0, 2}, errISO},
		"a root that is a file":        {rootAt + 25, []byte{0}, errISO},
		"a root that is large":         {rootAt + 10, []byte{0, 0, 0, 1}, errISO},
		"a root of an odd size":        {rootAt + 10, []byte{1, 8}, errISO},
		"a root beyond the end":        {rootAt + 2, []byte{0xff, 0xff, 0xff, 0x7f}, errISO},
		"a file beyond the end":        {record + 2, []byte{0xff, 0xff}, errISO},
		"a file that is a folder":      {record + 25, []byte{2}, errISO},
		"a file in parts":              {record + 25, []byte{0x80}, errISO},
		"an interleaved file":          {record + 26, []byte{1}, errISO},
		"a record that is too short":   {record, []byte{10}, errISO},
		"a record longer than its own": {record + 32, []byte{0xff}, errISO},
		"a file of another name":       {record + 33 + 13 + 5, []byte{0xff}, fs.ErrNotExist},
	} {
		b := bytes.Clone(good)
		if name == "a file of another name" {
			i := bytes.Index(b, []byte("user-data"))
			copy(b[i:], "xser-data")
		} else {
			copy(b[tt.at:], tt.put)
		}
		if _, err := readISO(bytes.NewReader(b), "user-data", MaxDocument); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	for path, limit := range map[string]int64{"user-data": 10, "a/b/c/d/e": 10, "none": MaxDocument, "": MaxDocument, ".": MaxDocument} {
		if b, err := readISO(bytes.NewReader(good), path, limit); err == nil {
			t.Errorf("%s, at most %d bytes: %q", path, limit, b)
		}
	}
	// A folder full of records, the last of which leads out of its sector.
	out := bytes.Clone(good)
	full := make([]byte, 254)
	copy(full, good[record:record+int(good[record])])
	full[0] = byte(len(full))
	full = bytes.Replace(full, []byte("user-data"), []byte("xser-data"), 1)
	for at := 0; at+len(full) <= isoSector; at += len(full) {
		copy(out[folder+at:], full)
	}
	for length, want := range map[byte]error{0: fs.ErrNotExist, 40: errISO} {
		out[folder+isoSector/len(full)*len(full)] = length
		if _, err := readISO(bytes.NewReader(out), "user-data", MaxDocument); !errors.Is(err, want) {
			t.Errorf("a record of %d bytes at the end of a sector: %v, want %v", length, err, want)
		}
	}
	// Only the limit stops a folder that is as large as the volume.
	large := append(bytes.Clone(good), make([]byte, 2*maxISOFolder)...)
	for size, want := range map[uint32]error{maxISOFolder: nil, maxISOFolder + isoSector: errISO} {
		binary.LittleEndian.PutUint32(large[rootAt+10:], size)
		if _, err := readISO(bytes.NewReader(large), "user-data", MaxDocument); !errors.Is(err, want) {
			t.Errorf("a folder of %d bytes: %v, want %v", size, err, want)
		}
	}
	if b, err := readISO(bytes.NewReader(good), "user-data", MaxDocument); err != nil || !strings.Contains(string(b), "MachineMetadata") {
		t.Errorf("%q, %v", b, err)
	}
}

func FuzzISO(f *testing.F) {
	for _, name := range []string{"nocloud-rock-only.iso.gz", "configdrive-genisoimage.iso.gz"} {
		b := image(f, name)
		f.Add(b[firstDescriptor*isoSector:], "user-data")
		f.Add(b[firstDescriptor*isoSector:], "openstack/latest/user_data")
	}
	f.Fuzz(func(t *testing.T, b []byte, path string) {
		const limit = 1 << 10
		if got, err := readISO(bytes.NewReader(append(make([]byte, firstDescriptor*isoSector), b...)), path, limit); err == nil && len(got) > limit {
			t.Errorf("%d bytes", len(got))
		}
	})
}

func FuzzLabel(f *testing.F) {
	f.Add([]byte(strings.Repeat("FAT16   ", 64)))
	f.Fuzz(func(t *testing.T, b []byte) {
		file := filepath.Join(t.TempDir(), "x")
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if label, err := fatLabel(file); err == nil && len(label) > 11 {
			t.Errorf("%q", label)
		}
	})
}

// structure is an SMBIOS structure of type 11 with these strings.
func structure(strs ...string) string {
	return "\x0b\x05\x00\x00" + string(rune(len(strs))) + strings.Join(strs, "\x00") + "\x00\x00"
}

func TestCredentialsAreFoundWhereSystemdLooks(t *testing.T) {
	whole := document + "name: a\naddresses: [192.0.2.7]\n"
	const fwcfg, oem = firmwareConfig, "firmware/dmi/entries/11-0/raw"
	encoded := base64.StdEncoding.EncodeToString([]byte(whole))
	for name, tt := range map[string]struct{ file, content, want string }{
		"QEMU's fw_cfg":          {fwcfg, whole, ""},
		"an OEM string":          {oem, structure("other", "io.systemd.credential:muster.machine="+whole), ""},
		"an OEM string, base64":  {oem, structure("io.systemd.credential.binary:muster.machine="+encoded, "other"), ""},
		"no base64":              {oem, structure("io.systemd.credential.binary:muster.machine=%%%"), "base64"},
		"another credential":     {oem, structure("io.systemd.credential:muster.other=" + whole), ErrAbsent.Error()},
		"another kind of string": {oem, structure("muster.machine=" + whole), ErrAbsent.Error()},
		"no strings":             {oem, "\x0b\xff\x00\x00", ErrAbsent.Error()},
		"an empty structure":     {oem, "", ErrAbsent.Error()},
		"twice":                  {oem, structure("io.systemd.credential.binary:muster.machine="+encoded, "io.systemd.credential:muster.machine="+whole), "twice"},
		"text that is long":      {fwcfg, whole + strings.Repeat("#", MaxDocument), "longer"},
		"no document":            {fwcfg, "hello", "YAML"},
		"a structure too long":   {oem, structure("io.systemd.credential:muster.machine=" + strings.Repeat("#", maxStructure)), "longer"},
	} {
		m := machine(t)
		place(t, m.Sys, tt.file, tt.content)
		got, err := complete(t, m, metadata.ProviderCredential)
		if tt.want == "" && (err != nil || got.Name != "a") || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %+v, %v, want %q", name, got, err, tt.want)
		}
	}
}
