package attack

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
)

const invalid = attestv1.Reason_REASON_FRAME_INVALID

// Frames that are too many, of the wrong type, too early, or missing. Each script has a session of its own; `then`
// reads the verdict.
func TestFramesThatMayNotCome(t *testing.T) {
	x := newTarget(t, nil)
	gives := &attestv1.Offer{Gives: tpm2}
	genuine := func(t *testing.T, w *wire) (*attestv1.Evidence, attest.Binding) {
		sent := w.send(t, gives)
		_, theirs, err := w.receive()
		if err != nil {
			t.Fatal(err)
		}
		b := w.bind(client, sent, theirs)
		ev, err := x.machine().Attest(t.Context(), attestv1.Format_FORMAT_TPM2, b)
		if err != nil {
			t.Fatal(err)
		}
		return ev, b
	}
	for name, tt := range map[string]struct {
		play  func(t *testing.T, w *wire)
		want  attestv1.Reason
		fresh bool // the server must not know the machine yet, so that it challenges
	}{
		"an offer twice": {play: func(t *testing.T, w *wire) { w.send(t, gives); w.send(t, gives) }},
		"evidence first": {play: func(t *testing.T, w *wire) { w.send(t, &attestv1.Evidence{}) }},
		"a verdict first": {play: func(t *testing.T, w *wire) {
			w.send(t, &attestv1.Verdict{Reason: accepted})
		}},
		"a response without a challenge": {play: func(t *testing.T, w *wire) {
			w.send(t, gives)
			w.send(t, &attestv1.Response{Mac: make([]byte, 32)})
		}},
		"a challenge where nobody attests": {play: func(t *testing.T, w *wire) {
			w.send(t, gives)
			w.send(t, &attestv1.Challenge{CredentialBlob: []byte("b"), EncryptedSecret: []byte("s")})
		}},
		"acceptance before evidence": {play: func(t *testing.T, w *wire) {
			w.send(t, gives)
			w.send(t, &attestv1.Verdict{Reason: accepted})
		}},
		"evidence twice": {fresh: true, play: func(t *testing.T, w *wire) {
			ev, _ := genuine(t, w)
			w.send(t, ev)
			w.send(t, ev)
		}},
		"a response twice": {fresh: true, play: func(t *testing.T, w *wire) {
			// The second, which would be right, comes too late.
			ev, b := genuine(t, w)
			w.send(t, ev)
			f, _, err := w.receive()
			if err != nil || f.GetChallenge() == nil {
				t.Fatalf("%v, %v; want a challenge", f, err)
			}
			mac, err := x.machine().Respond(t.Context(), f.GetChallenge(), b)
			if err != nil {
				t.Fatal(err)
			}
			w.send(t, &attestv1.Response{Mac: mac[:31]})
			w.send(t, &attestv1.Response{Mac: mac})
		}, want: attestv1.Reason_REASON_ACTIVATION_FAILED},
		"FORMAT_UNSPECIFIED in an offer": {play: func(t *testing.T, w *wire) {
			w.send(t, &attestv1.Offer{Gives: []attestv1.Format{0, 1}})
		}},
		"17 formats": {play: func(t *testing.T, w *wire) {
			w.send(t, &attestv1.Offer{Gives: make([]attestv1.Format, 17)})
		}},
		"formats that nobody knows": {play: func(t *testing.T, w *wire) {
			w.send(t, &attestv1.Offer{Gives: []attestv1.Format{77}})
		}, want: attestv1.Reason_REASON_FORMAT_NONE},
		"evidence of another format than agreed": {play: func(t *testing.T, w *wire) {
			w.send(t, gives)
			w.send(t, &attestv1.Evidence{Format: 77})
		}, want: attestv1.Reason_REASON_EVIDENCE_MALFORMED},
		"evidence without a body": {play: func(t *testing.T, w *wire) {
			w.send(t, gives)
			w.send(t, &attestv1.Evidence{Format: attestv1.Format_FORMAT_TPM2})
		}, want: attestv1.Reason_REASON_EVIDENCE_MALFORMED},
		"a length of four gigabytes": {play: func(t *testing.T, w *wire) { raw(t, w, []byte{255, 255, 255, 255}) }},
		"an offer of 64 KiB and a byte": {play: func(t *testing.T, w *wire) {
			raw(t, w, []byte{0, 1, 0, 1})
		}},
		"evidence of 1 MiB and a byte": {play: func(t *testing.T, w *wire) {
			w.send(t, gives)
			raw(t, w, []byte{0, 0x10, 0, 1})
		}},
		"evidence of 1 MiB and a byte, to its end": {play: func(t *testing.T, w *wire) {
			// The verdict arrives although its sender closes with all of this unread.
			w.send(t, gives)
			_, _ = w.Write(append([]byte{0, 0x10, 0, 1}, make([]byte, 1<<20+1)...))
		}},
		"nothing in a frame":     {play: func(t *testing.T, w *wire) { raw(t, w, []byte{0, 0, 0, 0}) }},
		"no protobuf in a frame": {play: func(t *testing.T, w *wire) { raw(t, w, []byte{0, 0, 0, 2, 255, 255}) }},
		"HTTP in place of frames": {play: func(t *testing.T, w *wire) {
			raw(t, w, []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
		}},
		"half a frame": {play: func(t *testing.T, w *wire) {
			frame := encode(t, gives)
			raw(t, w, frame[:len(frame)-1])
			if err := w.CloseWrite(); err != nil {
				t.Fatal(err)
			}
		}},
		"half a length": {play: func(t *testing.T, w *wire) {
			raw(t, w, []byte{0, 0})
			if err := w.CloseWrite(); err != nil {
				t.Fatal(err)
			}
		}},
		"nothing of it": {play: func(t *testing.T, w *wire) {
			if got, err := w.play(t, honest(x.machine())); got != accepted {
				t.Errorf("%v, %v", got, err)
			}
		}, want: accepted},
	} {
		t.Run(name, func(t *testing.T) {
			if tt.fresh {
				defer func(known *target) { x = known }(x)
				x = newTarget(t, nil)
			}
			if tt.want == accepted { // play reads it
				tt.play(t, open(t, x.addr, nil))
				return
			}
			if tt.want == attestv1.Reason_REASON_UNSPECIFIED {
				tt.want = invalid
			}
			x.refuses(t, tt.want, func() attestv1.Reason {
				w := open(t, x.addr, nil)
				tt.play(t, w)
				return w.verdict(t)
			})
		})
	}
}

func raw(t *testing.T, w *wire, b []byte) {
	t.Helper()
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
}

// A frame that comes a byte at a time does not prolong the exchange.
func TestSlowFrames(t *testing.T) {
	t.Parallel()
	x := newTarget(t, nil)
	slow := func(every time.Duration, fields int) (got attestv1.Reason, whole bool) {
		w := open(t, x.addr, nil)
		sent := encode(t, &attestv1.Offer{})
		// An unknown field that this version ignores makes the frame long.
		sent = append(sent, bytes.Repeat([]byte{15<<3 | 2, 0}, fields)...)
		binary.BigEndian.PutUint32(sent, uint32(len(sent)-4))
		var wg sync.WaitGroup
		stop := make(chan struct{})
		wg.Go(func() {
			tick := time.NewTicker(every)
			defer tick.Stop()
			for i := range sent {
				select {
				case <-tick.C:
				case <-stop:
					return
				}
				if _, err := w.Write(sent[i : i+1]); err != nil {
					return
				}
			}
			whole = true
		})
		got = w.verdict(t)
		close(stop)
		wg.Wait()
		return got, whole
	}
	x.refuses(t, attestv1.Reason_REASON_DEADLINE, func() attestv1.Reason {
		got, whole := slow(200*time.Millisecond, 2000) // 13 min, and the server waits for 10 s
		if whole {
			t.Errorf("%v once the whole frame was there", got)
		}
		return got
	})
	got, whole := slow(time.Millisecond, 60)
	for until := time.Now().Add(patience); got == attestv1.Reason_REASON_DEADLINE && time.Now().Before(until); {
		got, whole = slow(time.Millisecond, 60)
	}
	if got != accepted {
		t.Errorf("faster: %v, to its end: %v", got, whole)
	}
}

// The server does not wait for a peer that does not read the answer to its request, either.
func TestAPeerThatDoesNotRead(t *testing.T) {
	t.Parallel()
	x := newTarget(t, func(c *rpc.Config) { c.ATLS.Attester = padded{c.ATLS.Attester} })
	w := open(t, x.addr, nil)
	w.send(t, &attestv1.Offer{Accepts: tpm2})
	select {
	case s := <-x.seen:
		// The whole exchange may fit into the kernel's buffers; if not, the deadline passes.
		if r := attest.ReasonOf(s.Err); r != attestv1.Reason_REASON_DEADLINE {
			t.Errorf("%v, want DEADLINE", s.Err)
		}
	case <-time.After(patience):
		t.Error("the server waits for ever")
	}
}

// padded makes evidence of almost 1 MiB: the evidence of a joinservice is not appraised here.
type padded struct{ attest.Attester }

func (p padded) Attest(ctx context.Context, f attestv1.Format, b attest.Binding) (*attestv1.Evidence, error) {
	ev, err := p.Attester.Attest(ctx, f, b)
	if err != nil {
		return nil, err
	}
	ev.SignedPolicy = &attestv1.SignedPolicy{Policy: make([]byte, 1<<20-8<<10)}
	if n := proto.Size(ev); n > 1<<20 || n < 1<<20-10<<10 {
		panic("not almost 1 MiB")
	}
	return ev, nil
}

// Two sides that first write a megabyte each, through small buffers.
func TestAMegabyteBothWays(t *testing.T) {
	x := newTarget(t, func(c *rpc.Config) {
		c.ATLS.Attester = padded{c.ATLS.Attester}
		c.Listener = narrow{c.Listener}
	})
	err := reaches(t, x.transport(t, func(c *atls.ClientConfig) {
		c.Attester = padded{c.Attester}
		c.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := new(net.Dialer).DialContext(ctx, network, addr)
			return shrink(conn), err
		}
	}), x.addr)
	if err != nil { // DEADLINE, if they block each other
		t.Fatal(err)
	}
}

