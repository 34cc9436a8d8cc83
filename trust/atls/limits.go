package atls

import (
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/peerlimit"
)

// Limits bound the resources that peers can take from a server before they attest, per source (an
// IPv4 address or an IPv6 /64) and in sum. When a sum is reached, the source that holds the most
// gives up a place to one that holds less. Zero fields have the defaults named.
//
// Limits per source need the peer's own address: behind a NodePort, set externalTrafficPolicy:
// Local. Otherwise all clients are one source.
type Limits struct {
	// SetUp is how many connections may be in handshake or exchange at one time; 256.
	SetUp int
	// SetUpPerSource is how many of those one source may have; 64.
	SetUpPerSource int
	// Open is how many connections of unattested peers may be open; 128.
	Open int
	// OpenPerSource is how many of those one source may have; 16.
	OpenPerSource int
	// Attested is how many connections of attested machines may be open; 512.
	Attested int
	// AttestedPerMachine is how many of those one machine may have; 8.
	AttestedPerMachine int
	// Rate is how many new connections a second one source may open; 16.
	Rate float64
	// Burst is how many new connections one source may open at once; 64.
	Burst int
	// Total is how many new connections a second may be opened by all sources together that already
	// opened one within the last 5 s; 128. A handshake takes about 1 ms of one core, and the check
	// of evidence 1 to 3 ms.
	Total float64
	// Bytes is how much memory may be held for unattested peers, beyond the fixed memory of each
	// connection: for large evidence in transit, and for requests and their responses; 16 MiB.
	Bytes int64
	// BytesPerSource is how much of it one source may hold; 4 MiB.
	BytesPerSource int64
	// AttestedBytes is how much memory may be held for requests of attested machines; 16 MiB.
	AttestedBytes int64
	// AttestedBytesPerMachine is how much of it one machine may hold; 2 MiB.
	AttestedBytesPerMachine int64
	// ConnBytes is how much an unattested peer may send in one session, in bytes on the wire; 32
	// KiB. After half of it the connection is closed with GOAWAY, after all of it at once. It
	// covers requests and all kinds of control frames.
	ConnBytes int64
	// PlainBytes is the same for a connection of plain HTTPS; 16 KiB, or three requests of 4 KiB
	// with their headers, so that no client that follows the protocol is cut off. Frames that
	// net/http answers by itself then take up to 20 ms of one core.
	PlainBytes int64
	// ConnCalls is how many requests an unattested peer may begin on one connection; 32. After half
	// of them the connection is closed with GOAWAY, after one more than all of them at once. So the
	// number of new connections that a source may open also bounds the processor time of its
	// requests.
	ConnCalls int
	// Large is how many sessions of unattested peers may send LargeBytes more than ConnBytes:
	// sessions that present a secret in a large request. 0 means none.
	Large int
	// LargePerSource is how many of those one source may have; 0 means all.
	LargePerSource int
	// LargeBytes is the additional amount, in bytes on the wire.
	LargeBytes int64
}

func (l Limits) withDefaults() Limits {
	for _, d := range []struct {
		field *int
		value int
	}{{&l.SetUp, 256}, {&l.SetUpPerSource, 64}, {&l.Open, 128}, {&l.OpenPerSource, 16}, {&l.Attested, 512}, {&l.AttestedPerMachine, 8}, {&l.Burst, 64}, {&l.ConnCalls, 32}} {
		if *d.field <= 0 {
			*d.field = d.value
		}
	}
	for _, d := range []struct {
		field *int64
		value int64
	}{{&l.Bytes, 16 << 20}, {&l.BytesPerSource, 4 << 20}, {&l.AttestedBytes, 16 << 20}, {&l.AttestedBytesPerMachine, 2 << 20}, {&l.ConnBytes, 32 << 10}, {&l.PlainBytes, 16 << 10}} {
		if *d.field <= 0 {
			*d.field = d.value
		}
	}
	if l.LargePerSource <= 0 {
		l.LargePerSource = l.Large
	}
	if l.Rate <= 0 {
		l.Rate = 16
	}
	if l.Total <= 0 {
		l.Total = 128
	}
	return l
}

// Maximum memory of one connection, in bytes, beside the part that is charged to Bytes and
// AttestedBytes.
const (
	// setUpMemory is for a connection in handshake or exchange: a ClientHello of the largest size,
	// twice while its buffer grows, a record, small frames, and the stacks of three goroutines.
	setUpMemory = 128 << 10
	// openMemory is for a connection of an unattested peer: TLS, HTTP/2, header fields of all its
	// streams.
	openMemory = 96 << 10
	// perByte is the memory that one byte from such a peer can cause: while the peer does not read,
	// HTTP/2 queues an answer of about 130 bytes for a PING of 17, and one of 64 for a SETTINGS of
	// 9.
	perByte = 8
	// attestedMemory is for a connection of an attested machine that follows the protocol.
	attestedMemory = 64 << 10
	// sourceTables is how many tables of sources a server has: limiters has six, and internal/rpc
	// those of log lines and of watches.
	sourceTables = 8
)

