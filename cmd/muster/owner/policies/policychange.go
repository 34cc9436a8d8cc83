package policies

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/signedpolicy"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

// Current refuses a policy of the folder that is older than the last one that the owner has signed, or differs from it under the same serial.
func Current(d *ownerdir.Dir, known *ownerdir.Known, p *attest.Policy, json []byte) error {
	if known.Version != 0 {
		public, err := d.OwnerKeys()
		if err != nil {
			return err
		}
		if _, err := known.Policy.Serial(public); err != nil {
			return fmt.Errorf("%s: %w", ownerdir.KnownFile, err)
		}
	}
	last, signed, err := NewestSigned(d, &v1alpha1.AttestationPolicy{})
	if err != nil {
		return err
	}
	if p.Serial() > last || p.Serial() == last && string(json) == signed {
		return nil
	}
	return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_POLICY_INVALID, "the folder's policy has the serial %d, and the last policy that the owner has signed, of serial %d, has other contents", p.Serial(), last),
		fmt.Sprintf("Machines are appraised only by the current policy. Restore %s from your newest copy, or, if you have edited it, set serial to %d or more.", d.File(ownerdir.PolicyFile), last+1))
}

// InForceTimeout limits the wait until the services apply a changed policy.
const InForceTimeout = 20 * time.Second

// FolderPolicy reads the policy of an owner's folder.
func FolderPolicy(d *ownerdir.Dir) (text []byte, p *attest.Policy, json []byte, err error) {
	if text, err = d.Read(ownerdir.PolicyFile); err != nil {
		return nil, nil, nil, err
	}
	if p, json, err = policyfile.Parse(text); err != nil {
		return nil, nil, nil, fmt.Errorf("%s: %w", d.File(ownerdir.PolicyFile), err)
	}
	return text, p, json, nil
}

// clusterPolicy reads the cluster's policy; it is empty if there is none.
func clusterPolicy(ctx context.Context, kube *clusterapi.Client) (*v1alpha1.AttestationPolicy, error) {
	have, err := kube.Policy(ctx)
	if clusterapi.Absent(err) {
		return &v1alpha1.AttestationPolicy{}, nil
	}
	return have, err
}

// policyChange is a change of the owner's policy that a command makes.
type policyChange struct {
	// done reports whether a policy has the change already; text is nil if the cluster has no policy.
	done func(text []byte, p *attest.Policy) (bool, error)
	// edit returns the policy with the change and that serial.
	edit func(text []byte, serial uint64) ([]byte, error)
	// what describes the changed policy.
	what func(p *attest.Policy) string
}

// duePolicy is a change to be made, with the policies of the folder and of the cluster.
type duePolicy struct {
	// text is the folder's policy with the change; nil if the folder has it already.
	text []byte
	// have is the cluster's policy.
	have *v1alpha1.AttestationPolicy
}

// due compares the change with the folder and the cluster; nil if both have it. The two policies must not differ otherwise: only muster policy apply
// compares an owner's edits with the running nodes, a policyChange does not. So the cluster's policy must be signed by the owner: others could write
// the owner's edits there. due refuses everything that [policyChange.apply] would refuse, before a command changes anything else.
func (c policyChange) due(ctx context.Context, d *ownerdir.Dir, kube *clusterapi.Client) (*duePolicy, error) {
	text, p, json, err := FolderPolicy(d)
	if err != nil {
		return nil, err
	}
	have, err := clusterPolicy(ctx, kube)
	if err != nil {
		return nil, err
	}
	if err := signsForServices(d, kube); err != nil {
		return nil, err
	}
	_, before, err := lastSigned(d, have)
	if err != nil {
		return nil, err
	}
	ours, err := c.done(text, p)
	if err != nil {
		return nil, err
	}
	if have.Spec.Policy != "" {
		public, err := d.OwnerKeys()
		if err != nil {
			return nil, err
		}
		theirs, err := OpenPolicy(have, public)
		if err != nil {
			return nil, fmt.Errorf("the cluster's policy: %w", err)
		}
		sent, err := c.done([]byte(have.Spec.Policy), theirs)
		if err != nil {
			return nil, err
		}
		// A7: an earlier policy of the owner is not in force, though somebody may have put it there.
		if ours && sent && have.Spec.Policy == before {
			return nil, nil
		}
	}
	signed, err := SignedSerial(d, have)
	if err != nil {
		return nil, err
	}
	if before != "" {
		same := before == string(json)
		if ours {
			changed, err := c.edit([]byte(before), p.Serial())
			if err != nil {
				return nil, err
			}
			if same, err = policyfile.SameRules(text, changed); err != nil {
				return nil, err
			}
		}
		if !same {
			return nil, problem.WithRemedy(fmt.Errorf("%s differs from the cluster's policy, so this command cannot change it", d.File(ownerdir.PolicyFile)),
				"Nothing was changed. Run muster policy apply first, if you have finished editing it, or undo what you have edited. If apply returns SERVER_NOT_LISTED for a control plane that this command removes, leave it in the list: this command removes it there too.")
		}
	}
	if ours {
		return &duePolicy{have: have}, Higher(d, have, p, string(json), d.File(ownerdir.PolicyFile))
	}
	out := &duePolicy{have: have}
	out.text, err = c.edit(text, max(p.Serial(), signed)+1)
	return out, err
}

