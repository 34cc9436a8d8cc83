package unlock_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/unlock"
	"github.com/muster-k8s/muster/trust/keys"
)

// B8: the running system compares the disk with the joinservice's list, which is in memory before the disk is open.
func TestTheListComesWithTheKey(t *testing.T) {
	w := newFixture(t)
	j := w.cluster(w.like(), w.owner)
	j.script(func(req *joinv1.IssueRejoinTicketRequest) (*joinv1.IssueRejoinTicketResponse, error) {
		resp, err := gives(right)(req)
		resp.Components = []*initv1.Component{{Url: "http://mirror/kubelet", Sha256: make([]byte, 32), Path: "/usr/local/bin/kubelet", Mode: 0o755}}
		resp.Adopted = true
		resp.Other = &joinv1.Release{Components: []*initv1.Component{{Url: "http://mirror/kubelet2", Sha256: make([]byte, 32), Path: "/usr/local/bin/kubelet", Mode: 0o755}}, Images: resp.GetImages()}
		return resp, err
	})
	if err := w.boot().end(t); err != nil {
		t.Fatal(err)
	}
	d, err := w.desired.Load()
	if err != nil || d == nil || len(d.List.Components) != 1 || d.List.Components[0].Path != "/usr/local/bin/kubelet" || !d.Adopted || d.Endpoint != "192.168.77.1:6443" || string(d.Authorities[component.CA]) != authority {
		t.Errorf("%+v, %v", d, err)
	}
	if d.Other == nil || len(d.Other.Components) != 1 || d.Other.Components[0].URL != "http://mirror/kubelet2" || len(d.Other.Images) != len(d.List.Images) {
		t.Errorf("the other release: %+v", d.Other)
	}
}

// A list that does not name all that the machine is to run is refused (B8, B9).
func TestAKeyWithoutAListOpensNothing(t *testing.T) {
	for name, change := range map[string]func(*joinv1.IssueRejoinTicketResponse){
		"no images":             func(r *joinv1.IssueRejoinTicketResponse) { r.Images = nil },
		"an image less":         func(r *joinv1.IssueRejoinTicketResponse) { r.Images = r.GetImages()[1:] },
		"no endpoint":           func(r *joinv1.IssueRejoinTicketResponse) { r.ControlPlaneEndpoint = "" },
		"an endpoint of a path": func(r *joinv1.IssueRejoinTicketResponse) { r.ControlPlaneEndpoint = "x/y:1" },
		"no authority":          func(r *joinv1.IssueRejoinTicketResponse) { r.Authorities = nil },
		"an authority twice": func(r *joinv1.IssueRejoinTicketResponse) {
			r.Authorities = append(r.Authorities, r.GetAuthorities()...)
		},
		"an authority that is none": func(r *joinv1.IssueRejoinTicketResponse) { r.Authorities[0].Content = []byte("x") },
		"a large authority": func(r *joinv1.IssueRejoinTicketResponse) {
			r.Authorities[0].Content = append(r.GetAuthorities()[0].GetContent(), make([]byte, 64<<10)...)
		},
		"a file of a control plane":      func(r *joinv1.IssueRejoinTicketResponse) { r.Authorities[0].Path = "sa.pub" },
		"a file elsewhere":               func(r *joinv1.IssueRejoinTicketResponse) { r.Authorities[0].Path = "../x" },
		"another release without images": func(r *joinv1.IssueRejoinTicketResponse) { r.Other = &joinv1.Release{} },
		"another release with an image less": func(r *joinv1.IssueRejoinTicketResponse) {
			r.Other = &joinv1.Release{Images: r.GetImages()[1:]}
		},
		"another release with a component elsewhere": func(r *joinv1.IssueRejoinTicketResponse) {
			r.Other = &joinv1.Release{Images: r.GetImages(), Components: []*initv1.Component{{Url: "http://m/x", Sha256: make([]byte, 32), Path: "/etc/x", Mode: 0o755}}}
		},
		"a rotation for a worker": func(r *joinv1.IssueRejoinTicketResponse) {
			r.Rotation = &joinv1.KeyRotation{Key: "service-account-key"}
		},
		"a component elsewhere": func(r *joinv1.IssueRejoinTicketResponse) {
			r.Components = []*initv1.Component{{Url: "http://m/x", Sha256: make([]byte, 32), Path: "/etc/x", Mode: 0o755}}
		},
	} {
		w := newFixture(t)
		j := w.cluster(w.like(), w.owner)
		j.script(func(req *joinv1.IssueRejoinTicketRequest) (*joinv1.IssueRejoinTicketResponse, error) {
			resp, err := gives(right)(req)
			change(resp)
			return resp, err
		})
		r := w.boot()
		eventually(t, name+" was answered", func() bool { return j.asked() > 1 })
		if w.disk.opens != 0 {
			t.Errorf("%s: opened", name)
		}
		j.script(gives(right))
		if err := r.end(t); err != nil || w.disk.opens != 1 {
			t.Errorf("%s, repaired: %v", name, err)
		}
	}
}

