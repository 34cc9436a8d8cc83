package rotation

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/client-go/util/cert"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/cmd/muster/owner/progress"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

// offAfter is the time without an attestation after which a node counts as off: three times the interval.
const offAfter = 15 * time.Minute

// behind adds to a plan the nodes that would be lost if the cluster's old authority were dropped now. A compromised machine can report anything, but
// harms only itself.
func (r *rotating) behind(nodes []clusterapi.NodeRelease, now time.Time, refuse func(string, ...any)) {
	const remedy = "start it and wait, remove it (muster forget %[1]s), or name it with --without %[1]s: it then gets the new authority at its first or second start, and its old kubelet's certificate is refused until then"
	for _, name := range r.Without {
		i := slices.IndexFunc(nodes, func(n clusterapi.NodeRelease) bool { return n.Name == name })
		switch {
		case i < 0:
			refuse("--without %s: there is no such node.", name)
		case nodes[i].ControlPlane:
			refuse("--without %s: it is a control plane, and would continue to use the old authority: remove it (muster forget %[1]s).", name)
		}
	}
	var enrolled []v1alpha1.AttestedNode
	for i := range nodes {
		if e := nodes[i].Enrollment; e != nil {
			enrolled = append(enrolled, *e)
		}
	}
	none := policies.NoneAttests(enrolled, now)
	if none { // these nodes must not be removed for that reason
		refuse("%s. %s", policies.NoneHasAttested, policies.WhyNoneAttests)
	}
	for i := range nodes {
		n := &nodes[i]
		if slices.Contains(r.Without, n.Name) || n.Enrollment != nil && n.Enrollment.ShutOut() {
			continue
		}
		if n.Enrollment == nil {
			refuse("%s has no AttestedNode, so it gets no new authority: have its machine join by Muster, delete its Node, or name it with --without %[1]s.", n.Name)
			continue
		}
		st := n.Enrollment.Status
		switch {
		case !n.Joined && n.Enrollment.Spec.DiskID == "": // its machine has not joined yet, and gets the authority when it joins
		case !slices.Contains(st.Authorities, r.now.ID):
			refuse("%s has not reported that it trusts the new authority, within five minutes of its start: "+remedy+".", n.Name)
		case st.LastVerdict != nil && !st.LastVerdict.Accepted:
			refuse("the machine of %s is refused (%s), so its last report may be outdated: repair it (muster verify %[1]s shows what differs), remove it (muster forget %[1]s), or name it with --without %[1]s.", n.Name, problem.Printable(st.LastVerdict.Reason))
		case !n.Ready || st.LastVerdict == nil || !none && now.Sub(st.LastVerdict.Time.Time) > offAfter:
			refuse("%s is off, or does not attest: "+remedy+".", n.Name)
		case len(st.KubeletAuthorities) == 0 || slices.ContainsFunc(st.KubeletAuthorities, func(id string) bool { return id != r.now.ID }):
			refuse("the kubelet of %s has a certificate of the old authority, and replaces it within 24 hours: wait.", n.Name)
		}
	}
}

// silent returns the nodes whose machines do not report their trusted authorities.
func silent(nodes []clusterapi.NodeRelease) (out []string) {
	for i := range nodes {
		if n := &nodes[i]; n.Takes() && n.Joined && len(n.Enrollment.Status.Authorities) == 0 {
			out = append(out, n.Name)
		}
	}
	return out
}

// adopt makes the owner's folder trust the new authority, at the end only that one. It also updates the data for machines
// that discover the cluster by a token.
func (r *rotating) adopt(ctx context.Context, only bool) error {
	if r.Key != clusterinfo.ClusterCA {
		return nil
	}
	list, err := cert.ParseCertsPEM([]byte(r.now.Public))
	if err != nil {
		return err
	}
	r.Report("cluster", "the folder's "+ownerdir.AdminConf+" gets a certificate of the new authority")
	if err := r.Adopt(ctx, list[0], only); err != nil {
		return fmt.Errorf("the folder's %s did not get a certificate of the new authority: %w", ownerdir.AdminConf, err)
	}
	if r.kube, err = access.Connect(r.Dir); err != nil { // the previous certificate may no longer be accepted
		return err
	}
	trusted, err := r.kube.Authorities()
	if err != nil {
		return err
	}
	text, err := cert.EncodeCertificates(trusted...)
	if err != nil {
		return err
	}
	return r.kube.SetClusterInfo(ctx, text)
}

// AdoptAuthority makes the folder's admin.conf trust another authority of the cluster, and gets a certificate from it. With only, admin.conf trusts
// no other authority; the others are kept in the folder. A repeated call changes nothing.
//
// An API server must present a certificate with which an authority that the folder already trusts has signed the other one's key. This is needed
// because every writer of the cluster's description can put another authority into it.
func AdoptAuthority(ctx context.Context, d *ownerdir.Dir, ca *x509.Certificate, only bool, report progress.Reporter) error {
	h, err := access.ReadHolder(d)
	if err != nil {
		return err
	}
	trusted := access.TrustedBy(h.Text)
	if !slices.ContainsFunc(trusted, ca.Equal) {
		if err := access.VerifyCrossCertificate(ctx, h.Conf.Clusters[h.Conf.Contexts[h.Conf.CurrentContext].Cluster].Server, trusted, ca); err != nil {
			return err
		}
		if err := h.Trust(d, append([]*x509.Certificate{ca}, trusted...)); err != nil {
			return err
		}
	}
	if h.Old.CheckSignatureFrom(ca) != nil {
		if _, err := access.RenewKubeconfig(ctx, access.RenewConfig{Dir: d, Now: time.Now, Report: report}); err != nil {
			return err
		}
		if h, err = access.ReadHolder(d); err != nil {
			return err
		}
		if h.Old.CheckSignatureFrom(ca) != nil { // the folder would lose access when the old one is dropped
			return problem.WithRemedy(errors.New("a control plane has signed the certificate with the old authority"), "Repeat the command. If the error remains, a control plane does not use the new key: muster doctor shows which.")
		}
	}
	if !only {
		return nil
	}
	if h, err = access.ReadHolder(d); err != nil {
		return err
	}
	if trusted = access.TrustedBy(h.Text); len(trusted) == 1 && trusted[0].Equal(ca) {
		return nil
	}
	return h.Trust(d, []*x509.Certificate{ca})
}
