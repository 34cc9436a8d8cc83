package install

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/peerdial"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	healthv1 "github.com/muster-k8s/muster/gen/grpc/health/v1"
	"github.com/muster-k8s/muster/gen/grpc/health/v1/healthv1connect"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// Deadlines of steps that wait for other programs. The error names what is missing.
const (
	apiTimeout         = 3 * time.Minute
	servicesTimeout    = 10 * time.Minute
	joinserviceTimeout = 3 * time.Minute
)

// compareStep comes before every change of an installed cluster: an older muster, or an older copy of the folder, changes nothing.
const compareStep = "compare the folder with the cluster"

// install installs Muster in the cluster. A repeated step recognizes its own work. In an installed cluster, it puts back what is missing of Muster's objects and
// services; enrollments and the policy stay as they are.
//
// The order matters: the first machine is enrolled before the chart's admission policies exist, because they would
// refuse its node's writes.
func (i *initializer) install(ctx context.Context) error {
	c := i.dir()
	kubeconfig, err := i.Dir.Read(ownerdir.AdminConf)
	if err != nil {
		return err
	}
	kube, err := clusterapi.Connect(kubeconfig)
	if err != nil {
		return err
	}
	m, hasPolicy := c.FirstMachine, false
	steps := []struct {
		name string
		do   func() (string, error)
	}{
		{"wait for the API server", func() (string, error) {
			ctx, cancel := deadline(ctx, apiTimeout, "the API server at "+c.ControlPlaneEndpoint+" did not become ready")
			defer cancel()
			return kube.Server(), kube.Reachable(ctx)
		}},
		{compareStep, func() (string, error) {
			if err := i.direction(kube); err != nil {
				return "", err
			}
			_, err := i.compare(ctx, kube, kube.PolicyIfDefined)
			return "", err
		}},
		{"record the existing nodes", func() (string, error) { return i.noteNodes(ctx, kube) }},
		{"apply the owner's manifests", func() (string, error) {
			return fmt.Sprintf("%d objects", len(i.Manifests)), kube.Apply(ctx, i.Manifests, i.Report.Update)
		}},
		{"define Muster's objects", func() (detail string, err error) {
			if detail, err = i.define(ctx, kube); err == nil {
				hasPolicy, err = i.compare(ctx, kube, kube.Policy)
			}
			return detail, err
		}},
		{"enroll the first machine", func() (string, error) { return m.NodeName, i.enroll(ctx, kube) }},
		{"set the policy", func() (_ string, err error) {
			if hasPolicy {
				return fmt.Sprintf("serial %d is there", i.policy.Serial()), nil
			}
			if hasPolicy, err = i.setPolicy(ctx, kube); !hasPolicy {
				return "none", err
			}
			return fmt.Sprintf("serial %d", i.policy.Serial()), err
		}},
		{"install Muster's services", func() (string, error) { return i.chart(ctx, kube) }},
		{"wait for Muster's services", func() (string, error) {
			if !hasPolicy { // A3: they wait for one
				return "", i.noPolicy()
			}
			ctx, cancel := deadline(ctx, servicesTimeout, "its pods did not become ready")
			defer cancel()
			return "", kube.ServicesReady(ctx, i.Report.Update)
		}},
		{"verify the joinservice", func() (string, error) {
			if c.Stage == ownerdir.StageInstalled {
				return i.anyJoinservice(ctx, kube)
			}
			return i.joinservice(ctx)
		}},
	}
	for _, s := range steps {
		if s.name == "apply the owner's manifests" && len(i.Manifests) == 0 {
			continue
		}
		if s.name == compareStep && c.Stage != ownerdir.StageInstalled {
			continue // nothing to compare with yet; an interrupted first run is compared after the definitions
		}
		if s.name == "record the existing nodes" && !c.Adopted {
			continue // it has only the first machine's node
		}
		if err := i.step(s.name, s.do); err != nil {
			return err
		}
	}
	c = i.dir()
	c.Stage = ownerdir.StageInstalled
	return i.Dir.Save(c)
}

// deadline limits a step; the error names what is missing.
func deadline(ctx context.Context, d time.Duration, what string) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, d, fmt.Errorf("%s within %s: %w", what, d, context.DeadlineExceeded))
}

