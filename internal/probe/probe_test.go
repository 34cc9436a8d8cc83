package probe_test

import (
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/internal/probe"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestOnlyAnAnswerOf200IsWell(t *testing.T) {
	for answer, want := range map[string]string{
		"HTTP/1.0 200 OK\r\n\r\nok\n":                            "",
		"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nok\n":       "",
		"HTTP/1.0 503 Service Unavailable\r\n\r\npolicy: none\n": `"HTTP/1.0 503 Service Unavailable": policy: none`,
		"HTTP/1.0 2000 OK\r\n\r\n":                               "2000",
		"200 OK\r\n\r\n":                                         `"200 OK"`,
		"":                                                       `""`,
		"HTTP/1.0 503 200 OK\r\n\r\n" + strings.Repeat("x", 1<<20): "503",
		"ICY 200 OK\r\n\r\n": "ICY",
	} {
		socket := fmt.Sprintf("@muster-probe-test-%d", os.Getpid())
		l, err := new(net.ListenConfig).Listen(t.Context(), "unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		served := make(chan struct{})
		go func() {
			defer close(served)
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Read(make([]byte, 100))
			_, _ = io.WriteString(conn, answer)
			_ = conn.Close()
		}()
		err = probe.Ask(t.Context(), []string{"/readyz", socket})
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want) || len(err.Error()) > 10<<10) {
			t.Errorf("%.40q: %v, want %q", answer, err, want)
		}
		_ = l.Close()
		<-served
	}
}
