package vm

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"time"

	"github.com/muster-k8s/muster/lab/internal/vtpm"
)

// Debian's OVMF: the 4 MiB build without System Management Mode, whose variables begin without Secure Boot keys; and
// the one with it, which protects its variables, and begins with a published key for tests (ovmf's README.Debian).
// PCR 0 and 7 differ between them, so each is a machine class of its own.
const (
	firmwareCode = "/usr/share/OVMF/OVMF_CODE_4M.fd"
	secureVars   = "/usr/share/OVMF/OVMF_VARS_4M.snakeoil.fd"
)

// The firmware of a machine with [Config.SecureBoot], and variables without keys, with which it has Secure Boot off.
const (
	SecureBootFirmware    = "/usr/share/OVMF/OVMF_CODE_4M.secboot.fd"
	NoSecureBootVariables = "/usr/share/OVMF/OVMF_VARS_4M.fd"
)

// The signer that a machine with [Config.SecureBoot] accepts: an encrypted private key with its passphrase, and its
// certificate, PEM both.
const (
	SecureBootKey         = "/usr/share/ovmf/PkKek-1-snakeoil.key"
	SecureBootPassphrase  = "snakeoil"
	SecureBootCertificate = "/usr/share/ovmf/PkKek-1-snakeoil.pem"
)

// firmware returns the machine's firmware, and its initial variables.
func firmware(c Config) (code, vars string) {
	code, vars = firmwareCode, NoSecureBootVariables
	if c.SecureBoot {
		code, vars = SecureBootFirmware, secureVars
	}
	if c.Hardware.Firmware != "" {
		code = c.Hardware.Firmware
	}
	return code, vars
}

// Files in a machine's folder.
const (
	qmpSocket     = "qmp.sock"
	mediumFile    = "medium.img"
	variablesFile = "vars.fd"
)

// processor has all features that QEMU can emulate except those that it emulates badly: Linux computes SHA-256 by the
// widest available instructions, and without AVX twice as fast (19 against 39 MB/s were measured, QEMU 7.2).
const processor = "max,-avx,-avx2"

