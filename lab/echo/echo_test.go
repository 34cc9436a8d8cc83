package main

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestEchoSaysWhereItRuns(t *testing.T) {
	t.Setenv("NODE_NAME", "node1")
	t.Setenv("POD_NAME", "echo-x")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	done := make(chan error)
	go func() { done <- run(ctx, []string{"serve", addr}, t.Output()) }()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	var out bytes.Buffer
	for {
		out.Reset()
		err := run(ctx, []string{"get", "http://" + addr + "/"}, &out)
		if err == nil {
			break
		}
		select {
		case <-ctx.Done():
			t.Fatal(err)
		case <-tick.C:
		}
	}
	if !strings.HasPrefix(out.String(), "node=node1 pod=echo-x remote=127.0.0.1:") {
		t.Errorf("%q", out.String())
	}
	if err := run(ctx, []string{"get"}, &out); err == nil {
		t.Error("half a command is no error")
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	http.DefaultClient.CloseIdleConnections()
}

func TestAFileIsPutAndPrinted(t *testing.T) {
	path := filepath.Join(t.TempDir(), "marker")
	var out bytes.Buffer
	if err := run(t.Context(), []string{"cat", path}, &out); err == nil {
		t.Error("a file that isn't there was printed")
	}
	for _, text := range []string{"a longer text", "text"} {
		out.Reset()
		if err := errors.Join(run(t.Context(), []string{"put", path, text}, &out), run(t.Context(), []string{"cat", path}, &out)); err != nil || out.String() != text {
			t.Errorf("%q, %v; want %q", out.String(), err, text)
		}
	}
}
