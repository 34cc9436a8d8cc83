// Package image builds the image of the lab's machines: a folder of files that is mounted over the host's /usr, /opt
// and /etc, and a manifest of the files that firmware measures.
//
// The manifest is made from the image's files, before any machine exists, and is the only source of the expected
// measurements. Machines get the folder as a read-only layer. The rest of /usr is the host's and not measured: a real
// image is verified as a whole (dm-verity), which is not possible with namespaces.
package image

import (
	"bytes"
	"embed"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/lab/internal/firmware"
	"github.com/muster-k8s/muster/lab/internal/kube"
)

//go:embed files
var files embed.FS

// Paths in a machine.
const (
	Bootstrapper = "/usr/bin/bootstrapper"
	Init         = "/usr/lib/muster-lab/lab" // PID 1, and systemctl by another name
	Config       = "/etc/muster/image.yaml"
	Units        = "/etc/systemd/system"
	EventLog     = "/run/muster/binary_bios_measurements"
	AuditLog     = "/var/log/kube-apiserver/audit.log"
	auditPolicy  = "/etc/muster/audit-policy.yaml"
	TPMSocket    = "/run/muster/tpm.sock"
)

// Name is the name of the lab's image in the manifest and measurements.json.
const Name = "muster-lab"

// A Spec describes an image.
type Spec struct {
	Lab          string       // this program's executable
	Bootstrapper string       // executable; empty for an image without Muster
	Kube         kube.Build   // containerd and the Kubernetes programs
	Release      kube.Release // of the clusters: its tags are in the configuration
	Preinstalled []string     // of Kube: those in the image's /usr/local/bin besides containerd
	EKRoots      []byte       // PEM: the CAs of TPMs, for image.yaml
	OwnerKeys    string       // base64 Ed25519 public keys for image.yaml, with commas between; may be empty
	Mirror       string       // host:port of the registry mirror
	Validity     string       // certificateValidityPeriod of kubeadm's certificates, as "8m"; empty: a year
	Audit        bool         // API servers log every request, at [AuditLog]
}

// A Manifest lists an image's measured files.
type Manifest struct {
	Version int             `json:"version"` // 1
	Name    string          `json:"name"`
	Files   []firmware.File `json:"files"`
}

// An Image is a built image in Dir: base/ and bootstrapper/ are layers, manifest.json is
// beside them. Images that were made of it are in v2/, v3/ and so on.
type Image struct{ Dir string }

// Layers returns the folders that lie over the host's, topmost first.
func (i Image) Layers(withBootstrapper bool) []string {
	layers := []string{filepath.Join(i.Dir, "base")}
	if withBootstrapper {
		layers = append([]string{filepath.Join(i.Dir, "bootstrapper")}, layers...)
	}
	if n := i.latest(); n > 1 {
		layers = append([]string{filepath.Join(i.version(n), "config")}, layers...)
	}
	return layers
}

// ManifestPath is where the manifest is.
func (i Image) ManifestPath() string { return filepath.Join(i.version(i.latest()), "manifest.json") }

// version returns the folder of the first image, or of a later one that was made of it.
func (i Image) version(n int) string {
	if n == 1 {
		return i.Dir
	}
	return filepath.Join(i.Dir, fmt.Sprintf("v%d", n))
}

// latest returns the number of the newest image.
func (i Image) latest() int {
	for n := 1; ; n++ {
		if _, err := os.Stat(i.version(n + 1)); err != nil {
			return n
		}
	}
}

// Update makes a new image, which differs from this one in the owner's keys and the name. Machines have it from their next boot on.
func (i Image) Update(name string, ownerKeys []string) (Manifest, error) {
	m, err := LoadManifest(i.ManifestPath())
	if err != nil {
		return m, err
	}
	text, err := os.ReadFile(filepath.Join(i.Dir, "base", Config))
	if err != nil {
		return m, fmt.Errorf("update image: %w", err)
	}
	var conf map[string]any
	if err := yaml.Unmarshal(text, &conf); err != nil {
		return m, fmt.Errorf("update image: %w", err)
	}
	conf["ownerKeys"] = ownerKeys
	delete(conf, "insecure")
	if text, err = yaml.Marshal(conf); err != nil {
		return m, fmt.Errorf("update image: %w", err)
	}
	made := filepath.Join(i.Dir, "next")
	b := builder{dir: made, manifest: Manifest{Version: 1, Name: name}}
	for _, f := range m.Files {
		if f.Path != Config {
			b.manifest.Files = append(b.manifest.Files, f)
			continue
		}
		b.put("config", bytes.NewReader(text), Config, 0o644, f.PCR)
	}
	j, err := json.MarshalIndent(b.manifest, "", "  ")
	if err := errors.Join(b.err, err); err != nil {
		return m, fmt.Errorf("update image: %w", err)
	}
	if err := os.WriteFile(filepath.Join(made, "manifest.json"), append(j, '\n'), 0o644); err != nil {
		return m, err
	}
	return b.manifest, os.Rename(made, i.version(i.latest()+1))
}