// arguments is QEMU's command line. The devices and their order are part of the machine's identity: firmware puts
// them into its boot options, which are measured (PCR 1).
func arguments(c Config, console string) []string {
	code, _ := firmware(c)
	smm := code == SecureBootFirmware // only firmware in System Management Mode writes its variables (OVMF's README)
	machine := "q35,smm=off"
	if smm {
		machine = "q35,smm=on"
	}
	args := []string{
		"-nodefaults", "-display", "none", "-monitor", "none",
		"-no-reboot", // a machine that reboots by itself would do so unnoticed; the caller powers it on again
		"-accel", "tcg,thread=multi", "-machine", machine, "-cpu", processor,
		"-smp", strconv.Itoa(processors), "-m", strconv.Itoa(orDefault(c.Memory, DefaultMemory)),
		"-chardev", "file,id=console,path=" + option(filepath.Base(console)), "-serial", "chardev:console",
		"-qmp", "unix:" + qmpSocket + ",server=on,wait=off",
		"-drive", "if=pflash,format=raw,readonly=on,file=" + option(code),
		"-drive", "if=pflash,format=raw,file=" + variablesFile,
		"-chardev", "socket,id=tpm,path=tpm/" + vtpm.ControlSocket, "-tpmdev", "emulator,id=tpm0,chardev=tpm", "-device", "tpm-crb,tpmdev=tpm0",
		"-drive", "if=none,id=boot,format=raw,readonly=on,file=" + option(c.Image),
		"-device", "virtio-blk-pci,drive=boot,serial=boot,bootindex=0",
	}
	if c.Hardware.FirstDisk != "" {
		args = append(args, "-drive", "if=none,id=first,format=raw,readonly=on,file="+option(c.Hardware.FirstDisk), "-device", "virtio-blk-pci,drive=first,serial=first")
	}
	args = append(args,
		// A write that the machine has made is in the host's page cache, which outlives QEMU: nothing has to
		// be flushed for a power cut to be one. What the machine had not written yet is lost, as it should be.
		"-drive", "if=none,id=state,format=raw,cache=unsafe,discard=unmap,file=state.raw",
		"-device", "virtio-blk-pci,drive=state,serial="+StateSerial,
	)
	if c.ClockOffset != 0 {
		args = append(args, "-rtc", "base="+time.Now().UTC().Add(c.ClockOffset).Format("2006-01-02T15:04:05"))
	}
	if smm {
		args = append(args, "-global", "driver=cfi.pflash01,property=secure,value=on", "-global", "ICH9-LPC.disable_s3=1")
	}
	if c.Medium != nil {
		args = append(args, "-drive", "if=none,id=medium,format=raw,readonly=on,file="+mediumFile, "-device", "virtio-blk-pci,drive=medium,serial=muster-meta")
	}
	if c.Tap != "" {
		args = append(args, "-netdev", "tap,id=lan,script=no,downscript=no,ifname="+option(c.Tap), "-device", "virtio-net-pci,netdev=lan,romfile=,mac="+c.MAC.String())
	}
	random := "virtio-rng-pci"
	if c.Hardware.OptionROM != "" {
		random += ",romfile=" + option(c.Hardware.OptionROM)
	}
	args = append(args, "-device", random)
	if c.Hardware.OEMString != "" {
		args = append(args, "-smbios", "type=11,value="+option(c.Hardware.OEMString))
	}
	if c.Hardware.MachineCredential != "" {
		args = append(args, "-fw_cfg", "name=opt/io.systemd.credentials/muster.machine,file="+option(c.Hardware.MachineCredential))
	}
	if c.Hardware.Disk != "" { // the last one, so that it moves no other to another place
		args = append(args, "-drive", "if=none,id=more,format=raw,readonly=on,file="+option(c.Hardware.Disk), "-device", "virtio-blk-pci,drive=more,serial=more")
	}
	if c.Hardware.CD != "" {
		args = append(args, "-device", "virtio-scsi-pci,id=scsi", "-drive", "if=none,id=cd,media=cdrom,readonly=on,file="+option(c.Hardware.CD), "-device", "scsi-cd,bus=scsi.0,drive=cd")
	}
	return args
}

// option escapes a value of a QEMU option list, where a comma is written twice.
func option(s string) string {
	var b []byte
	for i := range len(s) {
		if s[i] == ',' {
			b = append(b, ',')
		}
		b = append(b, s[i])
	}
	return string(b)
}

// qmpTimeout limits the exchange with QEMU itself, not the machine's reaction.
const qmpTimeout = 20 * time.Second

// powerButton presses a machine's power button by QMP (QEMU Machine Protocol, QEMU's docs/interop/qmp-spec).
func powerButton(ctx context.Context, socket string) error {
	ctx, cancel := context.WithTimeout(ctx, qmpTimeout)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return fmt.Errorf("talk to QEMU: %w", err)
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	in := json.NewDecoder(bufio.NewReader(c))
	var greeting struct {
		QMP json.RawMessage `json:"QMP"`
	}
	if err := in.Decode(&greeting); err != nil || greeting.QMP == nil {
		return errors.Join(errors.New("QEMU doesn't greet"), err, ctx.Err())
	}
	for _, command := range []string{"qmp_capabilities", "system_powerdown"} {
		if _, err := fmt.Fprintf(c, `{"execute":%q}`+"\n", command); err != nil {
			return err
		}
		for answered := false; !answered; { // events may come before the answer
			var m struct {
				Return json.RawMessage `json:"return"`
				Error  *struct {
					Desc string `json:"desc"`
				} `json:"error"`
			}
			if err := in.Decode(&m); err != nil {
				return errors.Join(fmt.Errorf("QEMU's answer to %s: %w", command, err), ctx.Err())
			}
			if m.Error != nil {
				return fmt.Errorf("QEMU refuses %s: %s", command, m.Error.Desc)
			}
			answered = m.Return != nil
		}
	}
	return nil
}
