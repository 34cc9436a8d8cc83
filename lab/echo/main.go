// Program echo is the workload that shows that a cluster carries traffic.
//
//	echo serve ADDR     answers each request with the node and the pod that it runs on
//	echo get URL        prints the answer of one request; exits with 1 if there is none
//	echo put FILE TEXT  writes a file, and returns when it is on the disk
//	echo cat FILE…      prints files
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "echo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 2 && args[0] == "serve" {
		return serve(ctx, args[1])
	}
	if len(args) == 2 && args[0] == "get" {
		return get(ctx, args[1], out)
	}
	if len(args) == 3 && args[0] == "put" {
		return put(args[1], args[2])
	}
	if len(args) > 1 && args[0] == "cat" {
		var all []byte
		for _, name := range args[1:] {
			b, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			all = append(all, b...)
		}
		_, err := out.Write(all)
		return err
	}
	return errors.New("usage: echo serve ADDR | echo get URL | echo put FILE TEXT | echo cat FILE…")
}

func put(path, text string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = io.WriteString(f, text)
	return errors.Join(err, f.Sync(), f.Close())
}

func serve(ctx context.Context, addr string) error {
	node, pod := os.Getenv("NODE_NAME"), os.Getenv("POD_NAME")
	s := &http.Server{
		Addr:              addr,
		ReadHeaderTimeout: 5 * time.Second,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprintf(w, "node=%s pod=%s remote=%s\n", node, pod, r.RemoteAddr)
		}),
	}
	stop := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stop()
	if err := s.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func get(ctx context.Context, url string, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answered %s", url, resp.Status)
	}
	_, err = io.Copy(out, resp.Body)
	return err
}
