package policies

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/peerdial"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/explain"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// askTimeout bounds the exchange with one waiting machine, askAtOnce how many are asked at the same time.
	askTimeout = 15 * time.Second
	askAtOnce  = 16
	// approvePoll is how often [Approver.Await] reads who waits. joinservice writes it every 5 s.
	approvePoll = 3 * time.Second
	// bareList is the policy's list of machines whose TPM has no EK certificate.
	bareList = "tpm2.bareMachineIds"
)

// Candidate is a waiting machine, as the owner sees it before the approval.
type Candidate struct {
	// Waiting is the cluster's record of the machine. If Verified is set, Endorsement and the fields after it are this program's own findings.
	clusterapi.Waiting
	// Endpoint is the machine's address for this program's own verification.
	Endpoint string `json:"endpoint,omitempty"`
	// Verified reports that this program has verified the machine's evidence itself, in a session of its own.
	Verified bool `json:"verified"`
	// Drivers are those that its firmware has loaded from elsewhere; only if Verified.
	Drivers []string `json:"drivers,omitempty"`
	// Problem is why the machine can't be approved; nil: it can.
	Problem *problem.Problem `json:"problem,omitempty"`

	err error // the cause whose text Problem shows
}

// refuse notes why the machine can't be approved.
func (c *Candidate) refuse(err error) {
	p := problem.Explain(err)
	c.err, c.Problem = err, &p
}

// ApproveConfig configures an [Approver]. The zero value trusts nothing that this program has not verified itself.
type ApproveConfig struct {
	// TrustCluster accepts the cluster's record of a machine that this program can't reach.
	TrustCluster bool
	// BareEK also approves machines with the endorsement bare-ek that were not named by their ID.
	BareEK bool
	// AnyAccount also approves machines of a cloud that are not named, and that could be in another customer's account.
	AnyAccount bool
	// AnyTPM also approves machines that are not named, and whose TPM any buyer of such a TPM could own.
	AnyTPM bool
	// Port is that of waiting machines; 0: 9000. DialContext opens connections to them; nil for a [net.Dialer].
	Port        int
	DialContext func(ctx context.Context, network, addr string) (net.Conn, error)
}

// Approver lists machines in the signed policy that meet all its other rules.
type Approver struct {
	ApproveConfig
	dir       *ownerdir.Dir
	kube      *clusterapi.Client
	policy    *attest.Policy
	clusterID [32]byte
	unsent    []policyfile.Listing
	text      []byte // of the folder's policy
	inForce   []byte // the text of the cluster's
	// former maps machines that were or are in the cluster to what the owner did with them.
	former map[string]string
}

// NewApprover returns an Approver for the cluster of an owner's folder. The folder's policy must be the cluster's, or have
// only more listed machines, by an approval that was interrupted.
func NewApprover(ctx context.Context, d *ownerdir.Dir, cfg ApproveConfig) (*Approver, error) {
	kube, err := access.Connect(d)
	if err != nil {
		return nil, err
	}
	id, err := access.FolderCluster(d)
	if err != nil {
		return nil, err
	}
	if cfg.Port == 0 {
		cfg.Port = 9000
	}
	a := &Approver{ApproveConfig: cfg, dir: d, kube: kube, clusterID: id}
	return a, a.load(ctx)
}

// remember reads which machines were or are in the cluster. If such a machine is not listed, the owner has removed it from
// the list, or it never was there.
func (a *Approver) remember(ctx context.Context) error {
	known, err := a.dir.Known()
	if err != nil {
		return err
	}
	now, err := access.ReadState(ctx, a.kube)
	if err != nil {
		return err
	}
	a.former = map[string]string{}
	note := func(machine, what string) {
		if a.former[machine] == "" {
			a.former[machine] = what
		}
	}
	for _, k := range []*ownerdir.Known{now, known} {
		for _, id := range k.BannedMachines {
			note(id, "it was banned")
		}
	}
	for name, n := range now.Nodes {
		note(n.MachineID, "the cluster has it as "+problem.Printable(name))
	}
	for _, k := range []*ownerdir.Known{now, known, known.Keep(now)} {
		for _, d := range k.Disks {
			note(d.MachineID, "it was removed from the cluster, or replaced")
		}
		for _, id := range k.Former {
			note(id, "it was removed from the cluster, or replaced")
		}
	}
	return nil
}

