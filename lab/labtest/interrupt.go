package labtest

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
)

// up are the labs of this process. Their machines are processes of their own, which a test that is interrupted would leave.
var up = struct {
	sync.Mutex
	labs map[*driver.Lab]bool
	quit chan struct{} // ends the goroutine that waits for a signal
}{labs: map[*driver.Lab]bool{}}

// whileUp takes the lab down, and ends this process, on an interrupt or SIGTERM until done is called.
func whileUp(lab *driver.Lab) (done func()) {
	up.Lock()
	defer up.Unlock()
	if up.labs[lab] = true; len(up.labs) == 1 {
		up.quit = make(chan struct{})
		signals := make(chan os.Signal, 1)
		signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
		go func(quit chan struct{}) {
			select {
			case <-signals:
				allDown()
				os.Exit(1)
			case <-quit:
				signal.Stop(signals)
			}
		}(up.quit)
	}
	return func() {
		up.Lock()
		defer up.Unlock()
		if delete(up.labs, lab); len(up.labs) == 0 {
			close(up.quit)
		}
	}
}

func allDown() {
	up.Lock() // nothing else runs
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	for lab := range up.labs {
		if err := lab.Down(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "take the lab down:", err) // the test's own output is buffered
		}
	}
}
