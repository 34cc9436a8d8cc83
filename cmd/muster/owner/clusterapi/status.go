package clusterapi

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"strings"
	"time"
	"unicode"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// Status is the state of a cluster.
type Status struct {
	// Server is the API server's address.
	Server string `json:"server"`
	// Nodes are all names for which there is a Node or an enrollment.
	Nodes []NodeStatus `json:"nodes"`
	// Policy is nil if the cluster has none.
	Policy *PolicyStatus `json:"policy,omitempty"`
	// Epoch is the cluster's, which increases with each change of the policy, enrollments, bans and disks, and each phase of a rotation; 0 if no
	// control plane has increased it yet.
	Epoch uint64 `json:"epoch,omitempty"`
	// History has the last epochs.
	History clusterinfo.History `json:"-"`
	// Services by name: empty if ready, otherwise what they wait for.
	Services map[string]string `json:"services"`
	// Upgrade is the upgrade of Kubernetes in progress; nil if there is none.
	Upgrade *KubernetesUpgrade `json:"kubernetesUpgrade,omitempty"`
	// Rotation is the rotation of a control planes' key in progress; nil if there is none.
	Rotation *clusterinfo.Rotation `json:"rotation,omitempty"`
	// OwnerKeyRotation is the next command of an unfinished rotation of the owner's key: [Status.OwnerKeyRotates].
	OwnerKeyRotation string `json:"ownerKeyRotation,omitempty"`
	// Chart is the installed release; nil if there is none.
	Chart *ChartStatus `json:"chart,omitempty"`
	// Pods are the pods of Services, one of each service on each control plane.
	Pods []PodStatus `json:"pods,omitempty"`
	// Waiting are machines that asked to join in the last hour and were refused, oldest first.
	Waiting []Waiting `json:"waiting,omitempty"`
	// Requests are undecided certificate requests.
	Requests []Request `json:"pendingRequests,omitempty"`
	// Certificates are those that no machine renews automatically.
	Certificates []Certificate `json:"certificates"`
	// Attention lists the problems that need an administrator's attention, worst first; see [Status.attention].
	Attention []Attention `json:"attention"`
	// Removed reports that the cluster has neither a release nor a definition of Muster, because Muster is not installed yet
	// or was removed.
	Removed   bool `json:"removed,omitempty"`
	undefined bool // it has no definition
}

// The stages of a [KubernetesUpgrade].
const (
	StageControlPlanes = "control planes"
	StageWorkers       = "workers"
)

// KubernetesUpgrade is an upgrade of Kubernetes that is in progress.
type KubernetesUpgrade struct {
	// From and To are versions, full and without "v".
	From string `json:"from"`
	To   string `json:"to"`
	// Since is the start of its stage.
	Since time.Time `json:"since"`
	// Stage is [StageControlPlanes] or [StageWorkers]; Upgraded is how many of the Nodes have the new kubelet.
	Stage    string `json:"stage"`
	Upgraded int    `json:"upgraded"`
	Nodes    int    `json:"nodes"`
}

// PodStatus is one pod of Muster's.
type PodStatus struct {
	Name  string `json:"name"`
	Node  string `json:"node"`
	Ready bool   `json:"ready"`
	// Problem is what it waits for.
	Problem  string `json:"problem,omitempty"`
	Restarts int32  `json:"restarts"`
}

// Waiting is a machine that was refused, with the reason.
type Waiting struct {
	Machine string    `json:"machine"`
	Node    string    `json:"node,omitempty"`
	Role    string    `json:"role,omitempty"`
	Reason  string    `json:"reason"`
	Remedy  string    `json:"remedy,omitempty"`
	Address string    `json:"address,omitempty"`
	Since   time.Time `json:"since"`
	Last    time.Time `json:"last"`
	// Endorsement, Instance, Image and Class are what its evidence shows, see [waiting.Entry].
	Endorsement string `json:"endorsement,omitempty"`
	Instance    string `json:"instance,omitempty"`
	Image       string `json:"image,omitempty"`
	Class       string `json:"class,omitempty"`
	// List is the field of the policy that lacks the machine. Differs is the reason if adding the machine there would not be
	// enough.
	List    string `json:"list,omitempty"`
	Differs string `json:"differs,omitempty"`
}

// Request is an undecided CertificateSigningRequest of one of the two node signers.
type Request struct {
	Name   string    `json:"name"`
	Signer string    `json:"signer"`
	By     string    `json:"by"`
	Since  time.Time `json:"since"`
}

