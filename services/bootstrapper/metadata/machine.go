package metadata

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
)

// These are the roles that a machine may request.
const (
	RoleWorker       = "worker"
	RoleControlPlane = "control-plane"
)

const (
	maxAddresses = 16
	// MaxEndpoints bounds the joinservices of a machine: those of its metadata, and those that DNS names.
	MaxEndpoints = 64
)

// ServicePrefix begins a join endpoint that is the name of DNS SRV records (RFC 2782).
const ServicePrefix = "srv:"

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
	// JoinEndpoints are joinservices as HOST:PORT, or names of DNS SRV records after [ServicePrefix]; at most [MaxEndpoints], none if there is no cluster
	// yet.
	JoinEndpoints []string
	// ProviderID is the Node's spec.providerID, by which a cloud's controllers find the machine; empty if there is none.
	ProviderID string
	// Labels and Taints are those with which the kubelet registers the Node; at most [maxLabels] and [maxTaints].
	Labels map[string]string
	Taints []Taint
	// Source is the origin of the metadata; nil: from a file that the operator wrote.
	Source *Source
}

type machineFile struct {
	APIVersion     string            `json:"apiVersion"`
	Kind           string            `json:"kind"`
	Name           string            `json:"name"`
	Role           string            `json:"role"`
	Addresses      []string          `json:"addresses"`
	InitSecretHash string            `json:"initSecretHash,omitempty"`
	JoinEndpoints  []string          `json:"joinEndpoints,omitempty"`
	ProviderID     string            `json:"providerID,omitempty"`
	Pool           string            `json:"pool,omitempty"`
	Labels         map[string]string `json:"labels,omitempty"`
	Taints         []Taint           `json:"taints,omitempty"`
	Source         *Source           `json:"source,omitempty"`
}

func parseMachineFile(b []byte) (*machineFile, error) {
	var f machineFile
	return &f, strict(b, &f, "MachineMetadata", func() (string, string) { return f.APIVersion, f.Kind })
}

var dnsLabel = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// LoadMachine reads a machine's metadata from the first of these files that exists. An error about no file at all is [fs.ErrNotExist].
func LoadMachine(files ...string) (m *Machine, err error) {
	var none error
	for _, file := range files {
		if m, err = load(file, ParseMachine); !errors.Is(err, fs.ErrNotExist) {
			return m, err
		}
		none = errors.Join(none, err)
	}
	return nil, none
}

// ParseMachine parses a machine's metadata (YAML).
func ParseMachine(b []byte) (*Machine, error) {
	f, err := parseMachineFile(b)
	if err != nil {
		return nil, err
	}
	if !dnsLabel.MatchString(f.Name) {
		return nil, fmt.Errorf("name: want a DNS label of at most 63 characters, not %q", f.Name)
	}
	if f.Role != RoleWorker && f.Role != RoleControlPlane {
		return nil, fmt.Errorf("role: want %q or %q, not %q", RoleWorker, RoleControlPlane, f.Role)
	}
	m := &Machine{Name: f.Name, Role: f.Role, Source: f.Source}
	if len(f.Addresses) == 0 || len(f.Addresses) > maxAddresses {
		return nil, fmt.Errorf("addresses: want 1 to %d, not %d", maxAddresses, len(f.Addresses))
	}
	seen := map[netip.Addr]bool{}
	for i, s := range f.Addresses {
		a, err := netip.ParseAddr(s)
		if err != nil || !ofMachine(a) || seen[a] {
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
	if len(f.JoinEndpoints) > MaxEndpoints {
		return nil, fmt.Errorf("joinEndpoints: at most %d, not %d", MaxEndpoints, len(f.JoinEndpoints))
	}
	for i, e := range f.JoinEndpoints {
		if err := checkEndpoint(e); err != nil {
			return nil, fmt.Errorf("joinEndpoints[%d]: %w", i, err)
		}
	}
	m.JoinEndpoints = f.JoinEndpoints
	return m, f.node(m)
}

// ofMachine reports whether a machine can have the address.
func ofMachine(a netip.Addr) bool {
	return a.IsValid() && a.Zone() == "" && !a.Is4In6() && !a.IsUnspecified() && !a.IsLoopback() && !a.IsMulticast()
}

// service is a name of SRV records: _SERVICE._PROTO.DOMAIN.
var service = regexp.MustCompile(`^_[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?\._tcp\.(.+)$`)

func checkEndpoint(e string) error {
	if name, ok := strings.CutPrefix(e, ServicePrefix); ok {
		m := service.FindStringSubmatch(name)
		if m == nil || !dnsName.MatchString(m[2]) || len(name) > 253 {
			return fmt.Errorf("want %s_SERVICE._tcp.DOMAIN in lower case, not %q", ServicePrefix, e)
		}
		return nil
	}
	host, port, err := net.SplitHostPort(e)
	n, perr := strconv.ParseUint(port, 10, 16)
	if err != nil || perr != nil || host == "" || n == 0 || len(e) > 300 {
		return fmt.Errorf("want HOST:PORT, or %s_SERVICE._tcp.DOMAIN, not %q", ServicePrefix, e)
	}
	return nil
}