// apply changes the policy in the owner's folder, then in the cluster: one signature, one serial. After an interruption
// between the two, the same call completes the change: the folder's policy already has it, and goes into the cluster
// unchanged.
func (c policyChange) apply(ctx context.Context, d *ownerdir.Dir, kube *clusterapi.Client, report func(string)) error {
	due, err := c.due(ctx, d, kube)
	if err != nil || due == nil {
		return err
	}
	have := due.have
	if due.text != nil {
		if err := d.Write(ownerdir.PolicyFile, due.text); err != nil { // B3: before it is sent
			return err
		}
	}
	p, signed, err := SignedPolicy(d)
	if err != nil {
		return err
	}
	if err := Higher(d, have, p, string(signed.GetPolicy()), d.File(ownerdir.PolicyFile)); err != nil {
		return err
	}
	if err := Put(ctx, d, kube, have, signed); err != nil {
		return err
	}
	report(fmt.Sprintf("policy of serial %d signed: %s", p.Serial(), c.what(p)))
	if have.Status.ObservedGeneration == 0 {
		return nil // no service checks policies yet
	}
	waiting, cancel := context.WithTimeout(ctx, InForceTimeout)
	defer cancel()
	if _, err := kube.PolicyInForce(waiting, string(signed.GetPolicy())); err != nil && (waiting.Err() == nil || ctx.Err() != nil) {
		return changed(err)
	} else if err != nil {
		report("no joinservice applies it yet: muster status shows when one does")
	}
	return nil
}

// signsForServices refuses a folder whose key the cluster's services do not accept. Otherwise its policy would replace the valid one, the services
// would refuse it, and a restarted joinservice would have none (A3). Before the chart is installed, no service checks a policy.
func signsForServices(d *ownerdir.Dir, kube *clusterapi.Client) error {
	r, err := kube.Release(slog.New(slog.DiscardHandler))
	if err != nil || r == nil {
		return err
	}
	key, err := d.OwnerKey()
	if err != nil {
		return err
	}
	if slices.Contains(clusterapi.OwnerKeys(r), attest.OwnerKeys{access.PublicOf(key)}.Strings()[0]) {
		return nil
	}
	return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_POLICY_SIGNATURE, "the services of this cluster accept another owner's key, not owner.key of %s", d.Path()),
		"The cluster's policy was not changed. Use the folder of this cluster's owner, or put its owner.key back from your newest copy; then repeat the command.")
}

// Higher refuses a policy whose serial the services would refuse. It may be the last one that the owner has signed, if the cluster
// lacks it or another key has signed the cluster's.
// file is the file in which the owner sets the serial.
func Higher(d *ownerdir.Dir, have *v1alpha1.AttestationPolicy, p *attest.Policy, json, file string) error {
	_, last, err := NewestSigned(d, have)
	if err != nil || last == json {
		return err
	}
	signed, err := SignedSerial(d, have)
	if err != nil || signed < p.Serial() {
		return err
	}
	err = attest.Refuse(attestv1.Reason_REASON_POLICY_INVALID, "its serial is %d, and the last policy that the owner has signed, of serial %d, has other contents", p.Serial(), signed)
	return problem.WithRemedy(err, fmt.Sprintf("Set serial to %d or more in %s: a cluster never accepts an older policy.", signed+1, file))
}

