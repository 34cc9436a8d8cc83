package machine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
)

const controlSocket = "/run/systemd/private"

// Exit codes of systemctl(1), LSB's for status.
const (
	codeOK        = 0
	codeFailed    = 1
	codeNotActive = 3
	codeNoUnit    = 4
)

type answer struct {
	Out  string `json:"out"`
	Err  string `json:"err"`
	Code int    `json:"code"`

	restarts bool // the machine restarts as soon as the answer is sent
}

// Systemctl is the program systemctl of a machine: it sends its arguments to PID 1 and
// prints the answer. It knows what kubeadm and the bootstrapper ask.
func Systemctl(args []string, stdout, stderr io.Writer) int {
	c, err := net.Dial("unix", controlSocket)
	if err != nil {
		fmt.Fprintln(stderr, "systemctl: this is not a machine of the lab, or its PID 1 has not got so far:", err)
		return codeFailed
	}
	defer c.Close()
	var a answer
	err = json.NewEncoder(c).Encode(args)
	if err == nil {
		err = json.NewDecoder(c).Decode(&a)
	}
	if err != nil {
		fmt.Fprintln(stderr, "systemctl:", err)
		return codeFailed
	}
	fmt.Fprint(stdout, a.Out)
	fmt.Fprint(stderr, a.Err)
	return a.Code
}

// serve answers systemctl until the listener fails.
func (s *supervisor) serve(ctx context.Context, l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			s.log.Error("control socket", "err", err)
			return
		}
		go func() {
			defer c.Close()
			var args []string
			if err := json.NewDecoder(c).Decode(&args); err != nil {
				return
			}
			a := s.systemctl(ctx, args)
			s.log.Info("systemctl", "args", args, "code", a.Code)
			if err := json.NewEncoder(c).Encode(a); err != nil {
				s.log.Warn("systemctl: answer", "err", err)
			}
			if a.restarts {
				s.restart()
			}
		}()
	}
}

func (s *supervisor) systemctl(ctx context.Context, args []string) answer {
	var verb string
	var names []string
	flags := map[string]bool{}
	for _, a := range args {
		switch {
		case strings.HasPrefix(a, "-"):
			flags[a] = true
		case verb == "":
			verb = a
		default:
			names = append(names, strings.TrimSuffix(a, ".service"))
		}
	}
	switch verb {
	case "daemon-reload":
		return outcome(s.reload())
	case "list-units", "":
		return s.list()
	case "reboot":
		return answer{restarts: true}
	case "start":
		if slices.Contains(names, rebootTarget) {
			return answer{restarts: true}
		}
	}
	if len(names) == 0 {
		return answer{Err: "systemctl " + verb + ": name a unit\n", Code: codeFailed}
	}
	var all answer
	for _, n := range names {
		a := s.one(ctx, verb, n, flags)
		if flags["-q"] || flags["--quiet"] {
			a.Out = ""
		}
		all.Out += a.Out
		all.Err += a.Err
		all.Code = max(all.Code, a.Code)
	}
	return all
}

func (s *supervisor) one(ctx context.Context, verb, name string, flags map[string]bool) answer {
	s.mu.Lock()
	u, known := s.units[name]
	var svc service
	if p := s.services[name]; p != nil {
		svc = *p
	}
	s.mu.Unlock()
	if !known {
		if verb == "is-active" {
			return answer{Out: "inactive\n", Code: codeNotActive}
		}
		return answer{Err: errNoUnit(name).Error() + "\n", Code: codeNoUnit}
	}
	start := func() error {
		if flags["--no-block"] {
			go func() {
				if err := s.start(ctx, name); err != nil {
					s.log.Error("start", "unit", name, "err", err)
				}
			}()
			return nil
		}
		return s.start(ctx, name)
	}
	switch verb {
	case "start":
		return outcome(start())
	case "stop":
		return outcome(s.stop(ctx, name))
	case "restart", "reload-or-restart":
		if err := s.stop(ctx, name); err != nil {
			return outcome(err)
		}
		return outcome(start())
	case "try-restart":
		if svc.pid == 0 {
			return answer{}
		}
		if err := s.stop(ctx, name); err != nil {
			return outcome(err)
		}
		return outcome(start())
	case "enable", "disable":
		if err := s.enable(name, verb == "enable"); err != nil || !flags["--now"] {
			return outcome(err)
		}
		if verb == "enable" {
			return outcome(start())
		}
		return outcome(s.stop(ctx, name))
	case "is-enabled":
		if s.isEnabled(u) {
			return answer{Out: "enabled\n"}
		}
		return answer{Out: "disabled\n", Code: codeFailed}
	case "is-active":
		a := answer{Out: svc.state + "\n"}
		if svc.state != "active" {
			a.Code = codeNotActive
		}
		return a
	case "is-failed":
		a := answer{Out: svc.state + "\n"}
		if svc.state != "failed" {
			a.Code = codeFailed
		}
		return a
	case "reset-failed":
		s.mu.Lock()
		if p := s.services[name]; p.state == "failed" {
			s.set(p, "inactive")
		}
		s.mu.Unlock()
		return answer{}
	case "status", "show":
		a := answer{Out: fmt.Sprintf("%s.service - %s\n     Loaded: loaded\n     Active: %s\n   Main PID: %d\n     Result: %s\n", name, u.Description, svc.state, svc.pid, svc.result)}
		if svc.state != "active" {
			a.Code = codeNotActive
		}
		return a
	}
	return answer{Err: "systemctl " + verb + " is not known to the lab\n", Code: codeFailed}
}

func (s *supervisor) list() answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(s.units)) {
		fmt.Fprintf(&b, "%-28s %-12s %s\n", name+".service", s.services[name].state, s.units[name].Description)
	}
	return answer{Out: b.String()}
}

func outcome(err error) answer {
	var none errNoUnit
	switch {
	case err == nil:
		return answer{Code: codeOK}
	case errors.As(err, &none):
		return answer{Err: err.Error() + "\n", Code: codeNoUnit}
	}
	slog.Error("systemctl", "err", err)
	return answer{Err: err.Error() + "\n", Code: codeFailed}
}
