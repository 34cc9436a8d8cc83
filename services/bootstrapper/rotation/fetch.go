package rotation

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/services/bootstrapper/bootsecret"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/tpm"
)

const (
	// dialTime bounds a connection, callTime a whole call with both sides' quotes and joinservice's check of this boot.
	dialTime, callTime = 10 * time.Second, time.Minute
)

// Peers fetches keys from other control planes. All fields are required.
type Peers struct {
	Root     string
	Image    *metadata.Image
	Metadata func() (*metadata.Machine, error)
	Journal  func() (journal.Record, error)
	// TPM is the machine's TPM. Attester makes evidence of the purpose machine.
	TPM      discovery.PCRReader
	Attester attest.Attester
	// NewVerifier returns a verifier that trusts the roots.
	NewVerifier func(roots []*x509.Certificate) (attest.Verifier, error)
	// Addresses are those of the other control planes.
	Addresses func(ctx context.Context) ([]netip.Addr, error)
	// Unit starts and stops units of the machine, as [machine.Machine] does.
	Unit func(ctx context.Context, verb, unit string) error
	Log  *slog.Logger
}

// Fetch asks one control plane after another for a key, each in an attested session: it must be locked to this cluster, and the owner's policy must list it
// (A7).
func (p Peers) Fetch(ctx context.Context, key clusterinfo.RotatedKey, id string) ([]byte, error) {
	rec, err := p.Journal()
	if err != nil {
		return nil, err
	}
	meta, err := p.Metadata()
	if err != nil {
		return nil, err
	}
	addresses, err := p.Addresses(ctx)
	if err != nil {
		return nil, err
	}
	// The endpoints in the metadata may be of a load balancer: they are asked after those at the addresses.
	var order discovery.Order
	if err := order.Update(ctx, meta, addresses, p.Log); err != nil {
		return nil, err
	}
	if len(order.List()) == 0 {
		return nil, errors.New("there is no other control plane")
	}
	var failed error
	for _, e := range order.List() {
		content, err := p.from(ctx, e, rec, key, id)
		if err == nil {
			return content, nil
		}
		failed = errors.Join(failed, fmt.Errorf("%s: %w", e, err))
	}
	return nil, failed
}

func (p Peers) from(ctx context.Context, endpoint string, rec journal.Record, key clusterinfo.RotatedKey, id string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	bank, err := tpm.ParseBank(p.Image.TPM.Bank)
	if err != nil {
		return nil, err
	}
	owner := discovery.OwnerKeys(p.Image, rec)
	known, err := discovery.Recall(p.Root, rec.Policy, owner)
	if err != nil {
		return nil, err
	}
	secret, err := bootsecret.Load(p.Root)
	if err != nil {
		return nil, err
	}
	dialing, stop := context.WithTimeout(ctx, dialTime)
	defer stop()
	first, err := discovery.Dial(dialing, endpoint)
	if err != nil {
		return nil, err
	}
	defer first.Close()
	session, err := discovery.Open(ctx, discovery.SessionConfig{
		Attester: p.Attester, Lock: attest.LockedTo([32]byte(rec.ClusterID)), Dial: dialTime, Log: p.Log,
		Verification: discovery.Verification{
			OwnerKeys: owner, NoOwnerKey: p.Image.NoOwnerKey, Lowest: p.Image.LowestPolicySerial, EKRoots: p.Image.EKRoots, Bank: bank, PCRs: p.TPM, NewVerifier: p.NewVerifier,
			// The attester keeps the newest policy: this process only compares.
			Newest: func(policy journal.Policy, owner attest.OwnerKeys, _ bool) error {
				return discovery.NotOlder(known, policy, owner)
			},
		},
	}, endpoint, first)
	if err != nil {
		return nil, err
	}
	defer session.Close()
	var resp *joinv1.GetRotatedKeyResponse
	err = p.withoutKubelet(ctx, func() (err error) {
		resp, err = session.GetRotatedKey(ctx, &joinv1.GetRotatedKeyRequest{NodeName: rec.NodeName, BootSecret: secret.Expose(), Key: string(key), Id: id}) // J11
		return err
	})
	if err != nil {
		return nil, err
	}
	return resp.GetContent(), nil
}

// withoutKubelet stops the kubelet while ask runs, at most for [callTime]: static pods run on, and the Node stays Ready for 40 s. If no joinservice
// has seen the previous boot end (J11), for example after a reboot with a plain disk or after a recovery, it watches the node's Lease. A renewal now
// would be by the kubelet of another machine, which a copy can't stop.
func (p Peers) withoutKubelet(ctx context.Context, ask func() error) error {
	if err := p.Unit(ctx, "stop", machine.UnitKubelet); err != nil {
		return fmt.Errorf("%s: %w", machine.UnitKubelet, err)
	}
	err := ask()
	if started := p.Unit(context.WithoutCancel(ctx), "start", machine.UnitKubelet); started != nil {
		err = errors.Join(err, fmt.Errorf("%s: %w", machine.UnitKubelet, started))
	}
	return err
}
