package clusterapi

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"helm.sh/helm/v4/pkg/action"
	chartcommon "helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/kube"
	"helm.sh/helm/v4/pkg/release/common"
	releasev1 "helm.sh/helm/v4/pkg/release/v1"
	"helm.sh/helm/v4/pkg/storage/driver"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/muster-k8s/muster/deploy/charts"
)

// hookTimeout limits the chart's hooks (it has none today); [Client.ServicesReady] waits for readiness.
const hookTimeout = 5 * time.Minute

// maxHistory is the number of revisions that helm keeps.
const maxHistory = 10

// Values are the values of the chart. None is secret (K3).
type Values struct {
	// OwnerKeys are the Ed25519 public keys in base64.
	OwnerKeys []string
	// JoinserviceImage and KMSImage are references by digest.
	JoinserviceImage, KMSImage string
	// More is merged below the fields above; may be nil.
	More map[string]any
}

// anys returns a list in helm's form of values.
func anys(list []string) []any {
	out := make([]any, len(list))
	for i, s := range list {
		out[i] = s
	}
	return out
}

// With returns v with the additional chart value section.name.
func (v Values) With(section, name string, value any) Values {
	more := maps.Clone(v.More)
	if more == nil {
		more = map[string]any{}
	}
	have, _ := more[section].(map[string]any)
	set := maps.Clone(have)
	if set == nil {
		set = map[string]any{}
	}
	set[name] = value
	more[section] = set
	v.More = more
	return v
}

func (v Values) tree() map[string]any {
	out := map[string]any{}
	for k, more := range v.More {
		out[k] = more
	}
	section := func(name string, set map[string]any) {
		merged := map[string]any{}
		if have, ok := out[name].(map[string]any); ok {
			for k, x := range have {
				merged[k] = x
			}
		}
		for k, x := range set {
			merged[k] = x
		}
		out[name] = merged
	}
	section("owner", map[string]any{"publicKeys": anys(v.OwnerKeys)})
	section("joinservice", map[string]any{"image": v.JoinserviceImage})
	section("kms", map[string]any{"image": v.KMSImage})
	return out
}

// InstallChart installs the chart as release "muster", or upgrades an existing release to it. It resumes an install
// that was killed. It tries again while the API server is briefly unavailable, as on a small machine whose cluster
// was just initialized, until ctx ends.
func (c *Client) InstallChart(ctx context.Context, v Values, log *slog.Logger) (r *releasev1.Release, err error) {
	err = once(ctx, func(ctx context.Context) (err error) { r, err = c.installChart(ctx, v, log); return err })
	return r, err
}

func (c *Client) installChart(ctx context.Context, v Values, log *slog.Logger) (*releasev1.Release, error) {
	chart, err := charts.Muster()
	if err != nil {
		return nil, err
	}
	cfg, err := c.helm(log)
	if err != nil {
		return nil, err
	}
	last, err := lastRelease(cfg)
	if err != nil {
		return nil, err
	}
	var out any
	if last == nil {
		install := action.NewInstall(cfg)
		install.ReleaseName, install.Namespace = release, Namespace
		install.ServerSideApply, install.ForceConflicts = true, true
		install.WaitStrategy, install.Timeout = kube.HookOnlyStrategy, hookTimeout
		out, err = install.RunWithContext(ctx, chart, v.tree())
	} else {
		if err := freeRelease(cfg, last); err != nil {
			return nil, err
		}
		upgrade := action.NewUpgrade(cfg)
		upgrade.Namespace = Namespace
		upgrade.ServerSideApply, upgrade.ForceConflicts = "true", true
		upgrade.WaitStrategy, upgrade.Timeout = kube.HookOnlyStrategy, hookTimeout
		upgrade.MaxHistory = maxHistory
		out, err = upgrade.RunWithContext(ctx, release, chart, v.tree())
	}
	if err != nil {
		return nil, fmt.Errorf("helm: %w", err)
	}
	r, ok := out.(*releasev1.Release)
	if !ok {
		return nil, fmt.Errorf("helm returned a %T", out)
	}
	return r, nil
}

func lastRelease(cfg *action.Configuration) (*releasev1.Release, error) {
	found, err := cfg.Releases.Last(release)
	if errors.Is(err, driver.ErrReleaseNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("helm: %w", err)
	}
	r, ok := found.(*releasev1.Release)
	if !ok {
		return nil, fmt.Errorf("helm returned a %T", found)
	}
	return r, nil
}

