package machine

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Pull implements [Machine] by CRI, as the kubelet does.
func (Real) Pull(ctx context.Context, socket, image string) error {
	conn, err := grpc.NewClient(socket, grpc.WithTransportCredentials(insecure.NewCredentials())) // a Unix socket
	if err != nil {
		return fmt.Errorf("container runtime at %s: %w", socket, err)
	}
	defer conn.Close() //nolint:errcheck // nothing more is sent
	client, spec := runtimeapi.NewImageServiceClient(conn), &runtimeapi.ImageSpec{Image: image}
	// containerd may have been started a moment ago.
	have, err := client.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: spec}, grpc.WaitForReady(true))
	if err != nil {
		return fmt.Errorf("container runtime at %s: %w", socket, err)
	}
	if have.GetImage() != nil {
		return nil
	}
	_, err = client.PullImage(ctx, &runtimeapi.PullImageRequest{Image: spec})
	return err
}
