package clusterapi

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/waiting"
)

var now = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func before(d time.Duration) *time.Time { return new(now.Add(-d)) }

// sound is a cluster without problems.
func sound() *Status {
	return &Status{
		Services: map[string]string{"muster-joinservice": "", "muster-kms": ""}, Chart: &ChartStatus{Revision: 1, Status: "deployed"},
		Policy: &PolicyStatus{Accepted: true, Serial: 3, Generation: 5, Newest: 5, Insecure: []string{"allowPlainState"}},
		Nodes: []NodeStatus{
			{Name: "node1", Joined: true, Ready: true, Enrolled: true, Accepted: new(true), Reason: "ACCEPTED", AppraisedAt: before(time.Minute), Serial: 3, ClientExpires: before(-20 * time.Hour), ServingExpires: before(-20 * time.Hour),
				ControlPlane: reported(`[{"name":"apiserver","notBefore":"2026-06-01T00:00:00Z","notAfter":"2027-06-01T00:00:00Z"}]`)},
			{Name: "cp2", Enrolled: true}, // enrolled in advance
		},
		Certificates: []Certificate{{Name: "cluster CA", Expires: now.AddDate(9, 0, 0)}, {Name: "admin.conf", Expires: now.AddDate(1, 0, 0)}},
		Requests:     []Request{{Name: "csr-1", Since: now.Add(-time.Minute)}},
	}
}

func rotationSince(phase clusterinfo.RotationPhase, age time.Duration) *clusterinfo.Rotation {
	return &clusterinfo.Rotation{Key: clusterinfo.ServiceAccountKey, Phase: phase, Since: now.Add(-age)}
}

func TestARotationThatIsInTimeNeedsNoAttention(t *testing.T) {
	for phase, age := range map[clusterinfo.RotationPhase]time.Duration{clusterinfo.RotationAccept: time.Hour, clusterinfo.RotationSettled: 2 * 24 * time.Hour} {
		s := sound()
		s.Rotation = rotationSince(phase, age)
		if got := s.attention(now); len(got) != 0 {
			t.Errorf("%s since %s: %+v", phase, age, got)
		}
	}
}

// Nodes without an AttestedNode are no finding during and after an uninstall: Muster's kinds are gone.
func TestAClusterWithoutMusterNeedsOneLineOfAttention(t *testing.T) {
	plain := func() *Status {
		s := sound()
		s.Chart, s.Services, s.undefined = nil, map[string]string{"muster-joinservice": "not installed", "muster-kms": "not installed"}, true
		s.Nodes = []NodeStatus{{Name: "node1", Joined: true, Ready: true}, {Name: "node2", Joined: true, Ready: true}}
		return s
	}
	s := plain()
	s.Policy, s.Removed = nil, true
	if got := s.attention(now); len(got) != 1 || !strings.Contains(got[0].Remedy, "muster uninstall") {
		t.Errorf("after it: %+v", got)
	}
	if got := plain().attention(now); len(got) != 1 || got[0].About != "chart" || !strings.Contains(got[0].Remedy, "muster uninstall") {
		t.Errorf("in the middle: %+v", got)
	}
}

func TestAnUpgradeThatIsInTimeNeedsNoAttention(t *testing.T) {
	for stage, age := range map[string]time.Duration{StageControlPlanes: time.Hour, StageWorkers: 20 * time.Hour} {
		s := sound()
		s.Upgrade = &KubernetesUpgrade{Stage: stage, Since: now.Add(-age)}
		if got := s.attention(now); len(got) != 0 {
			t.Errorf("%s since %s: %+v", stage, age, got)
		}
	}
}

func TestARotationOfTheOwnersKeyThatStoppedNeedsAttention(t *testing.T) {
	const next = "muster rotate owner-key --finish"
	for name, tt := range map[string]struct {
		next string
		age  time.Duration
		want int
	}{"over": {"", 1e6 * time.Hour, 0}, "in time": {next, 24 * time.Hour, 0}, "since eight days": {next, 8 * 24 * time.Hour, 1}} {
		s := sound()
		s.OwnerKeyRotates(tt.next, now.Add(-tt.age), now)
		if s.OwnerKeyRotation != tt.next || len(s.Attention) != tt.want || tt.want > 0 && (s.Attention[0].About != "owner's key" || !strings.Contains(s.Attention[0].Problem, "192h0m0s ago") || !strings.Contains(s.Attention[0].Remedy, next)) {
			t.Errorf("%s: %+v", name, s.Attention)
		}
	}
}

