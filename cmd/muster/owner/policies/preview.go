package policies

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/orders"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// Attests is the longest pause between two attestations of a running node, with a margin.
	Attests = 15 * time.Minute
	// maxNamedNodes is how many nodes an error names.
	maxNamedNodes = 10
)

// Signs are the signs of life that the cluster shows of nodes. The time of an attestation is by the clock of the joinservice that it went to, and may be wrong,
// as may the clocks with which it is compared. So a node counts as running if it has attested lately by the earlier of two clocks, or if its kubelet is heard,
// which the cluster determines without comparing clocks of machines. A node that is off may count as running then, and not the reverse.
type Signs struct {
	// Now is the earlier one of the API server's and this computer's time.
	Now   time.Time
	ready map[string]bool
}

// ReadSigns reads them from the cluster.
func ReadSigns(ctx context.Context, kube *clusterapi.Client) (s Signs, err error) {
	if s.Now, err = kube.ServerTime(ctx); err != nil {
		return s, err
	}
	if ours := time.Now(); ours.Before(s.Now) {
		s.Now = ours
	}
	s.ready, err = kube.ReadyNodes(ctx)
	return s, err
}

// Running reports whether the node's machine is accepted, runs, and is not shut out.
func (s Signs) Running(n *v1alpha1.AttestedNode) bool {
	return s.attests(n) && n.Status.LastVerdict.Accepted
}

// attests reports whether the node's machine has sent genuine evidence, runs, and is not shut out.
func (s Signs) attests(n *v1alpha1.AttestedNode) bool {
	return attested(n, s.Now) || s.ready[n.Name] && !n.ShutOut() && n.Status.LastVerdict != nil
}

// attested reports whether the node's machine has sent genuine evidence lately, and is not shut out.
func attested(n *v1alpha1.AttestedNode, now time.Time) bool {
	v := n.Status.LastVerdict
	return !n.ShutOut() && v != nil && now.Sub(v.Time.Time) < Attests
}

// NoneAttests reports whether nodes have attested before, and none has lately. The cluster then does not show which of them run: they are off, no
// joinservice records their evidence, or the clocks of control planes differ.
func NoneAttests(nodes []v1alpha1.AttestedNode, now time.Time) bool {
	before := false
	for i := range nodes {
		if attested(&nodes[i], now) {
			return false
		}
		before = before || !nodes[i].ShutOut() && nodes[i].Status.LastVerdict != nil
	}
	return before
}

// NoneHasAttested is the error text for [NoneAttests]; WhyNoneAttests is the remedy.
var NoneHasAttested = fmt.Sprintf("no node has attested in the last %s", Attests)

// WhyNoneAttests is the remedy if [NoneAttests].
const WhyNoneAttests = "muster status and muster doctor show why: joinservice does not run, or a clock is wrong."

// expels returns the running nodes whose last evidence does not match the policy. If no node attests, all nodes whose last
// evidence was accepted count as running.
func expels(ctx context.Context, kube *clusterapi.Client, p *attest.Policy) (out []Expelled, none bool, _ error) {
	all, err := kube.Enrollments(ctx)
	if err != nil {
		return nil, false, err
	}
	signs, err := ReadSigns(ctx, kube)
	if err != nil {
		return nil, false, err
	}
	none = NoneAttests(all, signs.Now)
	for i := range all {
		n := &all[i]
		if v := n.Status.LastVerdict; !signs.Running(n) && (!none || n.ShutOut() || v == nil || !v.Accepted) {
			continue
		}
		if err := mayMatch(p, n); err != nil {
			out = append(out, Expelled{n.Name, err.Error()})
		}
	}
	return out, none, nil
}

