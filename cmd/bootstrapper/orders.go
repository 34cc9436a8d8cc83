package main

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/muster-k8s/muster/internal/backup"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/services/bootstrapper/doctor"
	"github.com/muster-k8s/muster/services/bootstrapper/etcd"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/orders"
	"github.com/muster-k8s/muster/trust/attest"
)

// recordedTime is how long a reset waits until the cluster has recorded its start. The attester attests again 15 s after it got an order.
const recordedTime = 5 * time.Minute

// bootID is the file with the kernel's ID of this boot: random(4).
const bootID = "/proc/sys/kernel/random/boot_id"

// loopback is the address at which this machine's etcd listens for local clients.
var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// etcdAuthority reads the authority of this machine's etcd, PEM.
func etcdAuthority() (caCert, caKey []byte, err error) {
	for name, to := range map[string]*[]byte{"etcd/ca.crt": &caCert, "etcd/ca.key": &caKey} {
		*to, err = os.ReadFile(filepath.Join(machine.PKIFolder, name))
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil, errors.New("this machine is not a control plane with its own etcd")
		} else if err != nil {
			return nil, nil, err
		}
	}
	return caCert, caKey, nil
}

// removeMember removes another node's member through this machine's etcd.
func removeMember(ctx context.Context, member string) ([]string, error) {
	caCert, caKey, err := etcdAuthority()
	if err != nil {
		return nil, err
	}
	removed, err := etcd.RemoveNode(ctx, []netip.Addr{loopback}, caCert, caKey, member)
	var out []string
	for _, m := range removed {
		out = append(out, "removed "+m.String())
	}
	return out, err
}

// runOrders executes the owner's orders to this machine, until ctx ends.
func runOrders(ctx context.Context, image, meta, record, lock string, log *slog.Logger) error {
	img, err := metadata.LoadImage(image)
	if err != nil {
		return err
	}
	device, err := openTPM(img, lock)
	if err != nil {
		return err
	}
	own, err := newAttester(img, device, attest.PurposeOrder) // A5
	if err != nil {
		return err
	}
	e, err := orders.New(orders.Config{
		Root: "/", Image: img, Journal: journal.Open(record).Load, Poll: orders.Poll, ActionTime: orders.ActionTime, Now: time.Now, Log: log,
		Actions: map[ownerorder.Action]orders.Action{
			ownerorder.ActionDoctor: orders.Doctor(func(ctx context.Context) *checkup.Report {
				ctx, cancel := context.WithTimeout(ctx, doctorTime)
				defer cancel()
				return doctor.Examine(ctx, doctorConfig(image, meta, record, lock))
			}),
			ownerorder.ActionReboot: orders.Reboot(machine.Reboot),
			ownerorder.ActionReset: orders.Reset(img.StateDisk.Mode, func(ctx context.Context) error {
				ctx, cancel := context.WithTimeout(ctx, recordedTime)
				defer cancel()
				return orders.AwaitRecorded(ctx, "/", orders.Poll)
			}, func(ctx context.Context) error {
				return machine.Real{}.Unit(ctx, "start", machine.UnitReset)
			}, machine.Reboot),
			ownerorder.ActionBackup: orders.Backup(func(ctx context.Context) (backup.Stored, error) {
				m, err := backupMaker(img, record, log)
				if err != nil {
					return backup.Stored{}, err
				}
				return m.Make(ctx)
			}),
			ownerorder.ActionVerify:            orders.Verify("/", own),
			ownerorder.ActionUpgradeKubernetes: orders.UpgradeKubernetes("/", func(ctx context.Context) error { return machine.Oneshot(ctx, machine.UnitUpgrade) }),
			ownerorder.ActionRotateKey:         orders.RotateKey("/", func(ctx context.Context) error { return machine.Oneshot(ctx, machine.UnitRotation) }),
			ownerorder.ActionRemoveEtcdMember: orders.RemoveEtcdMember(func() (string, error) {
				rec, err := journal.Open(record).Load()
				return rec.NodeName, err
			}, removeMember),
		},
		Boot: func() (string, error) {
			b, err := os.ReadFile(bootID)
			return strings.TrimSpace(string(b)), err
		},
	})
	if err != nil {
		return err
	}
	return e.Run(ctx)
}
