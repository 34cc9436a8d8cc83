package tpm2_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/hex"
	"maps"
	"slices"
	"testing"
	"time"

	gotpm "github.com/google/go-tpm/tpm2"
	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/hardwaretest"
)

// gcp and azure make options of machines with a platform key. change may be nil.
var (
	gcp   = platform{Project: "ours", Zone: "zone-a"}.options
	azure = platform{Azure: true}.options
)

type platform attesttest.Platform

func (p platform) options(change func(*attesttest.Platform)) attesttest.Options {
	made := attesttest.Platform(p)
	if change != nil {
		change(&made)
	}
	return attesttest.Options{Platform: &made}
}

// platformRoot returns a change of a policy that lists the authority of platform keys, and no other.
func platformRoot(ca *attesttest.CA, r *attestv1.PlatformRoot) func(*attestv1.Policy) {
	return func(p *attestv1.Policy) {
		r.Pem = ca.PEM()
		p.Tpm2.EkRoots, p.Tpm2.PlatformRoots = nil, append(p.Tpm2.PlatformRoots, r)
	}
}

func claimsOf(t testing.TB, m *attesttest.Machine, ca *attesttest.CA) attest.Claims {
	t.Helper()
	c, err := attesttest.Claims(t.Context(), m.Attester(attest.PurposeMachine), attesttest.Verifier(t, ca), attest.PurposeMachine, attest.Binding{1})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Invariant A6.
func TestAPlatformKeyIsAppraisedByItsRule(t *testing.T) {
	ca, other := attesttest.NewCA(t), attesttest.NewCA(t)
	google, microsoft := attesttest.NewMachine(t, ca, gcp(nil)), attesttest.NewMachine(t, ca, azure(nil))
	inGCP := claimsOf(t, google, ca)
	if i := inGCP.Instance(); inGCP.Endorsement() != "platform-ak" || inGCP.Machine() != google.ID() || i.Project != "ours" || i.Zone != "zone-a" || i.Provider != "gcp" || !inGCP.Root().Equal(ca.Root()) {
		t.Errorf("%s, %s, %+v", inGCP.Endorsement(), inGCP.Machine(), i)
	}
	inAzure := claimsOf(t, microsoft, ca)
	ours := func(change func(*attestv1.PlatformRoot)) *attestv1.PlatformRoot {
		r := &attestv1.PlatformRoot{Provider: "gcp", Key: "ecc-p256", Projects: []string{"ours"}}
		if change != nil {
			change(r)
		}
		return r
	}
	const accepted, unlisted = attestv1.Reason_REASON_ACCEPTED, attestv1.Reason_REASON_POLICY_REFUSED
	revoke := func(key [32]byte) func(*attestv1.Policy) {
		return func(p *attestv1.Policy) {
			p.Tpm2.Revoked = &attestv1.Revoked{Keys: []string{hex.EncodeToString(key[:])}}
		}
	}
	ekRoot := func(p *attestv1.Policy) {
		p.Tpm2.EkRoots = []*attestv1.EkRoot{{Pem: ca.PEM(), Operator: true, Key: "ecc-p256"}}
	}
	azureList := &attestv1.PlatformRoot{Provider: "azure", Key: "rsa-2048", MachineIds: []string{microsoft.ID().String()}}
	appraisedAs(t, "Platform key, rules", ca, google, map[string]appraised{
		"in the project":                  {inGCP, []func(*attestv1.Policy){platformRoot(ca, ours(nil))}, accepted},
		"in project and zone":             {inGCP, []func(*attestv1.Policy){platformRoot(ca, ours(func(r *attestv1.PlatformRoot) { r.Zones = []string{"zone-b", "zone-a"} }))}, accepted},
		"in another project":              {inGCP, []func(*attestv1.Policy){platformRoot(ca, ours(func(r *attestv1.PlatformRoot) { r.Projects = []string{"theirs"} }))}, badEK},
		"in a project with a longer name": {inGCP, []func(*attestv1.Policy){platformRoot(ca, ours(func(r *attestv1.PlatformRoot) { r.Projects = []string{"our"} }))}, badEK},
		"in another zone":                 {inGCP, []func(*attestv1.Policy){platformRoot(ca, ours(func(r *attestv1.PlatformRoot) { r.Zones = []string{"zone-b"} }))}, badEK},
		"in the project of another rule, and the zone of this": {inGCP, []func(*attestv1.Policy){
			platformRoot(ca, ours(func(r *attestv1.PlatformRoot) { r.Projects = []string{"theirs"} })),
			platformRoot(ca, ours(func(r *attestv1.PlatformRoot) { r.Zones = []string{"zone-b"} })),
		}, badEK},
		"listed":                            {inGCP, []func(*attestv1.Policy){platformRoot(ca, ours(func(r *attestv1.PlatformRoot) { r.MachineIds = []string{google.ID().String()} }))}, accepted},
		"not listed":                        {inGCP, []func(*attestv1.Policy){platformRoot(ca, ours(func(r *attestv1.PlatformRoot) { r.MachineIds = []string{microsoft.ID().String()} }))}, unlisted},
		"below another root":                {inGCP, []func(*attestv1.Policy){platformRoot(other, ours(nil))}, badEK},
		"of another kind of key":            {inGCP, []func(*attestv1.Policy){platformRoot(ca, ours(func(r *attestv1.PlatformRoot) { r.Key = "rsa-2048" }))}, badEK},
		"of GCP, as if of Azure":            {inGCP, []func(*attestv1.Policy){platformRoot(ca, &attestv1.PlatformRoot{Provider: "azure", Key: "rsa-2048", MachineIds: []string{google.ID().String()}})}, badEK},
		"without a rule":                    {inGCP, []func(*attestv1.Policy){ekRoot}, badEK},
		"below a root for EKs, any machine": {inGCP, []func(*attestv1.Policy){ekRoot, func(p *attestv1.Policy) { p.Insecure = &attestv1.InsecureSwitches{AnyMachine: true} }}, badEK},
		"listed as without a certificate":   {inGCP, []func(*attestv1.Policy){platformRoot(ca, ours(func(r *attestv1.PlatformRoot) { r.Projects = []string{"theirs"} })), lists(google.ID())}, badEK},
		"revoked by its ID":                 {inGCP, []func(*attestv1.Policy){platformRoot(ca, ours(nil)), revoke(google.ID())}, badEK},
		"revoked by its platform key":       {inGCP, []func(*attestv1.Policy){platformRoot(ca, ours(nil)), revoke(inGCP.Chain()[0].Key)}, badEK},
		"whose authority is revoked":        {inGCP, []func(*attestv1.Policy){platformRoot(ca, ours(nil)), revoke(sha256.Sum256(ca.Root().RawSubjectPublicKeyInfo))}, badEK},
		"in the second of two certificates of one authority": {inGCP, []func(*attestv1.Policy){
			platformRoot(ca, ours(func(r *attestv1.PlatformRoot) { r.Projects = []string{"theirs"} })), platformRoot(ca.Renewed(t), ours(nil)),
		}, accepted},
		"of Azure, listed":     {inAzure, []func(*attestv1.Policy){platformRoot(ca, azureList)}, accepted},
		"of Azure, not listed": {inAzure, []func(*attestv1.Policy){platformRoot(ca, &attestv1.PlatformRoot{Provider: "azure", Key: "rsa-2048", MachineIds: []string{google.ID().String()}})}, unlisted},
		"of Azure, as if of GCP": {inAzure, []func(*attestv1.Policy){platformRoot(ca, ours(func(r *attestv1.PlatformRoot) {
			r.Key, r.Projects, r.MachineIds = "rsa-2048", nil, []string{microsoft.ID().String()}
		}))}, badEK},
	}, func(c appraised) []func(*attestv1.Policy) {
		if c.claims.Instance().Provider == "azure" {
			return []func(*attestv1.Policy){platformRoot(ca, azureList)}
		}
		return []func(*attestv1.Policy){platformRoot(ca, ours(nil))}
	})
	t.Run("the rule accepts no EK certificate", func(t *testing.T) {
		m := attesttest.NewMachine(t, ca, attesttest.Options{})
		p := attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{m}, platformRoot(ca, ours(nil)))
		if _, err := p.Appraise(claimsOf(t, m, ca), attest.Unlocked()); attest.ReasonOf(err) != badEK {
			t.Error(err)
		}
	})
}

