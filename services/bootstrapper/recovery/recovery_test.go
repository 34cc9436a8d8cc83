package recovery

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/hex"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	recoverv1 "github.com/muster-k8s/muster/gen/muster/recover/v1"
	"github.com/muster-k8s/muster/gen/muster/recover/v1/recoverv1connect"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/internal/refusaltest"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

func TestTheOwnersKeyOpensTheDisk(t *testing.T) {
	w := newFixture(t)
	owner := w.from("127.0.0.1")
	states, err := w.recover(t.Context(), owner, request(), nil)
	if err != nil {
		t.Fatal(err)
	}
	want := []recoverv1.State{recoverv1.State_STATE_RECEIVED, recoverv1.State_STATE_TRYING, recoverv1.State_STATE_OPENED}
	if !slices.Equal(states, want) {
		t.Errorf("%v, want %v", states, want)
	}
	<-w.server.Recovered()
	// A later caller gets the state that the disk is open; that does not mean that its key is right.
	states, err = w.recover(t.Context(), owner, wrong(), nil)
	if err != nil || states[len(states)-1] != recoverv1.State_STATE_OPEN_ALREADY {
		t.Errorf("%v %v, want that it is open already", states, err)
	}
}

// The machine locks itself to the cluster in the owner's signed request.
func TestAKeyIsTriedWithItsClusterID(t *testing.T) {
	w := newFixture(t)
	c := w.from("127.0.0.1")
	other := keys.ClusterID{0xC2}
	for _, req := range []*recoverv1.RecoverRequest{wrong(), signed(wrongKey, diskID, other, ownerKey), request()} {
		_, _ = w.recover(t.Context(), c, req, nil)
	}
	w.lock.mu.Lock()
	defer w.lock.mu.Unlock()
	if want := []keys.ClusterID{cluster, other, cluster}; !slices.Equal(w.lock.to, want) {
		t.Errorf("%v, want %v", w.lock.to, want)
	}
}

// B1: an attacker who makes a disk, and so knows its key, can't make the machine belong to a cluster of the attacker's choice.
func TestARequestThatTheOwnerDidNotSignIsRefused(t *testing.T) {
	otherOwner := ed25519.NewKeyFromSeed(bytes.Repeat([]byte{1}, 32))
	const other = "00000000-5b7e-4c1d-8a6f-0123456789ab"
	good := request()
	with := func(change func(r *recoverv1.RecoverRequest)) *recoverv1.RecoverRequest {
		r := request()
		change(r)
		return r
	}
	w := newFixture(t)
	c := w.from("127.0.0.1")
	for name, req := range map[string]*recoverv1.RecoverRequest{
		"signed by another owner":          signed(rightKey, diskID, cluster, otherOwner),
		"signed for another disk":          signed(rightKey, other, cluster, ownerKey),
		"signed for another boot":          signedFor(ownerorder.Nonce{0xB1}, rightKey, diskID, cluster, ownerKey),
		"with another cluster than signed": with(func(r *recoverv1.RecoverRequest) { r.ClusterId[0]++ }),
		"with another key than signed":     with(func(r *recoverv1.RecoverRequest) { r.DiskKey = bytes.Clone(wrongKey) }),
		"with a policy's signature": with(func(r *recoverv1.RecoverRequest) {
			r.Signature = attest.SignPolicy(ownerKey, []byte("{}")).GetSignature()
		}),
		"with another list than signed":      with(func(r *recoverv1.RecoverRequest) { r.Software.List = listOf("kubelet", "evil") }),
		"with a second list":                 with(func(r *recoverv1.RecoverRequest) { r.Software.Other = listOf("evil") }),
		"with another endpoint":              with(func(r *recoverv1.RecoverRequest) { r.Software.Endpoint = "evil:6443" }),
		"as of an adopted cluster":           with(func(r *recoverv1.RecoverRequest) { r.Software.Adopted = true }),
		"with a decision that is not signed": with(func(r *recoverv1.RecoverRequest) { r.Software.Replace = true }),
		"without the lists that it signed":   with(func(r *recoverv1.RecoverRequest) { r.Software = nil }),
		"with lists that it did not sign": func() *recoverv1.RecoverRequest {
			r := unlisted()
			r.Software = request().GetSoftware()
			return r
		}(),
		"with a changed signature": with(func(r *recoverv1.RecoverRequest) { r.Signature[3] ^= 1 }),
	} {
		refusaltest.Refused(t, w.observations(), attestv1.Reason_REASON_OWNER_SIGNATURE, refusedPlaces(), func() error {
			_, err := w.recover(t.Context(), c, req, nil)
			return err
		})
		if _, tried := w.lock.state(); tried != 0 {
			t.Errorf("%s: a key was tried", name)
		}
	}
	if _, err := w.recover(t.Context(), c, good, nil); err != nil {
		t.Errorf("repaired: %v", err)
	}
}

