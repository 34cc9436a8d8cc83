package rpc

import (
	"context"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"

	"github.com/muster-k8s/muster/gen/grpc/health/v1/healthv1connect"
	"github.com/muster-k8s/muster/gen/muster/attest/v1/attestv1connect"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/gen/muster/kms/v1/kmsv1connect"
	"github.com/muster-k8s/muster/gen/muster/recover/v1/recoverv1connect"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

// Level is how much a connection must have shown for an RPC to be served on it. The zero value is refused to all clients.
type Level int

const (
	// Plain is any HTTPS client: curl, grpcurl, a probe.
	Plain Level = iota + 1
	// Session is a connection over muster-atls/1 whose client did not attest: it has appraised this server, and proves its
	// rights by other means.
	Session
	// Attested is a connection whose client is a machine that was appraised and accepted.
	Attested
)

func (l Level) String() string {
	switch l {
	case Plain:
		return "plain"
	case Session:
		return "session"
	case Attested:
		return "attested"
	}
	return "none"
}

// Procedures of the reflection protocol, which has no generated code here.
const (
	reflectionV1      = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
	reflectionV1Alpha = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
)

// levels is the one table of access rights to RPCs. An RPC that is not in it is refused to all clients (A3); a test goes
// through the descriptors and fails on a missing entry.
var levels = map[string]Level{
	healthv1connect.HealthCheckProcedure: Plain,
	healthv1connect.HealthWatchProcedure: Plain,
	reflectionV1:                         Plain,
	reflectionV1Alpha:                    Plain,

	attestv1connect.EvidenceServiceGetEvidenceProcedure: Plain,

	initv1connect.InitServiceInitProcedure:         Session,
	initv1connect.InitServiceAdoptProcedure:        Session,
	initv1connect.InitServiceRestoreProcedure:      Session,
	initv1connect.MachineServiceGetStatusProcedure: Plain,

	joinv1connect.JoinServiceGetRotatedKeyProcedure:         Attested,
	joinv1connect.JoinServiceIssueJoinTicketProcedure:       Attested,
	joinv1connect.JoinServiceIssueRejoinTicketProcedure:     Attested,
	joinv1connect.JoinServiceReattestProcedure:              Attested,
	joinv1connect.JoinServiceRenewAdministratorProcedure:    Session,
	joinv1connect.JoinServiceRenewJoinLeaseProcedure:        Attested,
	joinv1connect.JoinServiceRenewNodeCertificatesProcedure: Attested,
	joinv1connect.JoinServiceReturnJoinTicketProcedure:      Attested,

	kmsv1connect.KeyServiceDeriveDiskKeyProcedure:   Attested,
	kmsv1connect.KeyServiceDeriveClusterIdProcedure: Attested,

	recoverv1connect.RecoverServiceDescribeProcedure:    Session,
	recoverv1connect.RecoverServiceRecoverProcedure:     Session,
	recoverv1connect.EpochServiceDescribeEpochProcedure: Session,
	recoverv1connect.EpochServiceAcceptEpochProcedure:   Session,
}

// streams lists the RPCs whose answer is a stream, so that it may take longer. A test compares it with the descriptors.
var streams = map[string]bool{
	healthv1connect.HealthWatchProcedure:      true,
	reflectionV1:                              true,
	reflectionV1Alpha:                         true,
	initv1connect.InitServiceInitProcedure:    true,
	initv1connect.InitServiceAdoptProcedure:   true,
	initv1connect.InitServiceRestoreProcedure: true,

	recoverv1connect.RecoverServiceRecoverProcedure: true,
}

// small lists the RPCs of the level session that a service in a cluster serves to any client, for as long as the cluster
// exists. Their requests have the limits of a plain client's.
var small = map[string]bool{joinv1connect.JoinServiceRenewAdministratorProcedure: true}

// LevelOf returns the level of a procedure, as in "/muster.join.v1.JoinService/IssueJoinTicket"; false if it has none, so
// that no client may call it.
func LevelOf(procedure string) (Level, bool) {
	l, ok := levels[procedure]
	return l, ok
}

// levelFrom returns the level of a request's connection.
func levelFrom(ctx context.Context) Level {
	if _, ok := atls.SessionFrom(ctx); !ok {
		return Plain
	}
	if _, ok := attest.PeerFrom(ctx); !ok {
		return Session
	}
	return Attested
}

// authorize checks that the connection of a request may call the procedure (J1).
func authorize(ctx context.Context, procedure string) error {
	need, ok := levels[procedure]
	have := levelFrom(ctx)
	switch {
	case !ok:
		return attest.Refuse(attestv1.Reason_REASON_INTERNAL, "%s has no access level, so it is refused to all clients", procedure)
	case have >= need:
		return nil
	case have < Session:
		return attest.Refuse(attestv1.Reason_REASON_SESSION_REQUIRED, "%s needs the level %s", procedure, need)
	default:
		return attest.Refuse(attestv1.Reason_REASON_PEER_NOT_ATTESTED, "%s needs the level %s", procedure, need)
	}
}
