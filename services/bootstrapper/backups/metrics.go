package backups

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
)

// Collector reads for each scrape which backup is the newest on a control plane. Other machines have no series.
type Collector struct {
	// Root is the root of the file system: "/" on a machine.
	Root string
	// Every is the time between two backups by the schedule; 0: there is no schedule.
	Every time.Duration
}

var (
	madeDesc  = prometheus.NewDesc("muster_backup_timestamp_seconds", "When the newest backup of the cluster on this control plane was made, in seconds since 1970; 0: there is none.", nil, nil)
	sizeDesc  = prometheus.NewDesc("muster_backup_size_bytes", "The size of that backup; 0: there is none.", nil, nil)
	everyDesc = prometheus.NewDesc("muster_backup_interval_seconds", "The time between two backups by the schedule of this control plane's image; 0: there is no schedule.", nil, nil)
)

// Describe implements [prometheus.Collector].
func (c Collector) Describe(out chan<- *prometheus.Desc) {
	out <- madeDesc
	out <- sizeDesc
	out <- everyDesc
}

// Collect implements [prometheus.Collector].
func (c Collector) Collect(out chan<- prometheus.Metric) {
	if is, err := renewal.IsControlPlane(c.Root); !is && err == nil {
		return
	}
	made := 0.0
	latest, err := Latest(c.Root)
	if err == nil && !latest.TakenAt.IsZero() {
		made = float64(latest.TakenAt.Unix())
	}
	out <- prometheus.MustNewConstMetric(madeDesc, prometheus.GaugeValue, made)
	out <- prometheus.MustNewConstMetric(sizeDesc, prometheus.GaugeValue, float64(latest.Size))
	out <- prometheus.MustNewConstMetric(everyDesc, prometheus.GaugeValue, c.Every.Seconds())
}