// An image without an owner's key verifies no request: insecure, and reported as such.
func TestWithoutAnOwnersKeyTheKeyAloneOpens(t *testing.T) {
	w := newFixture(t)
	w.server.cfg.OwnerKeys, w.server.cfg.NoOwnerKey = nil, true
	if _, err := w.recover(t.Context(), w.from("127.0.0.1"), signed(rightKey, diskID, cluster, ed25519.NewKeyFromSeed(make([]byte, 32))), nil); err != nil {
		t.Error(err)
	}
}

// The machine receives one disk's key. A developer who adds a field explains here why it is no root of other keys.
// The software is public: addresses and digests of programs.
func TestARequestHoldsNoRootSecret(t *testing.T) {
	var have []string
	fields := (&recoverv1.RecoverRequest{}).ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		have = append(have, string(fields.Get(i).Name()))
	}
	if want := []string{"disk_key", "cluster_id", "signature", "software"}; !slices.Equal(have, want) {
		t.Errorf("the request has the fields %v, want %v", have, want)
	}
	root := keys.NewRoot([32]byte{0x51}, [32]byte{0x52})
	id, err := keys.ParseDiskID(diskID)
	if err != nil {
		t.Fatal(err)
	}
	key, err := root.Disk(id, keys.DiskSalt{3})
	if err != nil {
		t.Fatal(err)
	}
	r := ownerorder.Recovery{Cluster: root.ClusterID([32]byte{0x53}), Disk: id, Key: key}.Wire(ownerKey)
	if !bytes.Equal(r.GetDiskKey(), key.Expose()) || !bytes.Equal(r.GetClusterId(), func() []byte { c := root.ClusterID([32]byte{0x53}); return c[:] }()) || len(r.GetSignature()) != ed25519.SignatureSize {
		t.Errorf("%v", r)
	}
}

func TestTheMachineNamesItsDiskBeforeAKeyIsSent(t *testing.T) {
	w := newFixture(t)
	r, err := recoverv1connect.NewRecoverServiceClient(w.from("127.0.0.1"), "https://"+w.addr, rpc.ClientOptions()...).Describe(t.Context(), &recoverv1.DescribeRequest{})
	if err != nil || r.GetDiskId() != diskID {
		t.Errorf("%v %v", r, err)
	}
}

func TestWrongKeysAreLimitedAndKeepNobodyElseOut(t *testing.T) {
	w := newFixture(t)
	now := time.Now()
	w.server.queue = newQueue(func() time.Time { return now }, 0) // no source may try again because time passes
	other := w.from("127.0.0.9")
	for range maxWrong {
		refusaltest.Refused(t, w.observations(), attestv1.Reason_REASON_RECOVERY_SECRET_INVALID, refusedPlaces(), func() error {
			_, err := w.recover(t.Context(), other, wrong(), nil)
			return err
		})
	}
	places := refusedPlaces()
	places.Log = []string{"msg", "call refused", "level", "DEBUG"}
	for range 20 {
		err := refusaltest.Refused(t, w.observations(), attestv1.Reason_REASON_TOO_MANY_ATTEMPTS, places, func() error {
			_, err := w.recover(t.Context(), other, wrong(), nil)
			return err
		})
		if d := rpc.RetryAfterFrom(err); d <= 0 || d > perWrong {
			t.Fatalf("come back in %s", d)
		}
	}
	if _, tried := w.lock.state(); tried != maxWrong {
		t.Errorf("%d keys were tried, want %d", tried, maxWrong)
	}
	w.opens(t, w.from("127.0.0.1"))
}

