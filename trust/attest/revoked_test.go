package attest

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/checked"
)

func revoke(key string) func(*attestv1.Policy) {
	return func(p *attestv1.Policy) { p.Tpm2.Revoked = &attestv1.Revoked{Keys: []string{key}} }
}

func revokeSerial(issuer, serial string) func(*attestv1.Policy) {
	return func(p *attestv1.Policy) {
		p.Tpm2.Revoked = &attestv1.Revoked{Certificates: []*attestv1.RevokedCertificate{{IssuerKey: issuer, Serial: serial}}}
	}
}

func TestRulesForTPMsAreParsed(t *testing.T) {
	_, pemRoot := ca(t, "operator")
	for name, tt := range map[string]struct {
		change func(*attestv1.Policy)
		want   string // part of the error; empty: accepted
	}{
		"a least firmware version is read":              {change: func(p *attestv1.Policy) { p.Tpm2.EkRoots[0].MinFirmwareVersion = "0x0007005500110500" }},
		"a firmware version of another form is refused": {func(p *attestv1.Policy) { p.Tpm2.EkRoots[0].MinFirmwareVersion = "7.85" }, "ekRoots[0].minFirmwareVersion"},
		"a root twice, with another firmware version, is refused": {func(p *attestv1.Policy) {
			p.Tpm2.EkRoots = append(p.Tpm2.EkRoots, &attestv1.EkRoot{Pem: pemRoot, Operator: true, Key: "ecc-p256", MinFirmwareVersion: "0x0007005500110500"})
		}, "another minFirmwareVersion"},
		"revoked keys and certificates are read": {change: func(p *attestv1.Policy) {
			p.Tpm2.Revoked = &attestv1.Revoked{Keys: []string{strings.Repeat("ab", 32)}, Certificates: []*attestv1.RevokedCertificate{{IssuerKey: strings.Repeat("ab", 32), Serial: "1f"}}}
		}},
		"a revoked key in capitals is refused": {func(p *attestv1.Policy) {
			p.Tpm2.Revoked = &attestv1.Revoked{Keys: []string{strings.Repeat("AB", 32)}}
		}, "revoked.keys[0]"},
		"a revoked key twice is refused": {func(p *attestv1.Policy) {
			p.Tpm2.Revoked = &attestv1.Revoked{Keys: slices.Repeat([]string{strings.Repeat("ab", 32)}, 2)}
		}, "twice"},
		"more revoked keys than allowed are refused": {func(p *attestv1.Policy) {
			p.Tpm2.Revoked = &attestv1.Revoked{Keys: make([]string, MaxRevoked), Certificates: make([]*attestv1.RevokedCertificate, 1)}
		}, "more than 1024"},
		"a revoked machine that is listed is refused": {func(p *attestv1.Policy) {
			p.Tpm2.MachineIds = []string{MachineIDOf([]byte("ek")).String()}
			p.Tpm2.Revoked = &attestv1.Revoked{Keys: p.Tpm2.MachineIds}
		}, "tpm2.machineIds lists it"},
		"a revoked machine that is a control plane is refused": {func(p *attestv1.Policy) {
			p.ControlPlanes = []string{MachineIDOf([]byte("ek")).String()}
			p.Tpm2.Revoked = &attestv1.Revoked{Keys: p.ControlPlanes}
		}, "controlPlanes lists it"},
		"a revoked certificate without its issuer is refused": {func(p *attestv1.Policy) {
			p.Tpm2.Revoked = &attestv1.Revoked{Certificates: []*attestv1.RevokedCertificate{{Serial: "1f"}}}
		}, "certificates[0].issuerKey"},
		"a revoked certificate with leading zeros is refused": {func(p *attestv1.Policy) {
			p.Tpm2.Revoked = &attestv1.Revoked{Certificates: []*attestv1.RevokedCertificate{{IssuerKey: strings.Repeat("ab", 32), Serial: "01f"}}}
		}, "certificates[0].serial"},
		"a revoked certificate without a serial number is refused": {func(p *attestv1.Policy) {
			p.Tpm2.Revoked = &attestv1.Revoked{Certificates: []*attestv1.RevokedCertificate{{IssuerKey: strings.Repeat("ab", 32)}}}
		}, "certificates[0].serial"},
		"a revoked certificate twice is refused": {func(p *attestv1.Policy) {
			p.Tpm2.Revoked = &attestv1.Revoked{Certificates: slices.Repeat([]*attestv1.RevokedCertificate{{IssuerKey: strings.Repeat("ab", 32), Serial: "1f"}}, 2)}
		}, "twice"},
	} {
		t.Run(name, func(t *testing.T) {
			p := goodPolicy(pemRoot)
			tt.change(p)
			_, err := ParsePolicy(encode(t, p))
			switch {
			case tt.want == "" && err != nil:
				t.Fatal(err)
			case tt.want == "":
			case err == nil || !strings.Contains(err.Error(), tt.want):
				t.Errorf("error %v, want one with %q", err, tt.want)
			case ReasonOf(err) != attestv1.Reason_REASON_POLICY_INVALID:
				t.Errorf("reason %s", ReasonOf(err))
			}
		})
	}
}

