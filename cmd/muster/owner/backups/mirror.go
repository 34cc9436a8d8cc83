package backups

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/muster-k8s/muster/internal/versions"
)

// fetchTimeout bounds the fetch of one component.
const fetchTimeout = 15 * time.Minute

// Wanted is one file or image that a mirror must have.
type Wanted struct {
	// Kind is component or image.
	Kind string `json:"kind"`
	// Source is a component's URL or an image's reference.
	Source string `json:"source"`
	// SHA256 is the digest of a component's content or of an image's manifest: 64 hexadecimal digits.
	SHA256 string `json:"sha256"`
	// Path is the component's path on nodes.
	Path string `json:"path,omitempty"`
	// Size in bytes; 0 if it was not fetched.
	Size int64 `json:"size,omitempty"`
	// Problem is the fault of the mirror; empty if there is none, or if it was not checked.
	Problem string `json:"problem,omitempty"`
}

// WantedComponents returns what nodes fetch.
func WantedComponents(list []versions.Component) []Wanted {
	out := make([]Wanted, 0, len(list))
	for _, c := range list {
		out = append(out, Wanted{Kind: "component", Source: c.URL, SHA256: c.SHA256, Path: c.Path})
	}
	return out
}

// WantedImages returns what nodes pull, of images by digest.
func WantedImages(refs []string) []Wanted {
	out := make([]Wanted, 0, len(refs))
	for _, ref := range refs {
		_, sum, _ := strings.Cut(ref, "@sha256:")
		out = append(out, Wanted{Kind: "image", Source: ref, SHA256: sum})
	}
	return out
}

// CheckComponents fetches every component as a node does, and records its size and whether its digest
// is right. It does not check images.
func CheckComponents(ctx context.Context, list []Wanted) {
	client := &http.Client{Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, DisableCompression: true, DisableKeepAlives: true}, Timeout: fetchTimeout}
	for i := range list {
		if list[i].Kind != "component" {
			continue
		}
		size, sum, err := fetch(ctx, client, list[i].Source)
		list[i].Size = size
		switch {
		case err != nil:
			list[i].Problem = err.Error()
		case sum != list[i].SHA256:
			list[i].Problem = "its content has the SHA-256 " + sum
		}
	}
}

func fetch(ctx context.Context, client *http.Client, url string) (size int64, sum string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return 0, "", fmt.Errorf("HTTP %s", resp.Status)
	}
	h := sha256.New()
	size, err = io.Copy(h, resp.Body)
	return size, hex.EncodeToString(h.Sum(nil)), err
}