// load reads the folder's policy, and compares it with the cluster's.
func (a *Approver) load(ctx context.Context) error {
	text, p, json, err := FolderPolicy(a.dir)
	if err != nil {
		return err
	}
	have, err := a.kube.Policy(ctx)
	if err != nil {
		return err
	}
	public, err := a.dir.OwnerKeys()
	if err != nil {
		return err
	}
	if _, err := OpenPolicy(have, public); err != nil {
		return fmt.Errorf("the cluster's policy: %w", err)
	}
	a.policy, a.text, a.inForce, a.unsent = p, text, []byte(have.Spec.Policy), nil
	if have.Spec.Policy == string(json) {
		return nil
	}
	more, only, err := policyfile.MoreMachines([]byte(have.Spec.Policy), json)
	if err != nil {
		return err
	}
	if !only {
		return problem.WithRemedy(fmt.Errorf("%s is not the policy that the cluster has, so no machine is listed in it", a.dir.File(ownerdir.PolicyFile)),
			"Run muster policy apply first, if you have finished editing it, or undo what you have edited. Nothing was changed.")
	}
	a.unsent = more
	return nil
}

// Unsent returns the machines that only the folder's policy lists, because an approval was interrupted.
func (a *Approver) Unsent() []policyfile.Listing { return a.unsent }

// Candidates returns the waiting machines, oldest first. It connects to and verifies those that only lack an entry in a list
// of the policy.
func (a *Approver) Candidates(ctx context.Context) ([]Candidate, error) {
	all, err := a.kube.Waiting(ctx)
	if err == nil {
		err = a.remember(ctx)
	}
	if err != nil {
		return nil, err
	}
	out := make([]Candidate, len(all))
	var wg sync.WaitGroup
	turns := make(chan struct{}, askAtOnce)
	for i, w := range all {
		out[i] = Candidate{Waiting: w}
		wg.Go(func() {
			turns <- struct{}{}
			defer func() { <-turns }()
			a.examine(ctx, &out[i], false)
		})
	}
	wg.Wait()
	return out, ctx.Err()
}

// Machine returns the waiting machine with that ID, which the owner has named: NOT_ENROLLED if it does not wait.
func (a *Approver) Machine(ctx context.Context, id attest.MachineID) (Candidate, error) {
	w, err := waitingEntry(ctx, a.kube, id)
	if err != nil {
		return Candidate{}, err
	}
	c := Candidate{Waiting: w}
	a.examine(ctx, &c, true)
	return c, nil
}

// Host returns the waiting machine at HOST:PORT. The cluster's list of waiting machines is not needed.
func (a *Approver) Host(ctx context.Context, addr string) (Candidate, error) {
	c := Candidate{Endpoint: addr}
	if err := a.remember(ctx); err != nil {
		return c, err
	}
	claims, err := a.ask(ctx, addr)
	if err != nil {
		return c, err
	}
	c.Machine, c.Verified = claims.Machine().String(), true
	a.judge(&c, claims, false)
	return c, nil
}

// examine completes a candidate of the cluster's list. named reports that the owner has named its ID.
func (a *Approver) examine(ctx context.Context, c *Candidate, named bool) {
	id, err := attest.ParseMachineID(c.Machine)
	ip, aerr := netip.ParseAddr(c.Address)
	if aerr == nil {
		c.Endpoint = netip.AddrPortFrom(ip.Unmap(), uint16(a.Port)).String()
	}
	switch {
	case err != nil:
		c.refuse(fmt.Errorf("its entry in the cluster is malformed: %w", err))
		return
	case c.List == "":
		c.refuse(problem.WithRemedy(fmt.Errorf("it was refused with %s, and no list of the policy is the cause", c.Reason), c.Remedy))
		return
	case aerr != nil:
		err = fmt.Errorf("the cluster's record has no usable address of it: %w", aerr)
	default:
		var claims attest.Claims
		if claims, err = a.ask(ctx, c.Endpoint); err == nil && claims.Machine() != id {
			err = attest.Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "at %s is machine %s, but the cluster's record has machine %s there", c.Endpoint, claims.Machine(), id)
			c.refuse(problem.WithRemedy(err, "Either another machine has the address now, or the cluster's record is wrong: don't approve this ID. muster approve "+ip.String()+" shows the machine that is there."))
			return
		}
		if err == nil {
			c.Verified = true
			a.judge(c, claims, named)
			return
		}
	}
	if _, refused := errors.AsType[*attest.Refusal](err); refused {
		c.refuse(fmt.Errorf("%s: %w", c.Endpoint, err))
		return
	}
	if !a.TrustCluster {
		c.refuse(problem.WithRemedy(fmt.Errorf("this computer can't verify it: %w", err), "Make port 9000 of the machine reachable from here. Or repeat the command with --trust-cluster: then the cluster's record of the machine is believed, which an administrator of the cluster can write."))
		return
	}
	if c.Differs != "" {
		a.booted(c, errors.New(c.Differs))
		return
	}
	if err := a.open(c.List); err != nil {
		c.refuse(err)
		return
	}
	a.refuseUnnamed(c, named, nil)
}