func TestWhatNeedsAttentionIsSaid(t *testing.T) {
	if got := sound().attention(now); len(got) != 0 {
		t.Fatalf("a sound cluster: %+v", got)
	}
	for name, tt := range map[string]struct {
		harm        func(*Status)
		about, says string
	}{
		"a service":                             {func(s *Status) { s.Services["muster-kms"] = "muster-kms 0/1 ready" }, "muster-kms", "0/1"},
		"no chart":                              {func(s *Status) { s.Chart = nil }, "chart", "not installed"},
		"a failed chart":                        {func(s *Status) { s.Chart.Status = "failed" }, "chart", "failed"},
		"no policy":                             {func(s *Status) { s.Policy = nil }, "policy", "no machine"},
		"a refused policy":                      {func(s *Status) { s.Policy.Accepted, s.Policy.Reason = false, "POLICY_INVALID" }, "policy", "POLICY_INVALID"},
		"a policy that no service has checked":  {func(s *Status) { s.Policy.Accepted = false }, "policy", "not yet checked"},
		"a Node that Muster let not in":         {func(s *Status) { s.Nodes[0].Enrolled = false }, "node node1", "AttestedNode"},
		"a banned Node":                         {func(s *Status) { s.Nodes[0].Banned = true }, "node node1", "banned"},
		"a node whose Node is gone":             {func(s *Status) { s.Nodes[0].Joined = false }, "node node1", "it has no Node object"},
		"a removal that was interrupted":        {func(s *Status) { s.Nodes[0].Banned, s.Nodes[0].Removing = true, true }, "node node1", "muster forget or reset has banned it"},
		"a replacement that was interrupted":    {func(s *Status) { s.Nodes[0].Banned, s.Nodes[0].Replacing = true, true }, "node node1", "muster replace has banned it"},
		"a node that is not ready":              {func(s *Status) { s.Nodes[0].Ready = false }, "node node1", "not Ready"},
		"a node whose certificates are revoked": {func(s *Status) { s.Nodes[0].Ready, s.Nodes[0].RevokedUntil = false, before(-time.Hour) }, "node node1", "muster replace or forget has revoked its certificates, and it has no newer ones: until 2026-11-21T13:00:00Z"},
		"a node whose kubelet is gone": {func(s *Status) {
			s.Nodes[0].Heartbeat = before(10 * time.Minute)
			s.Nodes[0].heard(*before(5 * time.Minute), now)
		}, "node node1", "its kubelet has not renewed its Lease for 5m0s"},
		"a node that an interrupted command has drained": {func(s *Status) { s.Nodes[0].Held, s.Nodes[0].ReadySince = true, before(time.Hour) }, "node node1", "it is still unschedulable"},
		"a node without a verdict":                       {func(s *Status) { s.Nodes[0].AppraisedAt = nil }, "node node1", "never appraised"},
		"a bad verdict":                                  {func(s *Status) { s.Nodes[0].Accepted, s.Nodes[0].Reason = new(false), "POLICY_REFUSED" }, "node node1", "POLICY_REFUSED"},
		"an old verdict":                                 {func(s *Status) { s.Nodes[0].AppraisedAt = before(16 * time.Minute) }, "node node1", "16m0s old"},
		"a verdict of an old policy":                     {func(s *Status) { s.Nodes[0].Serial, s.Nodes[0].AppraisedAt = 2, before(8*time.Minute) }, "node node1", "serial 2, but 3"},
		"one that lasts for a year":                      {func(s *Status) { s.Nodes[0].ClientExpires = before(-8000 * time.Hour) }, "node node1", "client certificate with a lifetime of 8000h"},
		"a client certificate":                           {func(s *Status) { s.Nodes[0].ClientExpires = before(-30 * time.Minute) }, "node node1", "client certificate ends in 30m"},
		"a serving certificate":                          {func(s *Status) { s.Nodes[0].ServingExpires = before(time.Hour) }, "node node1", "serving certificate ended 1h"},
		"a control plane's certificate that ended": {func(s *Status) {
			s.Nodes[0].ControlPlane[0].Expires = now.Add(-time.Hour)
		}, "node node1", "certificate apiserver ended 1h"},
		"a control plane's certificate that was not renewed": {func(s *Status) {
			s.Nodes[0].ControlPlane = reported(`[{"name":"etcd-peer","notBefore":"2026-01-01T00:00:00Z","notAfter":"2026-12-01T00:00:00Z"}]`)
		}, "node node1", "certificate etcd-peer ends in"},
		"admin.conf":                         {func(s *Status) { s.Certificates[1].Expires = now.AddDate(0, 0, 20) }, "certificate admin.conf", "ends in"},
		"the CA":                             {func(s *Status) { s.Certificates[0].Expires = now.AddDate(0, 0, -1) }, "certificate cluster CA", "ended"},
		"a phase of a rotation that stopped": {func(s *Status) { s.Rotation = rotationSince(clusterinfo.RotationUse, 3*time.Hour) }, "rotation", "in the phase use for 3h0m0s"},
		"an old key that stays accepted":     {func(s *Status) { s.Rotation = rotationSince(clusterinfo.RotationSettled, 8*24*time.Hour) }, "rotation", "in the phase settled"},
		"control planes that are not upgraded": {func(s *Status) {
			s.Upgrade = &KubernetesUpgrade{To: "1.36.1", Stage: StageControlPlanes, Since: now.Add(-3 * time.Hour), Upgraded: 1, Nodes: 4}
		}, "upgrade of Kubernetes", "to 1.36.1, it is at the control planes for 3h0m0s: 1 of 4 nodes have it"},
		"workers that are not upgraded": {func(s *Status) { s.Upgrade = &KubernetesUpgrade{Stage: StageWorkers, Since: now.Add(-25 * time.Hour)} }, "upgrade of Kubernetes", "at the workers for 25h"},
		"a request":                     {func(s *Status) { s.Requests[0].Since = now.Add(-time.Hour) }, "request csr-1", "1h0m0s"},
		"an enrolled machine that waits": {func(s *Status) {
			s.Nodes[1].MachineID = strings.Repeat("ab", 32)
			s.Waiting = []Waiting{{Machine: strings.Repeat("ab", 32), Reason: "POLICY_REFUSED", Remedy: "Compare.", Since: now.Add(-time.Hour)}}
		}, "waiting abababababab", "POLICY_REFUSED"},
	} {
		t.Run(name, func(t *testing.T) {
			s := sound()
			tt.harm(s)
			got := s.attention(now)
			if len(got) != 1 || got[0].About != tt.about || !strings.Contains(got[0].Problem, tt.says) || got[0].Remedy == "" {
				t.Errorf("%+v, want one about %q that says %q", got, tt.about, tt.says)
			}
		})
	}
}

