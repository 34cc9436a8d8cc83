package joinclient

import (
	"bytes"
	"crypto/x509"
	"io/fs"
	"net/netip"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	joinv1 "github.com/muster-k8s/muster/gen/muster/join/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/services/bootstrapper/clusterca"
	"github.com/muster-k8s/muster/services/bootstrapper/component"
	"github.com/muster-k8s/muster/services/bootstrapper/kubeadm"
	"github.com/muster-k8s/muster/services/bootstrapper/kubelet"
	"github.com/muster-k8s/muster/services/bootstrapper/machine"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/provision"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/keys"
)

// controlPlaneFiles are the only files that a ticket may have (B4). A control plane needs all of them, a worker none.
var controlPlaneFiles = clusterinfo.ControlPlaneFiles()

const (
	// maxLeaseLife is the longest join lease that a joinservice may grant.
	maxLeaseLife = 10 * time.Minute
	// maxControlPlanes bounds the control planes in a ticket.
	maxControlPlanes = 64
)

// leaseLife returns the duration of a join lease.
func leaseLife(d *durationpb.Duration) (time.Duration, bool) {
	life := d.AsDuration()
	return life, d.IsValid() && life > 0 && life <= maxLeaseLife
}

// maxPKIFile bounds each of the files, in bytes.
const maxPKIFile = 64 << 10

// ticket is a checked ticket: every check was made before the machine is changed.
type ticket struct {
	id           []byte
	diskKey      keys.Disk
	clusterID    [32]byte
	endpoint     string
	ca           []byte
	cross        []byte // of a control plane, while the cluster's authority is rotated
	client       []byte // certificate and key, PEM
	serving      []byte
	software     *component.Software
	controlPlane bool
	own          string // HOST:PORT of a control plane's own API server
	files        []*joinv1.ControlPlaneFile
	token        *kubeadm.TokenDiscovery // nil: the certificate is used instead
	// These are set for a control plane only: the duration of its join lease, and the machines that run etcd.
	leaseLife     time.Duration
	controlPlanes []netip.Addr
}

// tokenForm matches Kubernetes' bootstrap tokens.
var tokenForm = regexp.MustCompile(`^[a-z0-9]{6}\.[a-z0-9]{16}$`)

// String keeps keys out of logs (K3).
func (ticket) String() string { return "a join ticket" }

// parseTicket checks a ticket against the request.
func parseTicket(t *joinv1.IssueJoinTicketResponse, k kubelet.Keys, m *metadata.Machine, now time.Time) (*ticket, error) {
	out := &ticket{
		id: t.GetTicketId(), endpoint: t.GetControlPlaneEndpoint(), ca: t.GetCaCertificate(),
		controlPlane: m.Role == metadata.RoleControlPlane, files: t.GetControlPlaneFiles(), own: kubeadm.LocalEndpoint(provision.KubeadmNode(m)),
	}
	if len(out.id) != 16 || len(t.GetClusterId()) != len(out.clusterID) {
		return nil, badTicket("its ID has %d bytes, its cluster ID %d", len(out.id), len(t.GetClusterId()))
	}
	out.clusterID = [32]byte(t.GetClusterId())
	var err error
	if out.diskKey, err = keys.ParseDisk(t.GetDiskKey()); err != nil {
		return nil, badTicket("%w", err)
	}
	if err := metadata.CheckHostPort(out.endpoint); err != nil {
		return nil, badTicket("control_plane_endpoint: %w", err)
	}
	if out.software, err = component.ParseSoftware(t.GetComponents(), t.GetImages()); err != nil {
		return nil, err
	}
	if err := checkFiles(out.files, out.controlPlane, out.ca); err != nil {
		return nil, err
	}
	if out.controlPlane {
		var ok bool
		if out.leaseLife, ok = leaseLife(t.GetLeaseLifetime()); !ok {
			return nil, badTicket("lease_lifetime: %s, want more than 0 and at most %s", t.GetLeaseLifetime().AsDuration(), maxLeaseLife)
		}
		if out.controlPlanes, err = parseAddresses(t.GetControlPlaneAddresses()); err != nil {
			return nil, err
		}
		if n := len(out.controlPlanes); n == 0 || n > maxControlPlanes {
			return nil, badTicket("control_plane_addresses: %d, want 1 to %d", n, maxControlPlanes)
		}
	}
	cas, err := kubelet.ParsePEM(out.ca)
	if err != nil {
		return nil, badTicket("ca_certificate: %w", err)
	}
	if token := t.GetBootstrapToken(); token != "" {
		if !tokenForm.MatchString(token) {
			return nil, badTicket("bootstrap_token does not have the form of one")
		}
		out.token = &kubeadm.TokenDiscovery{Token: token, Endpoint: out.endpoint, CA: cas}
	}
	if cross, err := kubelet.ParsePEM(t.GetCrossCertificate()); err == nil && len(cross) == 1 && clusterca.Crosses(cross[0], cas[0], cas) && out.controlPlane {
		out.cross = t.GetCrossCertificate()
	}
	roots := x509.NewCertPool()
	for _, c := range cas {
		roots.AddCert(c)
	}
	client, serving := t.GetKubeletClientCertificate(), t.GetKubeletServingCertificate()
	if err := kubelet.CheckCertificate(client, k.Client, roots, m.Name, nil, x509.ExtKeyUsageClientAuth, now); err != nil {
		return nil, kubelet.BadCertificate("kubelet_client_certificate", err)
	}
	if err := kubelet.CheckCertificate(serving, k.Serving, roots, m.Name, m.Addresses, x509.ExtKeyUsageServerAuth, now); err != nil {
		return nil, kubelet.BadCertificate("kubelet_serving_certificate", err)
	}
	if out.client, err = kubelet.Bundle(client, k.Client); err != nil {
		return nil, err
	}
	out.serving, err = kubelet.Bundle(serving, k.Serving)
	return out, err
}

