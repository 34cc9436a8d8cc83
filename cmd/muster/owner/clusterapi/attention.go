package clusterapi

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/muster-k8s/muster/api/v1alpha1"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/objects/nodeaccess"
	"github.com/muster-k8s/muster/trust/attest"
)

// Attention is one problem that needs an administrator's attention.
type Attention struct {
	// About is the object, as in "node node2".
	About string `json:"about"`
	// Problem is the fault, Remedy the step to take.
	Problem string `json:"problem"`
	Remedy  string `json:"remedy"`
}

// RenewRemedy is the remedy for certificates that no machine renews automatically.
const RenewRemedy = "The administrator's certificate, also after its expiry: muster kubeconfig renew. An expiring CA: docs/certificates.md#rotate-the-clusters-ca."

// CollateralRemedy is the remedy for missing or expired vendors' data in the policy.
const CollateralRemedy = "Run muster collateral fetch -o FILE, with --product or --fmspc, then muster collateral apply FILE."

// collateral is the reason of refusals for such data.
var collateral = attest.ReasonName(attestv1.Reason_REASON_HARDWARE_COLLATERAL)

const (
	// maxNames limits the machines that one line names.
	maxNames = 10
	// verdictOld is the default of joinservice's --verdict-max-age: older verdicts renew no certificate.
	verdictOld = 15 * time.Minute
	// certificateSoon is the remaining lifetime at which a kubelet should already have renewed its certificate: it does so
	// at 70–90 % of a certificate's life, that is with at least 2.4 h of 24 h left.
	certificateSoon = time.Hour
	// clockMargin is the allowed difference between the clocks of machine and owner.
	clockMargin = 15 * time.Minute
	// ownCertificateSoon is the same for certificates that a person has to renew.
	ownCertificateSoon = 30 * 24 * time.Hour
	// heldLong is how long a node may be Ready but unschedulable, while a command drains it or waits for Muster's services after its restart.
	heldLong = 30 * time.Minute
	// requestSoon is how long a kubelet's request may wait: a machine attests every five minutes.
	requestSoon = 10 * time.Minute
	// phaseSoon is how long a phase of a rotation may take: half an hour with three control planes, plus time to repair one. After settledSoon, the
	// owner should have dropped the old key, because tokens of pods are renewed within a day.
	phaseSoon   = 2 * time.Hour
	settledSoon = 7 * 24 * time.Hour
	// workersSoon is how long workers may take for an upgrade of Kubernetes. For control planes, phaseSoon applies, because none can join meanwhile.
	workersSoon = 24 * time.Hour
)

// ForeignPolicyRemedy is the remedy if the owner has not signed the cluster's policy.
const ForeignPolicyRemedy = "Run muster policy apply with the folder of this cluster's owner: it restores the owner's policy. Until then, a restarted joinservice has no policy and is not ready. " +
	"If you have not replaced the policy, find out who did: kubectl get attestationpolicy default -o yaml --show-managed-fields."

