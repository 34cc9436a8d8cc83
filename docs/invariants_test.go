package docs_test

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// invariants lists, for each invariant of docs/threat-model.md, folders with code that keeps it, and some of its tests.
// The others: git grep -nw A1. B7 is also tried by rolledBack in e2e/runbook, with three control planes and etcd.
const invariants = `
A1: trust/atls trust/attest/tpm2 internal/ownerorder cmd/muster/owner
    TestRelayWithTheServersPrivateKey TestReflection
A2: trust/attest trust/internal/checked trust/attest/tpm2
    TestEvidenceThatIsRefused TestAnyChangedBootPCRIsRefused
A3: trust/attest trust/atls internal/rpc
    TestNothingIsConfiguredToCheckNothing TestNothingConfiguredMeansNothingAccepted
A4: trust/atls
    TestResumption TestAResumedSessionIsRefused
A5: trust/attest trust/attest/tpm2 trust/tpm services/bootstrapper/attester cmd/bootstrapper
    TestEvidenceOfAnotherPurpose TestRelayThroughGetEvidence
A6: trust/internal/endorsement
    TestAMachineWithoutACertificateIsAcceptedOnlyIfListed TestParsePolicy
A7: trust/attest services/bootstrapper/discovery internal/service/policy services/kms services/joinservice cmd/muster/owner
    TestAWorkerPosesAsAJoinservice TestAnEditIsNotPutInForceThroughAForeignPolicy
A8: trust/internal/endorsement trust/attest trust/tpm internal/service/clusterview services/joinservice cmd/muster/owner/doctor
    TestOneTPMIsEnrolledOnce TestABannedTPMComesBackAsNoOtherMachine
A9: trust/attest trust/attest/tpm2/eventlog
    TestRealEventLogs TestEveryPCRIsNeeded
A10: trust/internal/hwreport trust/attest trust/attest/tpm2
    TestEvidenceWithHardwareReportsThatIsRefused TestRulesThatAreRefused
J1: trust/attest internal/rpc services/joinservice
    TestEveryRPCFromEveryLevel TestHeadersDoNotRaiseALevel
J2: services/joinservice services/bootstrapper/statecheck cmd/muster/owner/clusterapi deploy/charts/muster
    TestRefusedRequests TestAStolenDiskStaysClosed
J3: internal/audit services/joinservice services/kms
    TestWithoutAnAuditRecordNothingIsIssued TestOnAFullDiskNoTicketLeavesWithoutItsRecord
J4: services/joinservice api/v1alpha1 deploy/charts/muster
    TestACertificateOfBeforeDoesNotWriteAsTheNextMachine TestATicketThatMeetsABanIsNotIssued TestOneWrongClockEndsNoRevocation
J5: services/joinservice services/bootstrapper/kubeadm deploy/charts/muster
    TestDemonstration TestATicketsTokenIsOfLittleUseAndGoneOnceTheNodeIsReady
J6: services/joinservice
    TestRefusedRequestsForARotatedKey TestAControlPlaneThatThePolicyDoesNotListGetsNothing
J7: services/joinservice services/bootstrapper/reattestation
    TestAKeyWithoutItsMachineRenewsNothing TestARenewalNeedsARecentVerdictUnderThePolicyInForce TestNoNodeKeepsAClientCertificateForLonger
J8: services/joinservice services/bootstrapper/joinclient
    TestControlPlanesJoinOneAfterAnother TestNothingIsResetWhileEtcdCannotBeAsked
J9: internal/ownerorder services/joinservice services/bootstrapper/renewal cmd/muster/owner
    TestOrdersThatAreNotTheOwnersOfNowAreRefused TestOnlyTheOwnersOrderForThisClusterAndNowCounts
J10: services/joinservice/sweeping services/bootstrapper/renewal deploy/charts/muster
    TestWhatIsTakenFromANodeIsWorthLittleOnceItIsBanned TestANodePutsNothingInTheWayOfItsEviction
J11: services/joinservice/enroll services/bootstrapper/bootsecret deploy/charts/muster
    TestABootIsComparedWithTheLastOne TestACopyGetsNoKeyWhileTheOriginalRuns TestAnOriginalWhoseCopyCameFirstIsReported
K1: trust/keys services/kms
    TestDerivationsEqualTheVectorsOfAnIndependentProgram TestOneDiskHasOneSpelling
K2: services/kms
    TestOnlyJoinservicesOfThisClusterGetASession TestWhoGetsNoKey
K3: trust/keys cmd/muster/owner services/bootstrapper deploy/charts/muster
    TestSecretsNeverPrint TestNothingPrintsASecret
K4: trust/keys services/kms services/joinservice api/v1alpha1 deploy/charts/muster cmd/muster/owner
    TestTheKeyOfAnErasedDiskGoesToNobody TestNoKeyLeavesForADiskThatIsErasedMeanwhile
K5: internal/backup services/bootstrapper cmd/muster/owner
    TestWhatTheManifestDoesNotSayIsRefused TestARestoreIsRefusedBeforeAnythingIsSent
B1: services/bootstrapper/nodelock services/bootstrapper/journal trust/tpm trust/attest
    TestACrashAroundTheExtensionIsResolved TestAForeignValueIsRefusedAndNotExtended
B2: services/bootstrapper/nodelock services/bootstrapper/joinclient
    TestOfInitAndJoinExactlyOneWins TestAnInitIsRefusedOnceAJoinHasTheLock
B3: services/bootstrapper
    TestAnInitThatDiesAnywhereEndsAsANode TestAJoinThatDiesAnywhereEndsAsANode
B4: services/bootstrapper/component
    TestAFolderThatIsALinkOutIsRefused TestAnEscapingArchiveHasNoEffect
B5: services/bootstrapper/disk deploy/vm
    TestHostileBinaryHeadersAreRefused TestAHostileSuperblockIsRefused
B6: deploy/vm services/bootstrapper/doctor
    TestTheCommandLineNamesTheRootOnce TestEachHarmOfAMachineIsFound
B7: services/bootstrapper/epoch services/bootstrapper/provision services/bootstrapper/renewal services/bootstrapper/rotation trust/tpm internal/ownerorder services/bootstrapper/discovery internal/service/policy cmd/muster/owner
    TestControlPlanesThatAreRestoredAreNotServed TestAnIndexThatCanBeSetIsNoCounter TestNoPolicyBelowTheLowestSerialOfTheImageIsAccepted
B8: services/joinservice services/bootstrapper/unlock services/bootstrapper/recovery internal/ownerorder services/bootstrapper/statecheck services/bootstrapper/imagestore services/bootstrapper/component services/bootstrapper/kubeadm
    TestWhatRootLeftOnTheStateDiskDoesNotRun TestWhatRootLeftInContainerdsStoreIsNotUsed
B9: internal/versions services/bootstrapper/provision services/bootstrapper/kubeadm
    TestAnInitWithoutDigestsIsRefused TestMovedTagsAtTheMirrorRunNothing
B10: services/bootstrapper/initserver internal/ownerorder
    TestOnlyTheOwnerOfTheImageBeginsACluster TestEachKeyOfTheImageSignsForTheOwner
B11: services/bootstrapper/orders internal/ownerorder
    TestAnOrderIsForOneMachineAndForSomeTime TestAnOrderFromTheFutureIsRefused TestAnActionsProgramRunsOnlyByOrder
S1: deploy/vm lab/internal/kube
    TestAMirrorThatSendsOtherBytesThanTheLockNamesIsRefused TestOtherProgramsThanTheLocksAreRefused
S2: internal/image internal/image/builder
    TestSignaturesThatAreRefused TestWhatIsMeasuredIsWhatTheBuilderSigned
R1: trust/attest internal/rpc internal/audit internal/service
    TestEveryReasonHasACode TestEveryReasonIsAskedForInAllPlaces
`

