package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/trust/attest"
)

func (a *app) collateralCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "collateral", Short: "Fetch, check and apply what AMD and Intel publish for the check of hardware reports"}
	cmd.AddCommand(a.fetchCollateralCommand(), a.verifyCollateralCommand(), a.applyCollateralCommand())
	return cmd
}

func (a *app) fetchCollateralCommand() *cobra.Command {
	var (
		source policies.CollateralSource
		out    string
	)
	cmd := &cobra.Command{
		Use:   "fetch -o FILE [--product Milan|Genoa|Turin]... [--fmspc DIGITS]...",
		Short: "Fetch revocation lists and TCB data of processors from AMD and Intel, and check them",
		Long: `Fetches AMD's revocation lists of the lines of processors, and Intel's TCB data of the models, its quoting enclave's identity and
revocation lists. Nothing is written unless each part is signed by its vendor, valid, and what was requested. It needs no cluster:
if the site has no network, run it elsewhere and carry the file.

The refusal HARDWARE_COLLATERAL names the FMSPC of a machine's processor.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if out == "" {
				return usagef("-o is missing: name the file to write")
			}
			if len(source.Products)+len(source.FMSPCs) == 0 {
				return usagef("nothing to fetch: give --product for AMD or --fmspc for Intel")
			}
			c, ends, err := policies.FetchCollateral(cmd.Context(), source, time.Now())
			if err != nil {
				return err
			}
			b, err := protojson.MarshalOptions{Multiline: true}.Marshal(c)
			if err != nil {
				return err
			}
			if err := os.WriteFile(out, append(b, '\n'), 0o600); err != nil {
				return err
			}
			return a.showEnds(ends)
		},
	}
	f := cmd.Flags()
	f.StringVarP(&out, "out", "o", "", "file to write")
	f.StringSliceVar(&source.Products, "product", nil, "line of AMD's processors: Milan, Genoa (also Bergamo and Siena) or Turin")
	f.StringSliceVar(&source.FMSPCs, "fmspc", nil, "model of Intel's processors, 12 hexadecimal digits")
	f.StringVar(&source.AMD, "amd-url", "https://kdsintf.amd.com", "AMD's Key Distribution Service, or a mirror")
	f.StringVar(&source.Intel, "intel-url", "https://api.trustedservices.intel.com", "Intel's Provisioning Certification Service, or a cache of it")
	f.StringVar(&source.IntelRoot, "intel-root-url", "https://certificates.trustedservices.intel.com/IntelSGXRootCA.der", "revocation list of Intel's root")
	return cmd
}

func (a *app) verifyCollateralCommand() *cobra.Command {
	return &cobra.Command{
		Use: "verify FILE", Short: "Check that collateral is its vendors' and valid, and show when each part ends and the evaluation numbers of Intel's", Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			text, err := os.ReadFile(args[0])
			if err != nil {
				return err
			}
			_, ends, err := policies.ReadCollateral(text, time.Now())
			if err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			return a.showEnds(ends)
		},
	}
}

// applyCollateral are the flags of muster collateral apply.
type applyCollateral struct {
	dry, worse    bool
	expel         bool
	policy        string
	wait, timeout time.Duration
}

func (a *app) applyCollateralCommand() *cobra.Command {
	var f applyCollateral
	cmd := &cobra.Command{
		Use:   "apply FILE [--dry-run] [--expel] [--allow-worse] [--policy FILE]",
		Short: "Put collateral into the policy of the owner's folder, sign it, and put it in force",
		Long: `The policy of the owner's folder gets the collateral, and its serial is incremented. A vendor may have raised a TCB level. So before
the policy comes into force, the joinservices also appraise each running node by it, at the node's next attestation, within five minutes.
If one would be refused or does not attest, nothing comes into force, unless --expel is given. With --dry-run nothing comes into force in
any case; the exit code is 1 if there is such a node.

The file replaces all collateral in the policy. The command refuses a file that lacks data which the policy's rules need, or
that has a document older than the policy's: a mirror can serve old signed documents that have not expired. --allow-worse
applies it with a warning, for instance when a model of processors is no longer used.

Before there is a cluster, --policy names the policy that muster init will get. Then only that file changes.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if f.policy != "" && (f.dry || f.expel || cmd.Flags().Changed("timeout")) {
				return usagef("--policy changes only that file, so it can't be combined with --dry-run, --expel or --timeout")
			}
			if f.wait <= 0 && !f.dry && f.policy == "" {
				return usagef("--wait 0 goes with --dry-run; --expel applies the collateral without asking the nodes")
			}
			return a.applyCollateral(cmd.Context(), args[0], f, time.Now())
		},
	}
	cmd.Flags().BoolVar(&f.dry, "dry-run", false, "only show which running nodes would be refused")
	cmd.Flags().BoolVar(&f.expel, "expel", false, "don't ask the running nodes: those that the new data refuse get no key and no certificate from then on")
	cmd.Flags().BoolVar(&f.worse, "allow-worse", false, "apply it even if it lacks data that the rules need, or has data older than the policy's")
	cmd.Flags().StringVar(&f.policy, "policy", "", "change only this policy, before there is a cluster (default: that of the owner's folder, which is put in force)")
	cmd.Flags().DurationVar(&f.wait, "wait", 6*time.Minute, "how long to wait for the nodes; with --dry-run, 0 shows only the difference")
	cmd.Flags().DurationVar(&f.timeout, "timeout", time.Minute, "how long to wait for the services")
	return cmd
}

