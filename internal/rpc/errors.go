package rpc

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

// onWire is what a caller learns of a refusal.
type onWire struct {
	code connect.Code
	// sendText sends the refusal's own text. Without it a caller learns only the reason: the log has the details, as which PCR
	// or value it was.
	sendText bool
	// remedy is what the caller, or the cluster's owner, can do, 300 characters at most; empty if nothing.
	remedy string
}

// reasons is all that a caller can learn of an error. A test goes through the enum and fails on a missing entry.
var reasons = map[attestv1.Reason]onWire{
	attestv1.Reason_REASON_FORMAT_NONE:          {connect.CodeFailedPrecondition, false, "Use a version of Muster on both sides that shares an evidence format, and check that the address is that of a Muster service."},
	attestv1.Reason_REASON_PEER_WILL_NOT_ATTEST: {connect.CodeUnauthenticated, false, "Call from a machine that has a TPM and runs Muster's attester."},
	attestv1.Reason_REASON_FRAME_INVALID:        {connect.CodeInvalidArgument, false, "Use a client that speaks muster-atls/1."},
	attestv1.Reason_REASON_EVIDENCE_MALFORMED:   {connect.CodeInvalidArgument, false, "Use a version of Muster on the attesting side that fits the verifier's."},
	attestv1.Reason_REASON_BINDING_MISMATCH:     {connect.CodeUnauthenticated, false, "Connect directly: something between the two sides ended the TLS session, or the evidence was made for another."},
	attestv1.Reason_REASON_SIGNATURE_INVALID:    {connect.CodePermissionDenied, false, "Treat it as an attack or a broken TPM."},
	attestv1.Reason_REASON_AK_TEMPLATE:          {connect.CodePermissionDenied, false, "Use Muster's attester: the attestation key of another agent is not accepted."},
	attestv1.Reason_REASON_EK_UNTRUSTED:         {connect.CodePermissionDenied, false, "`muster verify HOST` shows why, and who issued the certificate. Revoked: keep the machine out. Expired: docs/endorsements.md#platform-ak. Authority of yours or your cloud: add it to `tpm2.ekRoots` or `tpm2.platformRoots`, then `muster policy apply`. Only a list lacks the machine: `muster approve`."},
	attestv1.Reason_REASON_ACTIVATION_FAILED:    {connect.CodePermissionDenied, false, "Treat it as an attack. If the machine's TPM was exchanged, reboot it."},
	attestv1.Reason_REASON_EVENTLOG_REPLAY:      {connect.CodePermissionDenied, false, "Reboot the machine. If it is refused again, `muster verify HOST` shows why: its firmware writes a wrong event log, or the log was changed."},
	attestv1.Reason_REASON_CLOCK_WENT_BACK:      {connect.CodePermissionDenied, false, "Reboot the machine. If you cleared its TPM: `muster replace NAME --tpm ID`, with its own ID, which its console shows."},
	attestv1.Reason_REASON_POLICY_REFUSED:       {connect.CodePermissionDenied, false, "`muster verify HOST` shows what differs. Only a list lacks it: `muster approve`. Your new firmware: `muster policy add-class NAME --from HOST`; new image: `muster policy add-image FILE`; then `muster policy apply`. Hardware report: docs/hardware-reports.md. Else don't trust it until you know why."},
	attestv1.Reason_REASON_BANNED:               {connect.CodePermissionDenied, false, "If the ban was a mistake: `muster unban NAME`, then reboot the machine. If its enrollment is being deleted: wait, or `muster forget NAME`."},
	attestv1.Reason_REASON_BUSY:                 {connect.CodeResourceExhausted, false, "Try again later. A machine that reboots twice within two minutes is admitted after two minutes; joinservice logs that."},
	attestv1.Reason_REASON_DEADLINE:             {connect.CodeDeadlineExceeded, false, "Try again. If the error persists, check the load of the TPM and the network."},
	attestv1.Reason_REASON_INTERNAL:             {connect.CodeInternal, false, "Look into the service's log."},
	attestv1.Reason_REASON_SESSION_REQUIRED:     {connect.CodeUnauthenticated, false, "Call over muster-atls/1, as the muster command does."},
	attestv1.Reason_REASON_PEER_NOT_ATTESTED:    {connect.CodeUnauthenticated, false, "Call from an attested machine."},
	attestv1.Reason_REASON_LOCK_FOREIGN:         {connect.CodePermissionDenied, false, "If the machine should change clusters: `muster reset NODE` with the folder of its cluster, or erase the first MiB of its state disk and boot it (docs/state-disk.md). If it asks for its disk's key: switch it off and on."},
	attestv1.Reason_REASON_SERVER_NOT_LISTED:    {connect.CodePermissionDenied, false, "If the machine is meant to be a control plane, let the owner list it: `muster enroll NAME --role control-plane --machine-id ID`. If it is not, find out why it answers."},
	attestv1.Reason_REASON_HARDWARE_UNTRUSTED:   {connect.CodePermissionDenied, false, "`muster verify HOST` shows why. If the certificate of the report's key is missing, the machine's host has to pass that of its VCEK or VLEK (docs/hardware-reports.md). Otherwise treat it as an attack, or as a key that its vendor has revoked: keep the machine out until you know why."},
	attestv1.Reason_REASON_HARDWARE_COLLATERAL:  {connect.CodeFailedPrecondition, false, "Get the processor vendor's current data: `muster collateral fetch`, then `muster collateral apply FILE`; the log names what is missing or expired."},
	attestv1.Reason_REASON_HARDWARE_TCB:         {connect.CodePermissionDenied, false, "Update the firmware of the machine's host: the log names the part that is too old. In a cloud, move the VM to a newer host. Otherwise lower the policy's minimum, if you accept the known weaknesses."},

	attestv1.Reason_REASON_REQUEST_INVALID:  {connect.CodeInvalidArgument, true, "Correct the field that the message names."},
	attestv1.Reason_REASON_NOT_READY:        {connect.CodeUnavailable, true, "Try again: a service that has just started becomes ready after a moment. If the error persists: `muster status` shows whether a policy is in force; `muster policy apply` puts one in force."},
	attestv1.Reason_REASON_POLICY_INVALID:   {connect.CodeFailedPrecondition, true, "If it does not parse: correct what the text, or `muster policy check FILE`, names. If its serial is too low: restore the newest policy.yaml or increase `serial`, then `muster policy apply`. If the policy was not changed, the cluster was rolled back: docs/recovery.md."},
	attestv1.Reason_REASON_POLICY_SIGNATURE: {connect.CodeFailedPrecondition, false, "Run `muster policy apply` with the owner's folder whose owner.key belongs to a key of the image's ownerKeys."},

	attestv1.Reason_REASON_INIT_SECRET_INVALID:   {connect.CodePermissionDenied, false, "Use the init secret whose hash stands in the machine's metadata."},
	attestv1.Reason_REASON_TOO_MANY_ATTEMPTS:     {connect.CodePermissionDenied, false, "Of an init: use the init secret whose hash stands in the machine's metadata; it is admitted at any time. Of a recovery: wait as long as is asked for, or call from another address, with the folder of the cluster's owner."},
	attestv1.Reason_REASON_NODE_LOCKED:           {connect.CodeFailedPrecondition, true, "Another init, or a join, has the machine. If that was your init: repeat it with the same folder. If the machine should start over: `muster reset NODE` if it is a node, else erase the first MiB of its state disk and boot it (docs/state-disk.md)."},
	attestv1.Reason_REASON_INIT_NOT_ALLOWED:      {connect.CodeFailedPrecondition, true, "Set initSecretHash and role control-plane in the metadata of the machine that should become the first, or that muster install is for."},
	attestv1.Reason_REASON_COMPONENT_HASH:        {connect.CodeFailedPrecondition, true, "Check the mirror: the file is not the one that was asked for."},
	attestv1.Reason_REASON_COMPONENT_PATH:        {connect.CodeInvalidArgument, true, "Use a path below a folder that the bootstrapper allows."},
	attestv1.Reason_REASON_COMPONENT_UNAVAILABLE: {connect.CodeUnavailable, true, "Check that the machine reaches the component's URL, or the image's registry or its mirror, and that the image has the listed digest there."},
	attestv1.Reason_REASON_KUBEADM_FAILED:        {connect.CodeAborted, true, "Correct what kubeadm complains of and try again; the machine was reset."},
	attestv1.Reason_REASON_STATE_DISK:            {connect.CodeFailedPrecondition, true, "The error names the cause. A header that is not Muster's: find out who changed it, and erase the first MiB only if nothing on the disk is needed (docs/state-disk.md). A missing file in /run/muster: reboot. A full disk: make room. A wrong key: correct joinEndpoints or the root secret."},
	attestv1.Reason_REASON_CLOCK_SKEW:            {connect.CodeFailedPrecondition, true, "Set the clock of the machine that is wrong; the text has both."},
	attestv1.Reason_REASON_MACHINE_CONFIG:        {connect.CodeFailedPrecondition, true, "Correct the machine's metadata or its image's configuration: its console names the file and the key."},

	attestv1.Reason_REASON_PLAIN_STATE_REFUSED: {connect.CodePermissionDenied, false, "Use an encrypted state disk, or set insecure.allowPlainState in the policy."},
	attestv1.Reason_REASON_NOT_ENROLLED:        {connect.CodePermissionDenied, false, "A new control plane: `muster enroll NAME --role control-plane --machine-id ID` (its console shows the ID). A machine that was forgotten: erase the first MiB of its state disk (docs/state-disk.md), and it joins as new. To keep its data: `muster enroll NAME --role ROLE --machine-id ID --disk-id UUID`."},
	attestv1.Reason_REASON_NAME_TAKEN:          {connect.CodeAlreadyExists, false, "If the machine takes the place of the enrolled one: `muster replace NAME --tpm ID`. If that is no longer needed: `muster forget NAME`. Otherwise give the machine another name."},
	attestv1.Reason_REASON_NODE_EXISTS:         {connect.CodeAlreadyExists, false, "Give the machine another name. If the Node is not needed: `muster forget NAME` deletes it."},
	attestv1.Reason_REASON_ROLE_REFUSED:        {connect.CodePermissionDenied, false, "Ask for a role that the policy lists and the machine is enrolled with."},
	attestv1.Reason_REASON_DISK_ERASED:         {connect.CodePermissionDenied, false, "Run `kubectl get attesteddisk UUID`. Not found: don't erase the disk, restore its salt from known.json (docs/leaving.md). If it has `erased: true`, its data are lost: erase its first MiB, then `muster replace NAME --disk NEW-UUID` (control plane: `muster forget`, `muster enroll`)."},
	attestv1.Reason_REASON_DISK_MISMATCH:       {connect.CodePermissionDenied, false, "Boot the machine with its own disk. If it was exchanged: `muster replace NAME --disk UUID`; the console shows the UUID (control plane: `muster forget`, `muster enroll`). If the disk is another machine's: put it back there, or `muster replace NODE --tpm ID` gives that node to this machine."},
	attestv1.Reason_REASON_NAME_MISMATCH:       {connect.CodePermissionDenied, false, "Give the machine the name that it is enrolled under, or let that be forgotten with `muster forget NAME`."},
	attestv1.Reason_REASON_CSR_INVALID:         {connect.CodeInvalidArgument, true, "Use a bootstrapper of this version."},
	attestv1.Reason_REASON_ADDRESS_REFUSED:     {connect.CodePermissionDenied, true, "Use an address in the policy's nodeCidrs that no other machine has."},
	attestv1.Reason_REASON_KMS_UNAVAILABLE:     {connect.CodeUnavailable, false, "Try again. If the error persists, check the pods of muster-kms."},
	attestv1.Reason_REASON_API_UNAVAILABLE:     {connect.CodeUnavailable, false, "Try again. If the error persists, check the Kubernetes API server."},
	attestv1.Reason_REASON_AUDIT_UNAVAILABLE:   {connect.CodeUnavailable, false, "Make room on the control plane's disk for the audit log."},
	attestv1.Reason_REASON_TICKET_UNKNOWN:      {connect.CodeNotFound, false, ""},
	attestv1.Reason_REASON_TICKET_FILE:         {connect.CodeFailedPrecondition, true, "Use a joinservice and a bootstrapper of one version."},
	attestv1.Reason_REASON_CERTIFICATE_PENDING: {connect.CodeUnavailable, false, "Try again. If the error persists, check kube-controller-manager."},
	attestv1.Reason_REASON_VERDICT_OLD:         {connect.CodeFailedPrecondition, false, "Connect again, so that new evidence is made and appraised. If it is refused again, `muster status` shows whether a later boot of the machine is known."},
	attestv1.Reason_REASON_CERTIFICATE_RETIRED: {connect.CodePermissionDenied, false, "Reset the machine and let it join again, if it is still meant to be a node."},
	attestv1.Reason_REASON_CONTROL_PLANE_BUSY:  {connect.CodeUnavailable, false, "Try again later: control planes join one after another."},
	attestv1.Reason_REASON_OWNER_SIGNATURE:     {connect.CodePermissionDenied, false, "Use the owner's folder whose owner.key belongs to this cluster, and to a key of the ownerKeys of the machine's image."},
	attestv1.Reason_REASON_MACHINE_CLONED:      {connect.CodePermissionDenied, false, "Two machines have one TPM state: `muster status` shows both addresses. If the refused one is the copy, switch it off, then `muster replace NAME --tpm ID` with the enrolled ID. If the original was refused, or you don't know: ban the node, revoke its TPM's key in the policy (docs/reason-codes.md)."},
	attestv1.Reason_REASON_TPM_KNOWN:           {connect.CodePermissionDenied, false, "The log of joinservice names the node that has the TPM. Let the machine attest with the endorsement key that this node is enrolled with, or run `muster forget` on that node."},

	attestv1.Reason_REASON_WORKLOAD_IDENTITY: {connect.CodeUnauthenticated, false, "Send the caller's service-account token of the audience muster-kms."},
	attestv1.Reason_REASON_WORKLOAD_NODE:     {connect.CodePermissionDenied, false, ""},
	attestv1.Reason_REASON_ROOT_SEALED:       {connect.CodeUnavailable, false, "Restore the Secret muster-system/muster-kms-root from the owner's folder: docs/operate.md#9-when-something-is-wrong has the command."},

	attestv1.Reason_REASON_CLUSTER_ROLLED_BACK:     {connect.CodeFailedPrecondition, false, "Restore the newest disk. If only this control plane's disk is old, don't accept it: forget it, and let it join as new with an empty disk. If all are old, or you cleared its TPM: `muster recover ADDRESS --machine-id ID` (ID: `muster status --endpoint ADDRESS`). If the order is refused, reboot it."},
	attestv1.Reason_REASON_RECOVERY_SECRET_INVALID: {connect.CodePermissionDenied, false, "Use the owner's folder of the cluster that the machine's disk belongs to, or a copy of it with the same root-secret and salt."},
}