// Memory returns the maximum memory that peers can make a Listener with these limits hold, in
// bytes: unattested peers, and attested machines that follow the protocol. The kernel's socket
// buffers are not included: 64 KiB for each direction of a connection.
func (l Limits) Memory() (unattested, attested int64) {
	l = l.withDefaults()
	unattested = int64(l.SetUp)*setUpMemory + int64(l.Open)*(openMemory+perByte*max(l.ConnBytes, l.PlainBytes)) + int64(l.Large)*perByte*l.LargeBytes + l.Bytes + sourceTables*peerlimit.SourcesMemory
	return unattested, int64(l.Attested)*attestedMemory + l.AttestedBytes
}

const (
	// handshakeBytes is how much a peer may send until its handshake has ended: a ClientHello with
	// hybrid key exchange has less than 2 KiB.
	handshakeBytes = 32 << 10
	// exchangeBytes is how much it may send in the exchange, beside evidence that was granted
	// memory: its other frames, and the bytes that TLS reads ahead.
	exchangeBytes = 96 << 10
	// socketBuffer is the kernel's buffer of each direction, in bytes. It holds the data that the
	// peer or this process has not read yet, and counts as our memory.
	socketBuffer = 64 << 10
	// evidenceCopies is how many copies of evidence are in memory while it is read or written: the
	// bytes, the message, and a second buffer while the first one grows.
	evidenceCopies = 3
	// busyRetry is how long a peer is asked to wait if there was no free place.
	busyRetry = time.Second
)

// NewChallengeQueue returns the queue that shares the TPM among unattested peers that send a
// challenge, on a machine that is not a member of a cluster: one challenge at a time, for half of
// the time at most; at most 64 wait, two of each source. A new source waits for one answer, for a
// pause of the same length, and then for its own answer: with a TPM that takes 150 ms for a command
// this is 7 s of the 10 that an exchange may take. Servers of one process share one queue.
func NewChallengeQueue() *peerlimit.Queue { return newChallengeQueue(1) }

// newChallengeQueue is the same for a server: rest 3 leaves three quarters of the TPM's time to
// machines that attest.
func newChallengeQueue(rest float64) *peerlimit.Queue {
	return peerlimit.NewQueue(peerlimit.QueueConfig{Slots: 1, Waiting: 64, PerSource: 2, Rest: rest})
}

const (
	// unattestedText is how much of an error that an unattested peer caused is logged, in bytes.
	// Such a peer chooses parts of it, such as the names in a certificate of 8 KiB, and quoting
	// makes the text eight times as long.
	unattestedText = 512
	// machinesText is the same for a genuine machine: the list of PCRs that differ from a policy
	// fits in.
	machinesText = 4 << 10
)

// LogText returns an error's text for the log: at most 4 KiB of it, or 512 bytes if an unattested
// peer caused it.
func LogText(err error, unattested bool) string {
	text, limit := err.Error(), machinesText
	if unattested {
		limit = unattestedText
	}
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:limit], "") + " [cut]"
}

// LogRate returns the rate at which refusals of unattested peers are logged as warnings: 64 lines
// of each source at once and one a second, and 32 a second of all sources together that had a line
// within the last 5 s. Metrics count all refusals.
func LogRate() *peerlimit.Rate { return peerlimit.NewRate(1, 64, 32, time.Now()) }

// limiters holds the limiters, rates and queues of one Listener.
type limiters struct {
	limits     Limits
	rate       *peerlimit.Rate
	setUp      *peerlimit.Limiter[peerlimit.Source]
	open       *peerlimit.Limiter[peerlimit.Source]
	attested   *peerlimit.Limiter[attest.MachineID]
	large      *peerlimit.Limiter[peerlimit.Source]
	bytes      *peerlimit.Limiter[peerlimit.Source]
	calls      *peerlimit.Limiter[attest.MachineID]
	verify     *peerlimit.Queue
	challenges *peerlimit.Queue // of unattested peers
	accepted   *peerlimit.Queue // challenges of attested peers
	lines      *peerlimit.Rate  // log lines about refusals
	genuine    *peerlimit.Rate  // the same for machines whose EK certificate a root of the policy issued: no other peer can use it up
	// Sizes of our own evidence as last made, without and with the event log, in bytes.
	evidence atomic.Int64
}