func TestASourceMayTryAgainAfterAWhile(t *testing.T) {
	w := newFixture(t)
	now, mu := time.Now(), sync.Mutex{}
	w.server.queue = newQueue(func() time.Time { mu.Lock(); defer mu.Unlock(); return now }, 0)
	c := w.from("127.0.0.1")
	for range maxWrong {
		_, _ = w.recover(t.Context(), c, wrong(), nil)
	}
	_, err := w.recover(t.Context(), c, request(), nil)
	if rpc.ReasonFrom(err) != attestv1.Reason_REASON_TOO_MANY_ATTEMPTS {
		t.Fatalf("%v, want TOO_MANY_ATTEMPTS", err)
	}
	mu.Lock()
	now = now.Add(rpc.RetryAfterFrom(err))
	mu.Unlock()
	w.opens(t, c) // the same secrets that were refused
}

func TestARequestThatIsNoneIsRefusedBeforeAKeyIsTried(t *testing.T) {
	for name, change := range map[string]func(*recoverv1.RecoverRequest){
		"no key":                            func(r *recoverv1.RecoverRequest) { r.DiskKey = nil },
		"a short key":                       func(r *recoverv1.RecoverRequest) { r.DiskKey = r.GetDiskKey()[:31] },
		"a long key":                        func(r *recoverv1.RecoverRequest) { r.DiskKey = append(r.DiskKey, 0) },
		"no cluster ID":                     func(r *recoverv1.RecoverRequest) { r.ClusterId = nil },
		"a short cluster ID":                func(r *recoverv1.RecoverRequest) { r.ClusterId = r.GetClusterId()[:31] },
		"a long cluster ID":                 func(r *recoverv1.RecoverRequest) { r.ClusterId = append(r.ClusterId, 0) },
		"no signature":                      func(r *recoverv1.RecoverRequest) { r.Signature = nil },
		"a short signature":                 func(r *recoverv1.RecoverRequest) { r.Signature = r.GetSignature()[:63] },
		"a large request":                   func(r *recoverv1.RecoverRequest) { r.DiskKey = make([]byte, maxRequest+1) },
		"a long list":                       signs(func(s *ownerorder.Software) { s.List += strings.Repeat(" ", ownerorder.MaxList) }),
		"a long second list":                signs(func(s *ownerorder.Software) { s.Other = s.List + strings.Repeat(" ", ownerorder.MaxList) }),
		"no list":                           signs(func(s *ownerorder.Software) { s.List = "" }),
		"a list of images":                  signs(func(s *ownerorder.Software) { s.List = strings.Replace(s.List, "ComponentList", "Images", 1) }),
		"an image by its tag":               signs(func(s *ownerorder.Software) { s.List = strings.Replace(s.List, "@sha256:", "-", 1) }),
		"a program elsewhere":               signs(func(s *ownerorder.Software) { s.List = strings.Replace(s.List, "/usr/local/bin/", "/etc/", 1) }),
		"a second list that is none":        signs(func(s *ownerorder.Software) { s.Other = "{}" }),
		"a second list's program elsewhere": signs(func(s *ownerorder.Software) { s.Other = strings.Replace(s.List, "/usr/local/bin/", "/etc/", 1) }),
		"a list in YAML":                    signs(func(s *ownerorder.Software) { s.List = "# a comment\n" + s.List }),
		"no endpoint":                       signs(func(s *ownerorder.Software) { s.Endpoint = "" }),
		"an endpoint of a path":             signs(func(s *ownerorder.Software) { s.Endpoint = "x/y:1" }),
	} {
		t.Run(name, func(t *testing.T) {
			w := newFixture(t)
			c := w.from("127.0.0.1")
			req := request()
			change(req)
			places := refusedPlaces()
			if len(req.GetDiskKey()) > maxRequest {
				places = refusaltest.Call(recoverv1connect.RecoverServiceRecoverProcedure) // it reaches no handler
				places.Audit = nil
			}
			refusaltest.Refused(t, w.observations(), attestv1.Reason_REASON_REQUEST_INVALID, places, func() error {
				_, err := w.recover(t.Context(), c, req, nil)
				return err
			})
			if _, tried := w.lock.state(); tried != 0 {
				t.Error("a key was tried")
			}
			w.opens(t, c)
		})
	}
}