// refusalOf returns the refusal in err, or the one that replaces it. An error that is not a deliberate refusal becomes
// INTERNAL.
func refusalOf(err error) *attest.Refusal {
	if r, ok := errors.AsType[*attest.Refusal](err); ok {
		return r
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return &attest.Refusal{Reason: attestv1.Reason_REASON_DEADLINE, Err: err}
	default:
		return &attest.Refusal{Reason: attestv1.Reason_REASON_INTERNAL, Err: err}
	}
}

// Error returns the error for the caller of a handler: a [connect.Error] whose code, text and [attestv1.ErrorInfo] come
// from the one table. No text of an error that is not an [attest.Refusal] is sent. Handlers behind [Server] need not call
// it.
//
// A refusal from another peer of ours (Remote) is not about the caller: it becomes INTERNAL here unless the handler wrapped
// it in its own reason.
func Error(err error) error {
	if err == nil {
		return nil
	}
	// An error made here by connect or by a generic handler, as health's NotFound, is correct already. An error from another
	// server is not passed on.
	if ce, ok := err.(*connect.Error); ok && !connect.IsWireError(err) { //nolint:errorlint // outermost only
		if ce.Code() != connect.CodeInternal {
			return ce
		}
		// connect uses its internal code for a request that breaks its protocol, as by a compressed message.
		err = attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "%w", err)
	}
	if errors.Is(err, context.Canceled) && !isRefusal(err) {
		return withInfo(connect.NewError(connect.CodeCanceled, context.Canceled), &attestv1.ErrorInfo{Reason: attestv1.Reason_REASON_DEADLINE})
	}
	r := refusalOf(err)
	if r.Remote {
		r = &attest.Refusal{Reason: attestv1.Reason_REASON_INTERNAL, Err: err}
	}
	w, ok := reasons[r.Reason]
	if !ok {
		r = &attest.Refusal{Reason: attestv1.Reason_REASON_INTERNAL, Err: err}
		w = reasons[r.Reason]
	}
	text := attest.ReasonName(r.Reason)
	if w.sendText && r.Err != nil {
		text += ": " + r.Err.Error()
	}
	ce := connect.NewError(w.code, errors.New(text))
	info := &attestv1.ErrorInfo{Reason: r.Reason, Remedy: w.remedy}
	if r.RetryAfter > 0 {
		info.RetryAfter = durationpb.New(r.RetryAfter)
	}
	return withInfo(ce, info)
}

