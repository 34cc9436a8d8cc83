package clusterapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Bounds of what a hostile API server may have this program hold in memory.
const (
	// maxAnswer bounds the answer to one request, and all pages of one list together, in bytes. It has room for 5,000
	// Nodes with the 50 images that a kubelet reports at most.
	maxAnswer = 256 << 20
	// pageSize is how many objects of a list are read at once, maxPages the number of its pages.
	pageSize = 500
	maxPages = 1000
)

// errTooLarge is returned by reading an answer above the bound.
var errTooLarge = errors.New("the API server has sent more for one answer or list than this program reads: docs/limits.md")

// allowance is how many bytes may still be read.
type allowance struct{ left atomic.Int64 }

func newAllowance(most int64) *allowance {
	a := &allowance{}
	a.left.Store(most)
	return a
}

// allowanceKey is the key of a context whose requests' answers share an allowance.
type allowanceKey struct{}

// bounded is a transport whose answers have a bounded number of bytes, after decompression.
type bounded struct {
	http.RoundTripper
	most int64
}

func (b bounded) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := b.RoundTripper.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	a, shared := r.Context().Value(allowanceKey{}).(*allowance)
	if !shared {
		a = newAllowance(b.most)
	}
	resp.Body = &boundedBody{resp.Body, a}
	return resp, nil
}

type boundedBody struct {
	io.ReadCloser
	*allowance
}

func (b *boundedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.left.Add(-int64(n)) < 0 {
		return 0, errTooLarge
	}
	return n, err
}

// paged is a client that reads lists in pages, unless the caller does. All pages of a list share an allowance.
type paged struct {
	client.Client
	most int64
}

// List implements [client.Reader].
func (p paged) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	o := (&client.ListOptions{}).ApplyOptions(opts)
	if o.Limit != 0 || o.Continue != "" {
		return p.Client.List(ctx, list, o)
	}
	ctx = context.WithValue(ctx, allowanceKey{}, newAllowance(p.most))
	o.Limit = pageSize
	empty := list.DeepCopyObject()
	var all []runtime.Object
	for range maxPages {
		page, ok := empty.DeepCopyObject().(client.ObjectList) // an array of its own: all has pointers into it
		if !ok {
			return fmt.Errorf("%T is no list", list)
		}
		if err := p.Client.List(ctx, page, o); err != nil {
			return err
		}
		items, err := meta.ExtractList(page)
		if err != nil {
			return err
		}
		all = append(all, items...)
		if o.Continue = page.GetContinue(); o.Continue == "" {
			list.SetResourceVersion(page.GetResourceVersion())
			return meta.SetList(list, all)
		}
	}
	return fmt.Errorf("the API server has more than %d pages of %T", maxPages, list)
}