// cloud makes options of machines of one cloud.
type cloud func(change func(*attesttest.Platform)) attesttest.Options

// certified changes what the platform key signs.
func (of cloud) certified(change func(a *gotpm.TPMSAttest, info *gotpm.TPMSCertifyInfo)) attesttest.Options {
	return of(func(p *attesttest.Platform) {
		p.Attest = func(a *gotpm.TPMSAttest) {
			info, err := a.Attested.Certify()
			if err != nil {
				panic(err)
			}
			change(a, info)
			if a.Type == gotpm.TPMSTAttestCertify {
				a.Attested = gotpm.NewTPMUAttest(gotpm.TPMSTAttestCertify, info)
			}
		}
	})
}

func (of cloud) certificate(change func(*x509.Certificate)) attesttest.Options {
	return of(func(p *attesttest.Platform) { p.Certificate = change })
}

func (of cloud) evidence(change func(*attestv1.Tpm2Evidence)) attesttest.Options {
	o := of(nil)
	o.Tamper = evidence(change)
	return o
}

// verdict is the reason with which the evidence of a machine is refused, or ACCEPTED.
type verdict struct {
	opts attesttest.Options
	want attestv1.Reason
}

func (v verdict) reason() attestv1.Reason { return v.want }

// attestOf returns the evidence of a machine for a session.
func attestOf(t testing.TB, m *attesttest.Machine, b attest.Binding) *attestv1.Tpm2Evidence {
	t.Helper()
	ev, err := m.Attester(attest.PurposeMachine).Attest(t.Context(), tpmFormat, b)
	if err != nil {
		t.Fatal(err)
	}
	return ev.GetTpm2()
}