// LoadManifest reads a manifest.
func LoadManifest(path string) (Manifest, error) {
	var m Manifest
	b, err := os.ReadFile(path)
	if err != nil {
		return m, fmt.Errorf("image manifest: %w; lab up builds the image", err)
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return m, fmt.Errorf("image manifest %s: %w", path, err)
	}
	if m.Version != 1 {
		return m, fmt.Errorf("image manifest %s has version %d, this lab reads 1", path, m.Version)
	}
	return m, nil
}

// Measurements computes, from the manifest alone, the PCRs of a machine that boots this image.
func (m Manifest) Measurements() (firmware.Measurements, error) {
	return firmware.Expected(m.Name, m.Files)
}

// Build makes an image in dir, which must not exist.
func Build(dir string, s Spec) (Image, error) {
	b := builder{dir: dir, manifest: Manifest{Version: 1, Name: Name}}
	img := Image{Dir: dir}
	b.all(s)
	if b.err != nil {
		return img, fmt.Errorf("build image: %w", b.err)
	}
	j, err := json.MarshalIndent(b.manifest, "", "  ")
	if err != nil {
		return img, err
	}
	return img, os.WriteFile(img.ManifestPath(), append(j, '\n'), 0o644)
}

type builder struct {
	dir      string
	manifest Manifest
	err      error // the first one; later steps do nothing
}

func (b *builder) all(s Spec) {
	b.copy("base", s.Lab, Init, firmware.PCRLoaded)
	b.symlink("base", Init, "/usr/bin/systemctl")
	if s.Bootstrapper != "" {
		b.copy("bootstrapper", s.Bootstrapper, Bootstrapper, firmware.PCRBoot)
		// Machines without a bootstrapper, an intruder's or a plain kubeadm node, start their kubelet by kubeadm.
		b.write("bootstrapper", "files/kubelet-condition.conf", Units+"/kubelet.service.d/muster.conf", strings.NewReplacer())
	}
	for _, p := range append([]string{"containerd", "containerd-shim-runc-v2", "ctr"}, s.Preinstalled...) {
		b.link("base", s.Kube, p, "/usr/local/bin/"+p)
	}
	b.copy("base", "/usr/sbin/runc", "/usr/local/sbin/runc", firmware.PCRLoaded)
	for _, p := range []string{"bridge", "host-local", "loopback", "portmap", "ptp"} {
		b.copy("base", "/usr/lib/cni/"+p, "/opt/cni/bin/"+p, firmware.PCRLoaded)
	}
	vars := strings.NewReplacer("@PAUSE@", s.Release.PauseTag, "@ETCD@", s.Release.EtcdTag, "@COREDNS@", s.Release.CoreDNSTag, "@MIRROR@", s.Mirror)
	b.write("base", "files/containerd.toml", "/etc/containerd/config.toml", vars)
	b.write("base", "files/hosts.toml", "/etc/containerd/certs.d/_default/hosts.toml", vars)
	units, err := files.ReadDir("files/units")
	b.fail(err)
	for _, u := range units {
		b.write("base", "files/units/"+u.Name(), Units+"/"+u.Name(), vars)
	}
	if s.Audit {
		b.put("base", strings.NewReader("apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: [{level: Metadata}]\n"), auditPolicy, 0o644, firmware.PCRConfig)
	}
	b.imageYAML(s, vars)
}

