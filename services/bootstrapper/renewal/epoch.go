package renewal

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/muster-k8s/muster/api/v1alpha1"
	"github.com/muster-k8s/muster/internal/objects/clusterinfo"
	"github.com/muster-k8s/muster/internal/objects/signedpolicy"
	"github.com/muster-k8s/muster/internal/retry"
	"github.com/muster-k8s/muster/services/bootstrapper/epoch"
)

// Keeper stores the cluster's epoch on this machine: [epoch.Keeper].
type Keeper interface {
	Load() (*epoch.Record, error)
	Advance(ctx context.Context, r epoch.Record) error
}

// betweenEpochs is the shortest time between two increments of the TPM's counter, whose memory wears out.
const betweenEpochs = 10 * time.Minute

// RunEpoch copies the cluster's epoch into this machine's record and its TPM's counter until ctx ends, so that an older copy of the disk is detected at
// boot (B7). It continues after failures.
func (r *Renewer) RunEpoch(ctx context.Context) error {
	pause := retry.Backoff{Min: r.Timing.Sign, Max: r.Timing.RetryMax}
	for {
		wait := r.Timing.Sign
		err := r.followEpoch(ctx)
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // stopped by its caller
		case err != nil:
			wait = pause.Next(0)
			r.Log.WarnContext(ctx, "this machine does not follow the cluster's epoch", "err", err, "again_in", wait.String())
		default:
			pause.Reset()
		}
		if retry.Wait(ctx, wait) != nil {
			return nil //nolint:nilerr // stopped by its caller
		}
	}
}

func (r *Renewer) followEpoch(ctx context.Context) error {
	had, err := r.Epoch.Load()
	if err != nil {
		return err
	}
	if had == nil {
		return fmt.Errorf("%s has no record: it is made when the machine starts", epoch.Folder)
	}
	c, err := r.Connect()
	if err != nil {
		return err
	}
	defer c.Close()
	now, history, err := c.Epoch(ctx)
	if err != nil {
		return err
	}
	known := clusterinfo.HistoryEpoch{Number: had.Epoch, ID: had.EpochID}
	switch lacks := history.Lacks(known); {
	case now.Epoch < had.Epoch || lacks != "":
		// The API server and etcd were restored while this machine ran, or the owner accepted another machine's disk. The machine keeps what it knows,
		// also if the cluster has counted on since.
		r.Log.ErrorContext(ctx, "the cluster is behind this machine: etcd was put back to an earlier copy", "cluster", now.Epoch, "machine", known.String(), "why", lacks)
	case now.Epoch > had.Epoch && (had.Epoch == 0 || r.advanced.IsZero() || r.Now().Sub(r.advanced) >= betweenEpochs):
		now.Written = r.Now()
		if err := r.Epoch.Advance(ctx, now); err != nil {
			return err
		}
		r.advanced = now.Written
		r.Log.InfoContext(ctx, "this machine's TPM knows the cluster's epoch", "epoch", now.Epoch, "policy_serial", now.PolicySerial, "bans", len(now.Bans))
		had = &now
	}
	return c.PublishEpoch(ctx, clusterinfo.HistoryEpoch{Number: had.Epoch, ID: had.EpochID})
}

// facts is the state that a restored copy of the cluster would undo.
type facts struct {
	policy [sha256.Size]byte
	serial uint64
	bans   []ban
	// lines has one line for each enrollment and disk, in order.
	lines []string
	// rotation has key, phase and ID of the rotation in progress; empty: there is none. It is not part of the digest: during an upgrade of the image,
	// control planes whose version computes the digest without it would otherwise increment the epoch in turn with the others.
	rotation string
}

// ban is a banned node and its machine.
type ban struct{ node, machine string }

func (f facts) digest() string {
	h := sha256.New()
	fmt.Fprintf(h, "%x\n", f.policy)
	for _, l := range f.lines {
		fmt.Fprintf(h, "%q\n", l)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Epoch implements [Cluster]. The number is in a ConfigMap, with a digest of the facts for which it was counted, and the rotation of that time. The first
// control plane that sees another digest or rotation increments it, by compare-and-swap.
//
// A version that does not know the rotation drops it from the ConfigMap when it increments. If a rotation is in progress, the next control plane that
// knows it increments once more. Then the digest is the same for both.
func (c *cluster) Epoch(ctx context.Context) (epoch.Record, clusterinfo.History, error) {
	f, err := c.facts(ctx)
	if err != nil {
		return epoch.Record{}, nil, err
	}
	maps := c.CoreV1().ConfigMaps(clusterinfo.Namespace)
	m, err := maps.Get(ctx, clusterinfo.EpochMap, metav1.GetOptions{})
	absent := apierrors.IsNotFound(err)
	if err != nil && !absent {
		return epoch.Record{}, nil, err
	}
	var number uint64
	var history clusterinfo.History
	if !absent {
		if history, err = clusterinfo.ParseHistory(m.Data["history"]); err != nil {
			return epoch.Record{}, nil, fmt.Errorf("ConfigMap %s: %w: correct that line", clusterinfo.EpochMap, err)
		}
		if number, err = strconv.ParseUint(m.Data["epoch"], 10, 64); err != nil {
			return epoch.Record{}, nil, fmt.Errorf("ConfigMap %s: epoch: %w: write a number above those of the annotation %s of control planes' Nodes", clusterinfo.EpochMap, err, clusterinfo.EpochAnnotation)
		}
	}
	// A number without an ID is from an earlier version or was written by an administrator: it gets an ID, and so counts as a new epoch.
	if digest := f.digest(); absent || m.Data["of"] != digest || m.Data["rotation"] != f.rotation || history.ID(number) == "" {
		number++
		history = history.Next(number)
		next := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: clusterinfo.EpochMap, Namespace: clusterinfo.Namespace}, Data: map[string]string{"epoch": strconv.FormatUint(number, 10), "of": digest, "rotation": f.rotation, "history": history.String()}}
		if absent {
			_, err = maps.Create(ctx, next, metav1.CreateOptions{})
		} else {
			next.ResourceVersion = m.ResourceVersion
			_, err = maps.Update(ctx, next, metav1.UpdateOptions{})
		}
		if err != nil { // another control plane was first: the next look reads its result
			return epoch.Record{}, nil, err
		}
	}
	out := epoch.Record{Epoch: number, EpochID: history.ID(number), PolicySerial: f.serial}
	for _, b := range f.bans {
		out.Bans, out.BannedMachines = append(out.Bans, b.node), append(out.BannedMachines, b.machine)
	}
	return out, history, nil
}

