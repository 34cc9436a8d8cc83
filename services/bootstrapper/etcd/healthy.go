package etcd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Healthy returns an error unless the etcd at an address has its quorum, and each of its members is a voter that has started, has no alarm, and has
// caught up with the others. So one member can stop without harm to an etcd of three. The certificate authority is etcd's, PEM.
func Healthy(ctx context.Context, at netip.Addr, caCert, caKey []byte) error {
	c, err := connect(ctx, []netip.Addr{at}, caCert, caKey)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // an error has no consequence
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	list, err := c.MemberList(call) // answered with the quorum only
	if err != nil {
		return fmt.Errorf("etcd: list members: %w", err)
	}
	var bad []error
	for _, m := range list.Members {
		if err := healthy(ctx, m, caCert, caKey); err != nil {
			bad = append(bad, fmt.Errorf("etcd: member %s: %w", cmp.Or(m.GetName(), strings.Join(m.GetPeerURLs(), ", ")), err))
		}
	}
	return errors.Join(bad...)
}

// healthy asks one member.
func healthy(ctx context.Context, m *etcdserverpb.Member, caCert, caKey []byte) error {
	switch {
	case m.GetIsLearner():
		return errors.New("it is a learner, which has no vote")
	case len(m.GetClientURLs()) == 0: // a member names them when it starts
		return errors.New("it has never started")
	}
	c, err := dial(ctx, m.GetClientURLs(), caCert, caKey)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // an error has no consequence
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	st, err := c.Status(ctx, m.GetClientURLs()[0])
	switch {
	case err != nil:
		return fmt.Errorf("it does not answer: %w", err)
	case st.Header.GetMemberId() != m.GetID():
		return fmt.Errorf("member %x answers at %s", st.Header.GetMemberId(), m.GetClientURLs()[0])
	case len(st.Errors) > 0: // of its own, and all alarms
		return errors.New(strings.Join(st.Errors, ", "))
	}
	if _, err := c.Get(ctx, "/", clientv3.WithCountOnly()); err != nil { // answered by a member alone that has applied what the quorum has agreed on
		return fmt.Errorf("it is not up to date: %w", err)
	}
	return nil
}
