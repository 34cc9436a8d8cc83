package main

import (
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/internal/versions"
)

// second returns another release.
func second() *clusterinfo.Release {
	r := &clusterinfo.Release{KubernetesVersion: "1.36.2", Components: []versions.Component{{URL: "http://mirror.example/kubelet2", SHA256: strings.Repeat("1", 64), Path: "/usr/local/bin/kubelet", Mode: 0o755}}}
	for _, name := range versions.ImageNames() {
		r.Images = append(r.Images, "registry.example/"+name+":v2@sha256:"+strings.Repeat("2", 64))
	}
	return r
}

// A control plane of the old release can't join while the others are upgraded. Workers can, and so can control planes before and after.
func TestNoControlPlaneJoinsWhileOthersAreUpgraded(t *testing.T) {
	s := setUp(t)
	two := s.controlPlane(t, "cp2", disk1, "192.168.77.12")
	s.Upgrading(t, func(i *clusterinfo.Info) { i.Next = second() })
	s.known(t, two)
	membertest.Eventually(t, func() error { // joinservice has seen it; no other machine has the lease
		_, err := two.ask(t)
		return membertest.Want(rpc.ReasonFrom(err) == attestv1.Reason_REASON_CONTROL_PLANE_BUSY, "%v", err)
	})
	s.mustWait(t, two, attestv1.Reason_REASON_CONTROL_PLANE_BUSY)
	if resp := s.ticketFor(t, s.machine(t), worker(t, named("w4", "5f0c95b6-2a3d-4c7e-9f10-000000000004", "192.168.77.14"))); resp.GetKubernetesVersion() != "1.36.1" || resp.GetComponents()[0].GetUrl() != "http://mirror.example/kubelet" {
		t.Errorf("a worker joins with %s, %v", resp.GetKubernetesVersion(), resp.GetComponents())
	}
	s.Upgrading(t, func(i *clusterinfo.Info) { i.Previous = second() })
	membertest.Eventually(t, func() error { _, err := two.ask(t); return err })
}

// B8: in the middle of an upgrade, a machine that has rebooted may be at either release.
func TestARebootedMachineIsToldBothReleases(t *testing.T) {
	s := setUp(t)
	m := s.machine(t)
	s.ticketFor(t, m, worker(t, encrypted))
	m.LockTo(s.ID)
	m.Reboot()
	for name, change := range map[string]func(*clusterinfo.Info){
		"before the control planes are": func(i *clusterinfo.Info) { i.Next = second() },
		"before the workers are":        func(i *clusterinfo.Info) { i.Previous = second() },
		"no upgrade":                    func(*clusterinfo.Info) {},
	} {
		want := name != "no upgrade"
		s.Upgrading(t, change)
		var resp *joinv1.IssueRejoinTicketResponse
		membertest.Eventually(t, func() (err error) {
			if resp, err = s.rejoined(t, m, again()); err != nil {
				return err
			}
			return membertest.Want((resp.GetOther() != nil) == want, "%s: other %v", name, resp.GetOther())
		})
		if want && (len(resp.GetOther().GetComponents()) != 1 || resp.GetOther().GetComponents()[0].GetUrl() != "http://mirror.example/kubelet2" || len(resp.GetOther().GetImages()) != len(versions.ImageNames())) {
			t.Errorf("%s: %v", name, resp.GetOther())
		}
		if resp.GetComponents()[0].GetUrl() != "http://mirror.example/kubelet" {
			t.Errorf("%s: %v", name, resp.GetComponents())
		}
	}
}
