// Package discovery finds a joinservice and verifies it before a machine sends it a request.
//
// It is the first half of every call of a machine to its cluster: one of the endpoints in the metadata must answer, and the owner's policy must accept
// it. The callers then send their own requests: for a ticket to join, for the key of a disk, for a new verdict.
package discovery

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
)

// These are errors of a discovery that found no joinservice.
var (
	ErrNoJoinservice = errors.New("no joinservice is known yet")
	ErrUnreachable   = errors.New("no joinservice can be reached")
)

// maxDialPause bounds the pause while no joinservice answers, and after an answer by a peer that was not attested as a joinservice.
const maxDialPause = 5 * time.Second

// Pauses are the waits between the attempts of one series. The zero value is not useful.
type Pauses struct{ refused, dialing retry.Backoff }

// NewPauses returns pauses from least to most.
func NewPauses(least, most time.Duration) *Pauses {
	return &Pauses{
		refused: retry.Backoff{Min: least, Max: most},
		// A failed dial costs little: a machine that waits for its cluster to be made tries again soon.
		dialing: retry.Backoff{Min: least, Max: min(most, maxDialPause)},
	}
}

// Next returns the pause after an attempt that failed with err. It follows the server's hint in err, but only up to 5 s if the server has not proven
// what it is.
func (p *Pauses) Next(err error) time.Duration {
	// A server that hung up without a reason may have limits that other clients reach from this machine's address.
	hungUp := rpc.ReasonFrom(err) == attestv1.Reason_REASON_UNSPECIFIED && ReasonOf(err) != attestv1.Reason_REASON_DEADLINE
	if errors.Is(err, ErrNoJoinservice) || errors.Is(err, ErrUnreachable) || hungUp {
		p.refused.Reset()
		return p.dialing.Next(0)
	}
	// A network attacker who answers for a joinservice could otherwise make this machine wait long after the attack.
	if atls.Unproven(err) {
		return min(p.dialing.Next(rpc.RetryAfterFrom(err)), maxDialPause)
	}
	if ReasonOf(err) == attestv1.Reason_REASON_CONTROL_PLANE_BUSY {
		p.refused.Reset() // other machines go first; the wait must not exceed this machine's join lease
	}
	p.dialing.Reset()
	return p.refused.Next(rpc.RetryAfterFrom(err))
}

// ReasonOf returns the reason of a local error or of a call's error.
func ReasonOf(err error) attestv1.Reason {
	if r := rpc.ReasonFrom(err); r != attestv1.Reason_REASON_UNSPECIFIED {
		return r
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return attestv1.Reason_REASON_DEADLINE
	}
	if e, ok := errors.AsType[net.Error](err); ok {
		// A system call's number has the methods of a net.Error; network errors wrap one.
		if _, file := e.(syscall.Errno); !file {
			return attestv1.Reason_REASON_NOT_READY
		}
	}
	return attestv1.Reason_REASON_INTERNAL
}

// handOver returns a dial function that returns the connection that won the race first, and dials after that.
func handOver(first net.Conn, timeout time.Duration) func(ctx context.Context, network, addr string) (net.Conn, error) {
	handed := make(chan net.Conn, 1)
	handed <- first
	return func(ctx context.Context, _, addr string) (net.Conn, error) {
		select {
		case c := <-handed:
			return c, nil
		default:
			ctx, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			return Dial(ctx, addr)
		}
	}
}

// maxHostAddresses bounds the addresses that are tried of one host name: an answer of DNS may have thousands.
const maxHostAddresses = 8

var errAddresses = fmt.Errorf("the host name has more than %d addresses, and the first ones do not answer", maxHostAddresses)

// Dial connects to an endpoint, and tries at most [maxHostAddresses] addresses of a host name.
func Dial(ctx context.Context, endpoint string) (net.Conn, error) {
	return newDialer().DialContext(ctx, "tcp", endpoint)
}

// newDialer returns the dialer of one endpoint.
func newDialer() *net.Dialer {
	tried := new(atomic.Int32)
	return &net.Dialer{KeepAlive: 30 * time.Second, ControlContext: func(context.Context, string, string, syscall.RawConn) error {
		if tried.Add(1) > maxHostAddresses {
			return errAddresses
		}
		return nil
	}}
}

// Race connects to the endpoints by "happy eyeballs" (RFC 8305): each gets a head start before the next, a failure starts the next at once, and the
// first connection wins. All endpoints are tried within half of the timeout.
func Race(ctx context.Context, endpoints []string, stagger, timeout time.Duration) (string, net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	type outcome struct {
		endpoint string
		conn     net.Conn
		err      error
	}
	results := make(chan outcome, len(endpoints))
	next, open := 0, 0
	var errs []error
	head := time.NewTimer(0)
	defer head.Stop()
	defer func() { // the other connections are closed
		go func() {
			for range open {
				if o := <-results; o.conn != nil {
					_ = o.conn.Close()
				}
			}
		}()
	}()
	for {
		select {
		case <-head.C:
			if next < len(endpoints) {
				e := endpoints[next]
				next, open = next+1, open+1
				go func() {
					c, err := Dial(ctx, e)
					results <- outcome{e, c, err}
				}()
				head.Reset(headStart(next, len(endpoints), stagger, timeout))
			}
		case o := <-results:
			open--
			if o.err == nil {
				return o.endpoint, o.conn, nil
			}
			if errs = append(errs, o.err); len(errs) == len(endpoints) {
				return "", nil, errors.Join(errs...)
			}
			head.Reset(0)
		}
	}
}

// headStart returns the pause after the n-th endpoint, at most stagger. The first ones, which are known without DNS, have a longer head start. The
// others share a quarter of the timeout, so that the last ones are also tried if many endpoints drop connections.
func headStart(n, of int, stagger, timeout time.Duration) time.Duration {
	const first = 8
	if n <= first {
		return min(stagger, timeout/(4*first))
	}
	return min(stagger, timeout/time.Duration(4*of))
}