// Certificate is a certificate with its expiry.
type Certificate struct {
	Name    string    `json:"name"`
	Expires time.Time `json:"expires"`
	// Renews is when its machine renews it, if one does.
	Renews *time.Time `json:"renews,omitempty"`
}

// NodeStatus is a Node with its enrollment.
type NodeStatus struct {
	Name string `json:"name"`
	// Joined reports that there is a Node of that name, Ready the Node's condition while its kubelet renews it.
	Joined bool `json:"joined"`
	Ready  bool `json:"ready"`
	// Heartbeat is when the kubelet last renewed its Lease or the condition. Stale reports that the condition is still Ready long after that.
	Heartbeat *time.Time `json:"heartbeat,omitempty"`
	Stale     bool       `json:"stale,omitempty"`
	// silence is the time since the last heartbeat of a stale node's kubelet, by the API server's clock, because this computer's may differ by hours.
	silence time.Duration
	// ReadySince is when it became Ready; nil if it is not.
	ReadySince *time.Time `json:"readySince,omitempty"`
	// Unschedulable reports that it is cordoned, by Muster or by kubectl.
	Unschedulable bool `json:"unschedulable,omitempty"`
	// Held reports that it is unschedulable since a command drained it, until that command completes.
	Held bool `json:"held,omitempty"`
	// Enrolled reports that there is an AttestedNode. A Node without one was not admitted by Muster.
	Enrolled    bool       `json:"enrolled"`
	Role        string     `json:"role,omitempty"`
	MachineID   string     `json:"machineID,omitempty"`
	DiskMode    string     `json:"diskMode,omitempty"`
	Banned      bool       `json:"banned,omitempty"`
	Deleting    bool       `json:"deleting,omitempty"`
	Replacing   bool       `json:"replacing,omitempty"` // muster replace has banned it, and is unfinished
	Removing    bool       `json:"removing,omitempty"`  // muster forget or reset has banned it, and is unfinished
	Accepted    *bool      `json:"accepted,omitempty"`
	Reason      string     `json:"reason,omitempty"`
	AppraisedAt *time.Time `json:"appraisedAt,omitempty"`
	// Cloned describes a second machine that has attested with this one's TPM, with the addresses of both; empty if there is
	// none.
	Cloned     string `json:"cloned,omitempty"`
	Serial     int64  `json:"policySerial,omitempty"`
	Generation int64  `json:"policyGeneration,omitempty"`
	Kubelet    string `json:"kubelet,omitempty"`
	// ClientExpires and ServingExpires are when the kubelet's certificates expire, as its machine reports them.
	ClientExpires  *time.Time `json:"clientExpires,omitempty"`
	ServingExpires *time.Time `json:"servingExpires,omitempty"`
	// ControlPlane are the certificates that a control plane's machine renews, as it reports them; see
	// docs/certificates.md.
	ControlPlane []Certificate `json:"controlPlaneCertificates,omitempty"`
	// Epoch is the cluster's newest epoch that a control plane's machine knows, as it reports it, and EpochID
	// identifies it among epochs of that number.
	Epoch   uint64 `json:"epoch,omitempty"`
	EpochID string `json:"epochID,omitempty"`
	// RevokedUntil is the end of the revocation if its machine's certificates were revoked and it has no newer ones. Until
	// then, all writes of its kubelet are refused.
	RevokedUntil *time.Time `json:"certificatesRevokedUntil,omitempty"`
	enrollment   *v1alpha1.AttestedNode
}

// PolicyStatus is the policy as the services report it.
type PolicyStatus struct {
	Accepted   bool     `json:"accepted"`
	Serial     int64    `json:"serial"`
	Generation int64    `json:"generation"`
	Newest     int64    `json:"newestGeneration"`
	Reason     string   `json:"reason,omitempty"`
	Message    string   `json:"message,omitempty"`
	Insecure   []string `json:"insecure,omitempty"`
}

// ChartStatus is the release.
type ChartStatus struct {
	Revision int    `json:"revision"`
	Version  string `json:"version"`
	Status   string `json:"status"`
}