// SignedSerial returns the serial of the newest policy that the owner has signed, as far as the cluster and the folder have it; 0 if there is none.
// The status of the cluster's policy is unsigned, so its serial is not used: if it were the highest possible, no policy could follow.
func SignedSerial(d *ownerdir.Dir, have *v1alpha1.AttestationPolicy) (uint64, error) {
	serial, _, err := NewestSigned(d, have)
	if err != nil {
		return 0, err
	}
	if status := have.Status.Serial; status > 0 && uint64(status) > serial {
		return 0, problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_POLICY_INVALID, "the cluster's status reports that a policy of serial %d was in force, but the newest one that the owner has signed, in the cluster and in %s, has %d", status, d.File(ownerdir.KnownFile), serial),
			fmt.Sprintf("If there is a newer copy of this folder, use that one: compare the serial in policy.yaml, signed-policy.json and known.json of every copy, and lowestPolicySerial of your images. Only if none is above %[1]d, the status was forged: correct it (kubectl edit attestationpolicy default --subresource status, serial: %[1]d), and restart the services, which then accept the owner's policy again: kubectl -n muster-system rollout restart daemonset muster-joinservice muster-kms.", serial))
	}
	return serial, nil
}

// OpenPolicy verifies the owner's signature of the cluster's policy. The remedy for POLICY_INVALID is for a policy that another version has accepted.
func OpenPolicy(have *v1alpha1.AttestationPolicy, owner attest.OwnerKeys) (*attest.Policy, error) {
	p, err := signedpolicy.Open(have, owner)
	if reason := attest.ReasonOf(err); reason == attestv1.Reason_REASON_POLICY_SIGNATURE {
		err = problem.WithRemedy(err, clusterapi.ForeignPolicyRemedy)
	} else if reason == attestv1.Reason_REASON_POLICY_INVALID {
		err = problem.WithRemedy(err, RefusedPolicyRemedy)
	}
	return p, err
}

// RefusedPolicyRemedy is the remedy for a policy in the cluster that the owner has signed, and that this version of muster refuses.
const RefusedPolicyRemedy = "Another version of muster has accepted this policy. Correct policy.yaml of the owner's folder, increase serial, and run muster policy apply."

// lastSigned returns the newest policy that the owner has signed, as far as the cluster and known.json have it; 0: none. It may be one that this version
// refuses. What another key has signed is none: no change of the owner's policy is compared with it. Nor is what the cluster may never have had
// ([ownerdir.Dir.Signed]): it was not compared with the running nodes, or failed there.
func lastSigned(d *ownerdir.Dir, have *v1alpha1.AttestationPolicy) (serial uint64, json string, err error) {
	public, err := d.OwnerKeys()
	if err != nil {
		return 0, "", err
	}
	known, err := d.Known()
	if err != nil {
		return 0, "", err
	}
	if n, err := signedpolicy.Serial(have, public); err == nil {
		serial, json = n, have.Spec.Policy
	}
	if n, err := known.Policy.Serial(public); err == nil && n > serial {
		serial, json = n, known.Policy.JSON
	}
	return serial, json, nil
}

// NewestSigned is lastSigned with the policy that was signed in the folder and perhaps sent. known.json may lack it: a command that applied it was interrupted,
// or could not record the cluster's state. Another policy needs a higher serial (B7).
func NewestSigned(d *ownerdir.Dir, have *v1alpha1.AttestationPolicy) (serial uint64, json string, err error) {
	if serial, json, err = lastSigned(d, have); err != nil {
		return 0, "", err
	}
	public, err := d.OwnerKeys()
	if err != nil {
		return 0, "", err
	}
	signed, err := d.Signed()
	if err != nil {
		return 0, "", problem.WithRemedy(err, "Take this file from the newest copy of the folder. If there is none, move it away, and set serial in "+d.File(ownerdir.PolicyFile)+" above that of every copy.")
	}
	if n, err := signed.Serial(public); err == nil && n > serial { // a key that is retired since may have signed it
		serial, json = n, signed.JSON
	}
	return serial, json, nil
}

// Put records a signed policy in the owner's folder and sets it in the cluster, if the cluster still has the policy of have, which the caller compared it with.
func Put(ctx context.Context, d *ownerdir.Dir, kube *clusterapi.Client, have *v1alpha1.AttestationPolicy, signed *attestv1.SignedPolicy) error {
	if err := d.SetSigned(signed); err != nil { // B3, B7: before it is sent
		return err
	}
	return changed(kube.PutPolicy(ctx, have.Spec, signed))
}

// changed adds the remedy for [clusterapi.ErrPolicyChanged].
func changed(err error) error {
	if errors.Is(err, clusterapi.ErrPolicyChanged) {
		err = problem.WithRemedy(err, "The cluster's policy is not that of this command. Find out who changed it (kubectl get attestationpolicy default -o yaml, audit log). If it was another copy of this folder, continue with that copy, or put its policy.yaml here; muster policy diff shows the difference.")
	}
	return err
}

// PolicyOf describes the policy of an epoch in words.
func PolicyOf(serial uint64) string {
	if serial == 0 {
		return "no policy yet"
	}
	return fmt.Sprintf("the policy of serial %d", serial)
}