// cases are the mistakes that machines of both clouds can make.
func (of cloud) cases(t testing.TB, ca *attesttest.CA, b attest.Binding) map[string]verdict {
	other := attesttest.NewMachine(t, ca, of(nil))
	theirs := attestOf(t, other, b)
	ek, err := attesttest.NewMachine(t, ca, attesttest.Options{}).EndorsementKey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	unknown := pkix.Extension{Id: asn1.ObjectIdentifier{1, 2, 3, 4}, Critical: true, Value: []byte{5, 0}}
	return map[string]verdict{
		"another session":     {of.certified(func(a *gotpm.TPMSAttest, _ *gotpm.TPMSCertifyInfo) { a.ExtraData.Buffer = make([]byte, 32) }), badBinding},
		"no session":          {of.certified(func(a *gotpm.TPMSAttest, _ *gotpm.TPMSCertifyInfo) { a.ExtraData.Buffer = nil }), badBinding},
		"a session cut short": {of.certified(func(a *gotpm.TPMSAttest, _ *gotpm.TPMSCertifyInfo) { a.ExtraData.Buffer = a.ExtraData.Buffer[:31] }), badBinding},
		"another magic":       {of.certified(func(a *gotpm.TPMSAttest, _ *gotpm.TPMSCertifyInfo) { a.Magic++ }), malformed},
		"another type": {of.certified(func(a *gotpm.TPMSAttest, _ *gotpm.TPMSCertifyInfo) {
			a.Type = gotpm.TPMSTAttestCreation
			a.Attested = creation()
		}), malformed},
		"a quote": {of.evidence(func(e *attestv1.Tpm2Evidence) {
			e.PlatformKey.Attest, e.PlatformKey.Signature = e.GetAttest(), e.GetSignature()
		}), badSig},
		"another key": {of.certified(func(_ *gotpm.TPMSAttest, i *gotpm.TPMSCertifyInfo) {
			i.Name.Buffer = append(bytes.Clone(i.Name.Buffer[:33]), 0)
		}), badAK},
		"no key":                     {of.certified(func(_ *gotpm.TPMSAttest, i *gotpm.TPMSCertifyInfo) { i.Name.Buffer = nil }), badAK},
		"a key of another hierarchy": {of.certified(func(_ *gotpm.TPMSAttest, i *gotpm.TPMSCertifyInfo) { i.QualifiedName.Buffer = i.Name.Buffer }), badAK},
		"another machine's, that of this session": {of.evidence(func(e *attestv1.Tpm2Evidence) { e.PlatformKey = theirs.GetPlatformKey() }), badAK},
		"another machine's certificate":           {of.evidence(func(e *attestv1.Tpm2Evidence) { e.PlatformKey.Certificates = theirs.GetPlatformKey().GetCertificates() }), badSig},
		"another machine's quote": {of.evidence(func(e *attestv1.Tpm2Evidence) {
			k := e.GetPlatformKey()
			proto.Reset(e)
			proto.Merge(e, theirs)
			e.PlatformKey = k
		}), badAK},
		"a changed signature":            {of(func(p *attesttest.Platform) { p.Signature = func(b []byte) []byte { b[len(b)-1] ^= 1; return b } }), badSig},
		"no signature":                   {of(func(p *attesttest.Platform) { p.Signature = func([]byte) []byte { return nil } }), malformed},
		"an empty message":               {of.evidence(func(e *attestv1.Tpm2Evidence) { e.PlatformKey = &attestv1.PlatformKey{} }), malformed},
		"signed bytes behind it":         {of(func(p *attesttest.Platform) { p.Message = func(b []byte) []byte { return append(b, 0) } }), malformed},
		"signed, cut short":              {of(func(p *attesttest.Platform) { p.Message = func(b []byte) []byte { return b[:len(b)-1] } }), malformed},
		"bytes behind it":                {of.evidence(func(e *attestv1.Tpm2Evidence) { e.PlatformKey.Attest = append(e.PlatformKey.Attest, 0) }), badSig},
		"an attest of more than 1 KiB":   {of.evidence(func(e *attestv1.Tpm2Evidence) { e.PlatformKey.Attest = make([]byte, 1025) }), malformed},
		"a signature of more than 1 KiB": {of.evidence(func(e *attestv1.Tpm2Evidence) { e.PlatformKey.Signature = make([]byte, 1025) }), malformed},
		"five certificates":              {of.evidence(func(e *attestv1.Tpm2Evidence) { e.PlatformKey.Certificates = make([][]byte, 5) }), malformed},
		"no certificate":                 {of.evidence(func(e *attestv1.Tpm2Evidence) { e.PlatformKey.Certificates[0] = []byte("x") }), malformed},
		"an EK certificate beside it":    {of.evidence(func(e *attestv1.Tpm2Evidence) { e.EkCertificates = ek.Certificates }), malformed},
		"a bare EK beside it":            {of.evidence(func(e *attestv1.Tpm2Evidence) { e.EkPublic = []byte{1} }), malformed},
		"an EK certificate in its place": {of.evidence(func(e *attestv1.Tpm2Evidence) { e.PlatformKey.Certificates = ek.Certificates }), badEK},
		"another root":                   {of(func(p *attesttest.Platform) { p.CA = attesttest.NewCA(t) }), badEK},
		"an expired certificate":         {of.certificate(func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }), badEK},
		"a certificate of tomorrow":      {of.certificate(func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Hour) }), badEK},
		"an unknown critical extension":  {of.certificate(func(c *x509.Certificate) { c.ExtraExtensions = append(c.ExtraExtensions, unknown) }), badEK},
		"a critical name of the TPM": {of.certificate(func(c *x509.Certificate) {
			c.ExtraExtensions = append(c.ExtraExtensions, pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Critical: true, Value: attesttest.TPMName("id:474F4F47", "vTPM", "id:20160511")})
		}), attestv1.Reason_REASON_ACCEPTED},
		"another critical name": {of.certificate(func(c *x509.Certificate) {
			c.ExtraExtensions = append(c.ExtraExtensions, pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Critical: true, Value: attesttest.TPMName("", "vTPM", "id:20160511")})
		}), badEK},
		"an issuer for TLS servers only": {of(func(p *attesttest.Platform) {
			p.CA = ca.Intermediate(t, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} })
		}), badEK},
		"an issuer for attestation keys": {of(func(p *attesttest.Platform) {
			p.CA = ca.Intermediate(t, func(c *x509.Certificate) { c.UnknownExtKeyUsage = []asn1.ObjectIdentifier{{2, 23, 133, 8, 3}} })
		}), attestv1.Reason_REASON_ACCEPTED},
	}
}

