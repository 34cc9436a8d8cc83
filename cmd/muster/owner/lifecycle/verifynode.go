package lifecycle

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"io"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/appraisal"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/orders"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/peerdial"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
)

// evidenceTries is how often evidence is read that the kubelet or the API server does not give at once.
const evidenceTries = 3

// VerifyNode verifies the machine of a running node, which serves no port. A signed order makes it answer a challenge and quote its PCRs, both bound to
// the order, and the cluster passes the evidence on. Neither the API nor joinservice is trusted with more than that: this program checks the evidence.
//
// The error is nil whenever there is something to show. NOT_ENROLLED: the cluster has no such node.
func VerifyNode(ctx context.Context, d *ownerdir.Dir, name string, policy *attest.Policy, report func(string)) (*appraisal.Report, error) {
	kube, err := access.Connect(d)
	if err != nil {
		return nil, err
	}
	n, err := kube.Enrollment(ctx, name)
	if err != nil {
		return nil, err
	}
	out := &appraisal.Report{Node: name, Disk: problem.Printable(n.Spec.DiskID), Purpose: string(attest.PurposeOrder), At: time.Now().UTC()}
	var challenge *tpm2.Activation
	signed, r, err := orders.Send(ctx, d, name, orders.Request{Action: ownerorder.ActionVerify, Supersede: true, Args: func(n *v1alpha1.AttestedNode) (map[string]string, error) {
		c, err := challengeTo(n)
		if err != nil {
			return nil, err
		}
		challenge = c // of the order that is written last
		return ownerorder.ChallengeArgs(c.Challenge()), nil
	}}, refusedFirst(n, report))
	var evidence []byte
	if err == nil {
		evidence, err = readEvidence(ctx, kube, name, signed)
	}
	if err != nil {
		out.Record = recordOf(n)
		if errors.Is(err, context.DeadlineExceeded) && out.Record.Reason != attest.ReasonName(attestv1.Reason_REASON_ACCEPTED) {
			err = problem.WithRemedy(err, "joinservice gives orders only to machines that it accepts, and it says that it refuses this one; above is why. "+problem.Remedy(err))
		}
		return out.Refused(err), nil
	}
	on, err := orders.Addressee(d, n)
	if err != nil {
		return nil, err
	}
	cfg := appraisal.VerifyConfig{Target: peerdial.Target{Policy: policy}, ClusterID: (*[32]byte)(&on.Cluster)}
	c, err := verifyEvidence(ctx, policy, challenge, signed, r.Output, evidence)
	if err != nil {
		return out.Refused(err), nil
	}
	appraisal, err := policy.For(attest.LockedTo(on.Cluster)).Appraise(ctx, c)
	out.Show(peerdial.Result{Claims: c, Appraisal: appraisal, Err: err}, cfg)
	digest := sha256.Sum256(evidence)
	out.EvidenceDigest = hex.EncodeToString(digest[:])
	if err != nil {
		return out.Refused(err), nil
	}
	out.Accepted = true
	return out, nil
}

// refusedFirst returns report, which tells once, behind its first text, that a refused machine gets no orders.
func refusedFirst(n *v1alpha1.AttestedNode, report func(string)) func(string) {
	reason := recordOf(n).Reason
	told := n.Status.LastVerdict == nil || reason == attest.ReasonName(attestv1.Reason_REASON_ACCEPTED)
	return func(s string) {
		report(s)
		if !told {
			told = true
			report("joinservice refused the machine last with " + reason + ", and a refused machine gets no orders: if nothing has been repaired since, end this command, and look at what differs by muster explain HOST, with the machine's address")
		}
	}
}

