package doctor

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/cmd/muster/owner/clusterapi"
	"github.com/muster-k8s/muster/deploy/charts"
	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
)

const again = "Run the muster init of this cluster again, with the same flags but without --policy: it restores the objects that Muster installs, and leaves the others."

// kinds compares Muster's definitions in the cluster with those of this program.
func (d *doctor) kinds(ctx context.Context) error {
	own, err := clusterapi.Definitions()
	if err != nil {
		return err
	}
	for _, want := range own {
		have, err := d.get(ctx, want)
		switch {
		case err != nil:
			return err
		case have == nil:
			d.Add(CheckKinds, checkup.Fail, again, "%s is not defined", want.GetName())
		case !contains(want.Object["spec"], have.Object["spec"]):
			d.Add(CheckKinds, checkup.Warn, "Use the muster of the version that is installed, or upgrade the cluster to this one's.", "%s is from another version of Muster", want.GetName())
		}
	}
	if d.Clean(CheckKinds) {
		d.OK(CheckKinds, "%d, as this version has them", len(own))
	}
	return nil
}

// get reads an object; nil if it does not exist.
func (d *doctor) get(ctx context.Context, of *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	have := &unstructured.Unstructured{}
	have.SetGroupVersionKind(of.GroupVersionKind())
	err := d.kube.Reader().Get(ctx, client.ObjectKeyFromObject(of), have)
	if clusterapi.Absent(err) {
		return nil, nil
	}
	return have, err
}

// chart checks the release, and for each of its objects that it exists and still has the chart's content: a user may
// have deleted or changed one.
func (d *doctor) chart(ctx context.Context) error {
	r, err := d.kube.Release(slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	if r == nil {
		d.Add(CheckChart, checkup.Fail, again, "Muster's release is not installed")
		return nil
	}
	d.release = r
	own, err := charts.Muster()
	if err != nil {
		return err
	}
	if s := r.Info.Status.String(); s != "deployed" {
		d.Add(CheckChart, checkup.Fail, again, "revision %d is %s", r.Version, s)
	}
	if have := r.Chart.Metadata.Version; have != own.Metadata.Version {
		d.Add(CheckChart, checkup.Warn, "Use the muster of that version, or upgrade the cluster to this one's.", "version %s is installed, but this program has %s", have, own.Metadata.Version)
	}
	if d.Clean(CheckChart) {
		d.OK(CheckChart, "version %s, revision %d", r.Chart.Metadata.Version, r.Version)
	}
	objects, err := clusterapi.ParseManifests("the release", []byte(r.Manifest))
	if err != nil {
		return err
	}
	counts := map[string]int{}
	for _, o := range objects {
		check := CheckObjects
		if strings.HasPrefix(o.GetKind(), "ValidatingAdmissionPolicy") {
			check = CheckAdmission
		}
		counts[check]++
		if err := d.object(ctx, check, o); err != nil {
			return err
		}
	}
	for _, check := range []string{CheckAdmission, CheckObjects} {
		if d.Clean(check) {
			d.OK(check, "all %d are in place", counts[check])
		}
	}
	return nil
}

func (d *doctor) object(ctx context.Context, check string, want *unstructured.Unstructured) error {
	have, err := d.get(ctx, want)
	if err != nil {
		return err
	}
	name := want.GetKind() + " " + want.GetName()
	if have == nil {
		d.Add(check, checkup.Fail, again, "%s was deleted", name)
		return nil
	}
	for field, value := range want.Object {
		if slices.Contains([]string{"apiVersion", "kind", "metadata", "status"}, field) {
			continue
		}
		if !contains(value, have.Object[field]) {
			d.Add(check, checkup.Fail, again, "%s differs from the chart: %s was changed", name, field)
		}
	}
	return nil
}

// contains reports whether have contains everything in want. Objects in have may have more fields, which the API
// server sets; lists must be equal in length and order.
func contains(want, have any) bool {
	switch w := want.(type) {
	case nil:
		return true
	case map[string]any:
		h, ok := have.(map[string]any)
		if !ok {
			return len(w) == 0 && have == nil
		}
		for k, v := range w {
			if !contains(v, h[k]) {
				return false
			}
		}
		return true
	case []any:
		h, ok := have.([]any)
		if !ok {
			return len(w) == 0 && have == nil
		}
		if len(w) != len(h) {
			return false
		}
		for i := range w {
			if !contains(w[i], h[i]) {
				return false
			}
		}
		return true
	default:
		return number(want) == number(have)
	}
}

// number makes numbers of JSON and YAML comparable, also quantities.
func number(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprint(v)
	}
	return string(b)
}

// services checks the DaemonSets and their images.
func (d *doctor) services(ctx context.Context) error {
	for _, name := range clusterapi.Services {
		text, images, err := d.kube.Service(ctx, name)
		if clusterapi.Absent(err) {
			d.Add(CheckServices, checkup.Fail, again, "%s is not installed", name)
			continue
		}
		if err != nil {
			return err
		}
		if text != "" {
			d.Add(CheckServices, checkup.Fail, "kubectl -n "+clusterapi.Namespace+" get pods. The log of a pod that is not ready, and its /readyz, show what is missing.", "%s", text)
		}
		for _, image := range images {
			if !strings.Contains(image, "@sha256:") {
				d.Add(CheckImages, checkup.Fail, "Name it by digest in the chart's values (make images writes digests): a tag can later refer to another program.", "%s runs %s", name, image)
			}
		}
	}
	if d.Clean(CheckServices) {
		d.OK(CheckServices, "joinservice and kms are ready on every control plane")
		if d.Clean(CheckImages) {
			d.OK(CheckImages, "by digest")
		}
	}
	return nil
}

