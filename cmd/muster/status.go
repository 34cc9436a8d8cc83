package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/recovery"
)

func (a *app) statusCommand() *cobra.Command {
	var (
		timeout          time.Duration
		endpoint, policy string
		check            bool
	)
	cmd := &cobra.Command{
		Use: "status", Short: "Show nodes, waiting machines with the reasons, the policy, certificates, and what needs attention",
		Long: `Shows the cluster of the owner's folder: its nodes with the verdicts on their machines, machines that were refused
recently, certificates with their expiry, the policy and its insecure switches, and finally what needs attention.
The exit code is 0 if the cluster answers, its state is not older than the recorded one, and the owner has signed its policy. With --check it is 1 if anything needs attention.

With --endpoint it shows what one machine that is not in a cluster yet waits for. The machine is verified as by muster verify;
if the policy does not accept it, the answer is shown as unproven.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if endpoint != "" {
				ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
				defer cancel()
				return a.machineStatus(ctx, endpoint, policy)
			}
			if policy != "" {
				return usagef("--policy goes with --endpoint")
			}
			dir, err := a.view()
			if err != nil {
				return err
			}
			defer func() { _ = dir.Close() }()
			kube, err := access.Connect(dir)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			s, err := kube.Status(ctx, slog.New(slog.DiscardHandler))
			if err != nil {
				return access.UnreachableError(kube.Server(), err)
			}
			keys, err := dir.KeyRotation()
			if err != nil {
				return err
			}
			s.OwnerKeyRotates(keys.Command(), keys.Since, time.Now())
			var older error
			if !s.Removed { // it would wait for Muster's definitions
				older = a.remember(ctx, dir)
			}
			if errors.Is(older, ownerdir.ErrUnreadable) {
				s.Attention = append(s.Attention, clusterapi.Attention{About: "known.json", Problem: older.Error(), Remedy: recovery.UnreadableRemedy})
				older = nil // it is not known
			}
			if behind := s.Behind(); behind != "" && older == nil { // also if the state could not be recorded
				older = fmt.Errorf("%w: %s", recovery.ErrRolledBack, behind)
			}
			if a.output == outputJSON {
				err = a.json(s)
			} else {
				err = a.showStatus(s, older == nil, time.Now())
			}
			if err == nil && older != nil { // B7
				err = &shown{older}
			}
			if err == nil && check && len(s.Attention) > 0 {
				err = &shown{errors.New(needAttention(len(s.Attention)))}
			}
			return err
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 30*time.Second, "how long to wait for the API server or the machine")
	cmd.Flags().StringVar(&endpoint, "endpoint", "", "show the state of this machine, HOST[:PORT], which is not in a cluster yet (default port 9000)")
	cmd.Flags().StringVar(&policy, "policy", "", "with --endpoint: policy to verify with (default: that of the owner's folder)")
	cmd.Flags().BoolVar(&check, "check", false, "exit with 1 if anything needs attention")
	return cmd
}

// showStatus prints the state for a person. Unless it is sound, an error follows.
func (a *app) showStatus(s *clusterapi.Status, sound bool, now time.Time) error {
	fmt.Fprintf(a.stdout, "API server  %s\n", s.Server)
	if s.Chart != nil {
		fmt.Fprintf(a.stdout, "Chart       %s, revision %d, %s\n", s.Chart.Version, s.Chart.Revision, s.Chart.Status)
	}
	if r := s.Rotation; r != nil {
		next := r.Command() + " continues; until then no control plane can join"
		if r.Joins() {
			next = "the old key is accepted until " + r.Command()
		}
		fmt.Fprintf(a.stdout, "Rotation    %s, %s since %s: %s\n", r.Key, r.Phase, r.Since.Local().Format(time.DateTime), next)
	}
	if next := s.OwnerKeyRotation; next != "" {
		fmt.Fprintf(a.stdout, "Owner's key a rotation is unfinished: roll out the image for the next step, then run %s\n", next)
	}
	if u := s.Upgrade; u != nil {
		fmt.Fprintf(a.stdout, "Kubernetes  upgrade %s -> %s, %s: %d of %d nodes have it; muster upgrade kubernetes %s continues\n", u.From, u.To, u.Stage, u.Upgraded, u.Nodes, u.To)
	}
	fmt.Fprintf(a.stdout, "Policy      %s\n", policyText(s.Policy))
	if s.Policy != nil && len(s.Policy.Insecure) > 0 {
		fmt.Fprintf(a.stdout, "INSECURE    %s\n", strings.Join(s.Policy.Insecure, ", "))
	}
	for _, c := range s.Certificates {
		fmt.Fprintf(a.stdout, "%-10s  expires %s\n", c.Name, c.Expires.UTC().Format(time.DateOnly))
	}
	tables := [][][]string{{{"NODE", "READY", "ROLE", "VERSION", "MACHINE", "VERDICT", "AGE", "POLICY", "CLIENT CERT", "SERVING CERT", "CONTROL PLANE"}}}
	for _, n := range s.Nodes {
		tables[0] = append(tables[0], []string{
			n.Name, ready(n), dash(n.Role), dash(n.Kubelet), dash(short(n.MachineID)), verdict(n), age(n, now), nodePolicy(n), left(n.ClientExpires, now), left(n.ServingExpires, now), left(first(n.ControlPlane), now),
		})
	}
	pods := [][]string{{"SERVICE", "NODE", "READY", "RESTARTS", "WAITS FOR"}}
	for _, p := range s.Pods {
		pods = append(pods, []string{p.Name, dash(p.Node), yes(p.Ready), fmt.Sprint(p.Restarts), dash(p.Problem)})
	}
	waiting := [][]string{{"WAITING", "WANTS TO BE", "ROLE", "REASON", "SINCE", "LAST", "FROM"}}
	for _, w := range s.Waiting {
		waiting = append(waiting, []string{short(w.Machine), dash(w.Node), dash(w.Role), w.Reason, ago(w.Since, now), ago(w.Last, now), dash(w.Address)})
	}
	requests := [][]string{{"PENDING REQUEST", "BY", "SIGNER", "AGE"}}
	for _, r := range s.Requests {
		requests = append(requests, []string{r.Name, r.By, strings.TrimPrefix(r.Signer, "kubernetes.io/"), ago(r.Since, now)})
	}
	for _, t := range append(tables, pods, waiting, requests) {
		if len(t) == 1 {
			continue
		}
		fmt.Fprintln(a.stdout)
		if err := a.table(t); err != nil {
			return err
		}
	}
	if n := listable(s.Waiting); n > 0 {
		fmt.Fprintf(a.stdout, "\n%d of the waiting machines lack only an entry in a list of the policy: muster approve\n", n)
	}
	fmt.Fprintln(a.stdout)
	if len(s.Attention) == 0 && sound {
		fmt.Fprintln(a.stdout, "Nothing needs attention.")
	}
	for _, x := range s.Attention {
		fmt.Fprintf(a.stdout, "ATTENTION  %s: %s\n           %s\n", x.About, x.Problem, dash(x.Remedy))
	}
	return nil
}

func needAttention(n int) string {
	if n == 1 {
		return "1 thing needs attention"
	}
	return fmt.Sprintf("%d things need attention", n)
}

// listable counts the waiting machines that the policy would accept if a list had them.
func listable(all []clusterapi.Waiting) (n int) {
	for _, w := range all {
		if w.List != "" && w.Differs == "" {
			n++
		}
	}
	return n
}

// nodePolicy compares the policy of the node's verdict with the one in force.
func nodePolicy(n clusterapi.NodeStatus) string {
	if n.Serial == 0 {
		return "-"
	}
	return fmt.Sprintf("%d/%d", n.Serial, n.Generation)
}

func left(end *time.Time, now time.Time) string {
	switch {
	case end == nil:
		return "-"
	case end.Before(now):
		return "ENDED"
	default:
		return end.Sub(now).Round(time.Minute).String()
	}
}

// first returns the earliest expiry of the certificates; nil if there is none.
func first(list []clusterapi.Certificate) *time.Time {
	if len(list) == 0 {
		return nil
	}
	c := slices.MinFunc(list, func(a, b clusterapi.Certificate) int { return a.Expires.Compare(b.Expires) })
	return &c.Expires
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func policyText(p *clusterapi.PolicyStatus) string {
	switch {
	case p == nil:
		return "none: no machine is admitted"
	case p.Accepted:
		return fmt.Sprintf("serial %d, generation %d", p.Serial, p.Generation)
	case p.Reason == "":
		return fmt.Sprintf("generation %d is not yet checked by the services", p.Newest)
	default:
		return fmt.Sprintf("generation %d is refused: %s %s; serial %d stays in force until a joinservice restarts", p.Newest, p.Reason, p.Message, p.Serial)
	}
}

func ready(n clusterapi.NodeStatus) string {
	if !n.Joined {
		return "not joined"
	}
	text := yes(n.Ready)
	if n.Stale {
		text = "no (old)"
	}
	if n.Unschedulable {
		text += ", cordoned"
	}
	return text
}

func verdict(n clusterapi.NodeStatus) string {
	switch {
	case !n.Enrolled:
		return "NOT ENROLLED"
	case n.Banned:
		return "BANNED"
	case n.Accepted == nil:
		return "-"
	default:
		return n.Reason
	}
}

func age(n clusterapi.NodeStatus, now time.Time) string {
	if n.AppraisedAt == nil {
		return "-"
	}
	return now.Sub(*n.AppraisedAt).Round(time.Second).String()
}

func short(s string) string {
	if len(s) > 12 {
		return s[:12]
	}
	return s
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