// challengeTo makes a challenge for the keys that the cluster has recorded of a node's machine. If they are not the machine's, it can't answer.
func challengeTo(n *v1alpha1.AttestedNode) (*tpm2.Activation, error) {
	if n.Status.EKPublic == "" {
		return nil, problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_NOT_READY, "the cluster has no endorsement key of %s yet", n.Name), "joinservice records it when the machine attests, every five minutes: muster status shows when it did. A virtual machine that the platform key of its cloud or AWS's NitroTPM endorses has none, and can only be verified by its address, before it joins. A joinservice of an earlier version records none: muster upgrade.")
	}
	ek, err := base64.StdEncoding.DecodeString(n.Status.EKPublic)
	ak, aerr := hex.DecodeString(n.Status.AKName)
	if err = errors.Join(err, aerr); err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_EK_UNTRUSTED, "what the cluster says of the keys of %s can't be read: %w", n.Name, err)
	}
	// The order is for the machine of n.Spec. So evidence with this endorsement key is that machine's.
	if id := attest.MachineIDOf(ek); id.String() != n.Spec.MachineID {
		return nil, problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_EK_UNTRUSTED, "AttestedNode %s: status.ekPublic is the endorsement key of machine %s, but spec.machineID is %s", n.Name, id, n.Spec.MachineID),
			"After muster replace, run the command again once the new machine has attested; muster status shows when. Otherwise the cluster's record was changed: don't trust it.")
	}
	return tpm2.NewActivation(ek, ak)
}

// readEvidence reads the evidence for an order from the node. At most one byte more is read than evidence may have.
func readEvidence(ctx context.Context, kube *clusterapi.Client, name string, signed ownerorder.SignedMachineOrder) ([]byte, error) {
	var err error
	for try := range evidenceTries {
		if try > 0 && retry.Wait(ctx, orders.ReportPoll) != nil {
			break
		}
		var r io.ReadCloser
		if r, err = kube.NodeLog(ctx, name, ownerorder.EvidenceFolder, signed.EvidenceFile()); err == nil {
			var b []byte
			if b, err = io.ReadAll(io.LimitReader(r, ownerorder.MaxEvidence+1)); errors.Join(err, r.Close()) == nil {
				return b, nil
			}
		}
	}
	return nil, problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_API_UNAVAILABLE, "%s has made evidence, and its kubelet does not give it: %w", name, err),
		"The API server has to reach the kubelet of "+name+", as for kubectl logs. Each order to verify replaces the evidence of the one before. Then run the command again.")
}

// verifyEvidence checks that evidence is that of the challenged machine for this order (A1), and returns its claims.
func verifyEvidence(ctx context.Context, policy *attest.Policy, challenge *tpm2.Activation, signed ownerorder.SignedMachineOrder, answer string, evidence []byte) (attest.Claims, error) {
	var none attest.Claims
	if len(evidence) > ownerorder.MaxEvidence {
		return none, attest.Refuse(attestv1.Reason_REASON_EVIDENCE_MALFORMED, "the evidence has more than %d bytes", ownerorder.MaxEvidence)
	}
	ev := &attestv1.Evidence{}
	if err := proto.Unmarshal(evidence, ev); err != nil {
		return none, attest.Refuse(attestv1.Reason_REASON_EVIDENCE_MALFORMED, "the evidence can't be read: %w", err)
	}
	mac, err := hex.DecodeString(answer)
	if err != nil {
		return none, attest.Refuse(attestv1.Reason_REASON_ACTIVATION_FAILED, "the answer to the challenge can't be read: %w", err)
	}
	v, err := tpm2.NewVerifier(tpm2.VerifierConfig{Roots: policy.Roots, Now: time.Now})
	if err != nil {
		return none, err
	}
	b := signed.Binding()
	if err := v.Activated(challenge, &attestv1.Response{Mac: mac}, b); err != nil {
		return none, err
	}
	pending, err := v.Verify(ctx, ev, attest.NewStatement(attest.PurposeOrder, b), b) // A5
	if err != nil {
		return none, err
	}
	c, err := pending.Complete(nil) // refused, if the evidence has another endorsement key than the challenged one, or another attestation key
	if err != nil {
		return none, err
	}
	if c.Machine() != challenge.Machine() { // A1: a platform key is not challenged, so this is the evidence of another machine
		return none, attest.Refuse(attestv1.Reason_REASON_BINDING_MISMATCH, "the evidence is that of machine %s, and machine %s answered the challenge", c.Machine(), challenge.Machine())
	}
	return c, nil
}

// recordOf returns what the cluster says of a node.
func recordOf(n *v1alpha1.AttestedNode) *appraisal.Record {
	out := &appraisal.Record{Machine: problem.Printable(n.Spec.MachineID), Reason: "NONE", PolicySerial: n.Status.PolicySerial}
	if v := n.Status.LastVerdict; v != nil {
		out.Reason, out.Message, out.Time = cmp.Or(problem.Printable(v.Reason), out.Reason), problem.Printable(v.Message), new(v.Time.UTC())
	}
	return out
}
