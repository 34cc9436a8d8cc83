package atls

import (
	"context"
	"errors"

	"github.com/muster-k8s/muster/trust/peerlimit"
)

// unattested is the peer of one exchange at a server, until it has attested. Every use of the
// server's resources by that peer goes through it. A nil one, a client's, limits nothing.
type unattested struct {
	conn     *tracked
	limiters *limiters
	held     []*peerlimit.Place[peerlimit.Source]
}

func (u *unattested) hold(bytes int64) error {
	p, err := u.limiters.bytes.Take(u.conn.source, bytes, u.conn.drop)
	if err != nil {
		return busy(err)
	}
	u.held = append(u.held, p)
	return nil
}

// release frees the resources that the exchange held.
func (u *unattested) release() {
	if u == nil {
		return
	}
	for _, p := range u.held {
		p.Release()
	}
}

// sends reserves memory for evidence of size bytes that the peer is about to send.
func (u *unattested) sends(size int64) error {
	if u == nil {
		return nil
	}
	if err := u.hold(evidenceCopies * size); err != nil {
		return err
	}
	u.conn.left.Add(size + size/16 + 4<<10) // with the headers of TLS records
	return nil
}

// discards lets the peer send size bytes more, which are not stored.
func (u *unattested) discards(size int64) {
	if u != nil {
		u.conn.left.Add(size)
	}
}

// gets reserves memory for our evidence, which the peer may leave unread.
func (u *unattested) gets() error {
	if u == nil {
		return nil
	}
	return u.hold(evidenceCopies * u.limiters.evidence.Load())
}

// got records the size of the evidence.
func (u *unattested) got(size int) {
	if u == nil || size == 0 {
		return
	}
	u.limiters.evidence.Store(int64(size))
	u.held[len(u.held)-1].Shrink(2 * int64(size))
}

// works keeps the peer's place until done is called, because a place is lost only by the peer's own
// delay, not by the server's work. If new connections could take the place, a server that needs
// more than 2 s, because many machines come at one time, would finish no exchange. After done the
// place is as young as a new one.
func (u *unattested) works() (done func()) {
	if u == nil {
		return func() {}
	}
	return u.conn.setUp.Pin()
}

// verify checks the peer's evidence when its source gets a slot.
func (u *unattested) verify(ctx context.Context, check func() error) error {
	if u == nil {
		return check()
	}
	defer u.works()() // the peer's TPM may need as long again for its next step
	return queued(u.limiters.verify.Do(ctx, u.conn.source, check))
}

// challenge answers the peer's challenge when its source gets a slot, in the queue of attested
// peers or in that of the others.
func (u *unattested) challenge(ctx context.Context, attested bool, answer func() error) error {
	switch {
	case u == nil:
		return answer()
	case attested:
		return queued(u.limiters.accepted.Do(ctx, u.conn.source, answer))
	default:
		return queued(u.limiters.challenges.Do(ctx, u.conn.source, answer))
	}
}

func queued(err error) error {
	switch {
	case errors.Is(err, peerlimit.ErrSourceFull), errors.Is(err, peerlimit.ErrBusy):
		return busy(err)
	default:
		return err
	}
}