// judge appraises what this program has verified.
func (a *Approver) judge(c *Candidate, claims attest.Claims, named bool) {
	c.Endorsement, c.Instance, c.Image, c.Class, c.Differs = claims.Endorsement(), "", "", "", ""
	if i := claims.Instance(); i.Provider != "" {
		c.Instance = problem.Printable(i.String())
	}
	for _, found := range a.policy.Compare(claims) {
		if found.Kind == "image" {
			c.Image = found.Name
		} else {
			c.Class = found.Name
		}
	}
	if fw, err := claims.Firmware(); err == nil {
		for _, e := range fw.Drivers {
			c.Drivers = append(c.Drivers, problem.Printable(fmt.Sprintf("PCR %d %s %q", e.PCR, e.Type, e.Text)))
		}
	}
	var err error
	if c.List, err = a.policy.AppraiseAsListed(claims, attest.Unlocked(), attest.LockedTo(a.clusterID)); err == nil {
		err = a.policy.CheckHardware(claims)
	}
	if err != nil {
		c.Differs = problem.Printable(explain.Words(err))
		a.booted(c, err)
		return
	}
	if c.List == "" {
		c.refuse(problem.WithRemedy(errors.New("the policy accepts it already"), "It joins with its next attempt. If it does not: muster status --endpoint "+c.Endpoint+"."))
		return
	}
	a.refuseUnnamed(c, named, claims.Root())
}

// booted refuses a machine because of its measurements, which no approval changes.
func (a *Approver) booted(c *Candidate, err error) {
	c.refuse(problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "the policy would refuse it even if it were listed: %w", err),
		"No flag changes that. muster explain "+c.Endpoint+" shows what differs. "+remedyOf(err)))
}

// remedyOf returns the remedy for a refusal that an approval cannot resolve. The general texts of these reasons also cover
// machines that an approval can admit.
func remedyOf(err error) string {
	if own := problem.Remedy(err); own != "" {
		return own
	}
	switch attest.ReasonOf(err) {
	case attestv1.Reason_REASON_POLICY_REFUSED:
		return "Your new firmware: `muster policy add-class NAME --from HOST`; new image: `muster policy add-image FILE`; then `muster policy apply`. Otherwise don't trust it until you know why."
	case attestv1.Reason_REASON_EK_UNTRUSTED:
		return "`muster verify HOST` shows who has certified its TPM. If the policy revokes that, keep the machine out. Otherwise docs/endorsements.md says which authorities a policy lists."
	default:
		return problem.Explain(err).Remedy
	}
}

// refuseUnnamed refuses three kinds of machines unless the owner has named their IDs: a machine whose TPM has no EK certificate; one whose authority
// also certifies machines of other people; one that is or was in the cluster and is in no list. Only the ID shows that such a machine is the owner's.
// root certifies its endorsement key; nil if it is not known.
func (a *Approver) refuseUnnamed(c *Candidate, named bool, root *x509.Certificate) {
	if named {
		return
	}
	if why := a.former[c.Machine]; why != "" {
		c.refuse(problem.WithRemedy(errors.New(why+", and no list of the policy has its ID"), "If you trust the machine, name it: muster approve "+c.Machine+"."))
		return
	}
	if c.List == bareList && !a.BareEK {
		c.refuse(problem.WithRemedy(errors.New("its TPM has no EK certificate, so any program at its address could show this evidence"),
			"Compare its ID with the one on the machine's own console (this machine has the ID …), then run muster approve "+c.Machine+". With --bare-ek all such machines are approved unseen."))
		return
	}
	others, err := policyfile.OthersOf(a.text, c.List, root)
	switch {
	case err != nil:
		c.refuse(err)
	case others == policyfile.OthersTPMBuyers && !a.AnyTPM:
		c.refuse(problem.WithRemedy(errors.New("a root in the policy's ekRoots certifies all TPMs of a vendor, so any buyer of such a TPM could own this machine"),
			"Compare its ID with the one on the machine's own console (this machine has the ID …), then run muster approve "+c.Machine+". With --any-tpm all such machines are approved unseen."))
	case others == policyfile.OthersCloudCustomers && !a.AnyAccount:
		c.refuse(problem.WithRemedy(errors.New("its cloud endorses the machines of all customers alike, so it could be in another account"),
			"Compare its ID with the one on the console that the cloud shows you of your machine, then run muster approve "+c.Machine+". With --any-account all such machines are approved unseen."))
	}
}