func TestADiskThatCannotBeReadSaysSoAndCostsNoTry(t *testing.T) {
	for name, fault := range map[string]error{
		"a refusal of the disk's": attest.Refuse(attestv1.Reason_REASON_STATE_DISK, "the header is damaged"),
		"another error":           errDisk,
	} {
		t.Run(name, func(t *testing.T) {
			w := newFixture(t)
			fault := fault
			w.lock.before = func(context.Context) error { return fault }
			c := w.from("127.0.0.1")
			for range maxWrong + 1 {
				refusaltest.Refused(t, w.observations(), attestv1.Reason_REASON_STATE_DISK, refusedPlaces(), func() error {
					_, err := w.recover(t.Context(), c, request(), nil)
					return err
				})
			}
			fault = nil
			w.opens(t, c)
		})
	}
}

func TestARecoveryWantsASession(t *testing.T) {
	w := newFixture(t)
	refusaltest.EveryProcedure(t, w.observations(), refusaltest.Plain(t), "https://"+w.addr, attestv1.Reason_REASON_SESSION_REQUIRED, recoverv1connect.RecoverServiceName)
}

// A source has one call at a time; another one waits in the queue, and is notified.
func TestCallsWaitForTheirTurn(t *testing.T) {
	w := newFixture(t)
	trying, release := make(chan struct{}), make(chan struct{})
	first := true
	w.lock.before = func(context.Context) error {
		if first {
			first = false
			close(trying)
			<-release
		}
		return nil
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	other, owner := w.from("127.0.0.9"), w.from("127.0.0.1")
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := w.recover(ctx, other, wrong(), nil); rpc.ReasonFrom(err) != attestv1.Reason_REASON_RECOVERY_SECRET_INVALID {
			t.Errorf("the other client: %v", err)
		}
	})
	<-trying
	refusaltest.Refused(t, w.observations(), attestv1.Reason_REASON_BUSY, refusedPlaces(), func() error {
		_, err := w.recover(ctx, other, wrong(), nil)
		return err
	})
	// A client that hangs up while it waits delays no other client.
	hungUp, hangUp := context.WithCancel(ctx)
	_, err := w.recover(hungUp, w.from("127.0.0.8"), wrong(), func(s recoverv1.State) {
		if s == recoverv1.State_STATE_WAITING {
			hangUp()
		}
	})
	if connect.CodeOf(err) != connect.CodeCanceled {
		t.Errorf("hung up: %v", err)
	}
	states, err := w.recover(ctx, owner, request(), func(s recoverv1.State) {
		if s == recoverv1.State_STATE_WAITING {
			close(release)
		}
	})
	want := []recoverv1.State{recoverv1.State_STATE_RECEIVED, recoverv1.State_STATE_WAITING, recoverv1.State_STATE_TRYING, recoverv1.State_STATE_OPENED}
	if err != nil || !slices.Equal(states, want) {
		t.Errorf("%v %v, want %v", states, err, want)
	}
	wg.Wait()
	if _, tried := w.lock.state(); tried != 2 {
		t.Errorf("%d keys were tried, want 2", tried)
	}
}