func (a *app) applyCollateral(ctx context.Context, file string, f applyCollateral, now time.Time) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	c, ends, err := policies.ReadCollateral(text, now)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	with := func(text []byte, serial uint64) ([]byte, error) {
		policy, why, err := policies.WithCollateral(text, serial, c, f.worse)
		if err != nil {
			return nil, err
		}
		for _, w := range why {
			fmt.Fprintf(a.stderr, "Warning: %s.\n", w)
		}
		return policy, nil
	}
	if f.policy != "" {
		path, serial, err := a.changePolicy(f.policy, with)
		if err != nil {
			return err
		}
		fmt.Fprintf(a.stderr, "%s has the collateral, and its serial is now %d.\n", path, serial)
		return a.showEnds(ends)
	}
	folder := a.open // the policy in it changes
	if f.dry {
		folder = a.view
	}
	dir, err := folder()
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	text, serial, err := nextSerial(func() ([]byte, error) { return dir.Read(ownerdir.PolicyFile) })
	if err != nil {
		return fmt.Errorf("%s: %w", dir.File(ownerdir.PolicyFile), err)
	}
	policy, err := with(text, serial)
	if err != nil {
		return err
	}
	if f.dry {
		return a.policyDiff(ctx, dir, policy, f.wait)
	}
	if !f.expel {
		look, stop := context.WithTimeout(ctx, time.Minute)
		defer stop()
		if _, err := policies.PlanPolicy(look, dir, policy); err != nil { // what does not need the nodes comes first
			return err
		}
		fmt.Fprintf(a.stderr, "Running nodes are appraised by the new data at their next attestation, within five minutes.\n")
		if err := policies.CheckPreview(ctx, dir, policy, f.wait, func(p policies.Preview) { fmt.Fprintf(a.stderr, "%s: %s\n", p.Node, p) }); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, f.timeout, fmt.Errorf("the services did not apply or refuse the policy within %s: %w", f.timeout, context.DeadlineExceeded))
	defer cancel()
	p, err := policies.ApplyPolicy(ctx, dir, policy, policies.Consent{Expel: f.expel})
	if err != nil {
		return err
	}
	_ = a.remember(ctx, dir) // a failure is printed
	if a.output == outputJSON {
		return a.json(p.Status)
	}
	fmt.Fprintf(a.stdout, "The policy of serial %d is in force (generation %d).\n", p.Status.Serial, p.Status.Generation)
	return a.showEnds(ends)
}

// showEnds prints each part's expiry, and the evaluation number of Intel's data, since their dates do not show their age.
func (a *app) showEnds(ends []attest.CollateralEnd) error {
	out, evaluations := map[string]time.Time{}, map[string]uint32{}
	rows := [][]string{{"PART", "EVALUATION", "ENDS (UTC)"}}
	for _, e := range ends {
		number := "-"
		if e.Evaluation > 0 {
			number, evaluations[e.Name] = strconv.FormatUint(uint64(e.Evaluation), 10), e.Evaluation
		}
		out[e.Name] = e.Time
		rows = append(rows, []string{e.Name, number, e.Time.UTC().Format(time.DateTime)})
	}
	if a.output == outputJSON {
		return a.json(map[string]any{"ends": out, "evaluations": evaluations})
	}
	return a.table(rows)
}
