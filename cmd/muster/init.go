package main

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/cmd/muster/owner/install"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/objects/jointoken"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/internal/versions"
)

// initFlags are the flags of muster init.
type initFlags struct {
	cluster                      ownerdir.Cluster
	initSecret, policy, ownerKey string
	components                   string
	images                       imageFlags
	manifests                    []string
	timeout                      time.Duration
}

func (a *app) initCommand() *cobra.Command {
	var f initFlags
	cmd := &cobra.Command{
		Use:   "init --name NAME --endpoint HOST:9000 --init-secret-file FILE --policy FILE …",
		Short: "Initialize a cluster on a first machine",
		Long: `Initializes a cluster of one machine. First the machine proves what it booted; the command sends no secret to a
machine that the policy does not accept. Before that, it stores everything that must not be lost in the owner's
folder.

Run the same command again to continue where it stopped.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.init(cmd.Context(), f) },
	}
	f.add(cmd)
	flags := cmd.Flags()
	flags.StringSliceVar(&f.cluster.PodCIDRs, "pod-cidr", []string{"10.244.0.0/16"}, "pod network, one per address family")
	flags.StringSliceVar(&f.cluster.ServiceCIDRs, "service-cidr", []string{"10.96.0.0/16"}, "service network, one per address family")
	flags.StringSliceVar(&f.manifests, "manifests", nil, "manifests to apply first, for instance a network plugin")
	return cmd
}

// add adds the flags that init and install share.
func (f *initFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.cluster.Name, "name", "", "name of the cluster, a DNS label")
	flags.StringVar(&f.cluster.Endpoint, "endpoint", "", "HOST:PORT of the first machine's bootstrapper (default port 9000)")
	flags.StringVar(&f.initSecret, "init-secret-file", "", "file with the secret whose hash the machine's metadata hold (muster init-secret makes one)")
	flags.StringVar(&f.policy, "policy", "", "policy in YAML; it is copied into the owner's folder, and edited there from then on")
	flags.StringVar(&f.ownerKey, "owner-key-file", "", "owner's key that images already have (muster key new creates one; default: a new key)")
	flags.StringVar(&f.cluster.KubernetesVersion, "kubernetes", versions.Supported()[len(versions.Supported())-1], "Kubernetes version, as in 1.36 or 1.36.1")
	flags.StringVar(&f.cluster.ControlPlaneEndpoint, "control-plane-endpoint", "", "HOST:PORT at which all machines reach the API server (default port 6443)")
	flags.StringSliceVar(&f.cluster.APIServerSANs, "api-server-san", nil, "further name or address of the API server")
	flags.StringVar(&f.components, "components", "", "list of the nodes' components, and of Kubernetes' images by digest (kind ComponentList)")
	f.images.add(flags)
	flags.DurationVar(&f.timeout, "timeout", 30*time.Minute, "time limit of the whole command")
	for _, name := range []string{"name", "endpoint", "init-secret-file", "control-plane-endpoint"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err) // a flag above was renamed
		}
	}
}

func (a *app) init(ctx context.Context, f initFlags) error {
	n, err := f.new()
	if err != nil {
		return err
	}
	values, err := f.chartValues()
	if err != nil {
		return err
	}
	manifests, err := readManifests(f.manifests)
	if err != nil {
		return err
	}
	path := a.directory
	if path == "" {
		path = "muster-" + n.Cluster.Name
	}
	dir, err := ownerdir.Create(path, n)
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()

	ctx, cancel := context.WithTimeoutCause(ctx, f.timeout, fmt.Errorf("not done within %s: %w", f.timeout, context.DeadlineExceeded))
	defer cancel()
	steps := install.Steps
	if f.cluster.Adopted {
		steps = install.InstallSteps
	}
	report := a.report(steps)
	err = install.Init(ctx, install.InitConfig{Dir: dir, Manifests: manifests, Values: values, Report: report, Log: slog.New(slog.DiscardHandler)})
	report.Close()
	if err != nil {
		return err
	}
	_ = a.remember(ctx, dir) // a failure is printed
	return a.initDone(dir)
}

func (a *app) initDone(dir *ownerdir.Dir) error {
	c := dir.Cluster()
	if a.output == outputJSON {
		line, err := json.Marshal(struct {
			Event     string `json:"event"`
			ClusterID string `json:"clusterID"`
			Directory string `json:"directory"`
			Node      string `json:"node"`
			Machine   string `json:"machine"`
		}{"result", c.ClusterID, dir.Path(), c.FirstMachine.NodeName, c.FirstMachine.ID.String()})
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(a.stdout, "%s\n", line)
		return err
	}
	abs, err := filepath.Abs(dir.Path())
	if err != nil {
		abs = dir.Path()
	}
	done := "is there"
	if c.Adopted {
		done = "has Muster"
	}
	_, err = fmt.Fprintf(a.stdout, `Cluster %s %s. Its first node is %s, machine %s.
  export KUBECONFIG=%s
  muster status --directory %s
Keep %s and a copy of it: without it you can't change the policy or recover the cluster.
`, c.Name, done, c.FirstMachine.NodeName, c.FirstMachine.ID, filepath.Join(abs, ownerdir.AdminConf), dir.Path(), abs)
	return err
}

// new reads and checks everything before a folder is created.
func (f *initFlags) new() (ownerdir.New, error) {
	n := ownerdir.New{Cluster: f.cluster}
	c := &n.Cluster
	c.Stage = ownerdir.StagePrepared
	if msgs := validation.IsDNS1123Label(c.Name); len(msgs) > 0 {
		return n, usagef("--name %q: %s", c.Name, msgs[0])
	}
	var err error
	if c.Endpoint, err = hostPort(c.Endpoint, 9000); err != nil {
		return n, usagef("--endpoint: %w", err)
	}
	if c.ControlPlaneEndpoint, err = hostPort(c.ControlPlaneEndpoint, 6443); err != nil {
		return n, usagef("--control-plane-endpoint: %w", err)
	}
	if c.KubernetesVersion, err = versions.Resolve(c.KubernetesVersion); err != nil {
		return n, usagef("--kubernetes: %w", err)
	}
	networks := map[string][]string{"--pod-cidr": c.PodCIDRs, "--service-cidr": c.ServiceCIDRs}
	if c.Adopted {
		networks = nil // it has them
	}
	for flag, cidrs := range networks {
		if err := checkCIDRs(cidrs); err != nil {
			return n, fmt.Errorf("%s: %w", flag, err)
		}
	}
	if f.components == "" {
		return n, usagef("give --components: a list that names Kubernetes' images by digest (docs/operate.md)")
	}
	list, err := readList(f.components)
	if err != nil {
		return n, err
	}
	c.Components, c.Images = list.Components, list.Images
	if f.policy != "" {
		if n.Policy, err = os.ReadFile(f.policy); err != nil {
			return n, usagef("--policy: %w", err)
		}
		if _, _, err := policyfile.Parse(n.Policy); err != nil {
			return n, usagef("--policy %s: %w", f.policy, err)
		}
	}
	secret, err := ownerdir.ReadInitSecret(f.initSecret)
	if err != nil {
		return n, err
	}
	n.Secrets = ownerdir.NewSecrets(secret)
	if f.ownerKey != "" {
		n.OwnerKey, err = ownerdir.ReadKey(f.ownerKey)
		return n, err
	}
	_, n.OwnerKey, err = ed25519.GenerateKey(rand.Reader)
	return n, err
}

func (f *initFlags) chartValues() (clusterapi.Values, error) {
	v, err := f.images.values()
	if err != nil {
		return v, err
	}
	if f.cluster.Adopted {
		v = v.With("joinservice", "joinCredential", jointoken.Credential)
	} else if _, set := v.More["podSecurity"]; !set {
		v = v.With("podSecurity", "default", "baseline") // as the bootstrapper configures API servers
	}
	if err := clusterapi.CheckValues(v); err != nil {
		return v, fmt.Errorf("images and chart values: %w", err)
	}
	return v, nil
}

func readManifests(paths []string) ([]*unstructured.Unstructured, error) {
	var out []*unstructured.Unstructured
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, usagef("--manifests: %w", err)
		}
		objects, err := clusterapi.ParseManifests(path, text)
		if err != nil {
			return nil, usagef("--manifests: %w", err)
		}
		out = append(out, objects...)
	}
	return out, nil
}

func hostPort(s string, port int) (string, error) {
	host, p, err := net.SplitHostPort(s)
	if err != nil {
		host, p = s, strconv.Itoa(port)
		if a, aerr := netip.ParseAddr(s); aerr == nil {
			host = a.String()
		} else if msgs := validation.IsDNS1123Subdomain(s); len(msgs) > 0 {
			return "", fmt.Errorf("%q: want HOST:PORT", s)
		}
	}
	if n, err := strconv.ParseUint(p, 10, 16); err != nil || n == 0 || host == "" {
		return "", fmt.Errorf("%q: want HOST:PORT", s)
	}
	return net.JoinHostPort(host, p), nil
}

func checkCIDRs(cidrs []string) error {
	if len(cidrs) == 0 {
		return errors.New("at least one is needed")
	}
	for _, s := range cidrs {
		if c, err := netip.ParsePrefix(s); err != nil || c != c.Masked() {
			return fmt.Errorf("%q is not a network like 10.0.0.0/16", s)
		}
	}
	return nil
}
