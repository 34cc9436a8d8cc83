package install

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"slices"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/problem"
	"github.com/muster-k8s/muster/internal/apiserver"
)

// lost returns an error if an API server answers, unless it is that of the machine on which this restore runs. Restoring a running cluster would
// create a second one.
func (i *initializer) lost(ctx context.Context) error {
	kube, err := access.Connect(i.Dir)
	if err != nil {
		return err
	}
	alive, cancel := context.WithTimeout(ctx, access.ProbeTimeout)
	defer cancel()
	err = kube.Answers(alive)
	c := i.dir()
	open := ""
	if c.Restore != nil {
		open = " To keep that cluster, cancel the restore: muster restore --abandon."
	}
	switch {
	case err == nil && c.Restore != nil && c.Stage == ownerdir.StageRequested:
		names, err := kube.NodeNames(alive)
		if err != nil {
			return problem.WithRemedy(fmt.Errorf("the API server at %s answers, so the cluster may not be lost, but does not list its nodes: %w", kube.Server(), err), "Run the same command again in a minute. If an old control plane answers there: power all of them off."+open)
		}
		if !slices.Contains(names, c.FirstMachine.NodeName) {
			return problem.WithRemedy(fmt.Errorf("the API server at %s answers, but does not have the node %s of the restore's machine: the cluster is not lost", kube.Server(), c.FirstMachine.NodeName),
				"If an old control plane answers there: power all of them off, and run the same command again. If the new machine's API server has just started: run it again in a minute."+open)
		}
		return nil
	case err == nil:
		return problem.WithRemedy(fmt.Errorf("the API server at %s answers: the cluster is not lost", kube.Server()), "Restoring a running cluster would create a second one. Repair it (docs/runbooks.md), or power all of its control planes off first."+open)
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	if _, foreign := errors.AsType[*tls.CertificateVerificationError](err); foreign {
		return problem.WithRemedy(fmt.Errorf("the API server at %s answers with a certificate that %s does not verify, so the cluster may not be lost: %w", kube.Server(), i.Dir.File(ownerdir.AdminConf), err), "If the cluster's CA was rotated since this copy of the folder, use the newest copy, or muster kubeconfig renew --joinservice ADDRESS. If another cluster answers there, direct the name elsewhere.")
	}
	if _, node := errors.AsType[*apiserver.NodeError](err); node {
		return problem.WithRemedy(fmt.Errorf("a node of the cluster answers at the address of its API server, so the cluster may not be lost: %w", err), "Find out why this address leads to a kubelet. If the cluster is lost: power all of its old machines off, and run the same command again."+open)
	}
	return nil
}

// Abandon cancels a restore that has no result, and returns the folder to its state before. It returns the machines that may have received the
// cluster's keys; none if nothing was sent.
func Abandon(ctx context.Context, d *ownerdir.Dir) ([]ownerdir.Asked, error) {
	c := d.Cluster()
	asked := c.Asked()
	const goOn = "Run the same muster restore again to complete it. If its machine can't be used, start again with another one: --start-over."
	switch {
	case c.Restore == nil:
		return nil, errors.New("no restore of this cluster is in progress: nothing was changed")
	case c.Restore.Ended || c.Stage != ownerdir.StagePrepared && c.Stage != ownerdir.StageRequested:
		return nil, problem.WithRemedy(errors.New("the restored cluster already has its first control plane: the restore can't be canceled"), goOn)
	case len(asked) > 0:
		kube, err := access.Connect(d)
		if err != nil {
			return nil, err
		}
		alive, cancel := context.WithTimeout(ctx, access.ProbeTimeout)
		defer cancel()
		names, err := kube.NodeNames(alive)
		if _, node := errors.AsType[*apiserver.NodeError](err); node {
			return nil, problem.WithRemedy(fmt.Errorf("it is not known whether the cluster is restored: %w", err), "Nothing was changed. Find out why the address of the API server leads to a kubelet, and run the same command again.")
		}
		if err != nil {
			break // it does not answer
		}
		for _, m := range asked {
			if slices.Contains(names, m.NodeName) {
				return nil, problem.WithRemedy(fmt.Errorf("the API server at %s has the node %s of the restore's machine %s: the cluster is restored there", kube.Server(), m.NodeName, m.ID), goOn)
			}
		}
	}
	c.Stage, c.FirstMachine = ownerdir.StageInstalled, c.Restore.Former
	if e := c.Restore.FormerEndpoint; e != "" { // folders of earlier versions have none
		c.Endpoint = e
	}
	c.Restore = nil
	return asked, d.Save(c)
}