// freeRelease ends the pending state of a release. Only a killed program leaves a release pending: the owner's
// folder is locked, so no other muster runs.
func freeRelease(cfg *action.Configuration, r *releasev1.Release) error {
	if !r.Info.Status.IsPending() {
		return nil
	}
	r.Info.Status = common.StatusFailed
	r.Info.Description = "interrupted; continued by muster"
	if err := cfg.Releases.Update(r); err != nil {
		return fmt.Errorf("helm: continue revision %d: %w", r.Version, err)
	}
	return nil
}

// Release returns the newest revision of the release; nil if there is none.
func (c *Client) Release(log *slog.Logger) (*releasev1.Release, error) {
	cfg, err := c.helm(log)
	if err != nil {
		return nil, err
	}
	return lastRelease(cfg)
}

// OwnerKeys returns the owner's public keys that the services of a release accept, in base64.
func OwnerKeys(r *releasev1.Release) []string {
	values, _ := r.Config["owner"].(map[string]any)
	list, _ := values["publicKeys"].([]any)
	out := make([]string, 0, len(list))
	for _, k := range list {
		if text, is := k.(string); is {
			out = append(out, text)
		}
	}
	return out
}

// asHelm assigns the fields that helm applies to helm's own field manager. The default manager is the program's
// name; then plain helm would find every field owned by another manager.
var asHelm = sync.OnceFunc(func() { kube.ManagedFieldsManager = "helm" })

// helm returns the configuration of plain helm: the history is in Secrets of the namespace.
func (c *Client) helm(log *slog.Logger) (*action.Configuration, error) {
	asHelm()
	cfg := action.NewConfiguration(action.ConfigurationSetLogger(log.Handler()))
	if err := cfg.Init(&getter{c: c}, Namespace, "secret"); err != nil {
		return nil, fmt.Errorf("helm: %w", err)
	}
	return cfg, nil
}

// getter provides helm with clients from a kubeconfig in memory. It discovers the API server's kinds only once,
// while helm would do so for every object.
type getter struct {
	c *Client

	mu   sync.Mutex
	seen discovery.CachedDiscoveryInterface
}

func (g *getter) ToRESTConfig() (*rest.Config, error) { return rest.CopyConfig(g.c.rest), nil }

func (g *getter) ToDiscoveryClient() (discovery.CachedDiscoveryInterface, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.seen == nil {
		d, err := discovery.NewDiscoveryClientForConfig(g.c.rest)
		if err != nil {
			return nil, err
		}
		g.seen = memory.NewMemCacheClient(d)
	}
	return g.seen, nil
}

func (g *getter) ToRESTMapper() (meta.RESTMapper, error) {
	d, err := g.ToDiscoveryClient()
	if err != nil {
		return nil, err
	}
	return restmapper.NewDeferredDiscoveryRESTMapper(d), nil
}

func (g *getter) ToRawKubeConfigLoader() clientcmd.ClientConfig {
	cfg, err := clientcmd.NewClientConfigFromBytes(g.c.kubeconfig)
	if err != nil {
		return clientcmd.NewDefaultClientConfig(*clientcmdapi.NewConfig(), nil) // Connect has read the same bytes
	}
	return cfg
}

// defaultJoinPort is the chart's joinservice.nodePort.
const defaultJoinPort = 30090

// JoinPort is the port of every control plane at which machines reach the joinservice.
func (v Values) JoinPort() int {
	section, _ := v.More["joinservice"].(map[string]any)
	switch port := section["nodePort"].(type) {
	case int:
		return port
	case int64:
		return int(port)
	case float64:
		return int(port)
	}
	return defaultJoinPort
}

// CheckValues returns the errors of v against the chart's schema, before any change. The owner's key is not checked:
// it is added later.
func CheckValues(v Values) error {
	chart, err := charts.Muster()
	if err != nil {
		return err
	}
	v.OwnerKeys = []string{base64.StdEncoding.EncodeToString(make([]byte, 32))}
	_, err = util.ToRenderValues(chart, v.tree(), chartcommon.ReleaseOptions{Name: release, Namespace: Namespace}, nil)
	return err
}
