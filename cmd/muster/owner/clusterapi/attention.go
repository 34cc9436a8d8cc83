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

// Attention is one problem that an administrator should look at.
type Attention struct {
	// About is the object, as in "node node2".
	About string `json:"about"`
	// Problem is the fault, Remedy the step to take.
	Problem string `json:"problem"`
	Remedy  string `json:"remedy"`
}

// RenewRemedy is the remedy for certificates that no machine renews by itself.
const RenewRemedy = "muster kubeconfig renew, for the administrator's, also after its end. For a CA that ends: docs/certificates.md#rotate-the-clusters-ca."

// CollateralRemedy is the remedy for vendors' data in the policy that are missing or have ended.
const CollateralRemedy = "Run muster collateral fetch -o FILE, with --product or --fmspc, then muster collateral apply FILE --dry-run, then muster collateral apply FILE."

// collateral is the reason of refusals for such data.
var collateral = attest.ReasonName(attestv1.Reason_REASON_HARDWARE_COLLATERAL)

const (
	// maxNames is how many machines one line names.
	maxNames = 10
	// verdictOld is the default of joinservice's --verdict-max-age: older verdicts renew no certificate.
	verdictOld = 15 * time.Minute
	// certificateSoon is when a kubelet should already have renewed by itself: it does so at 70–90 % of a
	// certificate's life, that is with at least 2.4 h of 24 h left.
	certificateSoon = time.Hour
	// clockMargin is the allowed difference between the clocks of machine and owner.
	clockMargin = 15 * time.Minute
	// ownCertificateSoon is for certificates that a person has to renew.
	ownCertificateSoon = 30 * 24 * time.Hour
	// heldLong is how long a node may be Ready and take no pods, while a command drains it or waits for Muster's services after its restart.
	heldLong = 30 * time.Minute
	// requestSoon is how long a kubelet's request may wait: a machine attests every five minutes.
	requestSoon = 10 * time.Minute
	// phaseSoon is how long a phase of a rotation may take: half an hour with three control planes, and one may be repaired meanwhile. In settledSoon, the
	// owner should have dropped the old key: tokens of pods are renewed within a day.
	phaseSoon   = 2 * time.Hour
	settledSoon = 7 * 24 * time.Hour
	// workersSoon is how long workers may take for an upgrade of Kubernetes. Control planes have phaseSoon: meanwhile none can join.
	workersSoon = 24 * time.Hour
)

// ForeignPolicyRemedy is the remedy for a policy in the cluster that its owner has not signed.
const ForeignPolicyRemedy = "Run muster policy apply with the folder of this cluster's owner: it puts the owner's policy back. Until then, a joinservice that restarts has no policy and is not ready. " +
	"If you have not replaced the policy, find out who did: kubectl get attestationpolicy default -o yaml --show-managed-fields."

