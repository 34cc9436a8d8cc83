package metadata

import (
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"strconv"
)

// These are the roles that a machine may request.
const (
	RoleWorker       = "worker"
	RoleControlPlane = "control-plane"
)

const (
	maxAddresses = 16
	maxEndpoints = 64
)

// Machine is the infrastructure's data about one machine. It is not measured.
type Machine struct {
	// Name is the requested node name: a DNS label (RFC 1123), at most 63 characters.
	Name string
	// Role is [RoleWorker] or [RoleControlPlane].
	Role string
	// Addresses are the node's IP addresses, the first one its main one; 1 to 16.
	Addresses []netip.Addr
	// InitSecretHash is the SHA-256 of the secret that allows init; nil: no init is allowed.
	InitSecretHash *[32]byte
	// JoinEndpoints are joinservices as HOST:PORT; at most 64, none if there is no cluster yet.
	JoinEndpoints []string
}

type machineFile struct {
	APIVersion     string   `json:"apiVersion"`
	Kind           string   `json:"kind"`
	Name           string   `json:"name"`
	Role           string   `json:"role"`
	Addresses      []string `json:"addresses"`
	InitSecretHash string   `json:"initSecretHash,omitempty"`
	JoinEndpoints  []string `json:"joinEndpoints,omitempty"`
}

var dnsLabel = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// LoadMachine reads a machine's metadata.
func LoadMachine(file string) (*Machine, error) { return load(file, ParseMachine) }

// ParseMachine parses a machine's metadata (YAML).
func ParseMachine(b []byte) (*Machine, error) {
	var f machineFile
	if err := strict(b, &f, "MachineMetadata", func() (string, string) { return f.APIVersion, f.Kind }); err != nil {
		return nil, err
	}
	if !dnsLabel.MatchString(f.Name) {
		return nil, fmt.Errorf("name: want a DNS label of at most 63 characters, not %q", f.Name)
	}
	if f.Role != RoleWorker && f.Role != RoleControlPlane {
		return nil, fmt.Errorf("role: want %q or %q, not %q", RoleWorker, RoleControlPlane, f.Role)
	}
	m := &Machine{Name: f.Name, Role: f.Role}
	if len(f.Addresses) == 0 || len(f.Addresses) > maxAddresses {
		return nil, fmt.Errorf("addresses: want 1 to %d, not %d", maxAddresses, len(f.Addresses))
	}
	seen := map[netip.Addr]bool{}
	for i, s := range f.Addresses {
		a, err := netip.ParseAddr(s)
		if err != nil || a.Zone() != "" || a.Is4In6() || a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || seen[a] {
			return nil, fmt.Errorf("addresses[%d]: want an IP address of this machine, once, not %q", i, s)
		}
		seen[a] = true
		m.Addresses = append(m.Addresses, a)
	}
	if f.InitSecretHash != "" {
		h, err := hex.DecodeString(f.InitSecretHash)
		if err != nil || len(h) != 32 {
			return nil, fmt.Errorf("initSecretHash: want the SHA-256 of the init secret as 64 hexadecimal digits")
		}
		m.InitSecretHash = (*[32]byte)(h)
	}
	if len(f.JoinEndpoints) > maxEndpoints {
		return nil, fmt.Errorf("joinEndpoints: at most %d, not %d", maxEndpoints, len(f.JoinEndpoints))
	}
	for i, e := range f.JoinEndpoints {
		host, port, err := net.SplitHostPort(e)
		n, perr := strconv.ParseUint(port, 10, 16)
		if err != nil || perr != nil || host == "" || n == 0 || len(e) > 300 {
			return nil, fmt.Errorf("joinEndpoints[%d]: want HOST:PORT, not %q", i, e)
		}
	}
	m.JoinEndpoints = f.JoinEndpoints
	return m, nil
}
