package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
	"github.com/muster-k8s/muster/cmd/muster/owner/policies"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/kubetest"
	"github.com/muster-k8s/muster/internal/membertest"
	"github.com/muster-k8s/muster/internal/policyfile"
)

// june is a time at which Intel's captured data are valid.
var june = time.Date(2025, 6, 20, 0, 0, 0, 0, time.UTC)

const tdxRules = "hardware:\n  tdx: {statuses: [UpToDate], modules: [{major: 1, svn: 5}], anyMrtd: true}\n"

// testPolicy is a policy that ends with the text more.
func testPolicy(t *testing.T, more string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "internal", "policyfile", "testdata", "policy.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return append(text, more...)
}

// collateralFile is what muster collateral fetch would have written in June 2025.
func collateralFile(t *testing.T) string {
	t.Helper()
	file := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join("..", "..", "trust", "attest", "hardware", "testdata", "tdx", "v4-uptodate-2025", name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	var all map[string]string
	if err := json.Unmarshal(file("collateral.json"), &all); err != nil {
		t.Fatal(err)
	}
	list := func(name string) []byte {
		b, err := hex.DecodeString(all[name])
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	signed := func(name, as string) []byte {
		return []byte(`{"` + as + `":` + all[name] + `,"signature":"` + all[name+"_signature"] + `"}`)
	}
	text, err := protojson.Marshal(&attestv1.Collateral{
		TcbInfos: [][]byte{signed("tcb_info", "tcbInfo")}, TcbInfoChain: []byte(all["tcb_info_issuer_chain"]),
		QeIdentity: signed("qe_identity", "enclaveIdentity"), QeIdentityChain: []byte(all["qe_identity_issuer_chain"]),
		IntelCrls: [][]byte{list("root_ca_crl"), list("pck_crl"), file("pck_crl_processor.der")},
	})
	if err != nil {
		t.Fatal(err)
	}
	return save(t, filepath.Join(t.TempDir(), "collateral.json"), text)
}

// accepts writes what joinservice writes when it has put the newest policy in force, once that has the serial. The command that
// applies the policy may end before only by an error.
func accepts(t *testing.T, api *kubetest.Cluster, serial int64, command <-chan error) {
	t.Helper()
	membertest.Eventually(t, func() error {
		select {
		case err := <-command:
			t.Fatalf("the command has ended: %v", err)
		default:
		}
		p := &v1alpha1.AttestationPolicy{}
		if err := api.Client.Get(t.Context(), types.NamespacedName{Name: v1alpha1.PolicyName}, p); err != nil {
			return err
		}
		if !strings.Contains(p.Spec.Policy, fmt.Sprintf(`"serial":%d`, serial)) {
			return fmt.Errorf("the cluster's policy is %s", p.Spec.Policy)
		}
		p.Status = v1alpha1.AttestationPolicyStatus{Accepted: true, ObservedGeneration: p.Generation, Generation: p.Generation, Serial: serial}
		return api.Client.Status().Update(t.Context(), p)
	})
}

// Collateral that has ended is replaced by a new policy, which the folder then has as well.
func TestCollateralIsPutInForce(t *testing.T) {
	api, file, path := cluster(t), collateralFile(t), filepath.Join(t.TempDir(), "muster-prod")
	if err := ownersFolder(path, api, testPolicy(t, tdxRules)); err != nil {
		t.Fatal(err)
	}
	policy := func() string {
		b, err := os.ReadFile(filepath.Join(path, ownerdir.PolicyFile))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	dir, err := ownerdir.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	kube, err := access.Connect(dir)
	if err != nil {
		t.Fatal(err)
	}
	_, signed, err := policies.SignedPolicy(dir)
	if err == nil {
		err = ownertest.PutPolicy(t.Context(), kube, signed)
	}
	if err != nil {
		t.Fatal(err)
	}
	accepts(t, api, 1, nil)

	// Another muster works with the folder: that does not stop what changes nothing.
	var out strings.Builder
	a := &app{stdout: &out, stderr: io.Discard, directory: path}
	if err := a.applyCollateral(t.Context(), file, applyCollateral{dry: true}, june); err != nil || !strings.Contains(out.String(), "collateral") || policy() != string(testPolicy(t, tdxRules)) {
		t.Errorf("--dry-run: %v\n%s", err, out.String())
	}
	if err := a.applyCollateral(t.Context(), file, applyCollateral{wait: time.Minute, timeout: time.Minute}, june); err == nil || !strings.Contains(err.Error(), "is in use by ") {
		t.Errorf("while another muster works with the folder: %v", err)
	}
	if err := dir.Close(); err != nil {
		t.Fatal(err)
	}

	out.Reset()
	done := make(chan error, 1)
	go func() {
		done <- a.applyCollateral(t.Context(), file, applyCollateral{wait: time.Minute, timeout: time.Minute}, june)
	}()
	accepts(t, api, 2, done)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if got := out.String(); !strings.Contains(got, "The policy of serial 2 is in force") || !strings.Contains(got, "TCB info of b0c06f000000") {
		t.Errorf("%s", got)
	}
	if got := policy(); !strings.Contains(got, "tcbInfos") || !strings.Contains(got, "serial: 2") {
		t.Errorf("the folder's policy:\n%s", got)
	}
}

// A vendor has raised a TCB: the owner learns which running node falls below it while nothing refuses it yet. This test has the part of a
// joinservice, which appraises nodes by the candidate.
func TestARaisedTCBIsAnnouncedBeforeItRefuses(t *testing.T) {
	api, file, path := cluster(t), collateralFile(t), filepath.Join(t.TempDir(), "muster-prod")
	if err := ownersFolder(path, api, testPolicy(t, tdxRules)); err != nil {
		t.Fatal(err)
	}
	dir, err := ownerdir.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	kube, err := access.Connect(dir)
	if err != nil {
		t.Fatal(err)
	}
	_, signed, err := policies.SignedPolicy(dir)
	if err == nil {
		err = ownertest.PutPolicy(t.Context(), kube, signed)
	}
	if err != nil {
		t.Fatal(err)
	}
	accepts(t, api, 1, nil)
	n := &v1alpha1.AttestedNode{ObjectMeta: metav1.ObjectMeta{Name: "w1"}, Spec: v1alpha1.AttestedNodeSpec{MachineID: strings.Repeat("ab", 32), Role: v1alpha1.RoleWorker}}
	if err := api.Client.Create(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	n.Status.LastVerdict = &v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED", Time: metav1.Now()}
	n.Status.PCRs = map[string]string{}
	for _, v := range regexp.MustCompile(`index: (\d+), value: "([0-9a-f]+)"`).FindAllStringSubmatch(string(testPolicy(t, "")), -1) {
		n.Status.PCRs[v[1]] = v[2]
	}
	if err := api.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	inForce := func() *v1alpha1.AttestationPolicy {
		p := &v1alpha1.AttestationPolicy{}
		if err := api.Client.Get(t.Context(), types.NamespacedName{Name: v1alpha1.PolicyName}, p); err != nil {
			t.Fatal(err)
		}
		return p
	}
	if err := dir.Close(); err != nil { // muster collateral apply opens it
		t.Fatal(err)
	}
	low, fine := v1alpha1.Verdict{Reason: "HARDWARE_TCB", Message: "the platform's TCB is OutOfDate"}, v1alpha1.Verdict{Accepted: true, Reason: "ACCEPTED"}
	asked := applyCollateral{wait: time.Minute, timeout: time.Minute}
	for _, tt := range []struct {
		name    string
		f       applyCollateral
		verdict v1alpha1.Verdict
		code    int // of the exit; 0: none
	}{
		{"--dry-run, refused", applyCollateral{dry: true, wait: time.Minute}, low, exitFailed},
		{"--dry-run, accepted", applyCollateral{dry: true, wait: time.Minute}, fine, 0},
		{"refused", asked, low, exitRefused},
		{"accepted", asked, fine, 0},
	} {
		var out strings.Builder
		a := &app{stdout: &out, stderr: &out, directory: path}
		done := make(chan error, 1)
		go func() { done <- a.applyCollateral(t.Context(), file, tt.f, june) }()
		v := tt.verdict
		membertest.Eventually(t, func() error {
			select {
			case err := <-done:
				t.Fatalf("%s: the command has ended: %v\n%s", tt.name, err, out.String())
			default:
			}
			_, text, found := strings.Cut(inForce().Annotations[v1alpha1.PolicyCandidate], " ")
			if !found {
				return errors.New("no candidate")
			}
			if !strings.Contains(text, "tcbInfos") || !strings.Contains(text, `"serial":2`) {
				t.Fatalf("%s: the candidate is %s", tt.name, text)
			}
			if err := api.Client.Get(t.Context(), types.NamespacedName{Name: "w1"}, n); err != nil {
				return err
			}
			sum := sha256.Sum256([]byte(text))
			v.Time = metav1.Now()
			n.Status.Candidate = &v1alpha1.CandidateVerdict{Digest: hex.EncodeToString(sum[:]), Verdict: v}
			return api.Client.Status().Update(t.Context(), n)
		})
		applies := v.Accepted && !tt.f.dry
		if applies {
			accepts(t, api, 2, done)
		}
		err := <-done
		if (err == nil) != v.Accepted || err != nil && exitCode(err) != tt.code || !strings.Contains(out.String(), "w1") || strings.Contains(out.String(), "HARDWARE_TCB") == v.Accepted {
			t.Errorf("%s: %v\n%s", tt.name, err, out.String())
		}
		if p := inForce(); strings.Contains(p.Spec.Policy, "tcbInfos") != applies || p.Annotations[v1alpha1.PolicyCandidate] != "" {
			t.Errorf("%s: in force is %+v", tt.name, p)
		}
		if had, err := os.ReadFile(filepath.Join(path, ownerdir.PolicyFile)); err != nil || (string(had) == string(testPolicy(t, tdxRules))) == applies {
			t.Errorf("%s: the folder's policy is %s, %v", tt.name, had, err)
		}
		n.Status.Candidate = nil // an answer about the same candidate would be taken
		if err := api.Client.Status().Update(t.Context(), n); err != nil {
			t.Fatal(err)
		}
	}
	// The node does not attest any more.
	a := &app{stdout: io.Discard, stderr: io.Discard, directory: path}
	silent := applyCollateral{wait: 100 * time.Millisecond, timeout: time.Minute}
	if err := a.applyCollateral(t.Context(), file, silent, june); exitCode(err) != exitRefused || !strings.Contains(err.Error(), "w1: unknown") || strings.Contains(inForce().Spec.Policy, `"serial":3`) {
		t.Errorf("of a node that does not attest: %v", err)
	}
	silent.expel = true
	done := make(chan error, 1)
	go func() { done <- a.applyCollateral(t.Context(), file, silent, june) }()
	accepts(t, api, 3, done)
	if err := <-done; err != nil {
		t.Errorf("--expel: %v", err)
	}
	// A node that is refused already keeps no new data from the others.
	n.Status.LastVerdict = &v1alpha1.Verdict{Reason: "HARDWARE_COLLATERAL", Time: metav1.Now()}
	if err := api.Client.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	silent.expel = false
	go func() { done <- a.applyCollateral(t.Context(), file, silent, june) }()
	accepts(t, api, 4, done)
	if err := <-done; err != nil {
		t.Errorf("if the policy in force refuses it: %v", err)
	}
}

// A policy from a repository may have the collateral of last month: muster policy apply and diff say so.
func TestAPolicyWithOlderCollateralIsNamed(t *testing.T) {
	text, err := os.ReadFile(collateralFile(t))
	if err != nil {
		t.Fatal(err)
	}
	c := &attestv1.Collateral{}
	if err := protojson.Unmarshal(text, c); err != nil {
		t.Fatal(err)
	}
	policy := func(serial uint64) []byte {
		out, err := policyfile.SetCollateral(testPolicy(t, tdxRules), serial, c)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	folder, path := t.TempDir(), filepath.Join(t.TempDir(), "muster-prod")
	if err := ownersFolder(path, &kubetest.Cluster{Kubeconfig: save(t, filepath.Join(folder, "kubeconfig"), nil)}, policy(2)); err != nil {
		t.Fatal(err)
	}
	dir, err := ownerdir.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = dir.Close() }()
	same := save(t, filepath.Join(folder, "same.yaml"), policy(3))
	c.TcbInfos[0] = bytes.Replace(c.GetTcbInfos()[0], []byte(`"tcbEvaluationDataNumber":17`), []byte(`"tcbEvaluationDataNumber":16`), 1)
	older := save(t, filepath.Join(folder, "older.yaml"), policy(3))
	for file, want := range map[string]bool{same: false, older: true} {
		var log strings.Builder
		a := &app{stdout: io.Discard, stderr: &log}
		if _, err := a.nextPolicy(dir, file); err != nil || strings.Contains(log.String(), "Warning: the collateral of "+file) != want || strings.Contains(log.String(), "evaluation 16") != want {
			t.Errorf("%s: %v, %s", file, err, log.String())
		}
	}
}

// The policy for muster init has collateral before there is a folder, and maybe before it has classes. Otherwise the first machine,
// which gets the cluster's secrets, could not be accepted by its hardware report.
func TestTheFirstPolicyGetsCollateral(t *testing.T) {
	whole := testPolicy(t, tdxRules)
	before, classes, _ := strings.Cut(string(whole), "  classes:\n")
	_, after, found := strings.Cut(classes, "# Switches")
	if !found {
		t.Fatalf("the policy is another:\n%s", whole)
	}
	path := save(t, filepath.Join(t.TempDir(), "policy.yaml"), []byte(before+"# Switches"+after))
	var out, log strings.Builder
	a := &app{stdout: &out, stderr: &log}
	if err := a.applyCollateral(t.Context(), collateralFile(t), applyCollateral{policy: path}, june); err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`(?m)^revocation list of Intel SGX Root CA +- +20\d\d-.*\n(?s:.*)^TCB info of b0c06f000000 +17 +2025-07-19 10:16:03$`).MatchString(out.String()) {
		t.Errorf("ends and evaluations:\n%s", out.String())
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if p, err := policyfile.ParseForClass(got); err != nil || p.Serial() != 2 || len(p.CollateralEnds()) != 5 || !strings.Contains(log.String(), "serial is now 2") {
		t.Errorf("%v, %s\n%s", err, log.String(), got)
	}
	out.Reset()
	a.output = outputJSON
	if err := a.applyCollateral(t.Context(), collateralFile(t), applyCollateral{policy: path}, june); err != nil || !strings.Contains(out.String(), `"TCB info of b0c06f000000": 17`) {
		t.Errorf("%v\n%s", err, out.String())
	}
	a.output = outputPlain
	// One that lacks what the rules need is refused, and the file stays.
	save(t, path, testPolicy(t, tdxRules+"  sevSnp: {minTcb: [{product: Milan, bootLoader: 0, tee: 0, snp: 0, microcode: 0}], keys: [vcek], anyChip: true, anyMeasurement: true}\n"))
	had, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.applyCollateral(t.Context(), collateralFile(t), applyCollateral{policy: path}, june); err == nil || !strings.Contains(err.Error(), "no revocation list of AMD") {
		t.Errorf("%v", err)
	}
	if after, err := os.ReadFile(path); err != nil || string(after) != string(had) {
		t.Errorf("it was written: %v", err)
	}
}