func TestPlatformKeysThatAreRefused(t *testing.T) {
	ca := attesttest.NewCA(t)
	b := attest.Binding{1}
	for name, of := range map[string]cloud{"GCP": gcp, "Azure": azure} {
		cases := of.cases(t, ca, b)
		if name == "GCP" {
			cases["an OID with the right prefix"] = verdict{of.certificate(func(c *x509.Certificate) {
				c.ExtraExtensions[0].Id = append(append(asn1.ObjectIdentifier{}, attesttest.OIDGCEInstance...), 1)
			}), badEK}
		} else {
			cases["a name of another domain"] = verdict{of.certificate(func(c *x509.Certificate) { c.Subject.CommonName += ".example" }), badEK}
			cases["an extended key usage with the right prefix"] = verdict{of.certificate(func(c *x509.Certificate) {
				c.UnknownExtKeyUsage = []asn1.ObjectIdentifier{{2, 23, 133, 8, 3, 1}}
			}), badEK}
		}
		refusedAs(t, name+" platform key", ca, b, cases, of(nil), capturedPlatformKeys(name)...)
	}
	other := attesttest.NewMachine(t, ca, gcp(nil))
	theirs := attestOf(t, other, b)
	t.Run("evidence of an old session", func(t *testing.T) {
		old := &attestv1.Evidence{Format: tpmFormat, Body: &attestv1.Evidence_Tpm2{Tpm2: theirs}}
		fresh := attest.Binding{2}
		v := attesttest.Verifier(t, ca)
		if _, err := v.Verify(t.Context(), old, attest.NewStatement(attest.PurposeMachine, fresh), fresh); attest.ReasonOf(err) != badBinding {
			t.Error(err)
		}
		// The quote is new, and the platform key's part is old.
		mixed := attestOf(t, other, fresh)
		mixed.PlatformKey = theirs.GetPlatformKey()
		ev := &attestv1.Evidence{Format: tpmFormat, Body: &attestv1.Evidence_Tpm2{Tpm2: mixed}}
		if _, err := v.Verify(t.Context(), ev, attest.NewStatement(attest.PurposeMachine, fresh), fresh); attest.ReasonOf(err) != badBinding {
			t.Error(err)
		}
	})
	t.Run("statements that share a quote", func(t *testing.T) {
		bindings := []attest.Binding{{3}, {4}, {5}}
		a := other.Attester(attest.PurposeMachine).(interface {
			AttestAll(ctx context.Context, f attestv1.Format, b []attest.Binding) ([]*attestv1.Evidence, error)
		})
		all, err := a.AttestAll(t.Context(), tpmFormat, bindings)
		if err != nil {
			t.Fatal(err)
		}
		for i, ev := range all {
			if _, err := attesttest.Verifier(t, ca).Verify(t.Context(), ev, attest.NewStatement(attest.PurposeMachine, bindings[i]), bindings[i]); err != nil {
				t.Error(err)
			}
		}
	})
}

