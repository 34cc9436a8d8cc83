package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/appraisal"
	"github.com/muster-k8s/muster/trust/attest"
)

// machineStatus shows one machine that is not in a cluster yet.
func (a *app) machineStatus(ctx context.Context, endpoint, policy string) error {
	cfg, err := a.target(endpoint, policy, string(attest.PurposeMachine), "")
	if err != nil {
		return err
	}
	s, err := appraisal.AskMachine(ctx, cfg)
	if err != nil {
		return err
	}
	if a.output == outputJSON {
		return a.json(s)
	}
	a.showMachine(s, time.Now())
	return nil
}

func (a *app) showMachine(s *appraisal.MachineStatus, now time.Time) {
	if !s.Proven {
		fmt.Fprintf(a.stdout, "UNPROVEN: the policy does not accept this machine (%s), so nothing below is proven.\n%s\n\n", s.Problem.Reason, s.Problem.Message)
	}
	line := func(name, format string, args ...any) {
		fmt.Fprintf(a.stdout, "%-12s %s\n", name, fmt.Sprintf(format, args...))
	}
	line("Machine", "%s", s.Machine)
	if s.Endorsement != "" {
		line("Endorsement", "%s", s.Endorsement)
	}
	line("Node", "%s, %s", dash(s.NodeName), dash(s.Role))
	if s.Disk != "" {
		line("State disk", "%s", s.Disk)
	}
	phase := s.Phase
	switch phase {
	case "unlocking":
		phase += " (its state disk waits for the key)"
	case "formatting":
		phase += " (its state disk, which happens once)"
	}
	if s.Taker != "" {
		phase += ", locked by " + map[string]string{"init": "an init", "join": "a join"}[s.Taker]
	}
	if s.Since != nil {
		phase += ", since " + ago(*s.Since, now.Add(s.Skew))
	}
	line("Phase", "%s", phase)
	if s.Reason != "" {
		when := ""
		if s.LastAttempt != nil {
			when = ", " + ago(*s.LastAttempt, now.Add(s.Skew)) + " ago"
		}
		by := ""
		if s.ReasonUnproven {
			by = ", from a peer that was not attested as a joinservice"
		}
		line("Last reason", "%s%s%s (failed attempts: %d)", s.Reason, by, when, s.FailedAttempts)
		if s.Remedy != "" {
			line("What to do", "%s", s.Remedy)
		}
	}
	if s.NextAttempt != nil {
		line("Next attempt", "in %s", max(0, s.NextAttempt.Sub(now.Add(s.Skew))).Round(time.Second))
	}
	switch {
	case len(s.JoinEndpoints) > 0:
		line("Tries", "%s", strings.Join(s.JoinEndpoints, ", "))
	case s.InitAllowed:
		line("Tries", "no joinservice: it waits for muster init")
	default:
		line("Tries", "no joinservice: its metadata have no joinEndpoints and allow no init")
	}
	if s.Skew.Abs() >= appraisal.SkewWarn {
		line("Clock", "%s off ours", s.Skew.Round(time.Second))
	}
	line("Version", "%s", s.Version)
}

// ago returns the time since an event as a short text.
func ago(t, now time.Time) string { return max(0, now.Sub(t)).Round(time.Second).String() }
