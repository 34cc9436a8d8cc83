package metadata

import (
	"fmt"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
)

// ReportInsecure logs each setting of the image that weakens the machine, and sets it in muster_insecure_config{reason}.
func ReportInsecure(r prometheus.Registerer, img *Image, log *slog.Logger) error {
	g := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "muster_insecure_config", Help: "1 for each way in which the configuration is weaker than it could be.",
	}, []string{"reason"})
	if err := r.Register(g); err != nil {
		return fmt.Errorf("metadata: %w", err)
	}
	for _, label := range img.Insecure() {
		g.WithLabelValues(label).Set(1)
		log.Warn("the image's configuration is weaker than it could be", "insecure", label)
	}
	return nil
}
