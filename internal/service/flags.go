package service

import (
	"context"
	"crypto/ed25519"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/internal/buildinfo"
	"github.com/muster-k8s/muster/internal/serve"
	"github.com/muster-k8s/muster/internal/service/attester"
	"github.com/muster-k8s/muster/trust/attest"
)

// Flags are those that the programs of all services have.
type Flags struct {
	service                                                         string
	listen, metrics, probes, socket, owner, image, node, kubeconfig *string
}

// NewFlags adds them to set. The service has the name of its purpose; listen is where its RPCs are by default.
func NewFlags(set *flag.FlagSet, service attest.Purpose, listen string) *Flags {
	return &Flags{
		service:    string(service),
		listen:     set.String("listen", listen, "address of the RPCs, over attested TLS"),
		metrics:    set.String("metrics", ":9464", "address of metrics and probes, in plain HTTP: pod network or loopback only"),
		probes:     set.String("probes", "", "Unix socket for the command probe, as "+serve.ProbeSocket+"; empty: none"),
		socket:     set.String("attester", attester.Socket(attester.Dir, service), "socket of this machine's attester for the purpose "+string(service)),
		owner:      set.String("owner-key", "", "the cluster owner's Ed25519 public key, 32 bytes in base64 (required)"),
		image:      set.String("image", ImagePath, "the measured configuration of this machine's image, for the lowest serial of a policy that it accepts"),
		node:       set.String("node-name", "", "name of the node that this pod runs on, for the log"),
		kubeconfig: set.String("kubeconfig", "", "kubeconfig of the cluster; empty: that of the pod"),
	}
}

// memoryShare is which part of the container's memory limit Go may use, unless GOMEMLIMIT says
// it; what the kernel holds for sockets needs the rest.
const memoryShare = 0.8

// Process is what a service's program has by its flags before the service itself is made.
type Process struct {
	// Listener is where RPCs are served, Metrics where metrics and probes are. Probes is where the latter are too, or nil.
	Listener, Metrics, Probes net.Listener
	// Attester makes evidence of this machine with the service's purpose.
	Attester *attester.Client
	// Owner is the public key that policies are signed with.
	Owner ed25519.PublicKey
	// LowestSerial is the least serial that a policy may have by this machine's image (B7); 0: any.
	LowestSerial uint64
	// API is how to reach the Kubernetes API.
	API *rest.Config
	Log *slog.Logger
}

// Open opens what the flags name, once they are parsed; its log goes to stderr. An error names the flag.
func (f *Flags) Open(ctx context.Context, stderr io.Writer) (*Process, error) {
	p := &Process{Log: slog.New(slog.NewJSONHandler(stderr, nil)).With("service", f.service, "node", *f.node)}
	memory, err := memlimit.Set(memlimit.WithRatio(memoryShare), memlimit.WithProvider(memlimit.FromCgroup))
	if err != nil {
		p.Log.WarnContext(ctx, "no memory limit of a cgroup is known, so the garbage collector heeds none", "err", err)
	}
	if p.Owner, err = ParseOwnerKey(*f.owner); err != nil {
		return nil, fmt.Errorf("--owner-key: %w", err)
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

// ImagePath is where the measured configuration of a machine's image is, on the machine and in pods.
const ImagePath = "/etc/muster/image.yaml"

// lowestSerial reads lowestPolicySerial of an image's configuration; 0: it has none. The rest of that file is the bootstrapper's to judge.
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

// Close closes all of it; what the service has closed by then stays closed.
func (p *Process) Close() {
	_, _ = p.Listener.Close(), p.Metrics.Close()
	if p.Probes != nil {
		_ = p.Probes.Close()
	}
	p.Attester.Close()
}