// attention returns the problems of s. Insecure switches do not count, because the cluster's owner chose them.
func (s *Status) attention(now time.Time) []Attention {
	out := []Attention{}
	add := func(about, remedy, problem string, args ...any) {
		out = append(out, Attention{About: about, Problem: fmt.Sprintf(problem, args...), Remedy: remedy})
	}
	if s.Removed {
		add("cluster", "If muster init was interrupted, complete it. If Muster was removed: muster uninstall shows what is left of it, and docs/runbooks.md#uninstall has the machines' part.", "Muster is not installed in it")
		return out
	}
	s.servicesAttention(add)
	switch p := s.Policy; {
	case p == nil:
		add("policy", "Run muster policy apply.", "there is none, so no machine is admitted")
	case !p.Accepted && p.Reason != "":
		remedy := "Correct it, increase its serial, and run muster policy apply."
		if p.Reason == attest.ReasonName(attestv1.Reason_REASON_POLICY_SIGNATURE) {
			remedy = ForeignPolicyRemedy
		}
		add("policy", remedy, "generation %d is refused: %s %s; serial %d stays in force, but a restarted joinservice has no policy", p.Newest, p.Reason, p.Message, p.Serial)
	case !p.Accepted:
		add("policy", "Look at the pods of muster-joinservice: they check it within seconds.", "generation %d is not yet checked by the services", p.Newest)
	}
	if behind := s.Behind(); behind != "" {
		add("cluster", BehindRemedy, "%s", behind)
	}
	if r := s.Rotation; r != nil {
		if age := now.Sub(r.Since); !r.Joins() && age > phaseSoon || age > settledSoon {
			add("rotation", "Run "+r.Command()+": it names the control plane that has not finished yet. muster doctor --node NODE shows what is wrong with it.", "the %s is in the phase %s for %s", r.Key, r.Phase, age.Round(time.Minute))
		}
	}
	if u := s.Upgrade; u != nil {
		if age := now.Sub(u.Since); u.Stage != StageWorkers && age > phaseSoon || age > workersSoon {
			add("upgrade of Kubernetes", "Run muster upgrade kubernetes "+u.To+": it continues, or names the node that stops it. While control planes are upgraded, none can join.",
				"to %s, it is at the %s for %s: %d of %d nodes have it", u.To, u.Stage, age.Round(time.Minute), u.Upgraded, u.Nodes)
		}
	}
	var lapsed []string // the machines are unchanged
	for _, n := range s.Nodes {
		if s.nodeAttention(n, now, add); n.lapsed() {
			lapsed = append(lapsed, n.Name)
		}
	}
	for _, w := range s.Waiting {
		if !s.enrolled(w.Machine) {
			continue // any machine with a genuine TPM can cause this; the table shows it
		}
		who := w.Node
		if who == "" {
			who = w.Machine[:min(12, len(w.Machine))]
		}
		if w.Reason == collateral {
			if !slices.Contains(lapsed, who) {
				lapsed = append(lapsed, who)
			}
			continue
		}
		add("waiting "+who, w.Remedy, "%s refused for %s: %s", w.Machine, now.Sub(w.Since).Round(time.Second), w.Reason)
	}
	if len(lapsed) > 0 {
		add("nodes", CollateralRemedy+" joinservice's log names what is missing: kubectl -n "+Namespace+" logs -l app.kubernetes.io/name=muster-joinservice --prefix --tail=-1.",
			"%d machines are refused with %s, since the policy lacks current data of their processors' vendor: %s", len(lapsed), collateral, strings.Join(lapsed[:min(len(lapsed), maxNames)], ", "))
	}
	for _, r := range s.Requests {
		if age := now.Sub(r.Since); age > requestSoon {
			add("request "+r.Name, "Check joinservice's log, and the attester's on that node: without a recent verdict nothing is renewed. "+checkup.Journal("NODE", "muster-attester"),
				"%s waits for %s for a certificate of %s", r.By, age.Round(time.Second), strings.TrimPrefix(r.Signer, "kubernetes.io/"))
		}
	}
	for _, c := range s.Certificates {
		if left := c.Expires.Sub(now); left < ownCertificateSoon {
			add("certificate "+c.Name, RenewRemedy, "%s", ends(left))
		}
	}
	return out
}

// OwnerKeyRotates adds that a rotation of the owner's key is unfinished: next is its next command by the owner's folder,
// since the time of its last step.
func (s *Status) OwnerKeyRotates(next string, since, now time.Time) {
	s.OwnerKeyRotation = next
	if age := now.Sub(since); next != "" && age > settledSoon {
		s.Attention = append(s.Attention, Attention{
			About: "owner's key", Problem: fmt.Sprintf("its rotation is unfinished, and its last step was %s ago: until it is finished, machines accept the old key", age.Round(time.Hour)),
			Remedy: "Roll out the image for the next step, then run " + next + ": with --dry-run it shows which nodes' images have which keys.",
		})
	}
}

