package enrollment

import (
	"testing"
	"time"

	"go.uber.org/goleak"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func node(role v1alpha1.Role, change func(*v1alpha1.AttestedNode)) *v1alpha1.AttestedNode {
	n := &v1alpha1.AttestedNode{Spec: v1alpha1.AttestedNodeSpec{Role: role}, Status: v1alpha1.AttestedNodeStatus{Ticket: &v1alpha1.Ticket{ID: "1", CertificateID: "X509SHA256=new"}}}
	if change != nil {
		change(n)
	}
	return n
}

func TestAccessFollowsFromTheEnrollment(t *testing.T) {
	revoked := nodeaccess.Entry{}.Revoke(now)
	old := nodeaccess.Entry{}.Revoke(now.Add(-48 * time.Hour))
	at := func(addresses ...string) func(*v1alpha1.AttestedNode) {
		return func(n *v1alpha1.AttestedNode) { n.Spec.Addresses = addresses }
	}
	banned := func(n *v1alpha1.AttestedNode) { n.Spec.Banned = true }
	for name, tt := range map[string]struct {
		have    nodeaccess.Entry
		n       *v1alpha1.AttestedNode
		present Present
		members bool
		want    nodeaccess.Entry
	}{
		"a worker that joins needs no entry":      {n: node(v1alpha1.RoleWorker, nil)},
		"a control plane is listed as such":       {n: node(v1alpha1.RoleControlPlane, nil), want: nodeaccess.Entry{ControlPlane: true}},
		"one that has no certificates yet is not": {n: node(v1alpha1.RoleControlPlane, func(n *v1alpha1.AttestedNode) { n.Status.Ticket = nil })},
		"the first machine has no ticket": {
			n: node(v1alpha1.RoleControlPlane, func(n *v1alpha1.AttestedNode) {
				n.Status.Ticket, n.Status.LastVerdict = nil, &v1alpha1.Verdict{Accepted: true}
			}),
			want: nodeaccess.Entry{ControlPlane: true},
		},
		"a refused machine is no control plane yet": {
			n: node(v1alpha1.RoleControlPlane, func(n *v1alpha1.AttestedNode) { n.Status.Ticket, n.Status.LastVerdict = nil, &v1alpha1.Verdict{} }),
		},
		"a banned machine writes nothing":        {n: node(v1alpha1.RoleWorker, banned), want: nodeaccess.Entry{Suspended: true}},
		"a banned control plane is none":         {have: nodeaccess.Entry{ControlPlane: true}, n: node(v1alpha1.RoleControlPlane, banned), want: nodeaccess.Entry{Suspended: true}},
		"after a ban it writes again":            {have: nodeaccess.Entry{Suspended: true}, n: node(v1alpha1.RoleControlPlane, nil), want: nodeaccess.Entry{ControlPlane: true}},
		"one that is being removed is suspended": {n: node(v1alpha1.RoleWorker, func(n *v1alpha1.AttestedNode) { n.DeletionTimestamp = &metav1.Time{Time: now} }), want: nodeaccess.Entry{Suspended: true}},
		"so is one that returned its ticket": {
			n:    node(v1alpha1.RoleWorker, func(n *v1alpha1.AttestedNode) { n.Status.Ticket, n.Status.ReleasedAt = nil, &metav1.Time{Time: now} }),
			want: nodeaccess.Entry{Suspended: true},
		},
		"a removal without a revocation is one":                 {have: nodeaccess.Entry{Suspended: true}, want: revoked},
		"a name without a machine keeps its own":                {have: revoked, want: revoked},
		"the name's next machine gets its own in":               {have: revoked, n: node(v1alpha1.RoleWorker, nil), want: revoked.Allow("X509SHA256=new")},
		"but not while it is banned":                            {have: revoked, n: node(v1alpha1.RoleWorker, banned), want: nodeaccess.Entry{Suspended: true, Revoked: revoked.Revoked}},
		"a lapsed revocation goes":                              {have: old, n: node(v1alpha1.RoleWorker, nil)},
		"a lapsed revocation without a machine goes too":        {have: old},
		"certificate requests stay paused":                      {have: nodeaccess.Entry{Paused: true}, n: node(v1alpha1.RoleWorker, nil), want: nodeaccess.Entry{Paused: true}},
		"in an adopted cluster members are listed":              {members: true, n: node(v1alpha1.RoleWorker, nil), want: nodeaccess.Entry{Member: true}},
		"and who is gone is not":                                {members: true, have: nodeaccess.Entry{Member: true}},
		"a node of before goes on":                              {members: true, have: nodeaccess.Entry{Unattested: true}, want: nodeaccess.Entry{Unattested: true, Member: true}},
		"a control plane of before by its label":                {have: nodeaccess.Entry{Unattested: true}, present: Present{Is: true, ControlPlane: true}, want: nodeaccess.Entry{Unattested: true, ControlPlane: true}},
		"one that lost the label is none":                       {have: nodeaccess.Entry{Unattested: true, ControlPlane: true}, present: Present{Is: true}, want: nodeaccess.Entry{Unattested: true}},
		"one that the owner enrolled stays for now":             {have: nodeaccess.Entry{Unattested: true, ControlPlane: true}, present: Present{Is: true, ControlPlane: true}, n: node(v1alpha1.RoleControlPlane, func(n *v1alpha1.AttestedNode) { n.Status.Ticket = nil }), want: nodeaccess.Entry{Unattested: true, ControlPlane: true}},
		"a Node with the enrollment's addresses needs no entry": {n: node(v1alpha1.RoleWorker, at("192.0.2.1", "2001:db8::1")), present: Present{Is: true, Addresses: []string{"2001:db8::1", "192.0.2.1", "192.0.2.1"}}},
		"nor one whose kubelet does not report all":             {n: node(v1alpha1.RoleWorker, at("192.0.2.1", "192.0.2.2")), present: Present{Is: true, Addresses: []string{"192.0.2.1"}}},
		"nor a node without a Node":                             {n: node(v1alpha1.RoleWorker, at("192.0.2.1"))},
		"one that has another may add its own":                  {n: node(v1alpha1.RoleWorker, at("192.0.2.1", "2001:db8::1")), present: Present{Is: true, Addresses: []string{"192.0.2.1", "192.0.2.9"}}, want: nodeaccess.Entry{Addresses: "192.0.2.1 2001:db8::1"}},
		"one that has fewer may":                                {n: node(v1alpha1.RoleWorker, at("192.0.2.1", "2001:db8::1")), present: Present{Is: true, Addresses: []string{"192.0.2.1"}}, want: nodeaccess.Entry{Addresses: "192.0.2.1 2001:db8::1"}},
		"its entry stays":                                       {have: nodeaccess.Entry{Addresses: "192.0.2.1"}, n: node(v1alpha1.RoleWorker, at("192.0.2.1")), present: Present{Is: true, Addresses: []string{"192.0.2.1"}}, want: nodeaccess.Entry{Addresses: "192.0.2.1"}},
		"and follows the enrollment":                            {have: nodeaccess.Entry{Addresses: "192.0.2.1"}, n: node(v1alpha1.RoleWorker, at("2001:db8::1")), want: nodeaccess.Entry{Addresses: "2001:db8::1"}},
		"a ban deletes its Node":                                {n: node(v1alpha1.RoleWorker, func(n *v1alpha1.AttestedNode) { n.Spec.Banned, n.Spec.Addresses = true, []string{"192.0.2.1"} }), want: nodeaccess.Entry{Suspended: true, Addresses: "192.0.2.1"}},
		"until that ends":                                       {have: nodeaccess.Entry{Addresses: "192.0.2.1"}, present: Present{Is: true, Addresses: []string{"192.0.2.1"}}},
		"a node of before may add any": {
			have: nodeaccess.Entry{Unattested: true}, n: node(v1alpha1.RoleWorker, func(n *v1alpha1.AttestedNode) { n.Status.Ticket = nil }), present: Present{Is: true, Addresses: []string{"192.0.2.1"}},
			want: nodeaccess.Entry{Unattested: true},
		},
		"until its machine joins by a ticket (J4)": {
			members: true, have: nodeaccess.Entry{Unattested: true, Member: true}, n: node(v1alpha1.RoleWorker, nil),
			want: func() nodeaccess.Entry {
				e := nodeaccess.Entry{Unattested: true}.Revoke(now).Allow("X509SHA256=new")
				e.Member = true
				return e
			}(),
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := Access(tt.have, tt.n, tt.present, tt.members, Clock{now, now})
			if !got.Equal(tt.want) {
				t.Errorf("%+v (%+v), want %+v (%+v)", got, got.Revoked, tt.want, tt.want.Revoked)
			}
			if again := Access(got, tt.n, tt.present, tt.members, Clock{now, now}); !again.Equal(got) {
				t.Errorf("the second time: %+v, the first: %+v", again, got)
			}
		})
	}
}
