package recovery

import (
	"net"
	"net/netip"
	"sync"
	"time"
)

const (
	// maxPlaces is how many connections there are at one time.
	maxPlaces = 128
	// settle is how long a connection is left alone that has no more of its source beside it than others: long
	// enough to be judged and to send a request.
	settle = 3 * time.Second
	// idleTimeout bounds how long a connection is open without a call.
	idleTimeout = 5 * time.Second
	// callTimeout bounds a call, and so how long a caller may leave unread what it is told. Who waits in the
	// queue for longer comes back, and keeps its place.
	callTimeout = 3 * time.Minute
)

// door keeps a place for who comes. When all are taken, the oldest connection of the source that has the most of
// them is closed: so a few addresses can't take all places, however often they come. A connection
// whose call is tried, or waits for its turn, stays; of those there are as many as turns lets in.
type door struct {
	places  int
	now     func() time.Time
	dropped func(remote net.Addr)

	mu     sync.Mutex
	guests map[string]*guest // by remote address
	of     map[netip.Prefix]int
}

// guest is a connection that has a place.
type guest struct {
	net.Conn

	door   *door
	source netip.Prefix
	since  time.Time // when it came, or had its turn
	calls  int       // that are tried, or wait for their turn
	once   sync.Once
}

// newDoor makes one that nobody came to; dropped is told of each connection that finds no place.
func newDoor(places int, now func() time.Time, dropped func(net.Addr)) *door {
	return &door{places: places, now: now, dropped: dropped, guests: map[string]*guest{}, of: map[netip.Prefix]int{}}
}

// doorway is a listener whose connections have places.
type doorway struct {
	net.Listener

	door *door
}

// Accept implements [net.Listener].
func (w *doorway) Accept() (net.Conn, error) {
	for {
		conn, err := w.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if g := w.door.admit(conn); g != nil {
			return g, nil
		}
		_ = conn.Close()
		w.door.dropped(conn.RemoteAddr())
	}
}

// admit gives nil if there is no place.
func (d *door) admit(conn net.Conn) *guest {
	remote := conn.RemoteAddr().String()
	g := &guest{Conn: conn, door: d, source: sourceOf(remote), since: d.now()}
	d.mu.Lock()
	var leaves *guest
	if len(d.guests) >= d.places {
		if leaves = d.expendable(g.source, g.since); leaves == nil {
			d.mu.Unlock()
			return nil
		}
		d.remove(leaves)
	}
	d.guests[remote] = g
	d.of[g.source]++
	d.mu.Unlock()
	if leaves != nil {
		_ = leaves.Close()
	}
	return g
}

// expendable gives who leaves for a connection of that source, or nil. It is called with the lock held.
func (d *door) expendable(forSource netip.Prefix, now time.Time) *guest {
	var out *guest
	for _, g := range d.guests {
		if g.calls > 0 {
			continue
		}
		if out == nil || d.of[g.source] > d.of[out.source] || d.of[g.source] == d.of[out.source] && g.since.Before(out.since) {
			out = g
		}
	}
	if out == nil {
		return nil
	}
	switch with := d.of[forSource] + 1; {
	case d.of[out.source] > with:
		return out
	case d.of[out.source] == with && now.Sub(out.since) >= settle:
		return out
	}
	return nil
}

// remove is called with the lock held. It may be called again.
func (d *door) remove(g *guest) {
	g.once.Do(func() {
		delete(d.guests, g.RemoteAddr().String())
		if d.of[g.source]--; d.of[g.source] == 0 {
			delete(d.of, g.source)
		}
	})
}

// Close implements [net.Conn].
func (g *guest) Close() error {
	g.door.mu.Lock()
	g.door.remove(g)
	g.door.mu.Unlock()
	return g.Conn.Close()
}

// calling keeps the place of the connection from that address until done is called.
func (d *door) calling(remote string) (done func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	g := d.guests[remote]
	if g == nil {
		return func() {}
	}
	g.calls++
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		g.calls--
		g.since = d.now()
	}
}
