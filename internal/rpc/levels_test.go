package rpc

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/gen/muster/join/v1/joinv1connect"
	"github.com/muster-k8s/muster/trust/attest"
)

// procedures returns the methods of every service that Muster could serve.
func procedures(t *testing.T) map[string]protoreflect.MethodDescriptor {
	t.Helper()
	all := map[string]protoreflect.MethodDescriptor{}
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		p := string(f.Package())
		if !strings.HasPrefix(p, "muster.") && !strings.HasPrefix(p, "grpc.") {
			return true
		}
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			for j := range s.Methods().Len() {
				m := s.Methods().Get(j)
				all["/"+string(s.FullName())+"/"+string(m.Name())] = m
			}
		}
		return true
	})
	if len(all) < 8 {
		t.Fatalf("only %d procedures are linked in", len(all))
	}
	return all
}

func TestEveryProcedureHasALevel(t *testing.T) {
	all := procedures(t)
	for procedure, m := range all {
		level, ok := levels[procedure]
		if !ok || level < Plain || level > Attested {
			t.Errorf("%s has no access level: add it to the table in levels.go", procedure)
			continue
		}
		stream := m.IsStreamingServer() || m.IsStreamingClient()
		if stream != streams[procedure] {
			t.Errorf("%s: streaming is %v, the table says %v", procedure, stream, streams[procedure])
		}
		if m.IsStreamingClient() && level != Plain {
			t.Errorf("%s streams requests: give its reading a limit of time first", procedure)
		}
	}
	for procedure := range levels {
		if _, ok := all[procedure]; !ok && !strings.HasPrefix(procedure, "/grpc.reflection.") {
			t.Errorf("%s is in the table, but there is no such procedure", procedure)
		}
	}
}

// Any client that reaches a joinservice can open a session with it: an order there costs no more than a plain client's
// call.
func TestAnOrderHasTheRoomOfAPlainClientsCall(t *testing.T) {
	g := &guard{maxRequest: 16 << 10}
	if got := g.requestLimit(joinv1connect.JoinServiceRenewAdministratorProcedure); got != maxPlainRequest {
		t.Errorf("a request may have %d bytes, want %d", got, maxPlainRequest)
	}
	for procedure, level := range levels {
		if want := level == Attested || level == Session && !small[procedure]; trusted(procedure) != want || small[procedure] && level != Session {
			t.Errorf("%s, of the level %s, has the room of a plain client's: %v", procedure, level, !trusted(procedure))
		}
	}
}

// The comments in the schemas state which clients may call: they must agree with the table.
func TestLevelsAreThoseOfTheSchemas(t *testing.T) {
	rpcLine := regexp.MustCompile(`(?m)((?:^\s*//.*\n)+)\s*rpc (\w+)\(`)
	access := regexp.MustCompile(`Access:\s+(?://\s+)?(\w+)`)
	service := regexp.MustCompile(`(?m)^service (\w+)`)
	pkg := regexp.MustCompile(`(?m)^package ([\w.]+);`)
	checked := 0
	err := filepath.WalkDir("../../proto", func(path string, _ os.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".proto") {
			return err
		}
		raw, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		text := string(raw)
		for _, m := range rpcLine.FindAllStringSubmatchIndex(text, -1) {
			comment, name := text[m[2]:m[3]], text[m[4]:m[5]]
			services := service.FindAllStringSubmatch(text[:m[0]], -1)
			procedure := "/" + pkg.FindStringSubmatch(text)[1] + "." + services[len(services)-1][1] + "/" + name
			said := access.FindStringSubmatch(comment)
			if said == nil {
				t.Errorf("%s: the schema of %s does not say its access level", path, procedure)
				continue
			}
			if got := levels[procedure].String(); got != said[1] {
				t.Errorf("%s: the schema says %q, the table %q", procedure, said[1], got)
			}
			checked++
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if checked < 8 {
		t.Errorf("only %d procedures were compared", checked)
	}
}

// Invariant A3.
func TestAnUnknownProcedureIsServedToNobody(t *testing.T) {
	if err := authorize(t.Context(), "/muster.join.v1.JoinService/Forgotten"); attest.ReasonOf(err) != attestv1.Reason_REASON_INTERNAL {
		t.Errorf("%v, want a refusal", err)
	}
	var none Level
	if none.String() != "none" {
		t.Errorf("the zero level is for %q", none)
	}
}