// creation is another structure that a TPM signs.
func creation() gotpm.TPMUAttest {
	return gotpm.NewTPMUAttest(gotpm.TPMSTAttestCreation, &gotpm.TPMSCreationInfo{})
}

// FuzzPlatformKey passes arbitrary certify structures to the verifier.
func FuzzPlatformKey(f *testing.F) {
	ca := attesttest.NewCA(f)
	m := attesttest.NewMachine(f, ca, gcp(nil))
	b := attest.Binding{1}
	ev, err := m.Attester(attest.PurposeMachine).Attest(f.Context(), tpmFormat, b)
	if err != nil {
		f.Fatal(err)
	}
	good := proto.CloneOf(ev.GetTpm2()).GetPlatformKey()
	f.Add(good.GetCertificates()[0], good.GetAttest(), good.GetSignature())
	f.Fuzz(func(t *testing.T, certificate, attested, signature []byte) {
		ev.GetTpm2().PlatformKey = &attestv1.PlatformKey{Certificates: [][]byte{certificate}, Attest: attested, Signature: signature}
		_, err := attesttest.Verifier(t, ca).Verify(t.Context(), ev, attest.NewStatement(attest.PurposeMachine, b), b)
		if err == nil && !bytes.Equal(attested, good.GetAttest()) {
			t.Fatal("accepted")
		}
		if err != nil && !refusals[attest.ReasonOf(err)] {
			t.Fatal(err)
		}
	})
}

