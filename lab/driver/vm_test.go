package driver

import (
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestAConfigMediumHoldsWhatTheMachineReads(t *testing.T) {
	v := VM{Name: "node7", JoinEndpoints: []string{"192.168.77.11:30090"}, InitSecretHash: strings.Repeat("ab", 32), NTP: []string{"192.168.77.2"}}
	number, role, err := seat(v.Name, v.Number, v.Role)
	if err != nil || number != 7 || role != "worker" {
		t.Fatalf("%d, %q, %v", number, role, err)
	}
	files, err := configMedium(v, number, role)
	if err != nil {
		t.Fatal(err)
	}
	m, err := metadata.ParseMachine(files["metadata.yaml"])
	if err != nil {
		t.Fatal(err)
	}
	if m.Name != "node7" || len(m.Addresses) != 1 || m.Addresses[0].String() != "192.168.77.17" || len(m.JoinEndpoints) != 1 {
		t.Errorf("%+v", m)
	}
	for _, want := range []string{"kind: MachineNetwork", "192.168.77.17/24", "gateway: 192.168.77.1", "mac: 02:", "ntp:\n- 192.168.77.2\n"} {
		if !strings.Contains(string(files["network.yaml"]), want) {
			t.Errorf("no %q in network.yaml:\n%s", want, files["network.yaml"])
		}
	}
}

func TestDocumentsAreOneStreamOfTheMediumsFiles(t *testing.T) {
	v := VM{Name: "node7", JoinEndpoints: []string{"srv:_muster-join._tcp.lab.example"}, Nameservers: []string{"192.168.77.2"}}
	text, err := v.Documents()
	if err != nil {
		t.Fatal(err)
	}
	first, second, ok := strings.Cut(text, "---\n")
	m, err := metadata.ParseMachine([]byte(first))
	if err != nil || !ok || m.JoinEndpoints[0] != v.JoinEndpoints[0] || !strings.Contains(second, "kind: MachineNetwork") || !strings.Contains(second, "nameservers:\n- 192.168.77.2\n") {
		t.Errorf("%+v, %v of %s", m, err, text)
	}
}

func TestAMachinesNumberAndRoleAreNamedOrRefused(t *testing.T) {
	for _, tt := range []struct {
		name, role string
		number     int
		ok         bool
	}{
		{"node3", "", 0, true}, {"joiner", "", 12, true}, {"node3", "control-plane", 0, true},
		{"joiner", "", 0, false}, {"node3", "owner", 0, false},
	} {
		if _, _, err := seat(tt.name, tt.number, tt.role); (err == nil) != tt.ok {
			t.Errorf("%+v: %v", tt, err)
		}
	}
}

func TestAVirtualMachineNeedsAnImage(t *testing.T) {
	l := &Lab{Dir: t.TempDir(), Log: t.Output()}
	if _, err := l.AddVM(t.Context(), VM{Name: "node7"}); err == nil || !strings.Contains(err.Error(), "vm-image") {
		t.Errorf("%v", err)
	}
}
