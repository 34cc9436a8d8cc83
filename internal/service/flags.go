package service

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/buildinfo"
	"github.com/muster-k8s/muster/internal/probe"
	"github.com/muster-k8s/muster/internal/service/attester"
	"github.com/muster-k8s/muster/trust/attest"
)

// Flags are the common flags of all services' programs.
type Flags struct {
	service                                                         string
	listen, metrics, probes, socket, owner, image, node, kubeconfig *string
}

// NewFlags adds them to set. The service has the name of its purpose; listen is the default address of its RPCs.
func NewFlags(set *flag.FlagSet, service attest.Purpose, listen string) *Flags {
	return &Flags{
		service:    string(service),
		listen:     set.String("listen", listen, "address of the RPCs, over attested TLS"),
		metrics:    set.String("metrics", ":9464", "address of metrics and probes, in plain HTTP: pod network or loopback only"),
		probes:     set.String("probes", "", "Unix socket for the command probe, as "+probe.Socket+"; empty: none"),
		socket:     set.String("attester", attester.Socket(attester.Dir, service), "socket of this machine's attester for the purpose "+string(service)),
		owner:      set.String("owner-keys", "", "the cluster owner's Ed25519 public keys, 32 bytes each in base64, with commas between (required)"),
		image:      set.String("image", ImagePath, "the measured configuration of this machine's image, for the lowest serial of a policy that it accepts"),
		node:       set.String("node-name", "", "name of the node that this pod runs on, for the log"),
		kubeconfig: set.String("kubeconfig", "", "kubeconfig of the cluster; empty: that of the pod"),
	}
}

// memoryShare is the part of the container's memory limit that Go may use, unless GOMEMLIMIT sets it; the kernel needs the
// rest for sockets.
const memoryShare = 0.8

// Process holds what a service's flags name, opened before the service itself is created.
type Process struct {
	// Listener serves RPCs, Metrics serves metrics and probes. Probes serves probes too, or is nil.
	Listener, Metrics, Probes net.Listener
	// Attester makes evidence of this machine with the service's purpose.
	Attester *attester.Client
	// Owner has the public keys of which one signs each policy.
	Owner attest.OwnerKeys
	// LowestSerial is the lowest policy serial that this machine's image accepts (B7); 0 for any.
	LowestSerial uint64
	// API is the configuration for the Kubernetes API.
	API *rest.Config
	Log *slog.Logger
}

// Open opens what the parsed flags name; it logs to stderr. An error names the flag.
func (f *Flags) Open(ctx context.Context, stderr io.Writer) (*Process, error) {
	p := &Process{Log: slog.New(slog.NewJSONHandler(stderr, nil)).With("service", f.service, "node", *f.node)}
	memory, err := memlimit.Set(memlimit.WithRatio(memoryShare), memlimit.WithProvider(memlimit.FromCgroup))
	if err != nil {
		p.Log.WarnContext(ctx, "no memory limit of a cgroup is known, so the garbage collector heeds none", "err", err)
	}
	if p.Owner, err = attest.ParseOwnerKeys(strings.Split(*f.owner, ",")); err != nil {
		return nil, fmt.Errorf("--owner-keys: %w", err)
	}
	if p.LowestSerial, err = lowestSerial(*f.image); err != nil {
		return nil, fmt.Errorf("--image: %w", err)
	}
	if p.API, err = API(*f.kubeconfig); err != nil {
		return nil, err
	}
	build := buildinfo.Read()
	p.API.UserAgent = "muster-" + f.service + "/" + build.Version
	if p.Attester, err = attester.New(*f.socket); err != nil {
		return nil, err
	}
	if p.Metrics, err = new(net.ListenConfig).Listen(ctx, "tcp", *f.metrics); err != nil {
		p.Attester.Close()
		return nil, fmt.Errorf("--metrics: %w", err)
	}
	if p.Listener, err = new(net.ListenConfig).Listen(ctx, "tcp", *f.listen); err != nil {
		p.Attester.Close()
		return nil, errors.Join(fmt.Errorf("--listen: %w", err), p.Metrics.Close())
	}
	if *f.probes != "" {
		if p.Probes, err = new(net.ListenConfig).Listen(ctx, "unix", *f.probes); err != nil {
			p.Probes = nil
			p.Close()
			return nil, fmt.Errorf("--probes: %w", err)
		}
	}
	p.Log.InfoContext(ctx, "starting", "version", build.String(), "listen", p.Listener.Addr().String(), "metrics", p.Metrics.Addr().String(), "memoryLimitBytes", memory)
	return p, nil
}

// ImagePath is the path of the measured configuration of a machine's image, on the machine and in pods.
const ImagePath = "/etc/muster/image.yaml"

// lowestSerial reads lowestPolicySerial of an image's configuration; 0 if it has none. The bootstrapper checks the rest of
// that file.
func lowestSerial(file string) (uint64, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	var image struct {
		LowestPolicySerial uint64 `json:"lowestPolicySerial"`
	}
	if err := yaml.Unmarshal(b, &image); err != nil {
		return 0, fmt.Errorf("%s: %w", file, err)
	}
	return image.LowestPolicySerial, nil
}

// Close closes everything that the service has not closed yet.
func (p *Process) Close() {
	_, _ = p.Listener.Close(), p.Metrics.Close()
	if p.Probes != nil {
		_ = p.Probes.Close()
	}
	p.Attester.Close()
}
