package machine

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// maxImageList is the largest list of images that is read, in bytes: the kubelet's limit.
const maxImageList = 16 << 20

// ImageNames implements [Machine] by CRI, as the kubelet does.
func (Real) ImageNames(ctx context.Context, socket string) ([]string, error) {
	conn, err := grpc.NewClient(socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxImageList))) // a Unix socket
	if err != nil {
		return nil, fmt.Errorf("container runtime at %s: %w", socket, err)
	}
	defer conn.Close() //nolint:errcheck // nothing more is sent
	list, err := runtimeapi.NewImageServiceClient(conn).ListImages(ctx, &runtimeapi.ListImagesRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return nil, fmt.Errorf("container runtime at %s: list images: %w", socket, err)
	}
	var names []string
	for _, i := range list.GetImages() {
		names = append(names, i.GetRepoDigests()...)
	}
	return names, nil
}

// ImportArguments are the arguments of ctr for an import from its standard input into the kubelet's images. Of an index, the part for exactly this platform is
// needed: without the flag, ctr on amd64 needs those for 386 too, which no pull has brought.
func ImportArguments(socket string) []string {
	return []string{"--address", strings.TrimPrefix(socket, "unix://"), "--namespace", "k8s.io", "images", "import", "--local", "--no-unpack", "--platform", "linux/" + runtime.GOARCH, "-"}
}

// ImportImages implements [Machine] with containerd's ctr.
func (Real) ImportImages(ctx context.Context, socket string, archive io.Reader) error {
	var out []string
	err := feed(ctx, archive, func(l string) { out = append(out, l) },
		"ctr", ImportArguments(socket)...)
	if err != nil {
		return fmt.Errorf("ctr images import: %w: %s", err, strings.Join(out[max(0, len(out)-5):], "; "))
	}
	return nil
}