func newLimiters(l Limits, challenges *peerlimit.Queue) *limiters {
	if challenges == nil {
		challenges = newChallengeQueue(3)
	}
	out := &limiters{
		limits:     l,
		rate:       peerlimit.NewRate(l.Rate, l.Burst, l.Total, time.Now()),
		setUp:      peerlimit.NewLimiter[peerlimit.Source](int64(l.SetUp), int64(l.SetUpPerSource)),
		open:       peerlimit.NewLimiter[peerlimit.Source](int64(l.Open), int64(l.OpenPerSource)),
		large:      peerlimit.NewLimiter[peerlimit.Source](int64(l.Large), int64(l.LargePerSource)),
		attested:   peerlimit.NewLimiter[attest.MachineID](int64(l.Attested), int64(l.AttestedPerMachine)).KeepEqual(),
		bytes:      peerlimit.NewLimiter[peerlimit.Source](l.Bytes, l.BytesPerSource),
		calls:      peerlimit.NewLimiter[attest.MachineID](l.AttestedBytes, l.AttestedBytesPerMachine).KeepEqual(),
		verify:     peerlimit.NewQueue(peerlimit.QueueConfig{Slots: runtime.GOMAXPROCS(0), Waiting: l.SetUp, PerSource: l.SetUp}),
		challenges: challenges,
		accepted:   peerlimit.NewQueue(peerlimit.QueueConfig{Slots: 1, Waiting: l.SetUp, PerSource: l.SetUpPerSource}),
		lines:      LogRate(),
		genuine:    LogRate(),
	}
	out.evidence.Store(maxSmallEvidence)
	return out
}

// busy turns a Limiter's error into a refusal; nil stays nil.
func busy(err error) error {
	if err == nil {
		return nil
	}
	return attest.RefuseFor(busyRetry, attestv1.Reason_REASON_BUSY, "%w", err)
}

// tracked is the TCP connection under a TLS connection. It counts the bytes that the peer sends
// until it has attested, and reports once that the connection was closed.
type tracked struct {
	net.Conn
	source  peerlimit.Source
	onClose func(*tracked)
	once    sync.Once
	setUp   *peerlimit.Place[peerlimit.Source] // nil at a client
	open    *peerlimit.Place[peerlimit.Source] // nil at a client, and if the peer has attested
	// left is how much the peer may still send, in bytes; negative means no limit.
	left atomic.Int64
	// half is the value of left after which half is used up; it is written before requests are
	// read.
	half int64
	// calls is the number of requests that the peer has started.
	calls atomic.Int64
	// more is called once, when left is used up, and may increase it; nil means that the connection
	// ends then. Only Read uses it.
	more func(*tracked) error

	mu      sync.Mutex
	closed  bool
	places  []interface{ Release() } // released when it is closed
	session *Conn                    // set once the exchange has succeeded; guarded by its Listener's lock
}

// Read implements [net.Conn].
func (t *tracked) Read(p []byte) (int, error) {
	left := t.left.Load()
	if more := t.more; left == 0 && more != nil {
		t.more = nil
		if err := more(t); err != nil {
			return 0, err
		}
		left = t.left.Load()
	}
	if left == 0 {
		return 0, attest.Refuse(attestv1.Reason_REASON_FRAME_INVALID, "the peer sent more than it may before it has attested")
	}
	if left < 0 {
		return t.Conn.Read(p)
	}
	n, err := t.Conn.Read(p[:min(int64(len(p)), left)])
	t.left.Add(-int64(n))
	return n, err
}

// spent counts a request of an unattested peer. It reports whether half of the permitted bytes or
// requests is used up, and whether the peer has started more requests than permitted.
func (t *tracked) spent(l Limits) (half, all bool) {
	left := t.left.Load()
	if left < 0 {
		return false, false
	}
	calls := t.calls.Add(1)
	return left < t.half || calls >= int64(l.ConnCalls)/2, calls > int64(l.ConnCalls)
}

// Close implements [net.Conn].
func (t *tracked) Close() error {
	err := t.Conn.Close()
	t.once.Do(func() {
		t.mu.Lock()
		t.closed = true
		places := t.places
		t.places = nil
		t.mu.Unlock()
		for _, p := range places {
			p.Release()
		}
		t.onClose(t)
	})
	return err
}

// keep releases p when the connection is closed.
func (t *tracked) keep(p interface{ Release() }) {
	t.mu.Lock()
	closed := t.closed
	if !closed {
		t.places = append(t.places, p)
	}
	t.mu.Unlock()
	if closed {
		p.Release()
	}
}

// drop closes the connection because its place goes to another source.
func (t *tracked) drop() { _ = t.Close() }