// expelled refuses a policy for running nodes that do not match it; none is the result of [NoneAttests].
func expelled(nodes []Expelled, none bool) error {
	var named []string
	for _, n := range nodes[:min(len(nodes), maxNamedNodes)] {
		named = append(named, n.Node+": "+n.Why)
	}
	if none {
		return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "%s, so it is not known which nodes run; %d nodes do not match the policy: %s", NoneHasAttested, len(nodes), strings.Join(named, "; ")),
			"The policy in force is unchanged. "+WhyNoneAttests+" If none of these nodes is needed any more, or they run another image now, repeat the command with --expel.")
	}
	return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "%d running nodes do not match the policy: %s", len(nodes), strings.Join(named, "; ")),
		"The policy in force is unchanged. Keep the images and classes that they run in the policy until no node runs them (muster rollout status). To shut these nodes out, repeat the command with --expel.")
}

// mayMatch compares what the cluster has stored of the node's last evidence with the policy.
func mayMatch(p *attest.Policy, n *v1alpha1.AttestedNode) error {
	m, err := attest.ParseMachineID(n.Spec.MachineID)
	if err != nil {
		return err
	}
	values, err := StoredPCRs(n)
	if err != nil {
		return err
	}
	return p.MayMatch(m, values)
}

// StoredPCRs returns the PCR values of the node's last evidence.
func StoredPCRs(n *v1alpha1.AttestedNode) (map[int][]byte, error) {
	values := map[int][]byte{}
	for number, digits := range n.Status.PCRs {
		i, err := strconv.Atoi(number)
		if err != nil {
			return nil, fmt.Errorf("PCR %q: %w", number, err)
		}
		if values[i], err = hex.DecodeString(digits); err != nil {
			return nil, fmt.Errorf("PCR %d: %w", i, err)
		}
	}
	return values, nil
}

// Preview is the result of a policy for a running node.
type Preview struct {
	Node string `json:"node"`
	// Answered is false if its machine has not attested while Preview waited.
	Answered bool   `json:"answered"`
	Accepted bool   `json:"accepted"`
	Reason   string `json:"reason,omitempty"`
	Message  string `json:"message,omitempty"`
	// InForce is the reason for which the policy in force refuses the node; empty if it accepts it.
	InForce string `json:"inForce,omitempty"`
}

// String returns the result in words.
func (p Preview) String() string {
	switch {
	case !p.Answered && p.InForce != "":
		return "unknown: refused by the policy in force with " + p.InForce + ", and its machine has not attested in time"
	case !p.Answered:
		return "unknown: its machine has not attested in time"
	case p.Accepted:
		return "accepted"
	}
	return "refused with " + p.Reason + ": " + p.Message
}

// DiffPolicy returns how the policy in a file differs from the one in force: a unified diff in YAML, empty if they are the same.
func DiffPolicy(ctx context.Context, d *ownerdir.Dir, text []byte) (string, error) {
	_, next, err := policyfile.Parse(text)
	if err != nil {
		return "", err
	}
	kube, err := access.Connect(d)
	if err != nil {
		return "", err
	}
	have, err := kube.Policy(ctx)
	if err != nil {
		return "", err
	}
	public, err := d.OwnerKeys()
	if err != nil {
		return "", err
	}
	if _, err := OpenPolicy(have, public); err != nil && attest.ReasonOf(err) != attestv1.Reason_REASON_POLICY_INVALID { // one that this version refuses can be shown
		return "", fmt.Errorf("the cluster's policy: %w", err)
	}
	return clusterapi.DiffJSON([]byte(have.Spec.Policy), next)
}

// CheckPreview refuses a policy by [PreviewPolicy] for nodes that it would refuse, or that do not attest within wait. Nodes that the policy in
// force refuses do not count: for them nothing would change for the worse.
func CheckPreview(ctx context.Context, d *ownerdir.Dir, text []byte, wait time.Duration, report func(Preview)) error {
	nodes, err := PreviewPolicy(ctx, d, text, wait, report)
	if err != nil {
		return err
	}
	var named []string
	for _, n := range nodes {
		if !n.Accepted && n.InForce == "" {
			named = append(named, n.Node+": "+n.String())
		}
	}
	if len(named) == 0 {
		return nil
	}
	return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "%s would not be accepted: %s", problem.Count(len(named), "running node"), strings.Join(named[:min(len(named), maxNamedNodes)], "; ")),
		"The policy in force is unchanged. Update the firmware of the machines first, or have the cloud do it; muster status shows a node that does not attest. To shut these nodes out, repeat the command with --expel.")
}

