package main

import (
	"bytes"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"

	"github.com/muster-k8s/muster/deploy/vm/internal/cpio"
)

// modules are those that the machine needs before it has its root: disks, the network, dm-verity, and everything that
// cryptsetup uses of the kernel; and where a virtual machine's host puts metadata. The others come from the root.
var modules = []string{
	"virtio_pci", "virtio_blk", "virtio_scsi", "sd_mod", "nvme", "virtio_net", "virtio_rng", "virtio_console", "af_packet",
	"ena", "gve", // AWS, GCP
	"hv_storvsc", "hv_netvsc", "pci_hyperv", "mana", // Azure, Hyper-V
	"vmxnet3", "vmw_pvscsi", // VMware
	"qemu_fw_cfg", "sr_mod",
	"dm_verity", "dm_crypt", "dm_integrity", "squashfs", "ext4", "vfat", "nls_cp437", "nls_ascii",
	"xts", "aesni_intel", "essiv", "authenc", "authencesn", "hmac", "sha256_ssse3", "sha256_generic", "crc32c_generic",
	"crypto_user", "algif_skcipher", "algif_hash",
}

// moduleOrder returns the files of modules and of their dependencies, each after its own, with paths below dir
// (modules.dep(5)).
func moduleOrder(dir string, names []string) ([]string, error) {
	dep, err := os.ReadFile(filepath.Join(dir, "modules.dep"))
	if err != nil {
		return nil, err
	}
	builtin, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return nil, err
	}
	needs, files := map[string][]string{}, map[string]string{}
	for line := range strings.Lines(string(dep)) {
		if file, list, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			needs[file] = strings.Fields(list)
			files[moduleName(file)] = file
		}
	}
	inside := map[string]bool{}
	for line := range strings.Lines(string(builtin)) {
		inside[moduleName(strings.TrimSpace(line))] = true
	}
	var order []string
	var visit func(string)
	visit = func(file string) {
		if slices.Contains(order, file) {
			return
		}
		for _, d := range needs[file] {
			visit(d)
		}
		order = append(order, file)
	}
	for _, n := range names {
		file, ok := files[moduleName(n)]
		switch {
		case ok:
			visit(file)
		case !inside[moduleName(n)]:
			return nil, fmt.Errorf("the kernel in %s has no module %s", dir, n)
		}
	}
	return order, nil
}

func moduleName(file string) string {
	name, _, _ := strings.Cut(path.Base(file), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

// initrd packs the init program and modules, compressed.
func initrd(program []byte, dir string) ([]byte, error) {
	order, err := moduleOrder(dir, modules)
	if err != nil {
		return nil, err
	}
	a := &cpio.Archive{}
	var list strings.Builder
	for _, err := range []error{
		a.File("/init", 0o755, program), a.Dir("/dev"), a.Dir("/proc"), a.Dir("/sys"), a.Dir("/run"), a.Dir("/sysroot"),
		a.CharDevice("/dev/console", 0o600, 5, 1),
	} {
		if err != nil {
			return nil, err
		}
	}
	for _, file := range order {
		b, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			return nil, err
		}
		at := path.Join("/lib/modules", path.Base(file))
		if err := a.File(at, 0o644, b); err != nil {
			return nil, err
		}
		fmt.Fprintln(&list, at)
	}
	if err := a.File("/etc/modules", 0o644, []byte(list.String())); err != nil {
		return nil, err
	}
	var out bytes.Buffer
	// A single encoder, since otherwise the bytes depend on the number of processors. The kernel takes windows of at
	// most 8 MiB (Linux, lib/decompress_unzstd.c).
	z, err := zstd.NewWriter(&out, zstd.WithEncoderLevel(zstd.SpeedBestCompression), zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(4<<20))
	if err != nil {
		return nil, err
	}
	if _, err := z.Write(a.Bytes()); err != nil {
		return nil, err
	}
	if err := z.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}
