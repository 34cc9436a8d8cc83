package access

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/peerdial"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// orderTimeout limits one call, so that an address that does not answer leaves time for the others.
	orderTimeout = 20 * time.Second
	// orderPoll is the pause between two calls if the joinservice names no usable one.
	orderPoll = 2 * time.Second
)

// orderCertificate has a control plane sign the request by an order with the owner's key (J9). It appraises each
// joinservice before it sends the order (A6, A7).
func orderCertificate(ctx context.Context, cfg RenewConfig, h *Holder, request []byte) (*joinv1.RenewAdministratorResponse, error) {
	if h.Old.Subject.CommonName != ownerorder.Administrator {
		return nil, problem.WithRemedy(fmt.Errorf("the kubeconfig is for %s, and the owner's order is for %s alone", h.Old.Subject, ownerorder.Administrator),
			"Copy /etc/kubernetes/admin.conf from a control plane to "+cfg.Dir.File(ownerdir.AdminConf)+", mode 0600.")
	}
	o := orderer{RenewConfig: cfg, order: ownerorder.Order{Request: request}, addrs: cfg.Joinservices}
	if err := o.load(); err != nil {
		return nil, err
	}
	var out *joinv1.RenewAdministratorResponse
	err := progress.Again(ctx, cfg.Report, func() (err error) {
		out, err = o.anywhere(ctx)
		return err
	})
	if err != nil {
		return nil, o.explain(err)
	}
	return out, nil
}

type orderer struct {
	RenewConfig

	target peerdial.Target
	order  ownerorder.Order
	addrs  []string
}

func (o *orderer) load() error {
	c := o.Dir.Cluster()
	id, err := FolderCluster(o.Dir)
	if err != nil {
		return err
	}
	o.order.Cluster = id
	text, err := o.Dir.Read(ownerdir.PolicyFile)
	if err != nil {
		return err
	}
	policy, _, err := policyfile.Parse(text)
	if err != nil {
		return fmt.Errorf("%s: %w", o.Dir.File(ownerdir.PolicyFile), err)
	}
	o.target = peerdial.Target{Purpose: attest.PurposeJoinservice, Policy: policy, Locks: []attest.Lock{attest.LockedTo(o.order.Cluster)}, DialContext: o.DialContext}
	if len(o.addrs) == 0 {
		o.addrs = joinservices(c)
	}
	return nil
}

// joinservices derives from the folder where joinservices may answer: on the machine that was initialized, and beside
// the API server.
func joinservices(c ownerdir.Cluster) []string {
	var hosts, out []string
	if c.FirstMachine != nil {
		hosts = append(hosts, c.FirstMachine.Addresses...)
	}
	for _, endpoint := range []string{c.Endpoint, c.ControlPlaneEndpoint} {
		if host, _, err := net.SplitHostPort(endpoint); err == nil {
			hosts = append(hosts, host)
		}
	}
	for _, host := range hosts {
		if addr := net.JoinHostPort(host, strconv.Itoa(clusterapi.Values{}.JoinPort())); !slices.Contains(out, addr) {
			out = append(out, addr)
		}
	}
	return out
}

// anywhere tries the joinservices one after another. The decision of an accepted one is final; else the error names
// all, since a refused one may be the one that was meant.
func (o *orderer) anywhere(ctx context.Context) (*joinv1.RenewAdministratorResponse, error) {
	var errs error
	for _, addr := range o.addrs {
		out, err := o.at(ctx, addr)
		if err == nil {
			return out, nil
		}
		err = fmt.Errorf("%s: %w", addr, err)
		if problem.Final(err) && connect.IsWireError(err) || ctx.Err() != nil {
			return nil, err
		}
		errs = errors.Join(errs, err)
	}
	return nil, errs
}

