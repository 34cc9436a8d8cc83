package main

import (
	"bytes"
	"fmt"
	"io"
	"os"

	"github.com/muster-k8s/muster/internal/printable"
)

// kernelLog takes lines that systemd's journal collects later.
const kernelLog = "/dev/kmsg"

// print prints a line for a person at the console, and logs it for the journal. An error about metadata may have an attacker's text, so the line has no control
// characters and a bounded length.
func (b *boot) print(format string, args ...any) {
	line := printable.Line(fmt.Sprintf("muster: "+format, args...), maxLine)
	fmt.Fprintln(b.console, line)
	if b.journal != nil {
		fmt.Fprintf(b.journal, "<5>%s\n", line) // KERN_NOTICE: below what "quiet" leaves on the console
	}
}

// openJournal begins to log lines for the journal. A machine starts without it, too.
func (b *boot) openJournal() {
	if f, err := os.OpenFile(kernelLog, os.O_WRONLY, 0); err == nil {
		b.journal = f
	}
}

// lines passes the output of a program to w, one line at a time, and remembers the last one. The kernel's log takes
// one record by each write, of less than a kilobyte (Linux, Documentation/ABI/testing/dev-kmsg).
type lines struct {
	w             io.Writer // nil: discarded
	prefix        string
	pending, last []byte
}

const maxLine = 900 // bytes

func (l *lines) Write(p []byte) (int, error) {
	n := len(p)
	for {
		line, rest, whole := bytes.Cut(p, []byte("\n"))
		if room := maxLine - len(l.pending); room > 0 {
			l.pending = append(l.pending, line[:min(len(line), room)]...)
		}
		if !whole {
			return n, nil
		}
		p = rest
		if len(l.pending) > 0 {
			l.last = bytes.Clone(l.pending)
			if l.w != nil {
				// A log that cannot be written must not end the program that writes it.
				_, _ = fmt.Fprintf(l.w, "%s%s\n", l.prefix, l.pending)
			}
		}
		l.pending = l.pending[:0]
	}
}
