package main

import (
	"bytes"
	"context"
	"crypto"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/muster-k8s/muster/internal/image"
	"github.com/muster-k8s/muster/internal/image/builder"
	"github.com/muster-k8s/muster/internal/image/gpt"
	"github.com/muster-k8s/muster/internal/image/layout"
	"github.com/muster-k8s/muster/internal/image/uki"
	"github.com/muster-k8s/muster/internal/image/verity"
)

// The files that a build writes.
const (
	diskFile       = "muster.raw"
	ukiFile        = "muster.efi"
	measuredFile   = "measurements.json"            // firmware without Secure Boot
	measuredSBFile = "measurements-secureboot.json" // firmware that checks signatures
	billFile       = "muster.spdx.json"
	lockFile       = "packages.lock" // the one that was used
)

// fixedCmdline is the kernel's command line without the root. It is measured: a changed word changes PCRs 4, 9 and
// 11.
var fixedCmdline = []string{
	"console=tty0", "console=ttyS0", "quiet", "loglevel=4", "panic=30",
	"printk.devkmsg=on", // the initramfs leaves its log for the journal, all of it
	"net.ifnames=0",     // the initramfs has named the interfaces, and they are up
	// Firmware's variables are not measured when the system reads them, and systemd takes options from one. Until the
	// kernel has control, no device behind a bridge writes to memory (Linux, EFI_DISABLE_PCI_DMA).
	"efi=noruntime,disable_early_pci_dma",
	// Afterwards the IOMMU limits devices to the memory that their drivers gave them; Debian's kernel leaves Intel's off.
	"intel_iommu=on", "iommu.passthrough=0", "iommu.strict=1",
	// Credentials from a hypervisor are not measured either: they could write files and passwords.
	"systemd.import_credentials=no",
	"systemd.gpt_auto=no", "systemd.firstboot=no", "systemd.show_status=error",
	// B6: root of the running system cannot change the kernel; otherwise the PCRs would not describe it. The level of
	// lockdown is an option of the build.
	"lsm=landlock,lockdown,yama,integrity,apparmor,bpf", "module.sig_enforce=1",
	// Another kernel of Debian's has a valid signature too. Set before the first program runs; only a boot resets it.
	"sysctl.kernel.kexec_load_disabled=1",
	"nohibernate", // K3: memory is not written to a disk
}

// lockdowns are the levels of kernel_lockdown(7) that an image may have. Kubernetes and containerd work with either.
var lockdowns = []string{"confidentiality", "integrity"}

func build(ctx context.Context, o options, stdout, log io.Writer) error {
	config, bank, err := o.config.make()
	if err != nil {
		return err
	}
	l, err := readLock(ctx, o)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return err
	}
	work, err := os.MkdirTemp(o.out, ".making-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	programs, err := programs(o, l, filepath.Join(work, "programs"))
	if err != nil {
		return err
	}
	debian, err := fetch(ctx, o, l, work, log)
	if err != nil {
		return err
	}
	kernel, err := kernelVersion(debian.kernel())
	if err != nil {
		return err
	}

	add, err := additions(o, debian, kernel, programs, config)
	if err != nil {
		return err
	}
	fmt.Fprintln(log, "the root: compressing it")
	rootFile := filepath.Join(work, "root")
	status, err := squash(ctx, o, debian, add, rootFile)
	if err != nil {
		return err
	}
	packages, err := billed(l, status)
	if err != nil {
		return err
	}
	f, err := os.Open(rootFile)
	if err != nil {
		return err
	}
	defer f.Close()
	root, tree, err := verity.Tree(f)
	if err != nil {
		return err
	}

	program := filepath.Join(work, "programs", "init")
	if err := compileInit(ctx, o, program); err != nil {
		return err
	}
	programs["init"] = program // of the initramfs
	boot, err := unified(o, debian, kernel, program, root)
	if err != nil {
		return err
	}
	if boot, err = sign(ctx, o, boot, work); err != nil {
		return err
	}
	esp, err := systemPartition(ctx, o, boot, work)
	if err != nil {
		return err
	}
	if err := writeDisk(filepath.Join(o.out, diskFile), esp, f, int64(root.Blocks)*layout.BlockSize, tree); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(o.out, ukiFile), boot, 0o644); err != nil {
		return err
	}
	if err := writeMeasurements(o, boot, bank); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(o.out, lockFile), l.Format(), 0o644); err != nil {
		return err
	}
	if err := writeBill(ctx, o, packages, programs); err != nil {
		return err
	}
	return report(o, stdout)
}

// compileInit builds the initramfs's program with the flags of all programs of the project.
func compileInit(ctx context.Context, o options, to string) error {
	abs, err := filepath.Abs(to)
	if err != nil {
		return err
	}
	if _, err := goTool(ctx, o, "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w -buildid=", "-o", abs, "./deploy/vm/initramfs"); err != nil {
		return fmt.Errorf("build the initramfs's program: %w", err)
	}
	return nil
}