// When collateral ends, all nodes are refused at once, and none of their machines has changed.
func TestCollateralThatHasEndedIsOneProblem(t *testing.T) {
	s := sound()
	other := s.Nodes[0]
	other.Name, other.MachineID = "node2", strings.Repeat("ab", 32)
	s.Nodes = append(s.Nodes, other)
	for i := range s.Nodes {
		if s.Nodes[i].Joined {
			s.Nodes[i].Accepted, s.Nodes[i].Reason = new(false), "HARDWARE_COLLATERAL"
		}
	}
	s.Nodes[1].MachineID = strings.Repeat("cd", 32)
	s.Waiting = []Waiting{
		{Machine: strings.Repeat("ab", 32), Node: "node2", Reason: "HARDWARE_COLLATERAL", Remedy: "Fetch.", Since: now.Add(-time.Hour)},
		{Machine: strings.Repeat("cd", 32), Node: "cp2", Reason: "HARDWARE_COLLATERAL", Remedy: "Fetch.", Since: now.Add(-time.Hour)},
	}
	got := s.attention(now)
	if len(got) != 1 || got[0].About != "nodes" || !strings.Contains(got[0].Problem, "3 machines are refused with HARDWARE_COLLATERAL, since the policy lacks current data of their processors' vendor: node1, node2, cp2") || !strings.Contains(got[0].Remedy, "muster collateral apply FILE") || strings.Contains(got[0].Remedy, "trust the machine") {
		t.Errorf("%+v", got)
	}
}

