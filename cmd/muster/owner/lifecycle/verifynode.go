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

// evidenceTries limits the attempts to read evidence through the kubelet and the API server.
const evidenceTries = 3

// VerifyNode verifies the machine of a running node, which serves no port. A signed order makes it answer a challenge and quote its PCRs, both bound
// to the order, and the cluster passes the evidence on. This program verifies the evidence, so it does not trust the API or joinservice.
//
// If there is a report to show, the error is nil. NOT_ENROLLED means that the cluster has no such node.
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
		challenge = c // of the order that was written last
		return ownerorder.ChallengeArgs(c.Challenge()), nil
	}}, refusedFirst(n, report))
	var evidence []byte
	if err == nil {
		evidence, err = readEvidence(ctx, kube, name, signed)
	}
	if err != nil {
		out.Record = recordOf(n)
		if errors.Is(err, context.DeadlineExceeded) && out.Record.Reason != attest.ReasonName(attestv1.Reason_REASON_ACCEPTED) {
			err = problem.WithRemedy(err, "joinservice passes orders only to machines that it accepts, and it refuses this one for the reason above. "+problem.Remedy(err))
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

// refusedFirst wraps report: after the first text, it adds once that a refused machine gets no orders.
func refusedFirst(n *v1alpha1.AttestedNode, report func(string)) func(string) {
	reason := recordOf(n).Reason
	told := n.Status.LastVerdict == nil || reason == attest.ReasonName(attestv1.Reason_REASON_ACCEPTED)
	return func(s string) {
		report(s)
		if !told {
			told = true
			report("joinservice refused the machine last with " + reason + ", and a refused machine gets no orders: if it was not repaired since, stop this command, and run muster explain HOST with the machine's address to see what differs")
		}
	}
}

// challengeTo makes a challenge to the keys that the cluster has recorded for a node's machine. If they are not the machine's, it can't answer.
func challengeTo(n *v1alpha1.AttestedNode) (*tpm2.Activation, error) {
	if n.Status.EKPublic == "" {
		return nil, problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_NOT_READY, "the cluster has no endorsement key of %s yet", n.Name), "joinservice records it when the machine attests, every five minutes: muster status shows when it did. A virtual machine that the platform key of its cloud or AWS's NitroTPM endorses has none, and can only be verified by its address, before it joins. A joinservice of an earlier version records none: muster upgrade.")
	}
	ek, err := base64.StdEncoding.DecodeString(n.Status.EKPublic)
	ak, aerr := hex.DecodeString(n.Status.AKName)
	if err = errors.Join(err, aerr); err != nil {
		return nil, attest.Refuse(attestv1.Reason_REASON_EK_UNTRUSTED, "the cluster's record of the keys of %s can't be read: %w", n.Name, err)
	}
	// The order is for the machine in n.Spec, so evidence with this endorsement key belongs to that machine.
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
	return nil, problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_API_UNAVAILABLE, "%s has made evidence, but its kubelet does not return it: %w", name, err),
		"The API server has to reach the kubelet of "+name+", as for kubectl logs. Repair that, then run the command again. Each order to verify replaces the previous evidence.")
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
	c, err := pending.Complete(nil) // refused if the evidence has another endorsement key or attestation key than the challenged ones
	if err != nil {
		return none, err
	}
	if c.Machine() != challenge.Machine() { // A1: only machines with an EK are challenged, so evidence with a platform key is that of another machine
		return none, attest.Refuse(attestv1.Reason_REASON_BINDING_MISMATCH, "the evidence is from machine %s, but machine %s answered the challenge", c.Machine(), challenge.Machine())
	}
	return c, nil
}

// recordOf returns the cluster's record of a node.
func recordOf(n *v1alpha1.AttestedNode) *appraisal.Record {
	out := &appraisal.Record{Machine: problem.Printable(n.Spec.MachineID), Reason: "NONE", PolicySerial: n.Status.PolicySerial}
	if v := n.Status.LastVerdict; v != nil {
		out.Reason, out.Message, out.Time = cmp.Or(problem.Printable(v.Reason), out.Reason), problem.Printable(v.Message), new(v.Time.UTC())
	}
	return out
}