// unified makes the one EFI program that firmware starts.
func unified(o options, b base, kernel, program string, root layout.Root) ([]byte, error) {
	init, err := os.ReadFile(program)
	if err != nil {
		return nil, err
	}
	ram, err := initrd(init, filepath.Join(b.kernel(), "lib", "modules", kernel))
	if err != nil {
		return nil, err
	}
	linux, err := os.ReadFile(filepath.Join(b.kernel(), "boot", "vmlinuz-"+kernel))
	if err != nil {
		return nil, err
	}
	// The loader's name ends in a word that elsewhere marks unfinished work.
	found, err := filepath.Glob(filepath.Join(b.loader(), "usr/lib/systemd/boot/efi/linuxx64.efi.*"))
	if err != nil || len(found) != 1 {
		return nil, fmt.Errorf("the package %s has %d loaders for x86-64, want one: %w", loaderPackage, len(found), err)
	}
	loader, err := os.ReadFile(found[0])
	if err != nil {
		return nil, err
	}
	return uki.Build(loader, []uki.Section{
		{Name: ".osrel", Data: osRelease(o)}, {Name: ".cmdline", Data: append([]byte(cmdline(o, root)), 0)}, {Name: ".linux", Data: linux}, {Name: ".initrd", Data: ram},
	})
}

func cmdline(o options, root layout.Root) string {
	words := append(slices.Clone(fixedCmdline), "lockdown="+o.lockdown)
	return strings.Join(append(append(words, strings.Fields(o.cmdline)...), layout.VerityKey+root.String()), " ")
}

// sign adds a signature for Secure Boot, if there is a key.
func sign(ctx context.Context, o options, image []byte, work string) ([]byte, error) {
	if o.key == "" {
		return image, nil
	}
	in, out := filepath.Join(work, "unsigned.efi"), filepath.Join(work, "signed.efi")
	if err := os.WriteFile(in, image, 0o644); err != nil {
		return nil, err
	}
	if err := tool(ctx, o, "sbsign", "--key", o.key, "--cert", o.cert, "--output", out, in); err != nil {
		return nil, err
	}
	signed, err := os.ReadFile(out)
	if err != nil {
		return nil, err
	}
	before, err := uki.Authenticode(image, crypto.SHA256)
	if err != nil {
		return nil, err
	}
	if after, err := uki.Authenticode(signed, crypto.SHA256); err != nil || !bytes.Equal(before, after) {
		return nil, fmt.Errorf("signing changed what firmware measures: %w", err)
	}
	return signed, nil
}

// systemPartition makes the file system that firmware reads (UEFI 2.10, section 13.3), with the program at the path
// that firmware uses for a disk without a boot entry (section 3.5.1.1).
func systemPartition(ctx context.Context, o options, image []byte, work string) ([]byte, error) {
	program, esp := filepath.Join(work, "boot.efi"), filepath.Join(work, "esp")
	if err := os.WriteFile(program, image, 0o644); err != nil {
		return nil, err
	}
	if err := os.Chtimes(program, o.date, o.date); err != nil {
		return nil, err
	}
	// FAT32 has at least 65,525 clusters; these have 512 bytes.
	size := max(int64(40<<20), (int64(len(image))+(8<<20))&^(1<<20-1))
	if err := os.WriteFile(esp, nil, 0o644); err != nil {
		return nil, err
	}
	if err := os.Truncate(esp, size); err != nil {
		return nil, err
	}
	for _, c := range [][]string{
		{"mkfs.vfat", "--invariant", "-F", "32", "-s", "1", "-i", "6d757374", "-n", "MUSTER-ESP", esp},
		{"mmd", "-i", esp, "::/EFI", "::/EFI/BOOT"},
		{"mcopy", "-m", "-i", esp, program, "::/EFI/BOOT/BOOTX64.EFI"},
	} {
		if err := tool(ctx, o, c[0], c[1:]...); err != nil {
			return nil, err
		}
	}
	return os.ReadFile(esp)
}

func writeDisk(to string, esp []byte, root io.ReadSeeker, rootSize int64, tree []byte) error {
	if _, err := root.Seek(0, io.SeekStart); err != nil {
		return err
	}
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = gpt.Write(f, layout.DiskGUID, []gpt.Partition{
		{Type: layout.ESPType, GUID: layout.ESPGUID, Name: layout.ESPName, Content: bytes.NewReader(esp), Size: int64(len(esp))},
		{Type: layout.RootType, GUID: layout.RootGUID, Name: layout.RootName, Content: root, Size: rootSize},
		{Type: layout.TreeType, GUID: layout.TreeGUID, Name: layout.TreeName, Content: bytes.NewReader(tree), Size: int64(len(tree))},
	})
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

func writeMeasurements(o options, program []byte, bank crypto.Hash) error {
	for file, secure := range map[string]bool{measuredFile: false, measuredSBFile: true} {
		m, err := image.Measurements(program, bank, secure)
		if err != nil {
			return err
		}
		b, err := json.MarshalIndent(m, "", "  ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(o.out, file), append(b, '\n'), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// report writes and prints the files with their hashes, like `sha256sum`, and signs that if there is a key.
func report(o options, stdout io.Writer) error {
	sums, err := builder.Format(o.out, diskFile, ukiFile, measuredFile, measuredSBFile, billFile, lockFile)
	if err != nil {
		return err
	}
	signature := filepath.Join(o.out, builder.SignatureFile)
	if err := os.RemoveAll(signature); err != nil { // of an earlier build
		return err
	}
	if err := os.WriteFile(filepath.Join(o.out, builder.SumsFile), sums, 0o644); err != nil {
		return err
	}
	if o.builderKey != "" {
		key, err := builder.ReadPrivateKey(o.builderKey)
		if err != nil {
			return err
		}
		b, err := builder.Sign(key, sums)
		if err != nil {
			return err
		}
		if err := os.WriteFile(signature, b, 0o644); err != nil {
			return err
		}
	}
	_, err = stdout.Write(sums)
	return err
}