// ask runs the exchange of attested TLS with a machine, and returns its claims, also if the policy refuses them.
func (a *Approver) ask(ctx context.Context, addr string) (attest.Claims, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	s, err := peerdial.Open(peerdial.Target{
		Addr: addr, Purpose: attest.PurposeMachine, Policy: a.policy, DialContext: a.DialContext,
		Locks: []attest.Lock{attest.Unlocked(), attest.LockedTo(a.clusterID)},
	})
	if err != nil {
		return attest.Claims{}, err
	}
	defer func() { _ = s.Close() }()
	_, err = s.Exchange(ctx)
	if r, ok := s.Result(); ok { // also if refused: the caller appraises it
		return r.Claims, nil
	}
	if err == nil {
		err = errors.New("it gave no evidence")
	}
	return attest.Claims{}, err
}

// Approve lists machines in the policy, signs it with the next serial, and puts it in force. Nothing is changed if one of
// them has a Problem. It first sends machines that an interrupted approval left unsent.
func (a *Approver) Approve(ctx context.Context, machines []Candidate, report func(string)) error {
	var add []policyfile.Listing
	for _, c := range machines {
		if c.Problem != nil {
			return problem.WithRemedy(fmt.Errorf("machine %s is not approved: %w", c.Machine, c.err), problem.Remedy(c.err))
		}
		id, err := attest.ParseMachineID(c.Machine)
		if err != nil {
			return err
		}
		add = append(add, policyfile.Listing{Field: c.List, Machine: id})
	}
	for _, batch := range [][]policyfile.Listing{a.unsent, add} {
		if len(batch) == 0 {
			continue
		}
		if err := a.list(ctx, batch, report); err != nil {
			return err
		}
	}
	return a.load(ctx)
}

// Await approves up to n machines in the network from as they come, until ctx ends; a zero from is any network. approved is called with
// each batch after the policy that lists it was signed and sent. Await returns how many were approved, and the error that ended it early.
func (a *Approver) Await(ctx context.Context, n int, from netip.Prefix, report func(string), approved func([]Candidate)) (int, error) {
	done, reported := 0, map[string]string{}
	for {
		all, err := a.Candidates(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return done, nil //nolint:nilerr // its time is over
			}
			return done, err
		}
		var batch []Candidate
		for _, c := range Within(all, from) {
			if c.Problem == nil && len(batch) < n-done {
				batch = append(batch, c)
			} else if c.Problem != nil && reported[c.Machine] != c.Problem.Message {
				reported[c.Machine] = c.Problem.Message
				report(fmt.Sprintf("machine %s is left out: %s", c.Machine, c.Problem.Message))
			}
		}
		if len(batch) > 0 {
			if err := a.Approve(context.WithoutCancel(ctx), batch, report); err != nil {
				return done, err
			}
			approved(batch)
			done += len(batch)
		}
		if done >= n || retry.Wait(ctx, approvePoll) != nil {
			return done, nil //nolint:nilerr // its time is over
		}
	}
}

// Within returns the candidates in a network; a zero network has all.
func Within(all []Candidate, from netip.Prefix) (out []Candidate) {
	for _, c := range all {
		ip, err := netip.ParseAddr(c.Address)
		if !from.IsValid() || err == nil && from.Contains(ip.Unmap()) {
			out = append(out, c)
		}
	}
	return out
}

// Booted describes what the machine booted, compared with the policy.
func (c Candidate) Booted() string {
	switch {
	case c.Differs != "":
		return c.Differs
	case c.Image == "":
		return "not known"
	}
	parts := []string{"image " + c.Image}
	if c.Class != "" {
		parts = append(parts, "firmware "+c.Class)
	}
	if len(c.Drivers) > 0 {
		parts = append(parts, "drivers: "+strings.Join(c.Drivers, ", "))
	}
	return strings.Join(parts, ", ")
}

// Serial returns the serial of the folder's policy.
func (a *Approver) Serial() uint64 { return a.policy.Serial() }

// WaitingMachine returns the cluster's record of a waiting machine, which is unverified; NOT_ENROLLED if there is none.
func WaitingMachine(ctx context.Context, d *ownerdir.Dir, id attest.MachineID) (clusterapi.Waiting, error) {
	kube, err := access.Connect(d)
	if err != nil {
		return clusterapi.Waiting{}, err
	}
	return waitingEntry(ctx, kube, id)
}

func waitingEntry(ctx context.Context, kube *clusterapi.Client, id attest.MachineID) (clusterapi.Waiting, error) {
	all, err := kube.Waiting(ctx)
	if err != nil {
		return clusterapi.Waiting{}, err
	}
	for _, w := range all {
		if w.Machine == id.String() {
			return w, nil
		}
	}
	return clusterapi.Waiting{}, problem.WithRemedy(attest.Refuse(attestv1.Reason_REASON_NOT_ENROLLED, "machine %s is not waiting", id),
		"muster approve shows who waits. joinservice lists a machine some seconds after it was refused, for an hour. If the list has no room, name the machine by its address: muster approve HOST.")
}
