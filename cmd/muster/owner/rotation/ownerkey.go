package rotation

import (
	"bytes"
	"context"
	"fmt"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/install"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/recovery"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

// RotateOwnerKey does a step of the rotation of the owner's key. After an interruption, the same call continues. At any time, machines and services
// accept the key that signs.
func RotateOwnerKey(ctx context.Context, cfg OwnerKeyConfig) (*OwnerKeyPlan, error) {
	p, err := PlanOwnerKey(ctx, cfg)
	if err == nil {
		err = p.Err()
	}
	if err != nil {
		return nil, err
	}
	switch cfg.Step {
	case OwnerKeyPrepare:
		_, err = cfg.Dir.PrepareKey(cfg.Key)
	case OwnerKeyCommit:
		err = commitOwnerKey(ctx, cfg)
	case OwnerKeyFinish:
		err = finishOwnerKey(ctx, cfg)
	default:
		return nil, fmt.Errorf("the rotation of the owner's key has no step %q", cfg.Step)
	}
	if err != nil {
		return nil, problem.WithRemedy(fmt.Errorf("%s: %w", cfg.Step, err), remedyOr(err, "muster doctor shows what is wrong with the cluster.")+" To continue the rotation, run the same command again.")
	}
	if p.keys, err = cfg.Dir.KeyRotation(); err != nil {
		return nil, err
	}
	return p, nil
}

func remedyOr(err error, otherwise string) string {
	if r := problem.Remedy(err); r != "" {
		return r
	}
	return otherwise
}

// commitOwnerKey lets the services accept both keys, then makes the folder sign with the new one, and then replaces the policy's signature. The
// policy's serial becomes higher than all serials that the old key has signed, by the records of cluster and folder. So everything that the new key
// signs is newer.
func commitOwnerKey(ctx context.Context, cfg OwnerKeyConfig) error {
	kube, err := access.Connect(cfg.Dir)
	if err != nil {
		return err
	}
	keys, err := cfg.Dir.OwnerKeys()
	if err != nil {
		return err
	}
	if err := cfg.Services.Accept(ctx, keys); err != nil {
		return err
	}
	cfg.Report("the services accept both keys")
	if err := cfg.Dir.SwitchKey(); err != nil {
		return err
	}
	cfg.Report("the new key signs")
	if err := resign(ctx, cfg, kube); err != nil {
		return err
	}
	return recovery.RecordState(ctx, cfg.Dir, kube)
}

// resign puts the policy into the cluster with the signature of the new key and the next serial, unless it has that signature.
func resign(ctx context.Context, cfg OwnerKeyConfig, kube *clusterapi.Client) error {
	r, err := cfg.Dir.KeyRotation()
	if err != nil {
		return err
	}
	have, err := kube.Policy(ctx)
	if err != nil {
		return err
	}
	opened, err := policies.OpenPolicy(have, r.Keys())
	if err != nil {
		return fmt.Errorf("the cluster's policy: %w", err)
	}
	if !bytes.Equal(opened.Signer(), r.Signs) {
		text, err := resigned(cfg.Dir, have)
		if err != nil {
			return err
		}
		if err := cfg.Dir.Write(ownerdir.PolicyFile, text); err != nil { // B3: before it is sent
			return err
		}
		p, signed, err := policies.SignedPolicy(cfg.Dir)
		if err != nil {
			return err
		}
		if err := policies.Higher(cfg.Dir, have, p, string(signed.GetPolicy()), cfg.Dir.File(ownerdir.PolicyFile)); err != nil { // B7
			return err
		}
		if err := policies.Put(ctx, cfg.Dir, kube, have, signed); err != nil {
			return err
		}
		have.Spec.Policy = string(signed.GetPolicy())
		cfg.Report(fmt.Sprintf("policy of serial %d signed with the new key", p.Serial()))
	}
	waiting, cancel := context.WithTimeout(ctx, policies.InForceTimeout)
	defer cancel()
	if _, err := kube.PolicyInForce(waiting, have.Spec.Policy); err != nil {
		return fmt.Errorf("the services do not apply the policy: %w", err)
	}
	return nil
}

// resigned returns the text of the folder's policy with the next serial. It refuses a folder's policy that differs from the cluster's in more than
// the serial: this command puts no edited policy in force. A higher serial is from an earlier, interrupted call.
func resigned(d *ownerdir.Dir, have *v1alpha1.AttestationPolicy) ([]byte, error) {
	text, p, _, err := policies.FolderPolicy(d)
	if err != nil {
		return nil, err
	}
	same, err := policyfile.SameRules(text, []byte(have.Spec.Policy))
	if err != nil {
		return nil, err
	}
	if !same {
		return nil, problem.WithRemedy(fmt.Errorf("%s differs from the cluster's policy", d.File(ownerdir.PolicyFile)), "Run muster policy apply first, if you have finished editing it, or undo what you have edited.")
	}
	signed, err := policies.SignedSerial(d, have)
	if err != nil {
		return nil, err
	}
	if p.Serial() > signed {
		return text, nil
	}
	return policyfile.SetSerial(text, signed+1)
}

// finishOwnerKey makes the services, and then the folder, accept only the new key.
func finishOwnerKey(ctx context.Context, cfg OwnerKeyConfig) error {
	r, err := cfg.Dir.KeyRotation()
	if err != nil {
		return err
	}
	kube, err := access.Connect(cfg.Dir)
	if err != nil {
		return err
	}
	if err := recovery.RecordState(ctx, cfg.Dir, kube); err != nil { // so that known.json has no policy of the old key
		return err
	}
	if err := cfg.Services.Accept(ctx, attest.OwnerKeys{r.Signs}); err != nil {
		return err
	}
	cfg.Report("the services accept only the new key")
	kept, err := cfg.Dir.RetireKey()
	if err == nil && kept != "" {
		cfg.Report("the old key is kept in " + cfg.Dir.File(kept) + ", for backups that are encrypted to it")
	}
	return err
}

// ServiceKeys changes the owner's keys of Muster's services in the cluster: an upgrade of the chart that changes nothing else.
type ServiceKeys struct{ install.UpgradeConfig }

// Check implements [OwnerKeyServices].
func (s ServiceKeys) Check(ctx context.Context, keys attest.OwnerKeys) error {
	s.OwnerKeys = keys
	plan, err := install.PlanUpgrade(ctx, s.UpgradeConfig)
	if err != nil {
		return err
	}
	if plan.Chart.From != plan.Chart.To || len(plan.Definitions) > 0 {
		return problem.WithRemedy(fmt.Errorf("the cluster runs the chart %s, but this program has %s", plan.Chart.From, plan.Chart.To), "Run muster upgrade first, so that this command changes only the keys.")
	}
	return nil
}

// Accept implements [OwnerKeyServices].
func (s ServiceKeys) Accept(ctx context.Context, keys attest.OwnerKeys) error {
	s.OwnerKeys = keys
	_, err := install.Upgrade(ctx, s.UpgradeConfig)
	return err
}
