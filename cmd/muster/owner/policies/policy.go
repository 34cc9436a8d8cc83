// Package policies changes and compares the owner's signed policy: it lists machines, approves waiting ones, predicts which
// nodes a new policy would refuse, and adds collateral.
package policies

import (
	"bytes"
	"context"
	"fmt"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// Enroll enrolls a machine under a name before it joins, as control planes need it. It first lists a control plane in the
// owner's policy (A7), because it may join once it is enrolled, and machines then have to trust its services. After an
// interruption, the same call completes the enrollment. Each step is reported to report.
func Enroll(ctx context.Context, d *ownerdir.Dir, name string, spec v1alpha1.AttestedNodeSpec, report func(string)) (created bool, err error) {
	kube, err := access.Connect(d)
	if err != nil {
		return false, err
	}
	if err := kube.Free(ctx, name, spec); err != nil {
		return false, err
	}
	l, err := enrollListing(d, name, spec)
	if err != nil {
		return false, err
	}
	if err := l.Apply(ctx, d, kube, report); err != nil {
		return false, err
	}
	for _, c := range l.Add {
		if err := d.RecordControlPlane(name, &c.Machine); err != nil {
			return false, err
		}
	}
	return kube.Enroll(ctx, name, spec, keys.DiskSalt{})
}

// SignedPolicy signs the current policy of an owner's folder.
func SignedPolicy(d *ownerdir.Dir) (*attest.Policy, *attestv1.SignedPolicy, error) {
	text, err := d.Read(ownerdir.PolicyFile)
	if err != nil {
		return nil, nil, err
	}
	return signText(d, text)
}

func signText(d *ownerdir.Dir, text []byte) (*attest.Policy, *attestv1.SignedPolicy, error) {
	p, json, err := policyfile.Parse(text)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", d.File(ownerdir.PolicyFile), err)
	}
	key, err := d.OwnerKey()
	if err != nil {
		return nil, nil, err
	}
	return p, attest.SignPolicy(key, json), nil
}

// Expelled is a running node that a policy would refuse.
type Expelled struct {
	Node string `json:"node"`
	Why  string `json:"why"`
}

// Application is a policy that may be put in force.
type Application struct {
	// Policy is the policy, Refused are the running nodes whose last evidence does not match it.
	Policy  *attest.Policy
	Refused []Expelled
	// Opened are its empty lists, which accept every machine, if the same list in force has entries.
	Opened []string
	// NoneAttests reports that no node has attested lately. Policy was then compared with all nodes whose last evidence was
	// accepted.
	NoneAttests bool

	signed *attestv1.SignedPolicy
	// have is the cluster's policy, with which Policy was compared.
	have *v1alpha1.AttestationPolicy
	kube *clusterapi.Client
}

// PlanPolicy makes the checks of [ApplyPolicy] and changes nothing. Running nodes that do not match are not an error.
func PlanPolicy(ctx context.Context, d *ownerdir.Dir, text []byte, leaveOut ...string) (*Application, error) {
	p, signed, err := signText(d, text)
	if err != nil {
		return nil, err
	}
	kube, err := access.Connect(d)
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
	file := "the policy that is to be applied"
	if own, err := d.Read(ownerdir.PolicyFile); err == nil && bytes.Equal(own, text) {
		file = d.File(ownerdir.PolicyFile)
	}
	if err := Higher(d, have, p, string(signed.GetPolicy()), file); err != nil {
		return nil, err
	}
	if err := MustList(ctx, d, kube, p, leaveOut); err != nil {
		return nil, err
	}
	_, last, err := lastSigned(d, have)
	if err != nil {
		return nil, err
	}
	open, err := policyfile.OpenedLists([]byte(last), signed.GetPolicy())
	if err != nil {
		return nil, err
	}
	refused, none, err := expels(ctx, kube, p)
	return &Application{Policy: p, Refused: refused, NoneAttests: none, Opened: open, signed: signed, have: have, kube: kube}, err
}

// Consent names effects of a policy that the owner intends, and that [ApplyPolicy] otherwise refuses as likely mistakes.
type Consent struct {
	// Expel accepts that running nodes do not match the policy, AnyMachine that a list of machines became empty, so that it accepts all.
	Expel, AnyMachine bool
}

// ApplyPolicy signs the policy of an owner's folder, puts it into the cluster, and waits for the services' result. It refuses a policy with a likely
// mistake that consent does not name. If text is not nil, it replaces the folder's policy after these checks, because other commands also put the
// folder's policy in force. leaveOut are names of control planes in the cluster that are not the owner's.
func ApplyPolicy(ctx context.Context, d *ownerdir.Dir, text []byte, consent Consent, leaveOut ...string) (*v1alpha1.AttestationPolicy, error) {
	var err error
	replaces := text != nil
	if !replaces {
		if text, err = d.Read(ownerdir.PolicyFile); err != nil {
			return nil, err
		}
	}
	plan, err := PlanPolicy(ctx, d, text, leaveOut...)
	if err != nil {
		return nil, err
	}
	if len(plan.Opened) > 0 && !consent.AnyMachine {
		return nil, opened(plan.Opened)
	}
	if len(plan.Refused) > 0 && !consent.Expel {
		return nil, expelled(plan.Refused, plan.NoneAttests)
	}
	if replaces {
		if err := d.Write(ownerdir.PolicyFile, text); err != nil { // B3: before it is sent
			return nil, err
		}
	}
	if err := Put(ctx, d, plan.kube, plan.have, plan.signed); err != nil {
		return nil, err
	}
	p, err := plan.kube.PolicyInForce(ctx, string(plan.signed.GetPolicy()))
	return p, changed(err)
}