// root compares the Secret with the folder. Its findings contain no byte of either (K3).
func (d *doctor) root(ctx context.Context) error {
	const remedy = "Restore it from the owner's folder: docs/operate.md, “muster-kms-root is lost”."
	s := &corev1.Secret{}
	err := d.kube.Reader().Get(ctx, client.ObjectKey{Namespace: clusterapi.Namespace, Name: "muster-kms-root"}, s)
	if clusterapi.Absent(err) {
		d.Add(CheckRoot, checkup.Fail, remedy, "the Secret muster-kms-root is gone: kms can derive no keys after its next restart")
		return nil
	}
	if err != nil {
		return err
	}
	own, err := d.dir.Secrets()
	if err != nil {
		return nil //nolint:nilerr // the folder's check has reported it
	}
	for key, want := range map[string][]byte{"root": own.Root[:], "salt": own.Salt[:]} {
		if subtle.ConstantTimeCompare(s.Data[key], want) != 1 {
			d.Err(CheckRoot, d.unlessDrilled(remedy), differs(key+" in the Secret muster-kms-root"))
		}
	}
	if d.Clean(CheckRoot) {
		d.OK(CheckRoot, "the Secret muster-kms-root is that of the owner's folder")
	}
	return nil
}

func (d *doctor) description(ctx context.Context) error {
	const remedy = "Restore the ConfigMap muster-cluster: clusterID and measurementSalt are in the owner's folder (cluster.json, measurement-salt)."
	m := &corev1.ConfigMap{}
	err := d.kube.Reader().Get(ctx, client.ObjectKey{Namespace: clusterapi.Namespace, Name: clusterinfo.ConfigMap}, m)
	if clusterapi.Absent(err) {
		d.Add(CheckDescription, checkup.Fail, remedy, "the ConfigMap %s is gone: no machine can join", clusterinfo.ConfigMap)
		return nil
	}
	if err != nil {
		return err
	}
	info, err := clusterinfo.Parse([]byte(m.Data[clusterinfo.Key]))
	if err != nil {
		d.Err(CheckDescription, remedy, err)
		return nil
	}
	if own, err := d.dir.Secrets(); err == nil && own.MeasurementSalt != info.MeasurementSalt {
		d.Err(CheckDescription, d.unlessDrilled(remedy), differs("measurementSalt"))
	}
	if info.ClusterID.String() != d.dir.Cluster().ClusterID {
		d.Err(CheckDescription, d.unlessDrilled(remedy), differs("clusterID"))
	}
	if d.Clean(CheckDescription) {
		d.OK(CheckDescription, "cluster %s, Kubernetes %s", info.ClusterID.String()[:16], info.KubernetesVersion)
	}
	d.rotation(info.Rotation)
	d.upgrade(info)
	return nil
}

// upgrade reports an unfinished upgrade of Kubernetes.
func (d *doctor) upgrade(i *clusterinfo.Info) {
	const remedy = "Run muster upgrade kubernetes %s: it continues where it stopped."
	switch {
	case i.Next != nil:
		d.Add(CheckUpgrade, checkup.Warn, fmt.Sprintf(remedy, i.Next.KubernetesVersion), "the control planes are being upgraded from %s to %s; until all are, no control plane can join", i.KubernetesVersion, i.Next.KubernetesVersion)
	case i.Previous != nil:
		d.Add(CheckUpgrade, checkup.Warn, fmt.Sprintf(remedy, i.KubernetesVersion), "the workers are being upgraded from %s to %s; until all are, both releases are accepted", i.Previous.KubernetesVersion, i.KubernetesVersion)
	default:
		d.OK(CheckUpgrade, "Kubernetes is not being upgraded")
	}
}

// rotation reports an unfinished rotation of a key.
func (d *doctor) rotation(r *clusterinfo.Rotation) {
	switch {
	case r == nil:
		d.OK(CheckRotation, "no key is being rotated")
	case r.Joins():
		d.Add(CheckRotation, checkup.Warn, "Run "+r.Command()+": with --dry-run it shows what stops working then.", "all control planes use the new %s since %s, and still accept the old one", r.Key, r.Since.Local().Format(time.DateTime))
	default:
		d.Add(CheckRotation, checkup.Warn, "Run "+r.Command()+": it continues where it stopped.", "the %s is in the phase %s since %s; no control plane can join until that phase is done", r.Key, r.Phase, r.Since.Local().Format(time.DateTime))
	}
}

// nodeClocks reads the leases that kubelets renew every ten seconds by their own clocks.
func (d *doctor) nodeClocks(ctx context.Context) error {
	leases := &unstructured.UnstructuredList{}
	leases.SetGroupVersionKind(coordinationv1.SchemeGroupVersion.WithKind("LeaseList"))
	if err := d.kube.Reader().List(ctx, leases, client.InNamespace(corev1.NamespaceNodeLease)); err != nil {
		return err
	}
	now := d.Now()
	for _, l := range leases.Items {
		text, _, _ := unstructured.NestedString(l.Object, "spec", "renewTime")
		if at, err := time.Parse(time.RFC3339Nano, text); err == nil && at.After(now) {
			// An old lease may also be that of a node that is down, which the check of nodes reports.
			d.skew(CheckNodeClocks, "the clock of node "+l.GetName(), at.Sub(now), time.Second)
		}
	}
	if d.Clean(CheckNodeClocks) {
		d.OK(CheckNodeClocks, "none of %d is ahead of this computer's", len(leases.Items))
	}
	return nil
}