// old reports whether a node's answer has the time of its answer before.
func old(before map[string]metav1.Time, node string, at metav1.Time) bool {
	was, had := before[node]
	return had && was.Equal(&at)
}

// PreviewPolicy lets the cluster appraise its running nodes by a policy that is not in force, also nodes that the policy in force refuses. It ends
// when each node has attested, after wait, or when ctx ends. It reports each node to report. It changes no verdict and leaves nothing in the cluster: the signature is
// valid only for a preview.
func PreviewPolicy(ctx context.Context, d *ownerdir.Dir, text []byte, wait time.Duration, report func(Preview)) (out []Preview, err error) {
	_, json, err := policyfile.Parse(text)
	if err != nil {
		return nil, err
	}
	key, err := d.OwnerKey()
	if err != nil {
		return nil, err
	}
	kube, err := access.Connect(d)
	if err != nil {
		return nil, err
	}
	signed := attest.SignCandidate(key, json)
	sum := sha256.Sum256(signed.GetPolicy())
	digest := hex.EncodeToString(sum[:])
	signs, err := ReadSigns(ctx, kube)
	if err != nil {
		return nil, err
	}
	// What a node answered to the same policy in an earlier preview says nothing about whether it still attests.
	all, err := kube.Enrollments(ctx)
	if err != nil {
		return nil, err
	}
	before := map[string]metav1.Time{}
	for _, n := range all {
		if c := n.Status.Candidate; c != nil && c.Digest == digest {
			before[n.Name] = c.Time
		}
	}
	note := base64.StdEncoding.EncodeToString(signed.GetSignature()) + " " + string(signed.GetPolicy())
	if err := kube.SetCandidate(ctx, note); err != nil {
		return nil, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		err = errors.Join(err, kube.DropCandidate(ctx, note))
	}()
	waiting, cancel := context.WithTimeout(ctx, wait) // from now on, so that a slow API server takes none of it
	defer cancel()
	seen, pause := map[string]bool{}, retry.Backoff{Min: orders.FirstPoll, Max: orders.ReportPoll}
	for {
		have, err := kube.Policy(ctx)
		if err == nil && have.Annotations[v1alpha1.PolicyCandidate] != note {
			err = problem.WithRemedy(errors.New("another muster policy diff has replaced this one's policy meanwhile"), "Run this one again when the other one is done.")
		}
		if err != nil {
			return out, err
		}
		all, err := kube.Enrollments(ctx)
		if err != nil {
			return out, err
		}
		var waits []Preview
		for i := range all {
			n := &all[i]
			if seen[n.Name] || !signs.attests(n) {
				continue
			}
			p := Preview{Node: n.Name}
			if v := n.Status.LastVerdict; !v.Accepted {
				p.InForce = problem.Printable(v.Reason)
			}
			switch c := n.Status.Candidate; {
			case c == nil || c.Digest != digest || old(before, n.Name, c.Time):
				waits = append(waits, p)
			default:
				seen[n.Name] = true
				p.Answered, p.Accepted, p.Reason, p.Message = true, c.Accepted, problem.Printable(c.Reason), problem.Printable(c.Message)
				out = append(out, p)
				report(p)
			}
		}
		if len(waits) == 0 {
			return out, nil
		}
		if retry.Wait(waiting, pause.Next(0)) != nil {
			slices.SortFunc(waits, func(a, b Preview) int { return strings.Compare(a.Node, b.Node) })
			for _, p := range waits {
				out = append(out, p)
				report(p)
			}
			return out, nil
		}
	}
}
