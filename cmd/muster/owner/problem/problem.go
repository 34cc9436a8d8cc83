// Package problem puts errors into the form that is shown to a person: reason code, message, and what to do.
package problem

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strings"

	"connectrpc.com/connect"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/apiserver"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
)

// Problem is an error in the form that is shown to a person.
type Problem struct {
	// Reason is the reason code; empty for an error without one.
	Reason string `json:"reason,omitempty"`
	// Message describes the failure.
	Message string `json:"message"`
	// Remedy is what to do; empty if it is not known.
	Remedy string `json:"remedy,omitempty"`
}

// Explain converts an error to a Problem.
func Explain(err error) Problem {
	p := Problem{Message: strings.ReplaceAll(err.Error(), "\u00a0", " ")} // protojson's errors have such spaces at random
	switch reason := rpc.ReasonFrom(err); reason {
	case attestv1.Reason_REASON_UNSPECIFIED, attestv1.Reason_REASON_ACCEPTED:
	default:
		p.Reason, p.Remedy = attest.ReasonName(reason), rpc.RemedyFrom(err)
	}
	if own := Remedy(err); own != "" {
		p.Remedy = own
	}
	return p
}

// Remedy returns a more specific remedy for the owner than the table of reasons.
func Remedy(err error) string {
	if r, ok := errors.AsType[*remedied](err); ok {
		return r.remedy
	}
	if len(attest.MismatchesOf(err)) > 0 {
		return "Don't trust the machine until you know why it differs. If it booted a newer image of yours, add that image's values (muster policy from-measurements) to the policy. Otherwise its boot chain was modified."
	}
	if _, hardware := errors.AsType[*attest.HardwareError](err); hardware && attest.ReasonOf(err) == attestv1.Reason_REASON_POLICY_REFUSED {
		return "Only the hardware report does not fit the policy. If the machine sent none: docs/hardware-reports.md lists the machines and images that send one. If it is a machine of yours, correct the values of hardware in the policy, then muster policy apply."
	}
	if n, ok := errors.AsType[*clusterapi.NoConnection](err); ok {
		return ServerRemedy + " It is the address in admin.conf of the owner's folder: " + n.Server + "."
	}
	if _, node := errors.AsType[*apiserver.NodeError](err); node {
		return "Nothing of this answer was used. Check address and port of the API server in admin.conf of the owner's folder, and what leads there (load balancer, name server). If they are right, an attacker on the network may have forwarded the connection: use another network. Then run the same command again."
	}
	_, path := errors.AsType[*fs.PathError](err)
	op, dial := errors.AsType[*net.OpError](err)
	switch {
	case dial && op.Op == "dial":
		return "Check the address, and whether this computer reaches it. Connection refused: nothing listens on that port; a machine that is a node has closed port 9000, and `muster verify NODE` verifies it. A timeout: the machine is off, or a firewall drops packets. Then run the same command again."
	case errors.Is(err, ownerdir.ErrInUse):
		return "Wait until that command is done, or end it with Ctrl-C: the same command continues it later. Then run this command again. muster status and muster ban work meanwhile."
	case errors.Is(err, fs.ErrNotExist) && path:
		return "Check the name, and the directory that you run the command in. A missing file of the owner's folder: restore it from your copy."
	case errors.Is(err, ownerdir.ErrOtherCluster):
		return "Nothing was sent or changed."
	case errors.Is(err, context.DeadlineExceeded):
		return "See the last lines above. Run the same command again to continue where it stopped, with a longer --timeout if the command has that flag."
	case errors.Is(err, context.Canceled):
		return "Run the same command again to continue where it stopped."
	}
	return ""
}

// ServerRemedy is the remedy for a cluster whose API server does not answer.
const ServerRemedy = "Check whether this computer reaches that address, and whether a load balancer there leads to a control plane. If all control planes were off at the same time, their state disks wait for a key: muster recover (docs/recovery.md). If half of them or more are lost for good: docs/runbooks.md#lost-quorum. muster status --endpoint HOST asks a machine that is not a node."

// remedied is an error with its remedy.
type remedied struct {
	err    error
	remedy string
}

func (r *remedied) Error() string { return r.err.Error() }
func (r *remedied) Unwrap() error { return r.err }

// WithRemedy adds to an error what to do.
func WithRemedy(err error, remedy string) error { return &remedied{err, remedy} }

// Unreachable reports whether the other side did not answer, or was not ready, or another command works with the folder: the same command may succeed later.
func Unreachable(err error) bool {
	switch rpc.ReasonFrom(err) {
	case attestv1.Reason_REASON_UNSPECIFIED:
	case attestv1.Reason_REASON_API_UNAVAILABLE, attestv1.Reason_REASON_KMS_UNAVAILABLE, attestv1.Reason_REASON_BUSY, attestv1.Reason_REASON_NOT_READY, attestv1.Reason_REASON_DEADLINE:
		return true
	default:
		return false
	}
	if errors.Is(err, ownerdir.ErrInUse) {
		return true
	}
	if _, network := errors.AsType[*net.OpError](err); network {
		return true
	}
	return errors.Is(err, context.DeadlineExceeded) || connect.IsWireError(err) && connect.CodeOf(err) == connect.CodeUnavailable
}

// Final reports whether an error is a decision, so that another attempt would give the same result.
func Final(err error) bool {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		// Either this command's context has ended, or that of a single request; only the latter has a reason code.
		if rpc.ReasonFrom(err) == attestv1.Reason_REASON_UNSPECIFIED {
			return false
		}
	}
	if rpc.RetryAfterFrom(err) > 0 {
		return false
	}
	switch rpc.ReasonFrom(err) {
	case attestv1.Reason_REASON_UNSPECIFIED:
		// No reason code: the connection failed, or a server that is not Muster's answered. The code unavailable may be
		// from a proxy without a backend.
		return connect.IsWireError(err) && connect.CodeOf(err) != connect.CodeUnavailable
	case attestv1.Reason_REASON_BUSY, attestv1.Reason_REASON_DEADLINE, attestv1.Reason_REASON_NOT_READY:
		return false
	default:
		return true
	}
}

// Count returns a number of things in words: "1 machine", "2 machines".
func Count(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}
