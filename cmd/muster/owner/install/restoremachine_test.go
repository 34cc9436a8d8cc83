package install

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

// reporting is a machine that reports one status after the other, the last one again and again.
type reporting struct {
	status []*initv1.GetStatusResponse
	asked  *atomic.Int32
}

func (r reporting) GetStatus(context.Context, *initv1.GetStatusRequest) (*initv1.GetStatusResponse, error) {
	return r.status[min(int(r.asked.Add(1)), len(r.status))-1], nil
}

func waitsAs(name string) *initv1.GetStatusResponse {
	return &initv1.GetStatusResponse{Phase: initv1.Phase_PHASE_WAITING, NodeName: name}
}

// newMachine is a machine on which a cluster can be restored; result may make its result wrong.
func newMachine(t *testing.T, m *attesttest.Machine, result func(*initv1.InitResult), status ...*initv1.GetStatusResponse) *ownertest.FirstMachine {
	t.Helper()
	conf := clientcmdapi.NewConfig()
	conf.Clusters["c"] = &clientcmdapi.Cluster{Server: "https://" + unused, CertificateAuthorityData: []byte("authority")}
	conf.AuthInfos["u"] = &clientcmdapi.AuthInfo{ClientCertificateData: []byte("certificate"), ClientKeyData: []byte("key")}
	conf.Contexts["c"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	conf.CurrentContext = "c"
	admin, err := clientcmd.Write(*conf)
	if err != nil {
		t.Fatal(err)
	}
	f := &ownertest.FirstMachine{Machine: m, Answers: []ownertest.Answer{ownertest.Succeed(m, admin, result)}}
	l := ownertest.Listen(t)
	f.Addr, f.Drop = l.Addr().String(), l.Drop
	ownertest.Serve(t, l, m.Attester(attest.PurposeMachine),
		rpc.Serve(initv1connect.InitServiceName, initv1connect.InitServiceHandler(f), initv1connect.NewInitServiceHandler),
		rpc.Serve(initv1connect.MachineServiceName, initv1connect.MachineServiceHandler(reporting{status, &atomic.Int32{}}), initv1connect.NewMachineServiceHandler))
	return f
}

// unused is an endpoint of an API server that no test connects to.
const unused = "192.0.2.1:6443"

// J4: the machine whose name and bans were checked is the one that gets the cluster's secrets, though a network
// attacker diverts the connections after the first to another one that the policy accepts.
func TestAClusterIsRestoredOnTheMachineThatWasChecked(t *testing.T) {
	ca := attesttest.NewCA(t)
	good, banned := attesttest.NewMachine(t, ca, attesttest.Options{}), attesttest.NewMachine(t, ca, attesttest.Options{})
	policy := attesttest.Policy(t, ca, []*attesttest.Machine{good, banned})
	m := &backup.Manifest{State: backup.State{Nodes: []backup.Node{{Name: "stolen", UID: "a", Role: "worker", MachineID: banned.ID().String(), Banned: true}}}}
	for name, tt := range map[string]struct {
		diverted int // the first connection to the banned machine; 0: none
		status   []*initv1.GetStatusResponse
		result   func(*initv1.InitResult)
		known    ownerdir.Known
		want     attestv1.Reason
		remedy   string
	}{
		"it is banned":                         {diverted: 1, want: attestv1.Reason_REASON_BANNED},
		"a later connection is diverted":       {diverted: 2, want: attestv1.Reason_REASON_POLICY_REFUSED, remedy: "Another machine answers"},
		"the connection of the request itself": {diverted: 3, want: attestv1.Reason_REASON_POLICY_REFUSED, remedy: "The restore was started on machine " + good.ID().String()},
		"it has a name of the backup":          {status: []*initv1.GetStatusResponse{waitsAs("stolen")}, want: attestv1.Reason_REASON_NAME_TAKEN},
		"it has the name of a node that has gone": {
			known: ownerdir.Known{Gone: []ownerdir.KnownGone{{Name: "node1"}}}, want: attestv1.Reason_REASON_NAME_TAKEN,
		},
		"it learns such a name only later": {
			status: []*initv1.GetStatusResponse{{Phase: initv1.Phase_PHASE_FORMATTING}, {LastReason: attestv1.Reason_REASON_MACHINE_CONFIG}, waitsAs("stolen")}, want: attestv1.Reason_REASON_NAME_TAKEN,
		},
		"its disk waits for a key": {
			status: []*initv1.GetStatusResponse{{Phase: initv1.Phase_PHASE_UNLOCKING, LastReason: attestv1.Reason_REASON_NOT_READY}}, want: attestv1.Reason_REASON_STATE_DISK, remedy: "erase its first MiB",
		},
		"it becomes another node than was checked": {
			result: func(r *initv1.InitResult) { r.NodeName = "stolen" }, want: attestv1.Reason_REASON_REQUEST_INVALID,
		},
	} {
		t.Run(name, func(t *testing.T) {
			if tt.status == nil {
				tt.status = []*initv1.GetStatusResponse{waitsAs("node1")}
			}
			run := func(diverted int, known *ownerdir.Known, result func(*initv1.InitResult), status ...*initv1.GetStatusResponse) (*ownertest.Owned, int, error) {
				good.Reboot()
				a, b := newMachine(t, good, result, status...), newMachine(t, banned, nil, waitsAs("node1"))
				o := ownertest.Own(t, a, unused, policy)
				err := restoreOn(t, o, m, known, func(n int) string {
					if diverted > 0 && n >= diverted {
						return b.Addr
					}
					return a.Addr
				})
				if len(b.Calls()) != 0 {
					t.Error("the banned machine was asked")
				}
				return o, len(a.Calls()), err
			}
			o, calls, err := run(tt.diverted, &tt.known, tt.result, tt.status...)
			if got := rpc.ReasonFrom(err); got != tt.want || !strings.Contains(problem.Explain(err).Remedy, tt.remedy) {
				t.Errorf("%v, remedy %q, want %s", err, problem.Explain(err).Remedy, attest.ReasonName(tt.want))
			}
			if tt.result == nil && calls != 0 {
				t.Errorf("%d requests", calls)
			}
			if s := o.Cluster().Stage; s != ownerdir.StagePrepared && s != ownerdir.StageRequested {
				t.Errorf("stage %s", s)
			}
			// With the right machine under a free name.
			if o, calls, err = run(0, &ownerdir.Known{}, nil, waitsAs("node1")); err != nil || calls != 1 || o.Cluster().FirstMachine.ID != good.ID() {
				t.Errorf("%d requests, %v", calls, err)
			}
		})
	}
}
