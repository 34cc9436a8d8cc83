package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// errPowerOff is returned if a machine lost its power during a wait for its console.
var errPowerOff = errors.New("the machine has gone off")

// escapes are control sequences of terminals (ECMA-48, section 5.4) and carriage returns.
var escapes = regexp.MustCompile("\x1b\\[[0-?]*[ -/]*[@-~]|\r|\x00")

// Clean converts a console's bytes to the text that a person would read.
func Clean(line string) string {
	return strings.TrimRight(escapes.ReplaceAllString(line, ""), " ")
}

// bootManager begins each line of EDK II's boot manager. Its last line reports the start of the system on the disk.
const bootManager = "BdsDxe: "

// nextConsole names the file for the console after the next power on: the ones before stay.
func nextConsole(dir string) (string, error) {
	_, n, err := lastConsole(dir)
	return filepath.Join(dir, fmt.Sprintf("console.%d.log", n+1)), err
}

// Console is the file with what the machine in dir wrote to its serial port since it got power last.
func Console(dir string) (string, error) {
	path, n, err := lastConsole(dir)
	if err == nil && n == 0 {
		err = fmt.Errorf("%s: the machine has never had power", dir)
	}
	return path, err
}

func lastConsole(dir string) (path string, last int, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "console.*.log"))
	if err != nil {
		return "", 0, err
	}
	for _, f := range files {
		n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(filepath.Base(f), "console."), ".log"))
		if err == nil && n > last {
			path, last = f, n
		}
	}
	return path, last, nil
}

// Wait returns the first line of the console since power on that match accepts. An incomplete line counts only
// after the machine has gone off, because its end may change before.
func (m *VM) Wait(ctx context.Context, match func(line string) bool) (string, error) {
	return WaitLine(ctx, m.Console, m.Alive, match)
}

// WaitLine is [VM.Wait] for a caller that has only the console's file, and alive, which reports whether more can
// come.
func WaitLine(ctx context.Context, path string, alive func() bool, match func(line string) bool) (string, error) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	var read int64  // bytes of the file that make up the lines before
	var last string // for the error
	for {
		on := alive() // before reading: what was written before the end is read
		b, err := readFrom(path, read)
		if err != nil {
			return "", err
		}
		for len(b) > 0 {
			n := bytes.IndexByte(b, '\n')
			line := Clean(string(b[:max(n, 0)]))
			if n < 0 {
				line = Clean(string(b))
			}
			if (n >= 0 || !on) && match(line) {
				return line, nil
			}
			if line != "" {
				last = line
			}
			if n < 0 {
				break
			}
			read += int64(n) + 1
			b = b[n+1:]
		}
		if !on {
			return "", fmt.Errorf("%w; its last line was %q, all of them are in %s", errPowerOff, last, path)
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("%w; the console's last line was %q, all of them are in %s", context.Cause(ctx), last, path)
		case <-tick.C:
		}
	}
}

func readFrom(path string, offset int64) ([]byte, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) { // QEMU makes it
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.NewSectionReader(f, offset, 1<<30))
}