// The connection breaks while the key is tried: the disk opens anyway.
func TestAKeyIsTriedToItsEndWithoutItsCaller(t *testing.T) {
	w := newFixture(t)
	ctx, hangUp := context.WithCancel(t.Context())
	released := make(chan struct{})
	w.lock.before = func(ctx context.Context) error {
		select {
		case <-released:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	_, err := w.recover(ctx, w.from("127.0.0.1"), request(), func(s recoverv1.State) {
		if s == recoverv1.State_STATE_TRYING {
			hangUp()
		}
	})
	if err == nil {
		t.Error("the caller was answered")
	}
	close(released)
	select {
	case <-w.server.Recovered():
	case <-time.After(patience):
		t.Fatal("the disk stays closed")
	}
}

// The bytes of one session are invalid in another: recorded bytes open nothing.
func TestRecordedBytesOpenNothing(t *testing.T) {
	w := newFixture(t)
	var mu sync.Mutex
	var sent bytes.Buffer
	taps := &net.Dialer{}
	record := w.fromDialer(func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := taps.DialContext(ctx, network, addr)
		return &tap{c, &mu, &sent}, err
	})
	if _, err := w.recover(t.Context(), record, wrong(), nil); rpc.ReasonFrom(err) != attestv1.Reason_REASON_RECOVERY_SECRET_INVALID {
		t.Fatal(err)
	}
	_, tried := w.lock.state()
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", w.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	mu.Lock()
	_, _ = conn.Write(sent.Bytes())
	mu.Unlock()
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	_, _ = io.Copy(io.Discard, conn) // until the server has closed it
	if _, again := w.lock.state(); again != tried {
		t.Error("a key was tried again")
	}
	w.opens(t, w.from("127.0.0.1"))
}

type tap struct {
	net.Conn
	mu   *sync.Mutex
	sent *bytes.Buffer
}

func (c *tap) Write(p []byte) (int, error) {
	c.mu.Lock()
	c.sent.Write(p)
	c.mu.Unlock()
	return c.Conn.Write(p)
}

// K3: no log line, metric or error has a part of the secrets, and the request's bytes are wiped.
func TestSecretsLeaveNoTrace(t *testing.T) {
	w := newFixture(t)
	c := w.from("127.0.0.1")
	var emitted []byte
	for _, req := range []*recoverv1.RecoverRequest{wrong(), {DiskKey: bytes.Repeat([]byte{0xAB}, 33)}, {DiskKey: bytes.Repeat([]byte{0xEE}, 4000)}, request()} {
		if _, err := w.recover(t.Context(), c, req, nil); err != nil {
			emitted = append(emitted, err.Error()...)
		}
	}
	emitted = append(emitted, w.logged.bytes()...)
	for _, secret := range [][]byte{bytes.Repeat([]byte{0xAB}, 8), bytes.Repeat([]byte{0xEE}, 8), w.lock.key} {
		for _, form := range []string{string(secret), hex.EncodeToString(secret), strings.TrimRight(base64.StdEncoding.EncodeToString(secret[:6]), "=")} {
			if bytes.Contains(emitted, []byte(form)) {
				t.Errorf("%x was emitted", secret)
			}
		}
	}
	req := request()
	key := req.GetDiskKey()
	id, _ := keys.ParseDiskID(diskID)
	if _, err := ownerorder.ParseRecovery(req, id, bootNonce, attest.OwnerKeys{ownerKey.Public().(ed25519.PublicKey)}); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(key, make([]byte, 32)) || req.GetDiskKey() != nil {
		t.Error("the request still holds the key")
	}
}

// The machine boots or shuts down while callers wait: they are answered or disconnected, and no goroutine is left.
func TestTheServerEndsWhileCallersWait(t *testing.T) {
	w := newFixture(t)
	if err := w.stop(); err != nil {
		t.Fatal(err)
	}
	w.server.grace = patience // the call is answered, however slow the machine is
	w.run()
	trying, release := make(chan struct{}), make(chan struct{})
	w.lock.before = func(context.Context) error { close(trying); <-release; return nil }
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := w.recover(t.Context(), w.from("127.0.0.1"), request(), nil); err != nil {
			t.Errorf("who was being tried: %v", err)
		}
	})
	<-trying
	stopped := make(chan error, 1)
	go func() { stopped <- w.stop() }()
	eventually(t, "the port is closed", func() bool {
		c, err := new(net.Dialer).DialContext(t.Context(), "tcp", w.addr)
		if err == nil {
			_ = c.Close()
		}
		return err != nil
	})
	close(release)
	wg.Wait()
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}

func TestNewSaysWhatIsMissing(t *testing.T) {
	w := newFixture(t)
	good := w.server.cfg
	for name, change := range map[string]func(*Config){
		"DiskID": func(c *Config) { c.DiskID = keys.DiskID{} }, "Try": func(c *Config) { c.Try = nil }, "Attester": func(c *Config) { c.Attester = nil },
		"Challenges": func(c *Config) { c.Challenges = nil }, "Calls": func(c *Config) { c.Calls = nil }, "Metrics": func(c *Config) { c.Metrics = nil }, "Log": func(c *Config) { c.Log = nil },
		"OwnerKeys": func(c *Config) { c.OwnerKeys = nil }, "OwnerKeys and none": func(c *Config) { c.NoOwnerKey = true },
		"metrics twice": func(*Config) {},
	} {
		cfg := good
		change(&cfg)
		if _, err := New(cfg); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
