package appraisal

import (
	"context"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-k8s/muster/cmd/muster/owner/peerdial"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/gen/muster/init/v1/initv1connect"
	"github.com/muster-k8s/muster/internal/rpc"
	"github.com/muster-k8s/muster/trust/attest"
)

// MachineStatus is the status of a machine that is not in a cluster yet, as it reports it.
type MachineStatus struct {
	Endpoint string `json:"endpoint"`
	// Proven reports that the policy accepts the reporting machine. If not, Problem is the reason, and everything
	// that follows is unauthenticated.
	Proven  bool             `json:"proven"`
	Problem *problem.Problem `json:"problem,omitempty"`

	Phase string     `json:"phase"`
	Since *time.Time `json:"since,omitempty"`
	// Taker is the holder of the node lock: "init", "join" or empty.
	Taker string `json:"taker,omitempty"`
	// Reason is why the latest attempt failed, Remedy what to do about it.
	Reason string `json:"reason,omitempty"`
	// ReasonUnproven: the reason is from a server that was not attested as a joinservice.
	ReasonUnproven bool       `json:"reasonUnproven,omitempty"`
	Remedy         string     `json:"remedy,omitempty"`
	LastAttempt    *time.Time `json:"lastAttempt,omitempty"`
	NextAttempt    *time.Time `json:"nextAttempt,omitempty"`
	FailedAttempts uint32     `json:"failedAttempts"`
	JoinEndpoints  []string   `json:"joinEndpoints,omitempty"`
	Version        string     `json:"version"`
	Machine        string     `json:"machine"`
	// Disk is the UUID of its state disk; empty if the machine does not know it yet.
	Disk string `json:"disk,omitempty"`
	// Endorsement is that of its evidence; empty if the evidence was not genuine.
	Endorsement string `json:"endorsement,omitempty"`
	NodeName    string `json:"nodeName,omitempty"`
	Role        string `json:"role,omitempty"`
	InitAllowed bool   `json:"initAllowed"`
	// Skew is the machine's clock minus this computer's clock.
	Skew time.Duration `json:"clockSkew"`
}

// AskMachine appraises the machine at cfg.Addr, and asks for its status. It also asks a machine that the policy
// refuses, over plain HTTPS: the answer is shown as unproven, and the machine is sent nothing else.
func AskMachine(ctx context.Context, cfg VerifyConfig) (*MachineStatus, error) {
	s, err := peerdial.Open(cfg.Target)
	if err != nil {
		return nil, err
	}
	defer func() { _ = s.Close() }()
	out := &MachineStatus{Endpoint: cfg.Addr}
	began := time.Now()
	got, err := initv1connect.NewMachineServiceClient(s.Client(), s.URL(), rpc.ClientOptions()...).GetStatus(ctx, &initv1.GetStatusRequest{})
	if refusal, refused := errors.AsType[*attest.Refusal](err); refused {
		p := problem.Explain(err)
		p.Message = refusal.Error() // without the text of the connection error
		out.Problem = &p
		began = time.Now()
		got, err = askUnproven(ctx, cfg)
	} else {
		out.Proven = err == nil
	}
	if err != nil {
		return nil, notWaiting(cfg.Addr, s.Unanswered(err))
	}
	if j, ok := s.Result(); ok {
		out.Endorsement = j.Claims.Endorsement()
	}
	out.fill(got, began)
	return out, nil
}

// askUnproven asks like an ordinary HTTPS client.
func askUnproven(ctx context.Context, cfg VerifyConfig) (*initv1.GetStatusResponse, error) {
	//nolint:gosec // neither certificate nor answer prove anything: the caller marks the answer as unproven
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}, DialContext: cfg.DialContext}
	defer transport.CloseIdleConnections()
	return initv1connect.NewMachineServiceClient(rpc.HTTPClient(transport), "https://"+cfg.Addr, rpc.ClientOptions()...).GetStatus(ctx, &initv1.GetStatusRequest{})
}

// notWaiting explains a machine whose bootstrapper does not answer.
func notWaiting(addr string, err error) error {
	err = fmt.Errorf("%s: %w", addr, err)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return problem.WithRemedy(err, "The machine is a node already (muster status without --endpoint shows those, and muster doctor --node NODE examines one), or its bootstrapper is not running: look at the machine's console, and if you can log in, run bootstrapper doctor on it.")
	case connect.CodeOf(err) == connect.CodeUnimplemented:
		return problem.WithRemedy(err, "Another program than a waiting machine's bootstrapper answers there, or a bootstrapper of an older version. The bootstrapper's port is 9000.")
	}
	return err
}

func (s *MachineStatus) fill(r *initv1.GetStatusResponse, began time.Time) {
	s.Phase = strings.ToLower(strings.TrimPrefix(r.GetPhase().String(), "PHASE_"))
	if r.GetTaker() != initv1.Taker_TAKER_UNSPECIFIED {
		s.Taker = strings.ToLower(strings.TrimPrefix(r.GetTaker().String(), "TAKER_"))
	}
	if r.GetLastReason() != attestv1.Reason_REASON_UNSPECIFIED {
		// The remedy is this program's: an unproven machine's is not shown.
		s.Reason, s.Remedy, s.ReasonUnproven = attest.ReasonName(r.GetLastReason()), rpc.RemedyFor(r.GetLastReason(), r.GetRole()), r.GetLastReasonUnproven()
		if s.ReasonUnproven {
			s.Remedy = rpc.RemedyUnproven
		}
	}
	s.Since, s.LastAttempt, s.NextAttempt = at(r.GetSince()), at(r.GetLastAttempt()), at(r.GetNextAttempt())
	s.FailedAttempts, s.InitAllowed = r.GetFailedAttempts(), r.GetInitAllowed()
	s.JoinEndpoints = make([]string, 0, len(r.GetJoinEndpoints()))
	for _, e := range r.GetJoinEndpoints()[:min(len(r.GetJoinEndpoints()), maxEndpoints)] {
		s.JoinEndpoints = append(s.JoinEndpoints, problem.Printable(e))
	}
	s.Version, s.Machine = problem.Printable(r.GetVersion()), hex.EncodeToString(r.GetMachineId()[:min(len(r.GetMachineId()), 32)])
	s.NodeName, s.Role, s.Disk = problem.Printable(r.GetNodeName()), problem.Printable(r.GetRole()), problem.Printable(r.GetDiskId())
	if now := at(r.GetNow()); now != nil {
		// The middle between request and answer is the best estimate of the machine's time.
		s.Skew = now.Sub(began.Add(time.Since(began) / 2)).Round(time.Millisecond)
	}
}

const maxEndpoints = 64 // limit of shown joinservice addresses

// at returns a time; nil if it is missing or not valid.
func at(t *timestamppb.Timestamp) *time.Time {
	if t == nil || t.CheckValid() != nil {
		return nil
	}
	v := t.AsTime()
	return &v
}

// SkewWarn is the smallest clock difference that is shown. Certificates are valid from five minutes before they are
// issued.
const SkewWarn = time.Minute