// refusedAs judges the evidence of machines; those that are refused are rows of a platform in the table, and right is accepted.
func refusedAs(t *testing.T, platform string, ca *attesttest.CA, b attest.Binding, cases map[string]verdict, right attesttest.Options, more ...hardwaretest.Vector) {
	t.Helper()
	judge := func(t testing.TB, v verdict) error {
		ev := &attestv1.Evidence{Format: tpmFormat, Body: &attestv1.Evidence_Tpm2{Tpm2: attestOf(t, attesttest.NewMachine(t, ca, v.opts), b)}}
		p, err := attesttest.Verifier(t, ca).Verify(t.Context(), ev, attest.NewStatement(attest.PurposeMachine, b), b)
		if err == nil && p.Challenge() != nil && !v.opts.Bare {
			t.Error("a challenge, although nothing is left to prove")
		}
		return err
	}
	for name, v := range cases {
		if v.want == attestv1.Reason_REASON_ACCEPTED {
			t.Run(name, func(t *testing.T) {
				if err := judge(t, v); err != nil {
					t.Error(err)
				}
			})
		}
	}
	hardwaretest.Refused(t, platform, append(vectors(cases, verdict.reason, judge, func(verdict) verdict { return verdict{opts: right} }), more...))
}

// vectors returns the cases that are refused in the order of their names. right returns the accepted one of a case.
func vectors[C any](cases map[string]C, want func(C) attestv1.Reason, judge func(testing.TB, C) error, right func(C) C) (all []hardwaretest.Vector) {
	for _, name := range slices.Sorted(maps.Keys(cases)) {
		if reason := want(cases[name]); reason != attestv1.Reason_REASON_ACCEPTED {
			all = append(all, hardwaretest.Vector{
				Name: name, Want: reason,
				Wrong: func(t testing.TB) error { return judge(t, cases[name]) },
				Right: func(t testing.TB) error { return judge(t, right(cases[name])) },
			})
		}
	}
	return all
}

// appraised is what a policy with a change says about claims.
type appraised struct {
	claims attest.Claims
	change []func(*attestv1.Policy)
	want   attestv1.Reason
}

// appraisedAs appraises claims; those that are refused are rows of a platform in the table. right returns the change with which the claims of
// a case are accepted.
func appraisedAs(t *testing.T, platform string, ca *attesttest.CA, m *attesttest.Machine, cases map[string]appraised, right func(appraised) []func(*attestv1.Policy)) {
	t.Helper()
	judge := func(t testing.TB, c appraised) error {
		_, err := attesttest.ParsedPolicy(t, ca, []*attesttest.Machine{m}, c.change...).Appraise(c.claims, attest.Unlocked())
		return err
	}
	for name, c := range cases {
		if c.want == attestv1.Reason_REASON_ACCEPTED {
			t.Run(name, func(t *testing.T) {
				if err := judge(t, c); err != nil {
					t.Error(err)
				}
			})
		}
	}
	hardwaretest.Refused(t, platform, vectors(cases, func(c appraised) attestv1.Reason { return c.want }, judge, func(c appraised) appraised {
		return appraised{claims: c.claims, change: right(c)}
	}))
}
