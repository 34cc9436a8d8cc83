package discovery

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

// lookupTime bounds the look-ups of all names of one round together.
const lookupTime = 5 * time.Second

// lookupSRV is the method LookupSRV of [net.Resolver]: the records sorted by priority, and those of one priority randomly by weight (RFC 2782).
type lookupSRV func(ctx context.Context, service, proto, name string) (cname string, addrs []*net.SRV, err error)

// resolve returns the endpoints of all names, at most [metadata.MaxEndpoints] of each. An error, which wraps [ErrUnreachable], is of the names that could not
// be looked up, beside the endpoints of the others. DNS is not trusted: it names addresses to ask, as the metadata do.
func resolve(ctx context.Context, names []string, lookup lookupSRV) (out []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	for _, name := range names {
		found, ferr := lookupAll(ctx, name, lookup)
		if ferr != nil {
			err = errors.Join(err, fmt.Errorf("the joinservices of %s: %w", name, ferr))
		}
		out = append(out, found...)
	}
	if err != nil {
		err = fmt.Errorf("%w: %w", ErrUnreachable, err)
	}
	return out, err
}

// lookupAll returns the endpoints that the records of a name have. Records of the wrong form are left out.
func lookupAll(ctx context.Context, name string, lookup lookupSRV) (out []string, err error) {
	_, records, err := lookup(ctx, "", "", name+".") // the name itself, and none below the resolver's search domains
	for _, r := range records {                      // also beside an error: the resolver reports records that it has left out
		host := strings.ToLower(strings.TrimSuffix(r.Target, "."))
		if r.Port == 0 || !metadata.IsHost(host) { // also the target ".", for which there is no service (RFC 2782)
			continue
		}
		if out = append(out, net.JoinHostPort(host, strconv.Itoa(int(r.Port)))); len(out) == metadata.MaxEndpoints {
			break
		}
	}
	if len(out) > 0 {
		return out, nil
	}
	if err == nil {
		err = errors.New("no record names a host and a port")
	}
	return nil, err
}