func withInfo(ce *connect.Error, info *attestv1.ErrorInfo) error {
	if d, err := connect.NewErrorDetail(info); err == nil {
		ce.AddDetail(d)
	}
	return ce
}

// ReasonOf returns the reason that [Error] sends to the caller, for the metrics, logs and audit records of the service that
// made err (R1): ACCEPTED for nil, DEADLINE for a caller that disconnected, and INTERNAL for an error without a reason.
func ReasonOf(err error) attestv1.Reason {
	r := ReasonFrom(Error(err))
	if r == attestv1.Reason_REASON_UNSPECIFIED {
		return attestv1.Reason_REASON_INTERNAL
	}
	return r
}

func isRefusal(err error) bool {
	_, ok := errors.AsType[*attest.Refusal](err)
	return ok
}

// infoFrom returns the detail that a Muster server added to err.
func infoFrom(err error) (*attestv1.ErrorInfo, bool) {
	ce, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return nil, false
	}
	for _, d := range ce.Details() {
		if v, err := d.Value(); err == nil {
			if info, ok := v.(*attestv1.ErrorInfo); ok {
				return info, true
			}
		}
	}
	return nil, false
}

// ReasonFrom returns the reason of a call's error: that of the refusal that prevented the connection, ours or the server's,
// or the one that the RPC returned. It is ACCEPTED for nil, and UNSPECIFIED for an error without one, such as a broken
// connection; then the client may try again.
func ReasonFrom(err error) attestv1.Reason {
	if err == nil {
		return attestv1.Reason_REASON_ACCEPTED
	}
	if r, ok := errors.AsType[*attest.Refusal](err); ok {
		return r.Reason
	}
	if info, ok := infoFrom(err); ok {
		return info.GetReason()
	}
	return attestv1.Reason_REASON_UNSPECIFIED
}

