package machine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// bootTarget is what units that start at boot are wanted by.
const bootTarget = "multi-user.target"

// rebootTarget is what restarts the machine.
const rebootTarget = "reboot.target"

// A Unit is a service as its file describes it. The lab reads the part of
// systemd.service(5) that its own units use; anything else in a file is an error, so that
// no setting is silently ignored.
type Unit struct {
	Name        string // without .service
	Description string
	After       []string
	Exec        []string // words, variables not yet replaced
	Env         []string // NAME=value
	EnvFiles    []string // a leading - means: may be missing
	Conditions  []string // paths that must exist
	Notify      bool     // Type=notify
	OneShot     bool     // Type=oneshot: a start waits for its end, without a limit
	Restart     string   // no, always or on-failure
	RestartWait time.Duration
	WantedBy    []string
}

func parseUnit(name, text string) (Unit, error) {
	u := Unit{Name: name, Restart: "no", RestartWait: 100 * time.Millisecond}
	section := ""
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' || line[0] == ';' {
			continue
		}
		if line[0] == '[' {
			section = line
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok {
			return u, fmt.Errorf("%s.service:%d: want KEY=VALUE", name, i+1)
		}
		if err := u.set(section, key, value); err != nil {
			return u, fmt.Errorf("%s.service:%d: %w", name, i+1, err)
		}
	}
	if len(u.Exec) == 0 {
		return u, fmt.Errorf("%s.service has no ExecStart", name)
	}
	if u.OneShot && u.Restart != "no" {
		return u, fmt.Errorf("%s.service: the lab does not start a unit with Type=oneshot again by itself", name)
	}
	return u, nil
}

func (u *Unit) set(section, key, value string) error {
	switch section + key {
	case "[Unit]Description":
		u.Description = value
	case "[Unit]After":
		for a := range strings.FieldsSeq(value) {
			u.After = append(u.After, strings.TrimSuffix(a, ".service"))
		}
	case "[Unit]ConditionPathExists":
		switch {
		case value == "": // as of systemd, it takes back those before it
			u.Conditions = nil
		case filepath.IsAbs(value):
			u.Conditions = append(u.Conditions, value)
		default:
			return errors.New("want ConditionPathExists with an absolute path, or empty")
		}
	case "[Service]Type":
		if !slices.Contains([]string{"simple", "notify", "oneshot"}, value) {
			return errors.New("want Type simple, notify or oneshot")
		}
		u.Notify, u.OneShot = value == "notify", value == "oneshot"
	case "[Service]ExecStart":
		u.Exec = strings.Fields(value)
	case "[Service]Environment":
		u.Env = append(u.Env, strings.Trim(value, `"`))
	case "[Service]EnvironmentFile":
		u.EnvFiles = append(u.EnvFiles, value)
	case "[Service]Restart":
		if !slices.Contains([]string{"no", "always", "on-failure"}, value) {
			return errors.New("want Restart no, always or on-failure")
		}
		u.Restart = value
	case "[Service]RestartSec":
		s, err := strconv.ParseFloat(value, 64)
		if err != nil || s < 0 {
			return errors.New("want RestartSec in seconds")
		}
		u.RestartWait = time.Duration(s * float64(time.Second))
	case "[Install]WantedBy":
		u.WantedBy = strings.Fields(value)
	default:
		return fmt.Errorf("%s in %s is not known to the lab", key, section)
	}
	return nil
}

// loadUnits reads all unit files in dir.
func loadUnits(dir string) (map[string]Unit, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.service"))
	if err != nil {
		return nil, err
	}
	units := map[string]Unit{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		name := strings.TrimSuffix(filepath.Base(f), ".service")
		dropIns, err := filepath.Glob(filepath.Join(f+".d", "*.conf"))
		if err != nil {
			return nil, err
		}
		for _, d := range dropIns {
			more, err := os.ReadFile(d)
			if err != nil {
				return nil, err
			}
			b = append(append(b, '\n'), more...)
		}
		u, err := parseUnit(name, string(b))
		if err != nil {
			return nil, err
		}
		units[name] = u
	}
	return units, nil
}

// command returns the words to run and the environment, base included.
func (u Unit) command(base []string) (argv, env []string, err error) {
	env = slices.Concat(base, u.Env)
	for _, f := range u.EnvFiles {
		path, optional := strings.CutPrefix(f, "-")
		b, err := os.ReadFile(path)
		if err != nil {
			if optional && errors.Is(err, os.ErrNotExist) {
				continue
			}
			return nil, nil, err
		}
		for line := range strings.Lines(string(b)) {
			line = strings.TrimSpace(line)
			if key, value, ok := strings.Cut(line, "="); ok && line[0] != '#' {
				env = append(env, key+"="+strings.Trim(value, `"`))
			}
		}
	}
	lookup := func(name string) string {
		for _, e := range slices.Backward(env) { // the last one counts
			if k, v, _ := strings.Cut(e, "="); k == name {
				return v
			}
		}
		return ""
	}
	for _, w := range u.Exec {
		// As systemd does: a word that is one variable is split at white space.
		if name, ok := strings.CutPrefix(w, "$"); ok && !strings.HasPrefix(name, "{") {
			argv = append(argv, strings.Fields(lookup(name))...)
			continue
		}
		argv = append(argv, os.Expand(w, lookup))
	}
	return argv, env, nil
}

// bootOrder sorts the units that a target wants, each behind those that it is After.
func bootOrder(units map[string]Unit, wanted []string) []string {
	var order []string
	seen := map[string]bool{}
	var visit func(string)
	visit = func(name string) {
		if seen[name] {
			return
		}
		seen[name] = true
		for _, a := range units[name].After {
			if slices.Contains(wanted, a) {
				visit(a)
			}
		}
		order = append(order, name)
	}
	for _, name := range wanted {
		visit(name)
	}
	return order
}
