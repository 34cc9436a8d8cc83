package kubeadm

import (
	"regexp"
	"strings"
	"sync"
)

// These bound what [Tail] keeps.
const (
	tailLines = 12
	tailWidth = 300
)

// secretLike matches text that must not leave the machine in an error (K3): bootstrap tokens, long hexadecimal or base64 strings (certificate keys,
// keys), and URLs with a user.
var secretLike = []*regexp.Regexp{
	regexp.MustCompile(`\b[a-z0-9]{6}\.[a-z0-9]{16}\b`),
	regexp.MustCompile(`\b[0-9a-fA-F]{40,}\b`),
	regexp.MustCompile(`[A-Za-z0-9+/_-]{60,}={0,2}`),
	regexp.MustCompile(`//[^/\s@]+:[^/\s@]+@`),
}

// color matches terminal colors.
var color = regexp.MustCompile("\x1b\\[[0-9;]*m")

// Redact removes text that looks like a secret, and colors, from a line of kubeadm's output.
func Redact(line string) string {
	line = color.ReplaceAllString(line, "")
	for _, r := range secretLike {
		line = r.ReplaceAllString(line, "[redacted]")
	}
	return line
}

// Tail keeps the last lines of a program's output, redacted. It is safe for concurrent use.
type Tail struct {
	mu    sync.Mutex
	lines []string
	inPEM bool
}

// Add adds one line.
func (t *Tail) Add(line string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case strings.Contains(line, "-----BEGIN "):
		t.inPEM = true
		return
	case strings.Contains(line, "-----END "):
		t.inPEM = false
		return
	case t.inPEM, strings.TrimSpace(line) == "":
		return
	}
	line = strings.ToValidUTF8(Redact(strings.TrimRight(line, " \r\t")), "?")
	if len(line) > tailWidth {
		line = strings.ToValidUTF8(line[:tailWidth], "") + "…"
	}
	t.lines = append(t.lines, line)
	if len(t.lines) > tailLines {
		t.lines = t.lines[1:]
	}
}

// String returns the lines that were kept.
func (t *Tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.Join(t.lines, "\n")
}

// Phase returns the phase's name from a line like "[control-plane] Creating static Pod manifest"; false for every other line.
func Phase(line string) (string, bool) {
	rest, ok := strings.CutPrefix(line, "[")
	name, _, found := strings.Cut(rest, "]")
	if !ok || !found || name == "" || len(name) > 40 || strings.ContainsFunc(name, func(r rune) bool { return r != '-' && (r < 'a' || r > 'z') }) {
		return "", false
	}
	return name, true
}
