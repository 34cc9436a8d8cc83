package image

import (
	"bytes"
	"encoding/pem"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/lab/internal/firmware"
	"github.com/muster-k8s/muster/lab/internal/kube"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var roots = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("root")})

// spec is an image of small files; /bin/true stands where programs are wanted that run.
func spec(t *testing.T) Spec {
	t.Helper()
	b := kube.Build{Release: kube.Current, Dir: t.TempDir(), Sums: map[string]string{}}
	for _, p := range kube.Current.Programs {
		if err := os.WriteFile(b.Path(p), []byte(p), 0o755); err != nil {
			t.Fatal(err)
		}
		sum, err := kube.Sum(b.Path(p))
		if err != nil {
			t.Fatal(err)
		}
		b.Sums[p] = sum
	}
	return Spec{Lab: "/bin/true", Bootstrapper: "/bin/true", Kube: b, Release: kube.Current, Preinstalled: []string{"kubelet"}, EKRoots: roots, Mirror: "192.168.77.1:5000"}
}

func build(t *testing.T, s Spec) (Image, Manifest) {
	t.Helper()
	img, err := Build(filepath.Join(t.TempDir(), "image"), s)
	if err != nil {
		t.Fatal(err)
	}
	m, err := LoadManifest(img.ManifestPath())
	if err != nil {
		t.Fatal(err)
	}
	return img, m
}