type narrow struct{ net.Listener }

func (u narrow) Accept() (net.Conn, error) {
	c, err := u.Listener.Accept()
	return shrink(c), err
}

// shrink sets small buffers on a connection.
func shrink(c net.Conn) net.Conn {
	if tc, ok := c.(*net.TCPConn); ok {
		_ = tc.SetReadBuffer(64 << 10)
		_ = tc.SetWriteBuffer(64 << 10)
	}
	return c
}

// Large evidence needs memory, so a source may send only a limited amount at one time.
func TestTooManyLargeFrames(t *testing.T) {
	// Room for three copies of each of two, and for the server's own evidence.
	x := newTarget(t, func(c *rpc.Config) { c.ATLS.Limits.BytesPerSource = 2*3*0x0f0000 + 160<<10 })
	var hold []*wire
	release := func() {
		for _, w := range hold {
			_ = w.Close()
		}
		hold = nil
	}
	large := honest(padded{x.machine()})
	got := accepted
	x.refuses(t, attestv1.Reason_REASON_BUSY, func() attestv1.Reason {
		for until := time.Now().Add(patience); got != attestv1.Reason_REASON_BUSY && time.Now().Before(until); {
			release() // they hold memory until their deadline
			for range 2 {
				w := open(t, x.addr, nil)
				w.send(t, &attestv1.Offer{Gives: tpm2})
				raw(t, w, []byte{0, 0x0f, 0, 0, 0}) // a megabyte is announced, and does not come
				hold = append(hold, w)
			}
			got = accepted
			for tries := 0; got == accepted && tries < 20; tries++ { // until both announcements are read
				got = x.play(t, large)
			}
		}
		return got
	})
	if got := x.play(t, honest(x.machine())); got != accepted {
		t.Errorf("evidence of the usual size: %v", got)
	}
	release()
	for until := time.Now().Add(patience); got != accepted && time.Now().Before(until); {
		got = x.play(t, large)
	}
	if got != accepted {
		t.Errorf("repaired: %v", got)
	}
}