// noteNodes records the nodes of an adopted cluster, once and before any change. So a resumed run does not include a
// node that was added in between (J4).
func (i *initializer) noteNodes(ctx context.Context, kube *clusterapi.Client) (string, error) {
	c := i.dir()
	if c.NodesBefore == nil && c.Stage != ownerdir.StageInstalled {
		names, err := kube.Present(ctx)
		if err != nil {
			return "", err
		}
		c.NodesBefore = slices.DeleteFunc(names, func(name string) bool { return name == c.FirstMachine.NodeName })
		if err := i.Dir.Save(c); err != nil {
			return "", err
		}
	}
	return fmt.Sprintf("%d besides the first machine", len(c.NodesBefore)), nil
}

// direction refuses a cluster whose services are of a newer version than this program.
func (i *initializer) direction(kube *clusterapi.Client) error {
	r, err := kube.Release(i.Log)
	if err == nil && r != nil {
		err = clusterapi.CheckDirection(r)
	}
	if errors.Is(err, clusterapi.ErrDowngrade) {
		err = problem.WithRemedy(err, "Muster's definitions and services were not changed. Use the muster of that version or a newer one.")
	}
	return err
}

// define writes the CRDs. It refuses to replace those of a newer version: data of newer services must stay readable.
func (i *initializer) define(ctx context.Context, kube *clusterapi.Client) (string, error) {
	if err := i.direction(kube); err != nil {
		return "", err
	}
	if err := kube.EnsureNamespace(ctx); err != nil {
		return "", err
	}
	objects, err := clusterapi.Definitions()
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%d definitions", len(objects)), kube.Apply(ctx, objects, i.Report.Update)
}

// enroll enrolls the first machine, and records that its node may write. In an installed cluster, it enrolls nothing.
func (i *initializer) enroll(ctx context.Context, kube *clusterapi.Client) error {
	c := i.dir()
	enroll, before := i.enrollFirst, c.NodesBefore
	if c.Stage == ownerdir.StageInstalled {
		enroll, before = i.keepFirst, nil
	}
	if err := enroll(ctx, kube); err != nil {
		return err
	}
	var others []string
	if c.Adopted {
		// All nodes from before Muster keep their access. After the installation, a Node that is not enrolled has no access.
		var err error
		if others, err = kube.Unattested(ctx, before); err != nil {
			return err
		}
		for _, name := range others {
			i.Report.Update(name + " keeps its access as a node, although its machine never attested")
		}
	}
	return kube.EnsureAccess(ctx, c.Adopted, c.FirstMachine.NodeName, others)
}

// enrollFirst records the machine that this owner appraised: its enrollment and its verdict.
func (i *initializer) enrollFirst(ctx context.Context, kube *clusterapi.Client) error {
	m := i.dir().FirstMachine
	for _, a := range m.Addresses {
		if ip, err := netip.ParseAddr(a); err != nil || !i.policy.AllowsAddress(ip) {
			err := attest.Refuse(attestv1.Reason_REASON_ADDRESS_REFUSED, "no network in the policy's nodeCidrs contains the machine's address %s", a)
			return problem.WithRemedy(err, "Add its network to nodeCidrs in "+i.Dir.File(ownerdir.PolicyFile)+" and run the command again, without --policy.")
		}
	}
	spec := v1alpha1.AttestedNodeSpec{MachineID: m.ID.String(), Role: v1alpha1.RoleControlPlane, DiskID: m.DiskID, Addresses: m.Addresses}
	salt, err := keys.ParseDiskSalt(m.DiskSalt)
	if err != nil {
		return problem.WithRemedy(fmt.Errorf("cluster.json: diskSalt: %w", err), "The disk of the first machine was erased, or an older version of muster started this init: initialize a new cluster in another --directory.")
	}
	if _, err := kube.Enroll(ctx, m.NodeName, spec, salt); err != nil {
		return err
	}
	appraised, err := time.Parse(time.RFC3339, m.Verdict.Time)
	if err != nil {
		return fmt.Errorf("cluster.json: %w", err)
	}
	return kube.RecordVerdict(ctx, m.NodeName, clusterapi.Verdict{
		Time: appraised, PolicySerial: m.Verdict.PolicySerial, EvidenceDigest: m.Verdict.EvidenceDigest,
		PCRs: m.Verdict.PCRs, AKName: m.Verdict.AKName, ResetCount: m.Verdict.ResetCount,
	})
}

