package crash

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/internal/disktest"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
)

// onSmallDisk puts a folder of the machine on a separate disk of 256 KiB.
func (h *host) onSmallDisk(folder string) (disk string) {
	h.t.Helper()
	disk = disktest.Small(h.t, 256<<10)
	at := filepath.Join(h.plan.Root, folder)
	if err := errors.Join(os.MkdirAll(filepath.Dir(at), 0o700), os.Symlink(disk, at)); err != nil {
		h.t.Fatal(err)
	}
	return disk
}

// B1, B3: a step that cannot be recorded is not taken. The owner of a machine with a full disk gets an error before
// the machine is locked, and once there is room the same call of the same process succeeds.
func TestAnInitIsRefusedBeforeTheLockIfTheJournalsDiskIsFull(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	req, id := request(b.mirror)
	h := b.newHost(t, first(), nil)
	free := disktest.Fill(t, h.onSmallDisk(filepath.Dir(journalPath)))
	l := h.start(-1)
	// The state disk, in the same folder, has no ID yet: without room the bootstrapper logs that and exits, and its
	// unit starts it again.
	if err := l.end(); err == nil || !strings.Contains(l.log.String(), "no space left on device") || !strings.Contains(l.log.String(), "STATE_DISK") {
		t.Fatalf("ended with %v\n%s", err, l.log)
	}
	free()
	l = h.start(-1)
	addr := l.addr(t)
	free = disktest.Fill(t, filepath.Join(h.plan.Root, filepath.Dir(journalPath)))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err := l.callInit(ctx, addr, req, id)
	if err == nil || !strings.Contains(err.Error(), "journal") || !strings.Contains(err.Error(), "no space left on device") || reasonOf(err) != "STATE_DISK" {
		t.Errorf("init on a full disk: %v", err)
	}
	if h.record().Locked() || !bytes.Equal(h.lockValue(), make([]byte, 32)) || h.count("PCR 15 is about to be extended") > 0 {
		t.Error("the machine was locked all the same")
	}
	free()
	if _, err := l.callInit(ctx, addr, req, id); err != nil {
		t.Fatalf("there is room again: %v\n%s", err, l.log)
	}
	if err := errors.Join(l.end(), h.isNode(journal.KindInit, id)); err != nil {
		t.Error(err)
	}
}

// The same for a join: the machine asks for no ticket that it could not use, and joins by itself once there is room.
func TestAJoinAsksForNoTicketIfTheJournalsDiskIsFull(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	j := newJoinservice(t, b)
	h := b.newHost(t, meta{Name: "node2", Role: "worker", JoinEndpoints: []string{"127.0.0.1:1"}}, j.ownerKey)
	disk := h.onSmallDisk(filepath.Dir(journalPath))
	l := h.start(-1)
	l.addr(t)
	free := disktest.Fill(t, disk)
	h.setEndpoints(j.addr)
	eventually(t, "the machine says that its disk is full", func() bool {
		return strings.Contains(l.log.String(), `"reason":"STATE_DISK"`) && strings.Contains(l.log.String(), "no space left on device")
	})
	if issued, _ := j.counts(); issued > 0 || h.record().Locked() || !bytes.Equal(h.lockValue(), make([]byte, 32)) {
		t.Errorf("%d tickets were asked for; the journal says %s", issued, h.record().Step)
	}
	free()
	if err := errors.Join(l.end(), h.isNode(journal.KindJoin, joinCluster)); err != nil {
		t.Errorf("there is room again: %v\n%s", err, l.log)
	}
}

// B3: the disks for components and configuration fill up after the lock. The machine logs that, and goes on by
// itself, or with the owner's next call, once there is room.
func TestAFullDiskAfterTheLockIsRetryable(t *testing.T) {
	t.Parallel()
	for folder, reason := range map[string]string{"/usr/local/bin": "COMPONENT_UNAVAILABLE", "/etc/kubernetes": "STATE_DISK"} {
		t.Run(strings.TrimPrefix(folder, "/"), func(t *testing.T) {
			b := newBench(t)
			j := newJoinservice(t, b)
			h := b.newHost(t, meta{Name: "node2", Role: "worker", JoinEndpoints: []string{j.addr}}, j.ownerKey)
			free := disktest.Fill(t, h.onSmallDisk(folder))
			l := h.start(-1)
			eventually(t, "the machine says that its disk is full", func() bool {
				return strings.Contains(l.log.String(), `"reason":"`+reason+`"`) && strings.Contains(l.log.String(), "no space left on device")
			})
			if !h.record().Locked() {
				t.Error("not locked")
			}
			free()
			if err := errors.Join(l.end(), h.isNode(journal.KindJoin, joinCluster)); err != nil {
				t.Errorf("there is room again: %v\n%s", err, l.log)
			}
		})
	}
}