// attention returns the problems of s. Insecure switches are none: the cluster's owner chose them.
func (s *Status) attention(now time.Time) []Attention {
	out := []Attention{}
	add := func(about, remedy, problem string, args ...any) {
		out = append(out, Attention{About: about, Problem: fmt.Sprintf(problem, args...), Remedy: remedy})
	}
	if s.Removed {
		add("cluster", "If muster init has not ended, run it to its end. If Muster was removed: muster uninstall says what is left of it, and docs/runbooks.md#uninstall has the machines' part.", "Muster is not installed in it")
		return out
	}
	s.servicesAttention(add)
	switch p := s.Policy; {
	case p == nil:
		add("policy", "Run muster policy apply.", "there is none, so no machine is admitted")
	case !p.Accepted && p.Reason != "":
		remedy := "Correct it, count its serial up and run muster policy apply."
		if p.Reason == attest.ReasonName(attestv1.Reason_REASON_POLICY_SIGNATURE) {
			remedy = ForeignPolicyRemedy
		}
		add("policy", remedy, "generation %d is refused: %s %s; serial %d stays in force until a joinservice restarts, which then has none", p.Newest, p.Reason, p.Message, p.Serial)
	case !p.Accepted:
		add("policy", "Look at the pods of muster-joinservice: they check it within seconds.", "generation %d is not yet checked by the services", p.Newest)
	}
	if behind := s.Behind(); behind != "" {
		add("cluster", BehindRemedy, "%s", behind)
	}
	if r := s.Rotation; r != nil {
		if age := now.Sub(r.Since); !r.Joins() && age > phaseSoon || age > settledSoon {
			add("rotation", "Run "+r.Command()+": it names the control plane that is not done yet. muster doctor --node NODE shows what is wrong with one.", "the %s is in the phase %s for %s", r.Key, r.Phase, age.Round(time.Minute))
		}
	}
	if u := s.Upgrade; u != nil {
		if age := now.Sub(u.Since); u.Stage != StageWorkers && age > phaseSoon || age > workersSoon {
			add("upgrade of Kubernetes", "Run muster upgrade kubernetes "+u.To+": it continues, or names the node that stops it. While control planes are upgraded, none can join.",
				"to %s, it is at the %s for %s: %d of %d nodes have it", u.To, u.Stage, age.Round(time.Minute), u.Upgraded, u.Nodes)
		}
	}
	var lapsed []string // the machines are as they were
	for _, n := range s.Nodes {
		if s.nodeAttention(n, now, add); n.lapsed() {
			lapsed = append(lapsed, n.Name)
		}
	}
	for _, w := range s.Waiting {
		if !s.enrolled(w.Machine) {
			continue // any machine with a genuine TPM can ask; the owner sees it in the table
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
			add("request "+r.Name, "Look at joinservice's log, and at the attester's on that node: without a recent verdict nothing is renewed. "+checkup.Journal("NODE", "muster-attester"),
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

// OwnerKeyRotates adds that a rotation of the owner's key is not over: by the owner's folder, next is its next command, and its last step was at since.
func (s *Status) OwnerKeyRotates(next string, since, now time.Time) {
	s.OwnerKeyRotation = next
	if age := now.Sub(since); next != "" && age > settledSoon {
		s.Attention = append(s.Attention, Attention{
			About: "owner's key", Problem: fmt.Sprintf("its rotation is not over, and its last step was %s ago: until the end, machines accept the old key", age.Round(time.Hour)),
			Remedy: "Roll out the image for the next step, then run " + next + ": with --dry-run it shows which nodes' images have which keys.",
		})
	}
}

func (s *Status) servicesAttention(add func(about, remedy, problem string, args ...any)) {
	for _, name := range Services {
		if text := s.Services[name]; text != "" && s.Chart != nil {
			add(name, fmt.Sprintf("kubectl -n %s get pods, and the log of the one that is not ready; its /readyz says what is missing.", Namespace), "%s", text)
		}
	}
	switch c := s.Chart; {
	case c == nil:
		add("chart", "If muster init has not ended, run it to its end. If you are removing Muster, muster uninstall continues.", "Muster's release is not installed")
	case c.Status != "deployed":
		add("chart", "Run the interrupted command again: muster upgrade with the same flags, or of a cluster that was never complete, muster init. helm history muster -n "+Namespace+" shows what became of it.", "revision %d is %s", c.Revision, c.Status)
	}
}

// whatKeeps returns where to find what keeps the Node or the pods of a machine that is shut out.
func whatKeeps(node string) string {
	return "kubectl -n default get events --field-selector involvedObject.kind=AttestedNode,involvedObject.name=" + node + " says what keeps it (NotEvicted): a finalizer, or that joinservice can run on no other control plane."
}

func (s *Status) nodeAttention(n NodeStatus, now time.Time, add func(about, remedy, problem string, args ...any)) {
	about := "node " + n.Name
	if n.Cloned != "" && !n.Deleting && !n.Banned { // J11; nothing to add to a ban
		add(about, "Find out which machine is genuine. If the refused one is the copy, switch it off, then muster replace "+n.Name+" --tpm "+n.MachineID+" lets the genuine one go on. If the genuine one was refused, or you don't know: ban the node and set up a new machine (docs/reason-codes.md#machine_cloned).", "MACHINE_CLONED: %s", n.Cloned)
	}
	switch {
	case !n.Enrolled && s.undefined:
		return // Muster is being removed, or installed
	case !n.Enrolled:
		add(about, "Muster did not let it in: find out who did, and run kubectl delete node "+n.Name+".", "it has no AttestedNode")
		return
	case n.Deleting:
		add(about, "joinservice ends it within seconds. If it stays, "+whatKeeps(n.Name)+" Where no joinservice runs, muster forget "+n.Name+" ends it.", "its enrollment is being deleted")
		return
	case n.Banned && n.Replacing:
		add(about, "If it does not run in another terminal, run it again with the same flags. If you don't trust the machine any more, muster ban "+n.Name+" evicts it.", "muster replace has banned it, and is not at its end")
		return
	case n.Banned && n.Joined:
		add(about, "joinservice deletes it within seconds. If it stays, "+whatKeeps(n.Name), "it is banned, and its Node object is still there")
		return
	case n.RevokedUntil != nil:
		anew := "power it off, erase its disk from a rescue system, and run muster forget " + n.Name
		if n.DiskMode == string(v1alpha1.DiskModeLUKS) {
			anew = "muster reset " + n.Name + ", which loses what is on its disk"
		}
		add(about, "If muster replace gave the node a wrong machine or disk, give it the right one first. Then leave the machine on: it gets new certificates by itself when its present ones end (CLIENT CERT), a worker also when it is rebooted in their last eight hours. To have it join anew at once: "+anew+".",
			"its machine attests, but its certificates were revoked by muster replace or forget, and it has got none since: until %s at the latest, its kubelet can write nothing", n.RevokedUntil.UTC().Format(time.RFC3339))
	case !n.Joined && !n.Banned && n.AppraisedAt != nil:
		add(about, "If it does not join just now: its kubelet makes one when its machine starts, so restart it, with its power or by muster reboot "+n.Name+"; labels and taints of the old one are gone. If the machine is gone for good: muster forget "+n.Name+".",
			"its machine was appraised %s ago, and there is no Node object of it", now.Sub(*n.AppraisedAt).Round(time.Second))
		return
	case !n.Joined:
		return // banned and evicted, enrolled in advance, or not yet joined
	}
	switch {
	case n.RevokedUntil != nil: // as above
	case n.Stale:
		add(about, "Its machine is off, or its kubelet does not run: the machine's console says what it waits for. kube-controller-manager would have marked the Node: unless the cluster was recovered minutes ago, kubectl -n kube-system get pods shows why it does not.",
			"its condition says Ready, and its kubelet %s", n.silent())
	case !n.Ready:
		add(about, "kubectl describe node "+n.Name+" says why; if its kubelet does not run, the machine's console says what it waits for.", "it is not Ready")
	}
	if n.Held && n.ReadySince != nil && now.Sub(*n.ReadySince) > heldLong {
		add(about, "If no command of yours is at work on it: run the interrupted one again, or kubectl uncordon "+n.Name+".", "it takes no pods since a command drained it, and is Ready for %s", now.Sub(*n.ReadySince).Round(time.Second))
	}
	switch {
	case n.AppraisedAt == nil:
		add(about, checkup.Journal(n.Name, "muster-attester"), "it was never appraised")
	case n.lapsed(): // one line for all of them
	case n.Accepted != nil && !*n.Accepted:
		add(about, "joinservice's log says what differs: kubectl -n "+Namespace+" logs -l app.kubernetes.io/name=muster-joinservice --prefix --tail=-1. Don't trust the machine until you know why.", "the last verdict is %s", n.Reason)
	case now.Sub(*n.AppraisedAt) > verdictOld:
		add(about, "Until it attests, it gets no new certificates. "+checkup.Journal(n.Name, "muster-attester"), "the last verdict is %s old", now.Sub(*n.AppraisedAt).Round(time.Second))
	case s.Policy != nil && s.Policy.Accepted && n.Serial != s.Policy.Serial && now.Sub(*n.AppraisedAt) > verdictOld/2:
		add(about, checkup.Journal(n.Name, "muster-attester"), "it was appraised by the policy of serial %d, and %d is in force", n.Serial, s.Policy.Serial)
	}
	for _, c := range n.ControlPlane {
		if left := c.Expires.Sub(now); left < 0 || left < c.Expires.Sub(*c.Renews)/2 {
			add(about, "Until all control planes are healthy, none renews. "+checkup.Journal(n.Name, "muster-renewal"), "its certificate %s %s and was not renewed", c.Name, ends(left))
		}
	}
	for _, c := range []struct {
		name string
		end  *time.Time
	}{{"client", n.ClientExpires}, {"serving", n.ServingExpires}} {
		if c.end != nil && c.end.Sub(now) < certificateSoon {
			add(about, "See which of its requests wait (kubectl get csr), and joinservice's log.", "its kubelet's %s certificate %s", c.name, ends(c.end.Sub(now)))
		}
	}
	if n.ClientExpires != nil && n.ClientExpires.Sub(now) > nodeaccess.CertificateLife+clockMargin { // J7
		add(about, "Set cluster-signing-duration of kube-controller-manager to 24h, then reboot the machine: it replaces the certificate before its kubelet starts. Until then a ban does not end what the node may read.",
			"its machine says that the kubelet's client certificate lasts for %s, and none may for more than %s", n.ClientExpires.Sub(now).Round(time.Hour), nodeaccess.CertificateLife)
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
