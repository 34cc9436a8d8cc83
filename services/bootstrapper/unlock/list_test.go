package unlock_test

import (
	"testing"

	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
)

// B8: the running system compares the disk with what the joinservice said, which is in memory before the disk is open.
func TestTheListComesWithTheKey(t *testing.T) {
	w := newWorld(t)
	j := w.cluster(w.like(), w.owner)
	j.script(func(req *joinv1.IssueRejoinTicketRequest) (*joinv1.IssueRejoinTicketResponse, error) {
		resp, err := gives(right)(req)
		resp.Components = []*initv1.Component{{Url: "http://mirror/kubelet", Sha256: make([]byte, 32), Path: "/usr/local/bin/kubelet", Mode: 0o755}}
		resp.Adopted = true
		return resp, err
	})
	if err := w.boot().end(t); err != nil {
		t.Fatal(err)
	}
	list, err := w.list.Load()
	if err != nil || list == nil || len(list.Components) != 1 || list.Components[0].Path != "/usr/local/bin/kubelet" || !list.Adopted {
		t.Errorf("%+v, %v", list, err)
	}
}

// A machine does not come up on a list that leaves open what it is to run (B8, B9).
func TestAKeyWithoutAListOpensNothing(t *testing.T) {
	for name, change := range map[string]func(*joinv1.IssueRejoinTicketResponse){
		"no images":     func(r *joinv1.IssueRejoinTicketResponse) { r.Images = nil },
		"an image less": func(r *joinv1.IssueRejoinTicketResponse) { r.Images = r.GetImages()[1:] },
		"a component elsewhere": func(r *joinv1.IssueRejoinTicketResponse) {
			r.Components = []*initv1.Component{{Url: "http://m/x", Sha256: make([]byte, 32), Path: "/etc/x", Mode: 0o755}}
		},
	} {
		w := newWorld(t)
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