func TestTheManifestSaysWhatFirmwareWillFind(t *testing.T) {
	img, m := build(t, spec(t))
	pcrs := map[int]int{}
	for _, layer := range img.Layers(true) {
		found, err := firmware.Hash(layer, m.Files)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range found {
			pcrs[f.PCR]++
			if !slices.Contains(m.Files, f) {
				t.Errorf("%s is not as the manifest says", f.Path)
			}
		}
	}
	if pcrs[firmware.PCRBoot] != 1 || pcrs[firmware.PCRLoaded] < 8 || pcrs[firmware.PCRConfig] < 6 {
		t.Errorf("files per PCR: %v", pcrs)
	}
	condition, err := os.ReadFile(filepath.Join(img.Layers(true)[0], Units, "kubelet.service.d/muster.conf"))
	if err != nil || !strings.Contains(string(condition), "[Unit]\nConditionPathExists=/run/muster/kubelet-may-start\n") {
		t.Errorf("with a bootstrapper, the kubelet starts by itself: %q, %v", condition, err)
	}
	// Nothing in the image escapes measuring, but the link that gives PID 1 its other name.
	measured := map[string]bool{"/usr/bin/systemctl": true}
	for _, f := range m.Files {
		measured[f.Path] = true
	}
	for _, layer := range img.Layers(true) {
		err := filepath.WalkDir(layer, func(p string, d os.DirEntry, err error) error {
			if rel := strings.TrimPrefix(p, layer); err == nil && !d.IsDir() && !measured[rel] {
				t.Errorf("%s is in the image and not in its manifest", rel)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestTheOwnersKeyAndTheRootsAreMeasuredConfiguration(t *testing.T) {
	s := spec(t)
	_, plain := build(t, s)
	s.OwnerKeys = "b3duZXI=,bmV4dA=="
	img, keyed := build(t, s)
	a, err := plain.Measurements()
	if err != nil {
		t.Fatal(err)
	}
	b, err := keyed.Measurements()
	if err != nil {
		t.Fatal(err)
	}
	for pcr := range a.PCRs {
		if moved := a.PCRs[pcr] != b.PCRs[pcr]; moved != (pcr == "11") {
			t.Errorf("the owner's key moved PCR %s: %t", pcr, moved)
		}
	}
	raw, err := os.ReadFile(filepath.Join(img.Dir, "base", Config))
	if err != nil {
		t.Fatal(err)
	}
	var conf struct {
		Kind, EKRoots string
		OwnerKeys     []string
		StateDisk     struct{ Mode string }
		Kubeadm       struct {
			ClusterConfiguration struct{ DNS struct{ ImageTag string } }
		}
	}
	if err := yaml.Unmarshal(raw, &conf); err != nil {
		t.Fatal(err)
	}
	if conf.Kind != "ImageConfiguration" || strings.Join(conf.OwnerKeys, ",") != s.OwnerKeys || conf.EKRoots != string(roots) || conf.StateDisk.Mode != "plain" ||
		conf.Kubeadm.ClusterConfiguration.DNS.ImageTag != kube.CoreDNSTag {
		t.Errorf("%s", raw)
	}
	if bytes.ContainsRune(raw, '@') {
		t.Errorf("a variable of the template is left: %s", raw)
	}
}

func TestAnUpdateDiffersInNameAndOwnersKeys(t *testing.T) {
	s := spec(t)
	s.OwnerKeys = "b3duZXI="
	img, first := build(t, s)
	manifest, err := img.Update("v2", []string{"b3duZXI=", "bmV4dA=="})
	if err != nil {
		t.Fatal(err)
	}
	s.OwnerKeys = "b3duZXI=,bmV4dA=="
	_, built := build(t, s)
	a, errA := manifest.Measurements()
	b, errB := built.Measurements()
	if errA != nil || errB != nil {
		t.Fatal(errA, errB)
	}
	if a.Image != "v2" || !maps.Equal(a.PCRs, b.PCRs) {
		t.Errorf("%v, and an image that was built with these keys %v", a, b)
	}
	if m, err := LoadManifest(img.ManifestPath()); err != nil || m.Name != "v2" {
		t.Errorf("machines boot %q, %v", m.Name, err)
	}
	layers := img.Layers(true)
	if _, err := os.Stat(filepath.Join(layers[0], Config)); err != nil || len(layers) != 3 {
		t.Errorf("%q: %v", layers, err)
	}
	if _, err := img.Update("v3", []string{"b3duZXI="}); err != nil {
		t.Fatal(err)
	}
	last, err := LoadManifest(img.ManifestPath())
	if err != nil {
		t.Fatal(err)
	}
	a, errA = first.Measurements()
	b, errB = last.Measurements()
	if errA != nil || errB != nil || !maps.Equal(a.PCRs, b.PCRs) || len(img.Layers(true)) != 3 {
		t.Errorf("with the keys of the first image: %v, %v, %v, want %v", errA, errB, b, a)
	}
}

func TestATamperedBootstrapperDiffersInOneByteAndRuns(t *testing.T) {
	img, m := build(t, spec(t))
	dir := t.TempDir()
	if err := img.Tamper(dir); err != nil {
		t.Fatal(err)
	}
	a, err := os.ReadFile("/bin/true")
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, Bootstrapper))
	if err != nil {
		t.Fatal(err)
	}
	differ := 0
	for i := range a {
		if a[i] != b[i] {
			differ++
		}
	}
	if len(a) != len(b) || differ != 1 {
		t.Errorf("%d bytes differ", differ)
	}
	if err := exec.CommandContext(t.Context(), filepath.Join(dir, Bootstrapper)).Run(); err != nil {
		t.Errorf("it doesn't run: %v", err)
	}
	found, err := firmware.Hash(dir, m.Files)
	if err != nil {
		t.Fatal(err)
	}
	if len(found) != 1 || slices.Contains(m.Files, found[0]) {
		t.Errorf("firmware takes it for the image's: %+v", found)
	}
}

func TestAnImageIsNotBuiltOutOfHalfItsParts(t *testing.T) {
	for name, change := range map[string]func(*Spec){
		"no program of the lab": func(s *Spec) { s.Lab = "/nonexistent" },
		"no bootstrapper there": func(s *Spec) { s.Bootstrapper = "/nonexistent" },
		"no EK roots":           func(s *Spec) { s.EKRoots = nil },
		"an unknown program":    func(s *Spec) { s.Preinstalled = []string{"docker"} },
	} {
		s := spec(t)
		change(&s)
		if _, err := Build(filepath.Join(t.TempDir(), "image"), s); err == nil {
			t.Errorf("%s: built", name)
		}
	}
}