// at sends the order to one joinservice until it has the certificate.
func (o *orderer) at(ctx context.Context, addr string) (*joinv1.RenewAdministratorResponse, error) {
	target := o.target
	target.Addr = addr
	s, err := peerdial.Open(target)
	if err != nil {
		return nil, err
	}
	defer func() { _ = s.Close() }()
	peer, err := o.appraise(ctx, s)
	if err != nil {
		return nil, err
	}
	o.Report.Update(fmt.Sprintf("appraised: control plane %s at %s", peer.Machine(), addr))
	client := joinv1connect.NewJoinServiceClient(s.Client(), s.URL(), rpc.ClientOptions()...)
	for filed := false; ; filed = true {
		resp, err := o.call(ctx, client)
		if err == nil && len(resp.GetCertificate()) > 0 {
			return resp, nil
		}
		if err == nil {
			o.Report.Update("ordered: waiting until a control plane has signed")
			pause := resp.GetRetryAfter().AsDuration()
			if pause <= 0 || pause > time.Minute {
				pause = orderPoll
			}
			err = retry.Wait(ctx, pause)
		}
		switch {
		case err != nil && filed && ctx.Err() != nil:
			return nil, fmt.Errorf("%w: %w", errUnsigned, context.Cause(ctx))
		case err != nil:
			return nil, err
		}
	}
}

var errUnsigned = errors.New("the order is filed, and no control plane has signed it")

func (o *orderer) appraise(ctx context.Context, s *peerdial.Session) (attest.Peer, error) {
	ctx, cancel := context.WithTimeout(ctx, orderTimeout)
	defer cancel()
	return s.Exchange(ctx)
}

func (o *orderer) call(ctx context.Context, c joinv1connect.JoinServiceClient) (*joinv1.RenewAdministratorResponse, error) {
	// It sends the same order each time, so that the cluster has one request for it; it signs a new one when the
	// order will soon be too old.
	if now := o.Now(); now.Sub(o.order.At) > ownerorder.MaxAge/2 {
		o.order.At = now.Truncate(time.Second)
	}
	key, err := o.Dir.OwnerKey()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, orderTimeout)
	defer cancel()
	return c.RenewAdministrator(ctx, &joinv1.RenewAdministratorRequest{Order: o.order.Sign(key).Wire()})
}

// explain returns the remedy where a refusal's general remedy cannot help.
func (o *orderer) explain(err error) error {
	tried := strings.Join(o.addrs, ", ")
	switch reason := rpc.ReasonFrom(err); {
	case reason == attestv1.Reason_REASON_CLOCK_SKEW:
		return problem.WithRemedy(err, "Compare this computer's clock and the control planes' with the right time, set the one that is wrong, and run the same command again.")
	case reason == attestv1.Reason_REASON_CSR_INVALID:
		return problem.WithRemedy(err, "The joinservice has accepted the order, and the control plane's machine has not: the text says why. Its image has to name the public key of this folder in ownerKeys: `muster key public FILE`, with the folder's owner.key, prints it.")
	case reason == attestv1.Reason_REASON_LOCK_FOREIGN, reason == attestv1.Reason_REASON_SERVER_NOT_LISTED:
		return problem.WithRemedy(err, "Nothing was sent. Name a control plane of this cluster by --joinservice HOST:PORT; "+o.Dir.File(ownerdir.PolicyFile)+" lists their machine IDs.")
	case errors.Is(err, errUnsigned):
		return problem.WithRemedy(err, "muster-renewal has to run on a control plane, of this version of Muster or a newer one; its clock has to be right, and its image has to name the public key of this folder in ownerKeys: `muster key public FILE`, with the folder's owner.key, prints it. If all this is so, switch one control plane off and on: the unit starts anew. --timeout waits longer.")
	case connect.CodeOf(err) == connect.CodeUnimplemented:
		return problem.WithRemedy(err, "The joinservice there is of an older version of Muster, which takes no orders.")
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, context.DeadlineExceeded) && reason == attestv1.Reason_REASON_UNSPECIFIED:
		return problem.WithRemedy(err, "Tried: "+tried+". Name a control plane that runs by --joinservice HOST:PORT (the port is 30090 by default).")
	}
	return err
}
