package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/muster-k8s/muster/cmd/muster/owner/appraisal"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestOnlyALabelMayBeANode(t *testing.T) {
	for text, want := range map[string]bool{
		"w1": true, "node-12": true, "192.0.2.11": false, "192.0.2.11:9000": false, "[2001:db8::1]:9000": false, "2001:db8::1": false, "w1:9000": false, "w1.example.com": false, "": false, "W1": false,
	} {
		if mayBeNode(text) != want {
			t.Errorf("%q: %v", text, !want)
		}
	}
}

// What the cluster says is never mistaken for what this program has verified.
func TestTheClustersRecordIsMarkedAsSuch(t *testing.T) {
	at := time.Now()
	refusal := attest.Refuse(attestv1.Reason_REASON_OWNER_SIGNATURE, "no owner")
	for name, tt := range map[string]struct {
		report appraisal.Report
		has    []string
		lacks  string
	}{
		"a record": {appraisal.Report{Node: "w1", Disk: "3f1c", Err: refusal, Record: &appraisal.Record{Machine: "abc", Reason: "ACCEPTED", Time: &at, PolicySerial: 7}},
			[]string{"The cluster's record of w1, which is unverified", "abc", "State disk     3f1c (the cluster's record: unverified)\n", "ACCEPTED, by the policy of serial 7", "Not verified."}, "Accepted"},
		"a record of a refusal": {appraisal.Report{Node: "w1", Err: refusal, Record: &appraisal.Record{Machine: "abc", Reason: "POLICY_REFUSED", Message: "POLICY_REFUSED: PCR 11", Time: &at, PolicySerial: 7}},
			[]string{"Verdict        POLICY_REFUSED: PCR 11, at", "Not verified."}, "serial 7"},
		"a record without a verdict": {appraisal.Report{Node: "w1", Err: refusal, Record: &appraisal.Record{Machine: "abc", Reason: "NONE"}}, []string{"it has not attested yet", "Not verified."}, "ACCEPTED"},
		"a refusal":                  {appraisal.Report{Node: "w1", Err: refusal}, []string{"Refused."}, "The cluster's record of"},
		"an accepted node":           {appraisal.Report{Node: "w1", Disk: "3f1c", Accepted: true, Machine: "abc", PolicySerial: 3}, []string{"Accepted by the policy of serial 3.", "State disk     3f1c (the cluster's record: unverified)\n"}, "The cluster's record of"},
	} {
		var out bytes.Buffer
		err := (&app{stdout: &out, stderr: io.Discard, output: outputPlain}).show(&tt.report, false)
		if !errors.Is(err, tt.report.Err) || strings.Contains(out.String(), tt.lacks) {
			t.Errorf("%s: %v\n%s", name, err, &out)
		}
		for _, text := range tt.has {
			if !strings.Contains(out.String(), text) {
				t.Errorf("%s: %q is missing\n%s", name, text, &out)
			}
		}
		out.Reset()
		if err := (&app{stdout: &out, stderr: io.Discard, output: outputJSON}).show(&tt.report, false); !errors.Is(err, tt.report.Err) {
			t.Errorf("%s: %v", name, err)
		}
		var got map[string]any
		if err := json.Unmarshal(out.Bytes(), &got); err != nil || (got["clusterRecord"] != nil) != (tt.report.Record != nil) || got["accepted"] != tt.report.Accepted {
			t.Errorf("%s: %v\n%s", name, err, &out)
		}
	}
	if code := exitCode(refusal); code != exitRefused {
		t.Errorf("a node that refuses exits with %d", code)
	}
}

// Without a cluster each name is an address.
func TestANameWithoutAClusterIsAnAddress(t *testing.T) {
	a := &app{stdout: io.Discard, stderr: io.Discard}
	t.Chdir(t.TempDir())
	if s, err := a.verifyNode(t.Context(), "w1", "", time.Second); s != nil || err != nil {
		t.Errorf("%+v, %v", s, err)
	}
	a.directory = filepath.Join(t.TempDir(), "none") // whoever names a folder means it
	if s, err := a.verifyNode(t.Context(), "w1", "", time.Second); s != nil || err == nil {
		t.Errorf("%+v, %v", s, err)
	}
}
