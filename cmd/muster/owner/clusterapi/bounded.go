package clusterapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/pager"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Bounds of the memory that a hostile API server can make this program use.
const (
	// maxAnswer bounds the answer to one request, and all pages of one list together, in bytes. It has room for 5,000
	// Nodes with the 50 images that a kubelet reports at most.
	maxAnswer = 256 << 20
	// pageSize is the number of objects in a page of a list, maxPages the maximum number of pages.
	pageSize = 500
	maxPages = 1000
)

// errTooLarge is returned for an answer above the bound.
var errTooLarge = errors.New("the API server has sent more for one answer or list than this program reads: docs/limits.md")

// allowance is the number of bytes that may still be read.
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
	empty, pages := list.DeepCopyObject(), 0
	// If a list takes longer than etcd keeps its revision, the whole list is read again at once, without pages.
	all, _, err := (&pager.ListPager{PageSize: pageSize, FullListIfExpired: true, PageFn: func(ctx context.Context, next metav1.ListOptions) (runtime.Object, error) {
		if pages++; pages > maxPages {
			return nil, fmt.Errorf("the API server has more than %d pages of %T", maxPages, list)
		}
		page, ok := empty.DeepCopyObject().(client.ObjectList) // an array of its own: the pager keeps pointers into it
		if !ok {
			return nil, fmt.Errorf("%T is no list", list)
		}
		o.Limit, o.Continue = next.Limit, next.Continue
		return page, p.Client.List(ctx, page, o)
	}}).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	items, err := meta.ExtractList(all)
	if err != nil {
		return err
	}
	of, err := meta.ListAccessor(all)
	if err != nil {
		return err
	}
	list.SetResourceVersion(of.GetResourceVersion())
	return meta.SetList(list, items)
}