// RemedyUnproven is the remedy for a client whose call was refused by a peer that has not proven its identity.
const RemedyUnproven = "The refusal is from a peer that was not attested as the called service: find out which machine has that address. If it is that service, its log shows why it refuses."

// RemedyFrom returns what the caller can do about a call's error; empty if it is not known.
func RemedyFrom(err error) string {
	if atls.UnprovenRefusal(err) {
		return RemedyUnproven
	}
	if info, ok := infoFrom(err); ok && info.GetRemedy() != "" {
		return info.GetRemedy()
	}
	return reasons[ReasonFrom(err)].remedy
}

// RemedyOf returns what a client that gets the reason can do, one sentence; empty if only the owner of the cluster can.
func RemedyOf(r attestv1.Reason) string { return reasons[r].remedy }

// RemedyFor returns what the owner can do about a machine that was refused with the reason, and wants to be a node of that role; empty if it is not known.
func RemedyFor(r attestv1.Reason, role string) string {
	if r == attestv1.Reason_REASON_NOT_ENROLLED && role == "worker" { // workers are not enrolled beforehand
		return "It is no longer enrolled, for example after `muster forget`. Erase the first MiB of its state disk (docs/state-disk.md), and it joins as new. To keep its data: `muster enroll NAME --role worker --machine-id ID --disk-id UUID` (its console shows both)."
	}
	return RemedyOf(r)
}

// maxRetryAfter bounds how long a server can make a client wait.
const maxRetryAfter = 10 * time.Minute

// RetryAfterFrom returns the pause before the next call that a call's error requests; 0 if it requests none.
func RetryAfterFrom(err error) time.Duration {
	if r, ok := errors.AsType[*attest.Refusal](err); ok {
		return r.RetryAfter
	}
	if info, ok := infoFrom(err); ok && info.GetRetryAfter().CheckValid() == nil {
		return min(max(info.GetRetryAfter().AsDuration(), 0), maxRetryAfter)
	}
	return 0
}
