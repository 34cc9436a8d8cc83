package clusterview

import (
	"log/slog"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/trust/attest"
)

type infoHolder struct {
	current atomic.Pointer[clusterinfo.Info]
}

// Info returns the cluster's description, or a refusal with NOT_READY until the first machine has written it.
func (c *Cluster) Info() (*clusterinfo.Info, error) {
	if i := c.info.current.Load(); i != nil {
		return i, nil
	}
	return nil, attest.Refuse(attestv1.Reason_REASON_NOT_READY, "ConfigMap %s/%s is missing or broken", clusterinfo.Namespace, clusterinfo.ConfigMap)
}

// set keeps the last description that parsed: a broken edit must not stop joins.
func (h *infoHolder) set(m *corev1.ConfigMap, log *slog.Logger) {
	info, err := clusterinfo.Parse([]byte(m.Data[clusterinfo.Key]))
	if err != nil {
		log.Error("the cluster's description is broken; the last good one stays in use", "configmap", m.Name, "err", err)
		return
	}
	h.current.Store(info)
}

func (h *infoHolder) remove(*corev1.ConfigMap) { h.current.Store(nil) }