func (s *Status) servicesAttention(add func(about, remedy, problem string, args ...any)) {
	for _, name := range Services {
		if text := s.Services[name]; text != "" && s.Chart != nil {
			add(name, fmt.Sprintf("kubectl -n %s get pods, and the log of the pod that is not ready; its /readyz shows what is missing.", Namespace), "%s", text)
		}
	}
	switch c := s.Chart; {
	case c == nil:
		add("chart", "If muster init was interrupted, complete it. If you are removing Muster, run muster uninstall again.", "Muster's release is not installed")
	case c.Status != "deployed":
		add("chart", "Run the interrupted command again with the same flags: muster upgrade, or muster init if it was never complete. helm history muster -n "+Namespace+" shows what happened to it.", "revision %d is %s", c.Revision, c.Status)
	}
}

// whatKeeps returns how to find out what prevents the deletion of the Node or the pods of a machine that is shut out.
func whatKeeps(node string) string {
	return "kubectl -n default get events --field-selector involvedObject.kind=AttestedNode,involvedObject.name=" + node + " shows what prevents that (NotEvicted): a finalizer, or joinservice can't run on another control plane."
}

func (s *Status) nodeAttention(n NodeStatus, now time.Time, add func(about, remedy, problem string, args ...any)) {
	about := "node " + n.Name
	if n.Cloned != "" && !n.Deleting && !n.Banned { // J11; nothing to add to a ban
		add(about, "Find out which machine is genuine. If the refused one is the copy, switch it off, then muster replace "+n.Name+" --tpm "+n.MachineID+" admits the genuine one again. If the genuine one was refused, or you don't know which one it is: ban the node and set up a new machine (docs/reason-codes.md#machine_cloned).", "MACHINE_CLONED: %s", n.Cloned)
	}
	switch {
	case !n.Enrolled && s.undefined:
		return // Muster is being removed or installed
	case !n.Enrolled:
		add(about, "Muster did not admit it: find out who created it, and run kubectl delete node "+n.Name+".", "it has no AttestedNode")
		return
	case n.Deleting:
		add(about, "joinservice completes that within seconds. If it does not, "+whatKeeps(n.Name)+" Where no joinservice runs, muster forget "+n.Name+" ends it.", "its enrollment is being deleted")
		return
	case n.Banned && n.Replacing:
		add(about, "If it does not run in another terminal, run it again with the same flags. If you don't trust the machine any more, muster ban "+n.Name+" evicts it.", "muster replace has banned it, and is unfinished")
		return
	case n.Banned && n.Removing:
		add(about, "If it does not run in another terminal: muster forget "+n.Name+", with --erase if the disk was to be erased, completes the removal. muster ban "+n.Name+" cancels it; after that, muster unban "+n.Name+" works only if its certificates were not revoked and its disk was not erased.", "muster forget or reset has banned it, and is unfinished")
		return
	case n.Banned && n.Joined:
		add(about, "joinservice deletes it within seconds. If it stays, "+whatKeeps(n.Name), "it is banned, but its Node object still exists")
		return
	case n.RevokedUntil != nil:
		anew := "power it off, erase its disk from a rescue system, and run muster forget " + n.Name
		if n.DiskMode == string(v1alpha1.DiskModeLUKS) {
			anew = "muster reset " + n.Name + " (the data on its disk are lost)"
		}
		add(about, "If muster replace gave the node a wrong machine or disk, correct that first. Then leave the machine on: it gets new certificates automatically when its present ones expire (CLIENT CERT), a worker also at a reboot in their last eight hours. To let it join as new at once: "+anew+".",
			"its machine attests, but muster replace or forget has revoked its certificates, and it has no newer ones: until %s at the latest, all its kubelet's writes are refused", n.RevokedUntil.UTC().Format(time.RFC3339))
	case !n.Joined && !n.Banned && n.AppraisedAt != nil:
		add(about, "If it is not joining just now: its kubelet creates the Node when the machine starts, so restart the machine, by its power or by muster reboot "+n.Name+"; labels and taints of the old Node are lost. If the machine will not return: muster forget "+n.Name+".",
			"its machine was appraised %s ago, but it has no Node object", now.Sub(*n.AppraisedAt).Round(time.Second))
		return
	case !n.Joined:
		return // banned and evicted, enrolled in advance, or not yet joined
	}
	switch {
	case n.RevokedUntil != nil: // as above
	case n.Stale:
		add(about, "Its machine is off, or its kubelet does not run: the machine's console shows what it waits for. kube-controller-manager should have marked the Node as not Ready: unless the cluster was recovered minutes ago, kubectl -n kube-system get pods shows why it did not.",
			"its condition is Ready, but its kubelet %s", n.silent())
	case !n.Ready:
		add(about, "kubectl describe node "+n.Name+" shows why; if its kubelet does not run, the machine's console shows what it waits for.", "it is not Ready")
	}
	if n.Held && n.ReadySince != nil && now.Sub(*n.ReadySince) > heldLong {
		add(about, "If none of your commands is working on it: run the interrupted one again, or kubectl uncordon "+n.Name+".", "a command drained it, and it is still unschedulable, although Ready for %s", now.Sub(*n.ReadySince).Round(time.Second))
	}
	switch {
	case n.AppraisedAt == nil:
		add(about, checkup.Journal(n.Name, "muster-attester"), "it was never appraised")
	case n.lapsed(): // reported in one line for all of them
	case n.Accepted != nil && !*n.Accepted:
		add(about, "joinservice's log shows what differs: kubectl -n "+Namespace+" logs -l app.kubernetes.io/name=muster-joinservice --prefix --tail=-1. Don't trust the machine until you know why.", "the last verdict is %s", n.Reason)
	case now.Sub(*n.AppraisedAt) > verdictOld:
		add(about, "Until it attests, it gets no new certificates. "+checkup.Journal(n.Name, "muster-attester"), "the last verdict is %s old", now.Sub(*n.AppraisedAt).Round(time.Second))
	case s.Policy != nil && s.Policy.Accepted && n.Serial != s.Policy.Serial && now.Sub(*n.AppraisedAt) > verdictOld/2:
		add(about, checkup.Journal(n.Name, "muster-attester"), "it was appraised by the policy of serial %d, but %d is in force", n.Serial, s.Policy.Serial)
	}
	for _, c := range n.ControlPlane {
		if left := c.Expires.Sub(now); left < 0 || left < c.Expires.Sub(*c.Renews)/2 {
			add(about, "No control plane renews certificates until all are healthy. "+checkup.Journal(n.Name, "muster-renewal"), "its certificate %s %s and was not renewed", c.Name, ends(left))
		}
	}
	for _, c := range []struct {
		name string
		end  *time.Time
	}{{"client", n.ClientExpires}, {"serving", n.ServingExpires}} {
		if c.end != nil && c.end.Sub(now) < certificateSoon {
			add(about, "Check which of its requests are pending (kubectl get csr), and joinservice's log.", "its kubelet's %s certificate %s", c.name, ends(c.end.Sub(now)))
		}
	}
	if n.ClientExpires != nil && n.ClientExpires.Sub(now) > nodeaccess.CertificateLife+clockMargin { // J7
		add(about, "Set cluster-signing-duration of kube-controller-manager to 24h, then reboot the machine: it replaces the certificate before its kubelet starts. Until then, a banned node can still read.",
			"its machine reports a kubelet client certificate with a lifetime of %s; the limit is %s", n.ClientExpires.Sub(now).Round(time.Hour), nodeaccess.CertificateLife)
	}
}

// lapsed reports whether the node's machine is refused only because the policy lacks current data of its processor's vendor.
func (s NodeStatus) lapsed() bool {
	return s.Enrolled && s.Joined && !s.Deleting && !s.Banned && s.AppraisedAt != nil && s.Accepted != nil && !*s.Accepted && s.Reason == collateral
}

func ends(left time.Duration) string {
	if left < 0 {
		return "ended " + (-left).Round(time.Minute).String() + " ago"
	}
	return "ends in " + left.Round(time.Minute).String()
}