// TestInvariantsAreExplainedAndKept compares the numbers in the threat model with those in comments of the code and of
// the tests.
func TestInvariantsAreExplainedAndKept(t *testing.T) {
	var explained, listed []string
	for _, m := range regexp.MustCompile(`(?m)^\*\*([AJKBSR]\d+)\. `).FindAllStringSubmatch(read(t, "docs/threat-model.md"), -1) {
		explained = append(explained, m[1])
	}
	// "(A1)", "(A1, A2)", "// J1" and "J1: …" are the forms of such a mention.
	mention := regexp.MustCompile(`(?:\(|// |//\t|/\* |# |, )([AJKBSR]\d+)\b`)
	kept := map[string][]string{} // the files that name it
	for _, rel := range files(t, ".go", ".yaml", ".proto", ".service") {
		if strings.HasSuffix(rel, "_test.go") {
			continue
		}
		for _, m := range mention.FindAllStringSubmatch(read(t, rel), -1) {
			kept[m[1]] = append(kept[m[1]], rel)
		}
	}
	function := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	tests := map[string][]string{} // the text of each file that has a test of this name
	for _, rel := range files(t, "_test.go") {
		text := read(t, rel)
		for _, m := range function.FindAllStringSubmatch(text, -1) {
			tests[m[1]] = append(tests[m[1]], text)
		}
	}
	for _, m := range regexp.MustCompile(`(?m)^(\w+): (.+)\n    (.+)$`).FindAllStringSubmatch(invariants, -1) {
		listed = append(listed, m[1])
		for folder := range strings.FieldsSeq(m[2]) {
			if !slices.ContainsFunc(kept[m[1]], func(rel string) bool { return strings.HasPrefix(rel, folder+"/") }) {
				t.Errorf("no line of code in %s says that it keeps %s", folder, m[1])
			}
		}
		number := regexp.MustCompile(`\b` + m[1] + `\b`)
		for name := range strings.FieldsSeq(m[3]) {
			if !slices.ContainsFunc(tests[name], number.MatchString) {
				t.Errorf("no file with a test %s says that it tries %s", name, m[1])
			}
		}
	}
	// The number of each group's invariants. None may be lost.
	var want []string
	for _, group := range []struct {
		letter string
		count  int
	}{{"A", 10}, {"J", 11}, {"K", 5}, {"B", 11}, {"S", 2}, {"R", 1}} {
		for i := range group.count {
			want = append(want, fmt.Sprint(group.letter, i+1))
		}
	}
	if !slices.Equal(explained, want) {
		t.Errorf("docs/threat-model.md explains %v, want %v", explained, want)
	}
	if !slices.Equal(listed, want) {
		t.Errorf("the list has %v, want %v", listed, want)
	}
}