// Invariant A8.
func TestRevokedKeysAndOldTPMsAreRefused(t *testing.T) {
	root, pemRoot := ca(t, "operator")
	_, otherRoot := ca(t, "another operator's")
	for name, tt := range map[string]struct {
		policy func(*attestv1.Policy)
		facts  func(*checked.Facts)
		want   attestv1.Reason // unset: accepted
	}{
		"the least firmware of a TPM is accepted": {
			policy: func(p *attestv1.Policy) { p.Tpm2.EkRoots[0].MinFirmwareVersion = "0x0007005500110500" },
		},
		"older firmware of a TPM is refused": {
			policy: func(p *attestv1.Policy) { p.Tpm2.EkRoots[0].MinFirmwareVersion = "0x0007005500110501" },
			want:   attestv1.Reason_REASON_POLICY_REFUSED,
		},
		"older firmware is refused whatever another root says": {
			policy: func(p *attestv1.Policy) {
				p.Tpm2.EkRoots[0].MinFirmwareVersion = "0x0008000000000000"
				p.Tpm2.EkRoots = append([]*attestv1.EkRoot{{Pem: otherRoot, Operator: true, Key: "ecc-p256"}}, p.Tpm2.EkRoots...)
			}, want: attestv1.Reason_REASON_POLICY_REFUSED,
		},
		"a revoked machine is refused": {policy: revoke(MachineIDOf([]byte("ek")).String()), want: attestv1.Reason_REASON_EK_UNTRUSTED},
		"a machine whose ID is not its key's is refused by its ID": {
			policy: revoke(strings.Repeat("0d", 32)),
			facts:  func(f *checked.Facts) { f.Machine = [32]byte(bytes.Repeat([]byte{0x0d}, 32)) }, want: attestv1.Reason_REASON_EK_UNTRUSTED,
		},
		"a machine of a revoked authority is refused":    {policy: revoke("02" + strings.Repeat("00", 31)), want: attestv1.Reason_REASON_EK_UNTRUSTED},
		"a machine of a revoked root is refused":         {policy: revoke("03" + strings.Repeat("00", 31)), want: attestv1.Reason_REASON_EK_UNTRUSTED},
		"a machine is accepted while others are revoked": {policy: revoke(strings.Repeat("00", 32))},
		"a revoked EK certificate is refused": {
			policy: revokeSerial("02"+strings.Repeat("00", 31), "1f"), want: attestv1.Reason_REASON_EK_UNTRUSTED,
		},
		"a revoked certificate of an authority is refused": {
			policy: revokeSerial("03"+strings.Repeat("00", 31), "2f"), want: attestv1.Reason_REASON_EK_UNTRUSTED,
		},
		"a serial number of another issuer revokes no key": {policy: revokeSerial("03"+strings.Repeat("00", 31), "1f")},
		"a chain that is not known is refused":             {facts: func(f *checked.Facts) { f.Chain = nil }, want: attestv1.Reason_REASON_EK_UNTRUSTED},
	} {
		t.Run(name, func(t *testing.T) {
			p, f := goodPolicy(pemRoot), facts(root)
			if tt.policy != nil {
				tt.policy(p)
			}
			if tt.facts != nil {
				tt.facts(f)
			}
			policy, err := ParsePolicy(encode(t, p))
			if err != nil {
				t.Fatal(err)
			}
			want := tt.want
			if want == 0 {
				want = attestv1.Reason_REASON_ACCEPTED
			}
			_, err = policy.For(Unlocked()).Appraise(t.Context(), claimsOf(f))
			if ReasonOf(err) != want {
				t.Errorf("%v, want %s", err, want)
			}
		})
	}
}