// setPolicy reports whether it has set a policy.
func (i *initializer) setPolicy(ctx context.Context, kube *clusterapi.Client) (bool, error) {
	if i.dir().Stage == ownerdir.StageInstalled {
		return i.putBack(ctx, kube)
	}
	key, err := i.Dir.OwnerKey()
	if err != nil {
		return false, err
	}
	return true, policies.Put(ctx, i.Dir, kube, &v1alpha1.AttestationPolicy{}, attest.SignPolicy(key, i.json))
}

func (i *initializer) chart(ctx context.Context, kube *clusterapi.Client) (string, error) {
	public, err := i.Dir.OwnerKeys()
	if err != nil {
		return "", err
	}
	v := i.Values
	v.OwnerKeys = public.Strings()
	r, err := kube.InstallChart(ctx, v, i.Log)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("release %s, revision %d", r.Name, r.Version), nil
}

// joinservice waits until a joinservice answers on one of the first machine's addresses, and appraises it as a
// joining machine does.
func (i *initializer) joinservice(ctx context.Context) (string, error) {
	m := i.dir().FirstMachine
	return i.askAny(ctx, i.servers(m.ID, m.Addresses))
}

// askAny asks one after the other, until one answers. A server that is refused is not asked again; the others still are.
func (i *initializer) askAny(ctx context.Context, at []server) (addr string, err error) {
	ctx, cancel := deadline(ctx, joinserviceTimeout, "no joinservice answered")
	defer cancel()
	var refused []error
	err = i.retry(ctx, func() error {
		var waiting []server
		var last error
		for _, s := range at {
			err := i.askJoinservice(ctx, s.addr, s.machine)
			if err == nil {
				addr = s.addr
				return nil
			}
			err = fmt.Errorf("the joinservice at %s: %w", s.addr, err)
			if problem.Final(err) {
				refused = append(refused, err)
				continue
			}
			waiting, last = append(waiting, s), err
		}
		if at = waiting; len(at) == 0 {
			return errors.Join(refused...)
		}
		return last
	})
	if err != nil && len(at) > 0 { // also say which ones were refused
		err = errors.Join(append(refused, err)...)
	}
	return addr, err
}

func (i *initializer) askJoinservice(ctx context.Context, addr string, id attest.MachineID) error {
	// The services only answer a machine that is locked to this cluster.
	s, err := peerdial.Open(peerdial.Target{
		Addr: addr, Purpose: attest.PurposeJoinservice, Policy: i.policy, Locks: []attest.Lock{attest.LockedTo(i.clusterID)}, Only: &id, DialContext: i.DialContext,
	})
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }()
	resp, err := healthv1connect.NewHealthClient(s.Client(), s.URL(), rpc.ClientOptions()...).Check(ctx, &healthv1.HealthCheckRequest{})
	if err != nil {
		return err
	}
	if resp.GetStatus() != healthv1.HealthCheckResponse_SERVING {
		return fmt.Errorf("it is %s", resp.GetStatus())
	}
	return nil
}

// listFirst lists the first machine in the folder's policy. The policy is not signed yet, so its serial stays the same.
func (i *initializer) listFirst() error {
	m := i.dir().FirstMachine
	if m == nil {
		return policies.ErrNoFirst
	}
	if i.policy.MayServe(m.ID) == nil || i.dir().Stage == ownerdir.StageInstalled {
		return nil
	}
	text, err := i.Dir.Read(ownerdir.PolicyFile)
	if err != nil {
		return err
	}
	if text, err = policyfile.ListControlPlanes(text, i.policy.Serial(), []policyfile.ControlPlane{{Machine: m.ID, Name: m.NodeName}}, nil); err != nil {
		return err
	}
	if err := i.Dir.Write(ownerdir.PolicyFile, text); err != nil {
		return err
	}
	return i.load()
}
