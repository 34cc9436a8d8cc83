package clusterinfo_test

import (
	"reflect"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/versions"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func good() *clusterinfo.Info {
	return &clusterinfo.Info{
		ClusterID: [32]byte{1}, MeasurementSalt: [32]byte{2}, KubernetesVersion: "1.36.1", ControlPlaneEndpoint: "[2001:db8::1]:6443",
		APIServerSANs: []string{"api.example.com"},
		Components:    []versions.Component{{URL: "http://mirror/kubelet", SHA256: strings.Repeat("0", 64), Path: "/usr/local/bin/kubelet", Mode: 0o755}}, Images: images(),
	}
}

func images() (refs []string) {
	for _, name := range versions.ImageNames() {
		refs = append(refs, "registry.example/"+name+":v1@sha256:"+strings.Repeat("1", 64))
	}
	return refs
}

func TestWhatIsWrittenIsReadBack(t *testing.T) {
	b, err := good().Marshal()
	if err != nil {
		t.Fatal(err)
	}
	got, err := clusterinfo.Parse(b)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, good()) {
		t.Errorf("%+v, want %+v", got, good())
	}
}

func TestIncompleteInformationIsRefused(t *testing.T) {
	b, err := good().Marshal()
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string][2]string{
		"a short cluster ID":    {`"clusterID":"01`, `"clusterID":"`},
		"no measurement salt":   {`"measurementSalt"`, `"clusterID"`},
		"no endpoint":           {"[2001:db8::1]:6443", ""},
		"an endpoint sans port": {"[2001:db8::1]:6443", "example.com"},
		"port 0":                {":6443", ":0"},
		"another version":       {"1.36.1", "1.2.3"},
		"an empty SAN":          {"api.example.com", ""},
		"an unknown field":      {`"components"`, `"secrets":[],"components"`},
		"an image by tag":       {"/pause:v1@sha256:" + strings.Repeat("1", 64), "/pause:v1"},
		"an image too few":      {`,"registry.example/pause:v1@sha256:` + strings.Repeat("1", 64) + `"`, ""},
		"no JSON":               {"{", "["},
	} {
		t.Run(name, func(t *testing.T) {
			text := strings.Replace(string(b), change[0], change[1], 1)
			if text == string(b) {
				t.Fatal("nothing was changed")
			}
			if i, err := clusterinfo.Parse([]byte(text)); err == nil {
				t.Errorf("accepted %+v", i)
			}
		})
	}
}

func release() *clusterinfo.Release {
	g := good()
	return &clusterinfo.Release{KubernetesVersion: "1.36.2", Components: g.Components, Images: g.Images}
}

func TestAnUpgradeIsReadBack(t *testing.T) {
	for name, change := range map[string]func(*clusterinfo.Info){
		"control planes": func(i *clusterinfo.Info) { i.Next = release() },
		"workers":        func(i *clusterinfo.Info) { i.Previous = release() },
		"none":           func(*clusterinfo.Info) {},
	} {
		want := good()
		change(want)
		b, err := want.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		got, err := clusterinfo.Parse(b)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		if (got.Other() != nil) != (name != "none") || got.Other() != nil && got.Other().KubernetesVersion != "1.36.2" || got.Current().KubernetesVersion != "1.36.1" {
			t.Errorf("%s: other %+v", name, got.Other())
		}
	}
}

func TestAnIncompleteUpgradeIsRefused(t *testing.T) {
	for name, change := range map[string]func(*clusterinfo.Info){
		"both":                func(i *clusterinfo.Info) { i.Next, i.Previous = release(), release() },
		"no version":          func(i *clusterinfo.Info) { i.Next = release(); i.Next.KubernetesVersion = "" },
		"a minor version":     func(i *clusterinfo.Info) { i.Next = release(); i.Next.KubernetesVersion = "1.36" },
		"an unknown version":  func(i *clusterinfo.Info) { i.Previous = release(); i.Previous.KubernetesVersion = "1.2.3" },
		"no components":       func(i *clusterinfo.Info) { i.Next = release(); i.Next.Components = nil },
		"no images":           func(i *clusterinfo.Info) { i.Previous = release(); i.Previous.Images = nil },
		"an image less":       func(i *clusterinfo.Info) { i.Next = release(); i.Next.Images = i.Next.Images[1:] },
		"an image by its tag": func(i *clusterinfo.Info) { i.Next = release(); i.Next.Images[0] = "registry.example/etcd:v1" },
	} {
		i := good()
		change(i)
		b, err := i.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		if got, err := clusterinfo.Parse(b); err == nil {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, change := range []func(*clusterinfo.Info){func(*clusterinfo.Info) {}, func(i *clusterinfo.Info) { i.Next = release() }, func(i *clusterinfo.Info) { i.Previous = release() }} {
		i := good()
		change(i)
		b, err := i.Marshal()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		i, err := clusterinfo.Parse(b)
		if err != nil {
			return
		}
		again, err := i.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		if back, err := clusterinfo.Parse(again); err != nil || back.ClusterID != i.ClusterID {
			t.Errorf("%q is not read back: %v", again, err)
		}
	})
}
