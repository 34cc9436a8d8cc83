// Package serve runs the parts of a process that start and stop together.
//
// Each part of a process runs until its context ends. The first part that ends stops the others, and the process ends when
// the last one has: no part continues alone, and a service does not run without its metrics server.
package serve

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
)

// Part is a part of a process.
type Part struct {
	// Name is for errors.
	Name string
	// Run works until ctx ends, then cleans up and returns. An error that only reports that ctx ended counts as none.
	Run func(ctx context.Context) error
}

// All runs the parts until ctx ends or one of them does, waits for all of them, and joins their errors, each with its
// part's name. A part that ends without an error before ctx also stops the others.
func All(ctx context.Context, parts ...Part) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make([]error, len(parts))
	var wg sync.WaitGroup
	for i, p := range parts {
		wg.Go(func() {
			defer cancel()
			err := p.Run(ctx)
			if err == nil || ctx.Err() != nil && errors.Is(err, ctx.Err()) {
				return
			}
			errs[i] = fmt.Errorf("%s: %w", p.Name, err)
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Listen listens on a TCP address. field names where the address is configured, for the error.
func Listen(ctx context.Context, field, addr string) (net.Listener, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", field, err)
	}
	return l, nil
}
