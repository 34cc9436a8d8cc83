package main

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"github.com/muster-k8s/muster/services/bootstrapper/doctor"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

// kubernetesPorts are the ports that kubeadm's preflight requires to be free: kubelet, API server, controller
// manager, scheduler and etcd.
var kubernetesPorts = []int{10250, 6443, 10257, 10259, 2379, 2380}

// doctorTime bounds all checks together.
const doctorTime = time.Minute

func doctorConfig(image, meta, record, lock string) doctor.Config {
	cfg := doctor.Config{
		Root: "/", Image: image, Metadata: meta, Found: metadata.RunPath, Journal: record, Now: time.Now, Ports: kubernetesPorts,
		Folders: []string{"/", "/var/lib", "/var/lib/containerd", "/var/lib/muster"},
		OpenTPM: func(img *metadata.Image) (doctor.TPM, error) { return openTPM(img, lock) },
	}
	if self, err := os.Executable(); err == nil {
		if st, err := os.Stat(self); err == nil {
			cfg.Built = st.ModTime()
		}
	}
	return cfg
}

// runDoctor checks this machine for problems. The error has the number of failed checks.
func runDoctor(ctx context.Context, image, meta, record, lock, roots string, asJSON bool, stdout io.Writer) error {
	cfg := doctorConfig(image, meta, record, lock)
	if roots != "" {
		text, err := os.ReadFile(roots)
		if err != nil {
			return err
		}
		if cfg.Roots, err = parseRoots(text); err != nil {
			return fmt.Errorf("--ek-roots: %w", err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, doctorTime)
	defer cancel()
	r := doctor.Examine(ctx, cfg)
	if asJSON {
		enc := json.NewEncoder(stdout)
		enc.SetIndent("", "  ")
		return errors.Join(enc.Encode(r), r.Verdict())
	}
	w := tabwriter.NewWriter(stdout, 0, 4, 3, ' ', 0)
	for _, row := range r.Rows() {
		fmt.Fprintf(w, "%s\t%s\t%s\n", row[0], row[1], row[2])
	}
	return errors.Join(w.Flush(), r.Verdict())
}

func parseRoots(text []byte) (out []*x509.Certificate, err error) {
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		out = append(out, c)
	}
	if len(out) == 0 {
		return nil, errors.New("there is no certificate in it")
	}
	return out, nil
}
