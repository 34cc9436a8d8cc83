package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/muster-k8s/muster/cmd/muster/owner/appraisal"
	"github.com/muster-k8s/muster/cmd/muster/owner/lifecycle"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// mayBeNode reports whether a text may be the name of a node, which is a DNS label. IP addresses, HOST:PORT and names with dots are not.
func mayBeNode(text string) bool { return len(validation.IsDNS1123Label(text)) == 0 }

// verifyNode verifies a running node of the folder's cluster. It returns nil if there is no cluster. If the cluster has no such node, it refuses
// with NOT_ENROLLED. Otherwise an attacker who answers the API and DNS could substitute another machine.
func (a *app) verifyNode(ctx context.Context, name, policyPath string, timeout time.Duration) (*appraisal.Report, error) {
	dir, err := a.view()
	if err != nil {
		if a.directory != "" {
			return nil, err
		}
		return nil, nil //nolint:nilnil // there is no folder here
	}
	defer func() { _ = dir.Close() }()
	if _, err := os.Stat(dir.File(ownerdir.AdminConf)); errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // its cluster is not initialized
	}
	p, err := readPolicy(cmp.Or(policyPath, dir.File(ownerdir.PolicyFile)), parsePolicy)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	s, err := lifecycle.VerifyNode(ctx, dir, name, p, func(step string) { fmt.Fprintf(a.stderr, "%s: %s\n", name, step) })
	if attest.ReasonOf(err) == attestv1.Reason_REASON_NOT_ENROLLED {
		return nil, problem.WithRemedy(err, "muster status shows the cluster's nodes. If it is a machine's address, write it with the port: "+name+":9000.")
	}
	return s, err
}

// recorded describes the cluster's record of a verdict. A message begins with the reason code.
func recorded(r *appraisal.Record) string {
	if r.Time == nil {
		return "none: it has not attested yet"
	}
	if r.Reason != attest.ReasonName(attestv1.Reason_REASON_ACCEPTED) { // the serial of the latest positive verdict
		return fmt.Sprintf("%s, at %s", cmp.Or(r.Message, r.Reason), r.Time.Local().Format(time.DateTime))
	}
	return fmt.Sprintf("%s, by the policy of serial %d, at %s", r.Reason, r.PolicySerial, r.Time.Local().Format(time.DateTime))
}
