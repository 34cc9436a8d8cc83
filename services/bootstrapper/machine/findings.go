package machine

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// findingsFile has a line for each finding of the comparison of the state disk in this boot. The attester counts them in its metrics.
const findingsFile = "/run/muster/state-findings"

// MaxFindings bounds the findings of a boot that are recorded.
const MaxFindings = 1000

// AddFinding records a finding of the comparison of the state disk: what was found and what was done about it. A boot may compare the disk more than
// once: a recorded finding is not recorded again.
func AddFinding(root, what, done string) error {
	file := filepath.Join(root, findingsFile)
	before, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if strings.Contains("\n"+string(before), fmt.Sprintf("\n%q ", what)) || bytes.Count(before, []byte("\n")) >= MaxFindings {
		return nil
	}
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(f, "%q %q\n", what, done)
	return errors.Join(err, f.Close())
}

// Findings returns the number of findings of the comparison of the state disk in this boot (B8).
func Findings(root string) float64 {
	text, err := os.ReadFile(filepath.Join(root, findingsFile))
	if err != nil {
		return 0 // there are no findings
	}
	return float64(bytes.Count(text, []byte("\n")))
}
