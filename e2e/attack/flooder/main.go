// Command flooder is a client without a TPM that exhausts one of Muster's listeners. It has many floods, which it
// lists with -list. Each one ends after its time limit, and prints its counts as JSON.
//
// Every connection comes from one of -sources addresses of the loopback network, from -first on. It implements TLS,
// HTTP/2 and muster-atls/1 itself, and breaks their rules where a flood requires that.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if errors.Is(err, flag.ErrHelp) {
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "flooder:", err)
		os.Exit(1)
	}
}

// flood is one way to exhaust a listener.
type flood struct {
	name, about string
	// open is the maximum number of connections that it keeps, from all sources together; 0: as many as are allowed.
	open int
	// attack works on one connection until ctx or the connection ends. It need not close it.
	attack func(ctx context.Context, c *client) error
}

// client is a fresh TCP connection of the attacker's.
type client struct {
	net.Conn
	target string
	count  *counts
}

// counts is the output of the program.
type counts struct {
	// Dialed is the number of TCP connections that were tried, Opened of those that were established.
	Dialed, Opened atomic.Int64
	// Most is the maximum that was open at one time.
	Most, open atomic.Int64
	// Sent is bytes below TLS.
	Sent atomic.Int64
	// first is called when a connection is established.
	first func()
}

// Write implements [io.Writer].
func (c *client) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.count.Sent.Add(int64(n))
	return n, err
}

const (
	// oneSource is the number of new connections per second that one source opens, and allSources that of all
	// together.
	oneSource, allSources = 16, 200
	// oneBurst and allBurst are their initial numbers.
	oneBurst, allBurst = 64, 400
	// oneOpen and allOpen are the numbers that they keep open, somewhat more than any listener allows.
	oneOpen, allOpen = 600, 4400
)

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("flooder", flag.ContinueOnError)
	flags.SetOutput(stderr)
	name := flags.String("flood", "", "which flood")
	target := flags.String("target", "", "HOST:PORT of the listener, on the loopback network")
	sources := flags.Int("sources", 1, "how many addresses it comes from")
	first := flags.String("first", "127.64.0.1", "the first of them")
	length := flags.Duration("for", time.Minute, "how long, from the first connection on")
	list := flags.Bool("list", false, "list the floods")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *list {
		for _, f := range floods {
			fmt.Fprintf(stdout, "%-28s %s\n", f.name, f.about)
		}
		return nil
	}
	i := slices.IndexFunc(floods, func(f flood) bool { return f.name == *name })
	if i < 0 {
		return fmt.Errorf("-flood: there is no %q; -list lists them", *name)
	}
	// This program can reach more than a test's listeners; use it only for those.
	to, err := netip.ParseAddrPort(*target)
	if err != nil || !to.Addr().IsLoopback() {
		return fmt.Errorf("-target: want an address of the loopback network with a port, not %q", *target)
	}
	from, err := netip.ParseAddr(*first)
	if err != nil || !from.Is4() || !from.IsLoopback() || *sources < 1 {
		return fmt.Errorf("-first, -sources: want at least one address of the loopback network")
	}
	count := floods[i].from(ctx, *target, addresses(from, *sources), *length)
	return json.NewEncoder(stdout).Encode(map[string]int64{
		"dialed": count.Dialed.Load(), "opened": count.Opened.Load(), "most": count.Most.Load(), "sent": count.Sent.Load(),
	})
}

func addresses(first netip.Addr, n int) (all []net.IP) {
	for range n {
		all = append(all, first.AsSlice())
		first = first.Next()
	}
	return all
}

// patience is how long a flood tries to open its first connection.
const patience = 5 * time.Minute

// from runs the flood for that long from its first connection on, or until ctx ends, from the sources in turn.
func (f flood) from(ctx context.Context, target string, sources []net.IP, length time.Duration) *counts {
	ctx, cancel := context.WithTimeout(ctx, patience+length)
	defer cancel()
	count := &counts{first: sync.OnceFunc(func() { time.AfterFunc(length, cancel) })}
	rate, open := float64(min(oneSource*len(sources), allSources)), min(oneOpen*len(sources), allOpen)
	if f.open > 0 {
		open = min(open, f.open)
	}
	burst := float64(min(oneBurst*len(sources), allBurst))
	places := make(chan struct{}, open)
	var wg sync.WaitGroup
	defer wg.Wait()
	began, tick := time.Now(), time.NewTicker(10*time.Millisecond)
	defer tick.Stop()
	for n := 0; ; {
		for due := int(burst + math.Ceil(time.Since(began).Seconds()*rate)); n < due; n++ {
			select {
			case places <- struct{}{}:
			default:
				n = due // connections that found no slot are not made up for
				continue
			}
			source := sources[n%len(sources)]
			wg.Go(func() {
				defer func() { <-places }()
				f.once(ctx, target, source, count)
			})
		}
		select {
		case <-ctx.Done():
			return count
		case <-tick.C:
		}
	}
}

func (f flood) once(ctx context.Context, target string, source net.IP, count *counts) {
	count.Dialed.Add(1)
	raw, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: source}, Timeout: 5 * time.Second}).DialContext(ctx, "tcp", target)
	if err != nil {
		return
	}
	defer func() { _ = raw.Close() }()
	// Every blocking call ends with the flood.
	defer context.AfterFunc(ctx, func() { _ = raw.Close() })()
	count.Opened.Add(1)
	count.first()
	now := count.open.Add(1)
	defer count.open.Add(-1)
	for most := count.Most.Load(); now > most && !count.Most.CompareAndSwap(most, now); most = count.Most.Load() {
	}
	_ = f.attack(ctx, &client{Conn: raw, target: target, count: count}) // it ends when it is refused
}

// hold waits until the peer closes the connection; data from the peer is discarded.
func hold(c net.Conn) error {
	_, err := io.Copy(io.Discard, c)
	return err
}

// pause waits, at most until the flood ends.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// drip sends b by one byte at a time.
func drip(ctx context.Context, w io.Writer, b []byte, every time.Duration) error {
	for i := range b {
		if _, err := w.Write(b[i : i+1]); err != nil {
			return err
		}
		if err := pause(ctx, every); err != nil {
			return err
		}
	}
	return nil
}