// checkFiles enforces the list of allowed files (B4): all of them for a control plane, none for a worker.
func checkFiles(files []*joinv1.ControlPlaneFile, controlPlane bool, ca []byte) error {
	refuse := func(format string, args ...any) error {
		return attest.Refuse(attestv1.Reason_REASON_TICKET_FILE, format, args...)
	}
	if !controlPlane {
		if len(files) > 0 {
			return refuse("a worker's ticket has %d files", len(files))
		}
		return nil
	}
	var names []string
	for _, f := range files {
		if !slices.Contains(controlPlaneFiles, f.GetPath()) {
			return refuse("%q is not one of the files %q", f.GetPath(), controlPlaneFiles)
		}
		if len(f.GetContent()) == 0 || len(f.GetContent()) > maxPKIFile {
			return refuse("%s has %d bytes, want 1 to %d", f.GetPath(), len(f.GetContent()), maxPKIFile)
		}
		if f.GetPath() == "ca.crt" && !bytes.Equal(bytes.TrimSpace(f.GetContent()), bytes.TrimSpace(ca)) {
			return refuse("ca.crt is not the cluster's authority")
		}
		names = append(names, f.GetPath())
	}
	slices.Sort(names)
	if !slices.Equal(names, controlPlaneFiles) {
		return refuse("a control plane's ticket has %q, want exactly %q", names, controlPlaneFiles)
	}
	return nil
}

// place writes a ticket's files to the fixed paths of kubelet and kubeadm, by rename, readable only by root (B4).
func (c *Client) place(t *ticket) error {
	if err := kubelet.Place(c.node.Root, t.client, t.serving); err != nil {
		return err
	}
	discovery, err := kubelet.Kubeconfig(t.endpoint, t.ca)
	if err != nil {
		return err
	}
	if err := machine.WriteFile(c.node.On(kubeadm.DiscoveryConf), discovery, 0o600, 0o755); err != nil {
		return err
	}
	conf := discovery
	if t.controlPlane {
		// As kubeadm sets it: a control plane depends neither on another one nor on the cluster's endpoint, which a network attacker could redirect.
		if conf, err = kubelet.Kubeconfig(t.own, t.ca); err != nil {
			return err
		}
	}
	if err := machine.WriteFile(c.node.On(kubeadm.KubeletConf), conf, 0o600, 0o755); err != nil {
		return err
	}
	if !t.controlPlane {
		return nil // kubeadm writes ca.crt itself, and fails if it exists
	}
	for _, f := range t.files {
		mode := fs.FileMode(0o600)
		if ext := path.Ext(f.GetPath()); ext == ".crt" || ext == ".pub" {
			mode = 0o644 // public, with kubeadm's mode
		}
		if err := machine.WriteFile(filepath.Join(c.node.On(machine.PKIFolder), f.GetPath()), f.GetContent(), mode, 0o755); err != nil {
			return err
		}
	}
	if err := clusterca.WriteSigner(c.node.On(machine.PKIFolder)); err != nil {
		return err
	}
	if t.cross != nil {
		if err := machine.WriteFile(filepath.Join(c.node.On(machine.PKIFolder), clusterca.CrossFile), t.cross, 0o644, 0o755); err != nil {
			return err
		}
	}
	return c.node.WriteAuthz()
}

// askFor returns the request for a ticket.
func askFor(m *metadata.Machine, mode string, id keys.DiskID, k kubelet.Keys) (*joinv1.IssueJoinTicketRequest, error) {
	role := joinv1.Role_ROLE_WORKER
	if m.Role == metadata.RoleControlPlane {
		role = joinv1.Role_ROLE_CONTROL_PLANE
	}
	diskMode := joinv1.DiskMode_DISK_MODE_PLAIN
	if mode == metadata.DiskLUKS {
		diskMode = joinv1.DiskMode_DISK_MODE_LUKS
	}
	client, serving, err := k.Requests(m.Name, m.Addresses)
	if err != nil {
		return nil, err
	}
	return &joinv1.IssueJoinTicketRequest{
		NodeName: m.Name, Role: role, DiskId: id.String(), DiskMode: diskMode,
		KubeletClientCsr: client, KubeletServingCsr: serving,
	}, nil
}

// parseAddresses parses a ticket's addresses of other control planes.
func parseAddresses(list []string) ([]netip.Addr, error) {
	out := make([]netip.Addr, 0, len(list))
	for _, s := range list {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return nil, badTicket("control_plane_addresses: %w", err)
		}
		out = append(out, a.Unmap())
	}
	return out, nil
}

func badTicket(format string, args ...any) error {
	return attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "the ticket is unusable: "+format, args...)
}
