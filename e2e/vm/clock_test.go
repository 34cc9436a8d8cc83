//go:build vm

package vm

import (
	"bufio"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
)

// Three hours behind, a machine finds its certificate not valid yet (docs/crashes.md), so it becomes a node only if
// the site's server has set its clock.
func TestAMachineWhoseClockIsHoursOffAsksTheSitesServerAndJoins(t *testing.T) {
	w := bringUp(t)
	server, err := w.Command(t.Context(), driver.Owner, onSeat(t, "time", driver.OwnerAddress)...)
	if err != nil {
		t.Fatal(err)
	}
	out, err := server.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	server.Stderr = t.Output()
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	asked := make(chan string, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for in := bufio.NewScanner(out); in.Scan(); {
			select {
			case asked <- in.Text():
			default: // one is enough
			}
		}
	}()
	t.Cleanup(func() {
		_ = server.Process.Kill()
		<-done
		_ = server.Wait() // killed
	})

	v := w.worker("node7")
	v.ClockOffset, v.NTP = -3*time.Hour, []string{driver.OwnerAddress}
	if _, err := w.AddVM(t.Context(), v); err != nil {
		t.Fatal(err)
	}
	w.says(t, "node7", "the time comes from "+driver.OwnerAddress, bootTime)
	select {
	case from := <-asked:
		if !strings.HasPrefix(from, node7+":") {
			t.Errorf("%s has asked for the time", from)
		}
		t.Logf("%s has asked for the time", from)
	case <-time.After(joinTime): // includes the formatting of the disk
		t.Fatal("nobody has asked for the time")
	}
	w.acceptFirmware(t, node7)
	w.ready(t, "node7", "")
}