// An unattested client receives only the reason of a refusal (R1).
func TestAStrangerLearnsTheReasonAlone(t *testing.T) {
	x := newTarget(t, nil)
	changed := attesttest.NewMachine(t, x.ca, attesttest.Options{Image: "one byte differs"})
	a := changed.Attester(attest.PurposeMachine)
	w := open(t, x.addr, nil)
	sent := w.send(t, &attestv1.Offer{Gives: tpm2})
	_, theirs, err := w.receive()
	if err != nil {
		t.Fatal(err)
	}
	b := w.bind(client, sent, theirs)
	ev, err := a.Attest(t.Context(), attestv1.Format_FORMAT_TPM2, b)
	if err != nil {
		t.Fatal(err)
	}
	w.send(t, ev)
	f, _, err := w.receive()
	if err != nil || f.GetChallenge() == nil {
		t.Fatalf("%v, %v; want a challenge", f, err)
	}
	mac, err := a.Respond(t.Context(), f.GetChallenge(), b)
	if err != nil {
		t.Fatal(err)
	}
	w.send(t, &attestv1.Response{Mac: mac})
	_, body, err := w.receive()
	if err != nil {
		t.Fatal(err)
	}
	want := encode(t, &attestv1.Verdict{Reason: attestv1.Reason_REASON_POLICY_REFUSED})
	if !bytes.Equal(body, want) {
		t.Errorf("the verdict is %x, want %x and nothing else", body, want)
	}
	if rest, err := io.ReadAll(w); err != nil || len(rest) > 0 {
		t.Errorf("%q, %v follow the verdict, want the end", rest, err)
	}
}