// The kubelet renews its Lease every ten seconds, and the condition every five minutes.
func TestANodeIsReadyAsLongAsItsKubeletIsHeard(t *testing.T) {
	for name, tt := range map[string]struct {
		ready            bool
		condition, lease time.Duration // before now
		want             bool
	}{
		"a renewed Lease":              {true, 4 * time.Minute, 9 * time.Second, true},
		"a Lease by a clock behind":    {true, 4 * time.Minute, 100 * time.Second, true},
		"a Lease by a clock ahead":     {true, 4 * time.Minute, -time.Minute, true},
		"a new condition":              {true, 20 * time.Second, 24 * time.Hour, true},
		"neither":                      {true, 4 * time.Minute, 2 * time.Minute, false},
		"a Lease, and another verdict": {false, time.Minute, 9 * time.Second, false},
	} {
		n := &corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionFalse, LastHeartbeatTime: metav1.NewTime(now.Add(-tt.condition))}}}}
		if tt.ready {
			n.Status.Conditions[0].Status = corev1.ConditionTrue
		}
		var s NodeStatus
		s.see(n)
		s.heard(now.Add(-tt.lease), now)
		if s.Ready != tt.want || s.Stale != (tt.ready && !tt.want) || (s.ReadySince == nil) == tt.want {
			t.Errorf("%s: %+v", name, s)
		}
	}
	var s NodeStatus
	if s.see(&corev1.Node{Spec: corev1.NodeSpec{Unschedulable: true}}); !s.Unschedulable || s.Held { // by kubectl cordon, or muster drain
		t.Errorf("a cordoned node: %+v", s)
	}
	s = NodeStatus{}
	s.see(&corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}})
	if s.heard(time.Time{}, now); s.Ready || !s.Stale || s.silent() != "has never renewed its Lease" {
		t.Errorf("without any time: %+v", s)
	}
}

// The workstation's clock may be hours behind the cluster's.
func TestTheSilenceOfAKubeletIsByTheClustersClock(t *testing.T) {
	s := sound()
	s.Nodes[0].Heartbeat = before(10 * time.Minute)
	s.Nodes[0].heard(*before(5 * time.Minute), now)
	for _, workstation := range []time.Time{now, now.Add(-3 * time.Hour)} {
		got := s.attention(workstation)
		if !slices.ContainsFunc(got, func(a Attention) bool {
			return strings.Contains(a.Problem, "its kubelet has not renewed its Lease for 5m0s")
		}) {
			t.Errorf("%+v", got)
		}
	}
}

// A proxy or load balancer may remove the API server's time. What the conditions say is then shown.
func TestWithoutTheClustersClockTheConditionsCount(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header()["Date"] = nil // the server adds none
		if r.URL.Path != "/readyz" {
			t.Errorf("%s is asked", r.URL)
		}
	}))
	defer server.Close()
	c := &Client{rest: &rest.Config{Host: server.URL}}
	s := &Status{Nodes: []NodeStatus{{Name: "node1", Ready: true}}}
	if err := c.heartbeats(t.Context(), s, now); err != nil || !s.Nodes[0].Ready {
		t.Errorf("%v, %+v", err, s.Nodes[0])
	}
	if _, err := c.Ready(t.Context()); !errors.Is(err, errNoClock) {
		t.Errorf("%v, want that there is no time", err)
	}
}

// Any machine with a genuine TPM can ask, so a check must not fail by it.
func TestARefusedMachineThatIsNotEnrolledNeedsNoAttention(t *testing.T) {
	s := sound()
	s.Waiting = []Waiting{{Machine: strings.Repeat("ab", 32), Reason: "POLICY_REFUSED", Since: now.Add(-time.Hour)}}
	if got := s.attention(now); len(got) != 0 {
		t.Errorf("%+v", got)
	}
}

