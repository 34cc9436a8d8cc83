package crash

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/console"
	"github.com/muster-k8s/muster/services/bootstrapper/disk"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/unlock"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// unlockProcess is the program `bootstrapper unlock` on a machine without device-mapper.
func unlockProcess(ctx context.Context, p plan, img *metadata.Image, f *fate, device mortalTPM, own attest.Attester) error {
	volume, err := disk.OpenLUKS(p.Unlock, disk.WithRoot(p.Root), disk.WithIntegrity(img.StateDisk.Integrity))
	if err != nil {
		return err
	}
	screen, err := console.Open(p.beside("console"))
	if err != nil {
		return err
	}
	defer func() { _ = screen.Close() }()
	return unlock.Serve(ctx, unlock.Config{
		Image: img, Metadata: func() (*metadata.Machine, error) { return metadata.LoadMachine(p.beside("metadata.yaml")) },
		Root: p.Root, Disk: mortalDisk{volume, f}, TPM: device, Attester: own, NewVerifier: verifierOf, Policy: journal.Open(filepath.Join(p.Root, journal.UnlockPolicy)), Desired: component.DesiredFile(filepath.Join(p.Root, component.UnlockFile)), Console: screen, Log: slog.New(slog.NewJSONHandler(os.Stderr, nil)),
		Timing: unlock.Timing{Stagger: 20 * time.Millisecond, RetryMin: 5 * time.Millisecond, RetryMax: 50 * time.Millisecond, Dial: 10 * time.Second, Ticket: 30 * time.Second},
	})
}

// mortalDisk is the state disk in the initramfs. The programs that a call runs report what happens inside it.
type mortalDisk struct {
	*disk.LUKS
	fate *fate
}

func (d mortalDisk) Format(ctx context.Context, progress func(done, total uint64)) error {
	if err := d.fate.step("the state disk is about to be formatted"); err != nil {
		return err
	}
	if err := d.LUKS.Format(ctx, progress); err != nil {
		return err
	}
	return d.fate.step("the state disk is formatted")
}

func (d mortalDisk) Unlock(ctx context.Context, key keys.Disk) error {
	if err := d.LUKS.Unlock(ctx, key); err != nil {
		return err
	}
	return d.fate.step("the cluster's key has opened the state disk")
}

// programs replace cryptsetup and mkfs.ext4 on a machine that has no device-mapper. The real cryptsetup reads and
// writes headers. Mappings are files: the folder kernel has the volume key while the volume is open, as the kernel's
// memory would, and sysfs shows the mapping. mkfs leaves a mark of that key on the disk's data. Each program reports
// to the process that has started it what it is about to do and has done, and waits for the answer.
var programs = map[string]string{
	"cryptsetup": `#!/bin/sh
set -eu
BASE
real=$programs/real
case $1 in
luksFormat)
	say "a new header is about to be made"
	$real "$@"
	say "a new header is made"
	;;
luksChangeKey)
	say "the key is about to be changed"
	$real "$@"
	say "the key is changed"
	;;
config)
	say "the label is about to be changed"
	$real "$@"
	say "the label is changed"
	;;
close)
	rm -rf "${sys%/dm}" "$kernel"
	;;
open)
	case " $* " in
	*" --test-passphrase "*)
		say "a key is about to be tried"
		code=0
		$real "$@" || code=$?
		say "a key was tried"
		exit $code
		;;
	esac
	say "the volume is about to be opened"
	rm -rf "$kernel"
	mkdir -p "$kernel" "$sys" "${sys%/dm}/slaves/state"
	echo 0:0 >"${sys%/dm}/slaves/state/dev" # a file's number
	$real luksDump --batch-mode --disable-locks --dump-volume-key --volume-key-file "$kernel/new" --key-file /proc/self/fd/4 --keyfile-size 32 /proc/self/fd/3
	uuid=$(dd if=/proc/self/fd/3 bs=1 skip=168 count=36 status=none | tr -d -)
	mv "$kernel/new" "$kernel/key"
	echo "CRYPT-LUKS2-$uuid-muster-state" >"$sys/uuid"
	echo muster-state >"$sys/name"
	say "the volume is open"
	;;
*)
	echo "this cryptsetup does not $1" >&2
	exit 1
	;;
esac
`,
	"mkfs.ext4": `#!/bin/sh
set -eu
BASE
say "the file system is about to be made"
: >"$data"
say "the file system is half made"
sha256sum <"$kernel/key" | cut -c1-64 >"$data"
say "the file system is made"
`,
}

// writePrograms puts the programs of a machine with that root into a folder. data is the file for the disk's data.
func writePrograms(t testing.TB, p *plan, data string) {
	t.Helper()
	p.Programs = filepath.Join(t.TempDir(), "programs")
	base := fmt.Sprintf(`kernel='%s' sys='%s' data='%s' programs='%s'
say() {
	echo "$1" >"$programs/say"
	read -r answer <"$programs/heard"
}`, p.beside("kernel"), filepath.Join(p.Root, "sys/block/dm-0/dm"), data, p.Programs)
	if err := os.Mkdir(p.Programs, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(p.Programs, "real"), nil, 0o700); err != nil { // withPrograms puts it there
		t.Fatal(err)
	}
	for name, text := range programs {
		if err := os.WriteFile(filepath.Join(p.Programs, name), []byte(strings.Replace(text, "BASE", base, 1)), 0o700); err != nil {
			t.Fatal(err)
		}
	}
}

// withPrograms runs this program in a mount namespace of its own, in which these programs are mounted over those of
// the host: a bootstrapper looks for its children in fixed folders, /usr/sbin first. The real cryptsetup is then
// beside them.
func withPrograms(dir string) *exec.Cmd {
	return exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-ec", `
mount --bind /usr/sbin/cryptsetup "$0/real"
for p in cryptsetup mkfs.ext4; do mount --bind "$0/$p" "/usr/sbin/$p"; done
exec "$1"`, dir, os.Args[0])
}

// ask makes the reports of the programs effects of this process: if one is the last, the programs end with it.
func (f *fate) ask(programs string) error {
	var pipes [2]*os.File
	for i, name := range []string{"say", "heard"} {
		path := filepath.Join(programs, name)
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			return err
		}
		if err := syscall.Mkfifo(path, 0o600); err != nil {
			return err
		}
		var err error
		if pipes[i], err = os.OpenFile(path, os.O_RDWR, 0); err != nil { // so that it is never without a reader, or a writer
			return err
		}
	}
	go func() { // until the process ends
		for said := bufio.NewScanner(pipes[0]); said.Scan(); {
			if f.step(said.Text()) != nil {
				return
			}
			if _, err := pipes[1].WriteString("\n"); err != nil {
				return
			}
		}
	}()
	return nil
}
