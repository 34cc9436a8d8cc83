package vm

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"
)

// MediumLabel is the volume label by which a machine finds its config medium.
const MediumLabel = "MUSTER-META"

// mediumSize is a config medium's size: far more than two small files, and still FAT12.
const mediumSize = 1024 // KiB

// WriteMedium makes a config medium at path: a FAT volume without partitions that holds the files. The
// same files make the same bytes.
func WriteMedium(ctx context.Context, path string, files map[string][]byte) error {
	dir, err := os.MkdirTemp(filepath.Dir(path), "medium")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	image := filepath.Join(dir, "image")
	if err := run(ctx, "/usr/sbin/mkfs.vfat", "--invariant", "-i", "4d555354", "-n", MediumLabel, "-C", image, fmt.Sprint(mediumSize)); err != nil {
		return err
	}
	epoch := time.Date(2026, time.January, 1, 0, 0, 0, 0, time.UTC)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if name != filepath.Base(name) || name == "." {
			return fmt.Errorf("config medium: %q is not a file name", name)
		}
		from := filepath.Join(dir, "file")
		if err := errors.Join(os.WriteFile(from, files[name], 0o600), os.Chtimes(from, epoch, epoch)); err != nil {
			return err
		}
		if err := run(ctx, "mcopy", "-m", "-i", image, from, "::"+name); err != nil {
			return err
		}
	}
	return os.Rename(image, path)
}

func run(ctx context.Context, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	// mtools writes the current time into directory entries by default; FAT has local time.
	cmd.Env = append(os.Environ(), "SOURCE_DATE_EPOCH=1767225600", "TZ=UTC")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, out)
	}
	return nil
}