// joinservice's replicas write the list some seconds late: a machine that was accepted since then does not wait.
func TestAMachineThatWasAcceptedSinceDoesNotWait(t *testing.T) {
	s := sound()
	s.Nodes[0].MachineID = strings.Repeat("ab", 32)
	for name, tt := range map[string]struct {
		machine string
		last    time.Duration // before now; the node was accepted a minute ago
		want    bool
	}{
		"refused before":  {s.Nodes[0].MachineID, 2 * time.Minute, true},
		"refused since":   {s.Nodes[0].MachineID, 30 * time.Second, false},
		"another machine": {strings.Repeat("cd", 32), 2 * time.Minute, false},
	} {
		if got := s.acceptedSince(tt.machine, now.Add(-tt.last)); got != tt.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// A worker that was forgotten must not be enrolled as a control plane.
func TestTheRemedyOfAWaitingMachineIsForItsRole(t *testing.T) {
	for role, want := range map[string]string{"worker": "--role worker --machine-id ID --disk-id UUID", "control-plane": "--role control-plane"} {
		w := waitingOf(waiting.Entry{Machine: strings.Repeat("ab", 32), Role: role, Reason: "NOT_ENROLLED"})
		if !strings.Contains(w.Remedy, want) || role == "worker" && strings.Contains(w.Remedy, "control-plane") {
			t.Errorf("%s: %q", role, w.Remedy)
		}
	}
}

// Root on a node may write anything into its Node.
func TestReportedCertificatesAreReadStrictly(t *testing.T) {
	if got := reported(`[{"name":"admin.conf","notBefore":"2026-01-01T00:00:00Z","notAfter":"2026-12-31T00:00:00Z"}]`); len(got) != 1 || got[0].Name != "admin.conf" || got[0].Renews.Month() != time.August {
		t.Errorf("%+v", got)
	}
	for _, text := range []string{"", "x", "{}", `[{"name":"a\u001b[2Jb"}]`, `[{"name":"` + strings.Repeat("a", 50) + `"}]`, `[{"name":""}]`, "[" + strings.Repeat(`{"name":"a"},`, maxReported) + `{"name":"a"}]`} {
		if got := reported(text); len(got) > 0 {
			t.Errorf("%q became %+v", text, got)
		}
	}
}

func TestExpiryNeedsACertificate(t *testing.T) {
	for _, text := range []string{"", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"} {
		if _, err := Expiry([]byte(text)); err == nil {
			t.Errorf("%q has an end", text)
		}
	}
}

// Root on any node writes its Node's status, which the owner reads in a terminal.
func TestWhatANodeSaysOfItselfIsNoCommandToATerminal(t *testing.T) {
	n := &corev1.Node{}
	n.Status.NodeInfo.KubeletVersion = "v1.36.1 yes\x1b]0;x\x07\n\u202e" + strings.Repeat("x", 1<<20)
	var s NodeStatus
	s.see(n)
	if want := "v1.36.1yes0x" + strings.Repeat("x", maxVersion-12); s.Kubelet != want {
		t.Errorf("%.100q, want %q", s.Kubelet, want)
	}
}

// A driver may write the reason why a pod of Muster's waits.
func TestWhatAPodWaitsForIsNoCommandToATerminal(t *testing.T) {
	p := &corev1.Pod{}
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "\x1b[2Jfine\nATTENTION run this", Message: strings.Repeat("é", 1<<20)}}}}
	got := podWaits(p)
	if want := "?[2Jfine?ATTENTION run this " + strings.Repeat("?", maxWhy-28); got != want {
		t.Errorf("%.100q, want %q", got, want)
	}
}

// A worker has no certificates of a control plane, whatever its Node reports.
func TestAWorkersNodeShowsNoCertificatesOfAControlPlane(t *testing.T) {
	const list = `[{"name":"apiserver","notAfter":"2020-01-01T00:00:00Z"}]`
	worker := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1", Annotations: map[string]string{clusterinfo.CertificatesAnnotation: list}}}
	control := worker.DeepCopy()
	control.Name, control.Labels = "c1", map[string]string{clusterinfo.ControlPlaneLabel: ""}
	if got := certificatesOf(worker); len(got) > 0 {
		t.Errorf("%+v", got)
	}
	if got := certificatesOf(control); len(got) != 1 {
		t.Errorf("%+v", got)
	}
}

func TestABannedNodeThatWasEvictedNeedsNoAttention(t *testing.T) {
	s := sound()
	s.Nodes[0].Joined, s.Nodes[0].Banned = false, true
	if got := s.attention(now); len(got) != 0 {
		t.Errorf("%+v", got)
	}
}