// facts reads the policy, all enrollments and disks, and how far the rotation of a key is.
func (c *cluster) facts(ctx context.Context) (facts, error) {
	var f facts
	p, err := c.policy(ctx)
	if err != nil && !apierrors.IsNotFound(err) {
		return f, err
	}
	if err == nil {
		f.policy = sha256.Sum256([]byte(p.Spec.Policy + p.Spec.Signature))
		f.serial = c.serial(p)
	}
	err = pages(ctx, c, "attestednodes", func(list v1alpha1.AttestedNodeList) string {
		for _, n := range list.Items {
			f.lines = append(f.lines, fmt.Sprintf("node %s %s %s %s %s %t %t", n.Name, n.UID, n.Spec.MachineID, n.Spec.Role, n.Spec.DiskID, n.Spec.Banned, n.Leaving()))
			if n.Spec.Banned {
				f.bans = append(f.bans, ban{n.Name, n.Spec.MachineID})
			}
		}
		return list.Continue
	})
	if err != nil {
		return f, err
	}
	err = pages(ctx, c, "attesteddisks", func(list v1alpha1.AttestedDiskList) string {
		for _, d := range list.Items {
			f.lines = append(f.lines, fmt.Sprintf("disk %s %s %t", d.Name, d.Spec.MachineID, d.Spec.Erased))
		}
		return list.Continue
	})
	if err != nil {
		return f, err
	}
	r, err := c.rotation(ctx)
	if r != nil {
		f.rotation = fmt.Sprintf("%s %s %s", r.Key, r.Phase, r.ID)
	}
	slices.Sort(f.lines)
	slices.SortFunc(f.bans, func(a, b ban) int { return strings.Compare(a.node, b.node) })
	return f, err
}

// rotation returns the rotation in progress; nil: there is none. It reads nothing else of the cluster's description, so that fields of a later version do
// not end the count.
func (c *cluster) rotation(ctx context.Context) (*clusterinfo.Rotation, error) {
	m, err := c.CoreV1().ConfigMaps(clusterinfo.Namespace).Get(ctx, clusterinfo.ConfigMap, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var d struct {
		Rotation *clusterinfo.Rotation `json:"rotation"`
	}
	if err := json.Unmarshal([]byte(m.Data[clusterinfo.Key]), &d); err != nil {
		return nil, fmt.Errorf("ConfigMap %s: %s: %w: correct it", clusterinfo.ConfigMap, clusterinfo.Key, err)
	}
	return d.Rotation, nil
}

func (c *cluster) policy(ctx context.Context) (p v1alpha1.AttestationPolicy, err error) {
	text, err := c.CoreV1().RESTClient().Get().AbsPath("/apis", v1alpha1.GroupVersion.String(), "attestationpolicies", v1alpha1.PolicyName).DoRaw(ctx)
	if err != nil {
		return p, err
	}
	if err := json.Unmarshal(text, &p); err != nil {
		return p, fmt.Errorf("AttestationPolicy: %w", err)
	}
	return p, nil
}

// serial returns the serial of a policy that the owner signed, also of one that this version refuses; 0 if there is none, or the owner is not known.
func (c *cluster) serial(p v1alpha1.AttestationPolicy) uint64 {
	serial, err := signedpolicy.Serial(&p, c.owner)
	if err != nil {
		return 0
	}
	return serial
}

// pages lists a resource of Muster's in pages; each returns the token of the next page. A resource that the cluster does not have is an empty list.
func pages[L any](ctx context.Context, c *cluster, resource string, each func(L) string) error {
	o := metav1.ListOptions{Limit: 500}
	for {
		text, err := c.CoreV1().RESTClient().Get().AbsPath("/apis", v1alpha1.GroupVersion.String(), resource).VersionedParams(&o, scheme.ParameterCodec).DoRaw(ctx)
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("list %s: %w", resource, err)
		}
		var list L
		if err := json.Unmarshal(text, &list); err != nil {
			return fmt.Errorf("%s: %w", resource, err)
		}
		if o.Continue = each(list); o.Continue == "" {
			return nil
		}
	}
}

// PublishEpoch implements [Cluster] with an annotation of the Node.
func (c *cluster) PublishEpoch(ctx context.Context, e clusterinfo.HistoryEpoch) error {
	return c.annotate(ctx, clusterinfo.EpochAnnotation, e.String())
}

// annotate writes an annotation of this control plane's Node, if its value differs.
func (c *cluster) annotate(ctx context.Context, name, value string) error {
	node, err := c.CoreV1().Nodes().Get(ctx, c.node, metav1.GetOptions{})
	if err != nil || node.Annotations[name] == value {
		return err
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{name: value}}})
	if err != nil {
		return err
	}
	_, err = c.CoreV1().Nodes().Patch(ctx, c.node, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}
