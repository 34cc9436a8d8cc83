package policies

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

// list adds machines to the policy's lists, and puts the policy in force.
func (a *Approver) list(ctx context.Context, add []policyfile.Listing, report func(string)) error {
	for _, l := range add {
		if err := a.open(l.Field); err != nil {
			return err
		}
	}
	return policyChange{
		done: func(text []byte, _ *attest.Policy) (bool, error) {
			for _, l := range add {
				if has, err := policyfile.Lists(text, l); err != nil || !has {
					return false, err
				}
			}
			return true, nil
		},
		edit: func(text []byte, serial uint64) ([]byte, error) {
			out, err := policyfile.ListMachines(text, serial, add)
			if err != nil {
				return nil, err
			}
			p, _, err := policyfile.Parse(out)
			if err == nil && p.OnlyECC() && !a.policy.OnlyECC() { // A8
				err = problem.WithRemedy(errors.New("a policy that lists a machine without an EK certificate accepts ECC attestation keys only, and the policy in force accepts RSA keys: running nodes could be refused"),
					"List the machine in "+bareList+" of "+a.dir.File(ownerdir.PolicyFile)+" by hand, increment serial, see by muster policy diff whether a node would be refused, then run muster policy apply.")
			}
			return out, err
		},
		what: func(*attest.Policy) string { return "it lists " + problem.Count(len(add), "more machine") },
	}.apply(ctx, a.dir, a.kube, report)
}

// open refuses a list that accepts every machine: no machine waits for an entry in it, and the first entry would shut out all others.
func (a *Approver) open(list string) error {
	empty, err := policyfile.Empty(a.inForce, list)
	if err != nil || !empty {
		return err
	}
	return problem.WithRemedy(fmt.Errorf("%s is empty in the policy in force, so it accepts every machine that its authorities certify: with a first entry, all other machines would be refused", list),
		"If you want to accept listed machines only, list all of them in policy.yaml and run muster policy apply, which shows the running nodes that would be refused. Otherwise undo what you have edited: the cluster's record of this machine is old or wrong.")
}

// NotOpened refuses a policy with an empty list, which accepts every machine, if the newest policy that the owner has signed lists machines there. It is for
// a restore, which puts the folder's policy in force without muster policy apply.
func NotOpened(d *ownerdir.Dir, have *v1alpha1.AttestationPolicy, json []byte) error {
	_, last, err := lastSigned(d, have)
	if err != nil {
		return err
	}
	lists, err := policyfile.OpenedLists([]byte(last), json)
	if err != nil || len(lists) == 0 {
		return err
	}
	return problem.WithRemedy(opened(lists), "List the machines again in "+d.File(ownerdir.PolicyFile)+", and run the same command again. To accept every machine, complete the restore first, and then run muster policy apply --any-machine.")
}

// opened refuses a policy with an empty list, which accepts every machine, if the same list in force has entries.
func opened(lists []string) error {
	return problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_POLICY_INVALID, "%s of the policy is empty, and the policy in force lists machines there: every machine that its authorities certify, and that booted an accepted image, could join", strings.Join(lists, " and ")),
		"The policy in force is unchanged. List the machines again: muster policy diff shows which ones are missing. To accept every machine, repeat the command with --any-machine.")
}
