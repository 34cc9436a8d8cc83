package main

import (
	"encoding/json"
	"os"

	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
)

// imageFlags are the flags for the services' images and the chart's values.
type imageFlags struct {
	images, chartValues        string
	joinserviceImage, kmsImage string
}

func (f *imageFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.images, "images", "", "digests.json of an image build, instead of the two flags below")
	flags.StringVar(&f.joinserviceImage, "joinservice-image", "", "image by digest, NAME@sha256:…")
	flags.StringVar(&f.kmsImage, "kms-image", "", "image by digest, NAME@sha256:…")
	flags.StringVar(&f.chartValues, "chart-values", "", "further values of the chart, YAML; never a secret")
}

// values reads the files. It does not check them against the chart.
func (f *imageFlags) values() (clusterapi.Values, error) {
	v := clusterapi.Values{JoinserviceImage: f.joinserviceImage, KMSImage: f.kmsImage}
	if f.images != "" {
		digests, err := readDigests(f.images)
		if err != nil {
			return v, err
		}
		v.JoinserviceImage, v.KMSImage = digests["joinservice"], digests["kms"]
	}
	if f.chartValues != "" {
		text, err := os.ReadFile(f.chartValues)
		if err != nil {
			return v, usagef("--chart-values: %w", err)
		}
		if err := yaml.UnmarshalStrict(text, &v.More); err != nil {
			return v, usagef("--chart-values %s: %w", f.chartValues, err)
		}
	}
	return v, nil
}

// readDigests reads digests.json: names of services to images by digest.
func readDigests(path string) (map[string]string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, usagef("--images: %w", err)
	}
	var digests map[string]string
	if err := json.Unmarshal(text, &digests); err != nil {
		return nil, usagef("--images %s: %w", path, err)
	}
	for _, name := range []string{"joinservice", "kms"} {
		if digests[name] == "" {
			return nil, usagef("--images %s: it has no image of %s", path, name)
		}
	}
	return digests, nil
}