// Status reads the state from the cluster. Parts of Muster that do not exist are left out.
func (c *Client) Status(ctx context.Context, log *slog.Logger) (*Status, error) {
	s := &Status{Server: c.Server(), Services: map[string]string{}}
	var err error
	if s.Nodes, err = c.nodes(ctx); err != nil {
		return nil, err
	}
	var p v1alpha1.AttestationPolicy
	if err := c.client.Get(ctx, types.NamespacedName{Name: v1alpha1.PolicyName}, &p); err == nil {
		s.Policy = &PolicyStatus{
			Accepted: p.Status.Accepted && p.Status.ObservedGeneration == p.Generation, Serial: p.Status.Serial, Generation: p.Status.Generation,
			Newest: p.Generation, Reason: p.Status.Reason, Message: p.Status.Message, Insecure: Insecure(&p),
		}
	} else if !Absent(err) {
		return nil, err
	} else {
		s.undefined = meta.IsNoMatchError(err)
	}
	for _, name := range Services {
		text, err := c.serviceWaits(ctx, name)
		if Absent(err) {
			text = "not installed"
		} else if err != nil {
			return nil, err
		}
		s.Services[name] = text
	}
	r, err := c.Release(log)
	if err != nil {
		return nil, err
	}
	if r != nil {
		s.Chart = &ChartStatus{Revision: r.Version, Version: r.Chart.Metadata.Version, Status: string(r.Info.Status)}
	}
	now := time.Now()
	for _, part := range []func(context.Context, *Status, time.Time) error{c.heartbeats, c.revocations, c.pods, c.waiting, c.requests, c.certificates, c.epoch, c.upgrading} {
		if err := part(ctx, s, now); err != nil {
			return nil, err
		}
	}
	s.Removed = s.undefined && s.Chart == nil
	s.Attention = s.attention(now)
	return s, nil
}

// maxVersion is the length of a kubelet's version that is shown, in characters.
const maxVersion = 40

// see stores a Node's report. It is untrusted: root on the node can change what its kubelet writes, and the owner reads it
// in a terminal.
func (s *NodeStatus) see(n *corev1.Node) {
	s.Joined = true
	s.Unschedulable = n.Spec.Unschedulable
	s.Held = n.Spec.Unschedulable && n.Annotations[v1alpha1.Returns] != ""
	for _, r := range n.Status.NodeInfo.KubeletVersion {
		// The characters of a semantic version (semver.org): no spaces, which would look like other columns.
		if (unicode.IsLetter(r) || unicode.IsDigit(r) || strings.ContainsRune(".+-", r)) && r < unicode.MaxASCII && len(s.Kubelet) < maxVersion {
			s.Kubelet += string(r)
		}
	}
	for _, cond := range n.Status.Conditions {
		if cond.Type == corev1.NodeReady && cond.Status == corev1.ConditionTrue {
			s.Ready, s.ReadySince, s.Heartbeat = true, &cond.LastTransitionTime.Time, &cond.LastHeartbeatTime.Time
		}
	}
}

func (c *Client) nodes(ctx context.Context) ([]NodeStatus, error) {
	var nodes corev1.NodeList
	if err := c.client.List(ctx, &nodes); err != nil {
		return nil, err
	}
	byName := map[string]*NodeStatus{}
	at := func(name string) *NodeStatus {
		if byName[name] == nil {
			byName[name] = &NodeStatus{Name: name}
		}
		return byName[name]
	}
	for _, n := range nodes.Items {
		s := at(n.Name)
		s.see(&n)
		known := epochOf(&n)
		s.ControlPlane, s.Epoch, s.EpochID = certificatesOf(&n), known.Number, known.ID
	}
	var enrolled v1alpha1.AttestedNodeList
	if err := c.client.List(ctx, &enrolled); err != nil && !Absent(err) {
		return nil, err
	}
	for _, n := range enrolled.Items {
		s := at(n.Name)
		s.enrollment = &n
		s.Enrolled, s.Role, s.MachineID = true, string(n.Spec.Role), n.Spec.MachineID
		s.DiskMode, s.Banned, s.Deleting = string(n.Spec.DiskMode), n.Spec.Banned, n.Leaving()
		_, s.Replacing = n.Annotations[v1alpha1.KeepNode]
		_, s.Removing = n.Annotations[v1alpha1.Removing]
		s.Serial, s.Generation = n.Status.PolicySerial, n.Status.PolicyGeneration
		if c := n.Status.Certificates; c != nil {
			s.ClientExpires, s.ServingExpires = timeOf(c.ClientExpiresAt), timeOf(c.ServingExpiresAt)
		}
		if c := meta.FindStatusCondition(n.Status.Conditions, v1alpha1.ConditionCloned); c != nil && c.Status == metav1.ConditionTrue {
			s.Cloned = c.Message
		}
		if v := n.Status.LastVerdict; v != nil {
			s.Accepted, s.Reason, s.AppraisedAt = &v.Accepted, v.Reason, &v.Time.Time
		}
	}
	out := make([]NodeStatus, 0, len(byName))
	for _, s := range byName {
		out = append(out, *s)
	}
	slices.SortFunc(out, func(a, b NodeStatus) int { return cmp.Compare(a.Name, b.Name) })
	return out, nil
}
