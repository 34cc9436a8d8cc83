package main

import (
	"bytes"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/appraisal"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
)

func TestTheStatusOfAMachineInItsInitramfsSaysWhatItWaitsFor(t *testing.T) {
	now := time.Now()
	next := now.Add(8 * time.Second)
	for phase, want := range map[string]string{
		"unlocking":  "Phase        unlocking (its state disk waits for the key)\n",
		"formatting": "Phase        formatting (its state disk, which happens once)\n",
		"waiting":    "Phase        waiting\n",
	} {
		var out bytes.Buffer
		(&app{stdout: &out}).showMachine(&appraisal.MachineStatus{Proven: true, Phase: phase, Reason: "NOT_ENROLLED", FailedAttempts: 3, NextAttempt: &next, NodeName: "w1", Role: "worker", Disk: "3f1c9d2a-5b7e-4c1d-8a6f-0123456789ab"}, now)
		for _, line := range []string{want, "NOT_ENROLLED", "failed attempts: 3", "Next attempt in 8s", "State disk   3f1c9d2a-5b7e-4c1d-8a6f-0123456789ab\n"} {
			if !strings.Contains(out.String(), line) {
				t.Errorf("%s: no %q in\n%s", phase, line, &out)
			}
		}
	}
}

// A drain that was interrupted leaves its node without new pods, and nothing else reminds of it.
func TestStatusNamesCordonedNodes(t *testing.T) {
	for want, n := range map[string]clusterapi.NodeStatus{
		"yes":                {Joined: true, Ready: true},
		"yes, cordoned":      {Joined: true, Ready: true, Unschedulable: true},
		"no, cordoned":       {Joined: true, Unschedulable: true},
		"no (old), cordoned": {Joined: true, Stale: true, Unschedulable: true},
		"not joined":         {},
	} {
		var out bytes.Buffer
		n.Name = "node8"
		if err := (&app{stdout: &out}).showStatus(&clusterapi.Status{Nodes: []clusterapi.NodeStatus{n}}, true, time.Now()); err != nil {
			t.Fatal(err)
		}
		if !regexp.MustCompile("node8 +" + regexp.QuoteMeta(want) + " +- ").MatchString(out.String()) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
}

func TestOneThingNeedsAttention(t *testing.T) {
	if one, two := needAttention(1), needAttention(2); one != "1 thing needs attention" || two != "2 things need attention" {
		t.Errorf("%q, %q", one, two)
	}
}
