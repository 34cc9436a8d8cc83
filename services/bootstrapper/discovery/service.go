package discovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

// lookupTime bounds the look-ups of all names of one round together.
const lookupTime = 5 * time.Second

// lookupSRV is the method LookupSRV of [net.Resolver]: the records sorted by priority, and those of one priority randomly by weight (RFC 2782).
type lookupSRV func(ctx context.Context, service, proto, name string) (cname string, addrs []*net.SRV, err error)

// Resolve returns the metadata with joinservices in the place of each DNS name of SRV records, at most [metadata.MaxEndpoints] in all. It is called in each
// round of a discovery, so a record's time to live has no effect. If a look-up fails, the endpoints known from the rounds before stay: an outage of DNS must
// not cut off a node. Without those it is an error, which wraps [ErrUnreachable]. DNS is not trusted: it names addresses to ask, as the metadata do.
func Resolve(ctx context.Context, meta *metadata.Machine, known []string, log *slog.Logger) (*metadata.Machine, error) {
	return resolve(ctx, meta, known, net.DefaultResolver.LookupSRV, log)
}

func resolve(ctx context.Context, meta *metadata.Machine, known []string, lookup lookupSRV, log *slog.Logger) (*metadata.Machine, error) {
	if !slices.ContainsFunc(meta.JoinEndpoints, func(e string) bool { return strings.HasPrefix(e, metadata.ServicePrefix) }) {
		return meta, nil
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	out := *meta
	out.JoinEndpoints = nil
	var failed error
	for _, e := range meta.JoinEndpoints {
		name, ok := strings.CutPrefix(e, metadata.ServicePrefix)
		if !ok {
			out.JoinEndpoints = Merge(out.JoinEndpoints, append(out.JoinEndpoints, e))
			continue
		}
		found, err := lookupAll(ctx, name, lookup)
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("the joinservices of %s: %w", name, err))
		}
		out.JoinEndpoints = Merge(out.JoinEndpoints, append(out.JoinEndpoints, found...))
	}
	if failed != nil {
		out.JoinEndpoints = Merge(out.JoinEndpoints, append(out.JoinEndpoints, known...))
		if len(out.JoinEndpoints) == 0 {
			return nil, fmt.Errorf("%w: %w", ErrUnreachable, failed)
		}
		log.WarnContext(ctx, "joinservices could not be looked up; the known ones are asked", "err", failed)
	}
	out.JoinEndpoints = out.JoinEndpoints[:min(len(out.JoinEndpoints), metadata.MaxEndpoints)]
	return &out, nil
}

// lookupAll returns the endpoints that the records of a name have. Records of the wrong form are left out.
func lookupAll(ctx context.Context, name string, lookup lookupSRV) (out []string, err error) {
	_, records, err := lookup(ctx, "", "", name)
	for _, r := range records { // also beside an error: the resolver reports records that it has left out
		host := strings.ToLower(strings.TrimSuffix(r.Target, "."))
		if r.Port == 0 || !metadata.IsHost(host) { // also the target ".", for which there is no service (RFC 2782)
			continue
		}
		out = append(out, net.JoinHostPort(host, strconv.Itoa(int(r.Port))))
	}
	if len(out) > 0 {
		return out, nil
	}
	if err == nil {
		err = errors.New("no record names a host and a port")
	}
	return nil, err
}
