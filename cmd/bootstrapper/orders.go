package main

import (
	"context"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/ownerorder"
	"github.com/muster-k8s/muster/services/bootstrapper/doctor"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/orders"
)

// bootID is where the kernel names this boot: random(4).
const bootID = "/proc/sys/kernel/random/boot_id"

// runOrders executes what the owner orders this machine to do, until ctx ends.
func runOrders(ctx context.Context, image, meta, record, lock string, log *slog.Logger) error {
	img, err := metadata.LoadImage(image)
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