// What a control plane may have of a rotation comes with its key too.
func TestARotationThatIsNoneOpensNothing(t *testing.T) {
	id := strings.Repeat("ab", 32)
	for name, wrong := range map[string]*joinv1.KeyRotation{
		"an unknown key":  {Key: "another-ca", Id: id},
		"no key":          {Id: id},
		"an ID of a path": {Key: "service-account-key", Id: "../sa.key"},
		"a large key":     {Key: "service-account-key", Id: id, Keep: make([]byte, 64<<10+1)},
	} {
		w := newFixture(t)
		w.meta.Role = "control-plane"
		j := w.cluster(w.like(), w.owner)
		send := func(rotation *joinv1.KeyRotation) {
			j.script(func(req *joinv1.IssueRejoinTicketRequest) (*joinv1.IssueRejoinTicketResponse, error) {
				resp, err := gives(right)(req)
				resp.Rotation = rotation
				return resp, err
			})
		}
		send(wrong)
		r := w.boot()
		eventually(t, name+" was answered", func() bool { return j.asked() > 1 })
		if w.disk.opens != 0 {
			t.Errorf("%s: opened", name)
		}
		send(&joinv1.KeyRotation{Key: "service-account-key", Id: id, Keep: []byte("public")})
		if err := r.end(t); err != nil || w.disk.opens != 1 {
			t.Errorf("%s, repaired: %v", name, err)
		}
		d, err := w.desired.Load()
		if err != nil || d.Rotation == nil || d.Rotation.Key != clusterinfo.ServiceAccountKey || d.Rotation.ID != id || string(d.Rotation.Keep) != "public" {
			t.Errorf("%s: it notes %+v, %v", name, d, err)
		}
	}
}

// The list is saved before the disk is open, and the list of a joinservice that gave no key is not used (B8).
func TestTheListOfWhoOpenedTheDiskIsKept(t *testing.T) {
	w := newFixture(t)
	w.cluster(w.like(), w.owner)
	noFolder := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(noFolder, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := w.config()
	cfg.Desired = component.DesiredFile(filepath.Join(noFolder, "desired"))
	w.bootWith(cfg)
	eventually(t, "it can't be kept", func() bool {
		return bytes.Contains(w.log.Bytes(), []byte("save the lists for the comparison of the disk"))
	})
	w.disk.set(func(v *volume) {
		if v.tried > 0 {
			t.Error("a key was tried whose list could not be kept")
		}
	})

	w = newFixture(t)
	w.meta.Role = "control-plane"
	w.cluster(w.like(), w.owner).script(gives(wrong))
	w.recovery = func(ctx context.Context, _ keys.DiskID, try unlock.Try) error {
		eventually(t, "a wrong key was tried", func() bool { d, err := w.desired.Load(); return err == nil && d != nil })
		return try(ctx, parsed(t, right), clusterID, component.Desired{Recovered: true, Endpoint: "192.168.77.1:6443"})
	}
	if err := w.boot().end(t); err != nil {
		t.Fatal(err)
	}
	if d, err := w.desired.Load(); err != nil || d == nil || !d.Recovered || len(d.Authorities) > 0 {
		t.Errorf("the owner opened it, and kept is %+v, %v", d, err)
	}
}
