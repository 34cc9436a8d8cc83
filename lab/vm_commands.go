package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/lab/driver"
)

func vmCommand(open opener) *cobra.Command {
	cmd := &cobra.Command{Use: "vm", Short: "Virtual machines with measured boot, on the lab's network; at most two with power at a time"}
	cmd.AddCommand(vmStartCommand(open), vmConsoleCommand(open), vmListCommand(open),
		simple("stop NAME", "Press its power button and wait until it is off", cobra.ExactArgs(1), open,
			func(cmd *cobra.Command, l *driver.Lab, args []string) error {
				return l.StopVM(cmd.Context(), args[0])
			}),
		simple("kill NAME", "Cut its power without notice; start gives it back", cobra.ExactArgs(1), open,
			func(cmd *cobra.Command, l *driver.Lab, args []string) error {
				return l.KillVM(cmd.Context(), args[0])
			}))
	return cmd
}

func vmStartCommand(open opener) *cobra.Command {
	var v driver.VM
	cmd := simple("start NAME", "Make a virtual machine and give it power, or give power again to one that is off", cobra.ExactArgs(1), open,
		func(cmd *cobra.Command, l *driver.Lab, args []string) error {
			v.Name = args[0]
			s, err := l.Status(cmd.Context())
			if err != nil {
				return err
			}
			i := slices.IndexFunc(s.Machines, func(m driver.Machine) bool { return m.Name == v.Name })
			var m driver.Machine
			switch {
			case i < 0:
				m, err = l.AddVM(cmd.Context(), v)
			case !s.Machines[i].VM || s.Machines[i].Running:
				return fmt.Errorf("machine %s runs already", v.Name)
			default:
				m, err = l.RebootVM(cmd.Context(), v.Name, driver.Boot{Image: v.Image, Hardware: &v.Hardware})
			}
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s %s\n", m.Name, m.Address)
			return err
		})
	f := cmd.Flags()
	f.StringVar(&v.Image, "image", "", "raw disk image to boot; for a machine that was off: another one than before")
	f.IntVar(&v.StateMiB, "state-size", 0, "MiB of its state disk, when it is made (default 4096)")
	f.IntVar(&v.MemoryMiB, "memory", 0, "MiB (default 2048)")
	f.IntVar(&v.Number, "number", 0, "1 to 240; the address is 192.168.77.(10+number) (default: the one in the name)")
	f.StringVar(&v.Role, "role", "worker", "control-plane or worker, for its metadata and the load balancer")
	f.StringVar(&v.InitSecretHash, "init-secret-hash", "", "SHA-256 of the init secret, hex: this machine may be initialized")
	f.StringSliceVar(&v.JoinEndpoints, "join-endpoint", nil, "joinservice to ask, host:port")
	f.BoolVar(&v.SecureBoot, "secure-boot", false, "give it firmware that starts what "+driver.SecureBootKey+" signed, and nothing else")
	f.StringVar(&v.Hardware.Firmware, "firmware", "", "flash image of other firmware code, for this boot")
	f.StringVar(&v.Hardware.OptionROM, "option-rom", "", "PCI expansion ROM of its random-number device, for this boot")
	f.StringVar(&v.Hardware.Disk, "disk", "", "raw image of one more disk, read-only, for this boot")
	f.DurationVar(&v.ClockOffset, "clock-offset", 0, "how far its firmware's clock is ahead of this host's, whenever it gets power")
	f.StringSliceVar(&v.NTP, "ntp", nil, "address of a time server, for its config medium")
	f.BoolVar(&v.ForeignEK, "foreign-ek", false, "give it a TPM from a CA that no listed root certifies")
	return cmd
}

func vmConsoleCommand(open opener) *cobra.Command {
	var (
		follow  bool
		wait    string
		timeout time.Duration
	)
	cmd := simple("console NAME", "Print what it wrote to its serial port since it got power last", cobra.ExactArgs(1), open,
		func(cmd *cobra.Command, l *driver.Lab, args []string) error {
			ctx := cmd.Context()
			if wait != "" {
				ctx, cancel := context.WithTimeout(ctx, timeout)
				defer cancel()
				line, err := l.WaitConsole(ctx, args[0], wait)
				if err == nil {
					_, err = fmt.Fprintln(cmd.OutOrStdout(), line)
				}
				return err
			}
			path, err := l.Console(args[0])
			if err != nil {
				return err
			}
			return printConsole(ctx, cmd.OutOrStdout(), path, follow)
		})
	f := cmd.Flags()
	f.BoolVarP(&follow, "follow", "f", false, "also print further output, until interrupted")
	f.StringVar(&wait, "wait", "", "wait until a line has this text, and print that line only")
	f.DurationVar(&timeout, "timeout", 5*time.Minute, "how long --wait waits")
	return cmd
}

// printConsole copies a console without what terminals obey.
func printConsole(ctx context.Context, w io.Writer, path string, follow bool) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	in, rest := bufio.NewReader(f), ""
	for {
		part, err := in.ReadString('\n')
		rest += part
		switch {
		case err == nil:
			if _, err := fmt.Fprintln(w, driver.CleanLine(strings.TrimSuffix(rest, "\n"))); err != nil {
				return err
			}
			rest = ""
		case !errors.Is(err, io.EOF):
			return err
		case !follow:
			_, err := fmt.Fprint(w, driver.CleanLine(rest))
			return err
		default:
			select {
			case <-tick.C:
			case <-ctx.Done():
				return nil
			}
		}
	}
}

func vmListCommand(open opener) *cobra.Command {
	return simple("list", "Show the virtual machines", cobra.NoArgs, open, func(cmd *cobra.Command, l *driver.Lab, _ []string) error {
		s, err := l.Status(cmd.Context())
		if err != nil {
			return err
		}
		w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 3, ' ', 0)
		fmt.Fprintln(w, "NAME\tADDRESS\tPOWER\tPID\tCONSOLE")
		for _, m := range s.Machines {
			if !m.VM {
				continue
			}
			power := "off"
			if m.Running {
				power = "on"
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\n", m.Name, m.Address, power, m.Init.PID, m.Console)
		}
		return w.Flush()
	})
}