// imageYAML writes the image-wide configuration with the settings of this lab.
func (b *builder) imageYAML(s Spec, vars *strings.Replacer) {
	tmpl, err := files.ReadFile("files/image.yaml")
	b.fail(err)
	var conf map[string]any
	b.fail(yaml.Unmarshal([]byte(vars.Replace(string(tmpl))), &conf))
	if b.err != nil {
		return
	}
	if block, _ := pem.Decode(s.EKRoots); block == nil {
		b.fail(errors.New("the lab's EK roots are not PEM"))
		return
	}
	conf["ekRoots"] = string(s.EKRoots)
	if s.OwnerKeys != "" {
		conf["ownerKeys"] = strings.Split(s.OwnerKeys, ",")
	} else {
		conf["insecure"] = map[string]any{"noOwnerKey": true}
	}
	if s.Validity != "" {
		b.fail(unstructured.SetNestedField(conf, s.Validity, "kubeadm", "clusterConfiguration", "certificateValidityPeriod"))
	}
	if s.Audit {
		b.fail(unstructured.SetNestedField(conf, map[string]any{
			"extraArgs": []any{
				map[string]any{"name": "audit-policy-file", "value": auditPolicy},
				map[string]any{"name": "audit-log-path", "value": AuditLog},
			},
			"extraVolumes": []any{
				map[string]any{"name": "audit-policy", "hostPath": auditPolicy, "mountPath": auditPolicy, "readOnly": true, "pathType": "File"},
				map[string]any{"name": "audit-log", "hostPath": filepath.Dir(AuditLog), "mountPath": filepath.Dir(AuditLog), "pathType": "DirectoryOrCreate"},
			},
		}, "kubeadm", "clusterConfiguration", "apiServer"))
	}
	out, err := yaml.Marshal(conf)
	b.fail(err)
	b.put("base", bytes.NewReader(out), Config, 0o644, firmware.PCRConfig)
}

func (b *builder) write(layer, embedded, to string, vars *strings.Replacer) {
	c, err := files.ReadFile(embedded)
	b.fail(err)
	b.put(layer, strings.NewReader(vars.Replace(string(c))), to, 0o644, firmware.PCRConfig)
}

// link takes a program from the cache of Kubernetes binaries, where a file never changes
// and its hash is known, as a hard link; where that doesn't work, as a copy.
func (b *builder) link(layer string, build kube.Build, program, to string) {
	if b.err != nil {
		return
	}
	at := filepath.Join(b.dir, layer, to)
	b.fail(os.MkdirAll(filepath.Dir(at), 0o755))
	if os.Link(build.Path(program), at) != nil {
		b.copy(layer, build.Path(program), to, firmware.PCRLoaded)
		return
	}
	fi, err := os.Stat(at)
	if err != nil {
		b.fail(err)
		return
	}
	b.manifest.Files = append(b.manifest.Files, firmware.File{Path: to, PCR: firmware.PCRLoaded, SHA256: build.Sums[program], Size: fi.Size()})
}

// copy copies a program. Never a hard link: a build may overwrite the original while machines run from this image.
func (b *builder) copy(layer, from, to string, pcr int) {
	f, err := os.Open(from)
	if err != nil {
		b.fail(err)
		return
	}
	defer f.Close()
	b.put(layer, f, to, 0o755, pcr)
}

func (b *builder) put(layer string, r io.Reader, to string, mode fs.FileMode, pcr int) {
	if b.err != nil {
		return
	}
	at := filepath.Join(b.dir, layer, to)
	b.fail(os.MkdirAll(filepath.Dir(at), 0o755))
	f, err := os.OpenFile(at, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		b.fail(err)
		return
	}
	n, err := io.Copy(f, r)
	b.fail(errors.Join(err, f.Close()))
	sum, err := kube.Sum(at)
	b.fail(err)
	b.manifest.Files = append(b.manifest.Files, firmware.File{Path: to, PCR: pcr, SHA256: sum, Size: n})
}

func (b *builder) symlink(layer, target, at string) {
	if b.err != nil {
		return
	}
	at = filepath.Join(b.dir, layer, at)
	b.fail(os.MkdirAll(filepath.Dir(at), 0o755))
	b.fail(os.Symlink(target, at))
}

func (b *builder) fail(err error) {
	if b.err == nil {
		b.err = err
	}
}

// Tamper makes a layer in dir whose bootstrapper differs from the image's in one byte and
// still runs: the last byte of ELF's e_ident, which is padding that no loader looks at.
func (i Image) Tamper(dir string) error {
	program, err := os.ReadFile(filepath.Join(i.Dir, "bootstrapper", Bootstrapper))
	if err != nil {
		return fmt.Errorf("tamper with the bootstrapper: %w", err)
	}
	const last = 15 // EI_NIDENT - 1
	if len(program) <= last || !bytes.HasPrefix(program, []byte("\x7fELF")) {
		return errors.New("tamper with the bootstrapper: it is not an ELF program")
	}
	program[last] ^= 1
	at := filepath.Join(dir, Bootstrapper)
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		return err
	}
	return os.WriteFile(at, program, 0o755)
}
