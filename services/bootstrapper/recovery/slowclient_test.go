package recovery

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"strconv"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	recoverv1 "github.com/muster-k8s/muster/gen/muster/recover/v1"
	"github.com/muster-k8s/muster/gen/muster/recover/v1/recoverv1connect"
	"github.com/muster-k8s/muster/trust/atls"
)

// session opens a session as a client does that does not verify the machine, and sends nothing more.
func (w *fixture) session(t *testing.T, ip string) (net.Conn, error) {
	t.Helper()
	dialer := &tls.Dialer{NetDialer: &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}, Config: &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{atls.ALPN}, InsecureSkipVerify: true,
	}}
	conn, err := dialer.DialContext(t.Context(), "tcp", w.addr)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { _ = conn.Close() })
	send := func(m proto.Message) {
		body, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...))
	}
	send(&attestv1.Frame{Message: &attestv1.Frame_Offer{Offer: &attestv1.Offer{}}})
	for range 2 { // the machine's offer and verdict
		var head [4]byte
		if _, err := io.ReadFull(conn, head[:]); err != nil {
			return nil, err
		}
		if _, err := io.CopyN(io.Discard, conn, int64(binary.BigEndian.Uint32(head[:]))); err != nil {
			return nil, err
		}
	}
	send(&attestv1.Frame{Message: &attestv1.Frame_Verdict{Verdict: &attestv1.Verdict{Reason: attestv1.Reason_REASON_ACCEPTED}}})
	return conn, nil
}

// slowClient requests a recovery with wrong secrets, and reads at most window bytes of the answer.
func (w *fixture) slowClient(t *testing.T, ip string, window uint32) net.Conn {
	t.Helper()
	conn, err := w.session(t, ip)
	if err != nil {
		t.Fatal(err)
	}
	message, err := proto.Marshal(wrong())
	if err != nil {
		t.Fatal(err)
	}
	var out, block bytes.Buffer
	out.WriteString(http2.ClientPreface)
	frames, headers := http2.NewFramer(&out, nil), hpack.NewEncoder(&block)
	for _, f := range [][2]string{
		{":method", "POST"}, {":scheme", "http"}, {":authority", "muster"}, {":path", recoverv1connect.RecoverServiceRecoverProcedure}, {"content-type", "application/grpc+proto"}, {"te", "trailers"},
	} {
		_ = headers.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}) // a buffer never fails
	}
	_ = frames.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: window})
	_ = frames.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true})
	_ = frames.WriteData(1, true, append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message))), message...))
	if _, err := conn.Write(out.Bytes()); err != nil {
		t.Fatal(err)
	}
	return conn
}

// A client that reads no message, or stops after the first or the second one, has its key tried like others, and delays no other client.
func TestCallersThatDoNotReadHoldUpNobody(t *testing.T) {
	message, err := proto.Marshal(&recoverv1.RecoverResponse{State: recoverv1.State_STATE_TRYING, DiskId: diskID})
	if err != nil {
		t.Fatal(err)
	}
	for messages := range 4 {
		t.Run(strconv.Itoa(messages)+" messages are read", func(t *testing.T) {
			w := newFixture(t)
			const deaf = 5
			for i := range deaf {
				w.slowClient(t, "127.0.3."+strconv.Itoa(i+1), uint32(messages*(5+len(message))))
			}
			w.opens(t, w.from("127.0.0.1"))
			eventually(t, "each of their keys is tried too", func() bool { _, tried := w.lock.state(); return tried == deaf+1 })
			// Some of these clients still hold their streams: the machine boots anyway.
			began := time.Now()
			if err := w.stop(); err != nil {
				t.Error(err)
			}
			if took := time.Since(began); took > patience {
				t.Errorf("it took %s to end", took)
			}
		})
	}
}
