// Package component installs what a node needs before kubeadm runs: kubelet, kubeadm,
// CNI plugins and their like, from any mirror.
//
// A mirror is trusted with nothing. What is fetched goes to a temporary file and is
// compared with the SHA-256 that came over an attested channel before a byte of it is
// used, and it lands by rename at a path below a folder of a fixed list (B4). An archive
// is looked through once before the first of its files is placed, so one that tries to
// leave its folder leaves nothing behind.
package component

import (
	"fmt"
	"io/fs"
	"net/url"
	"path"
	"strings"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// Folders are the only ones that components may be installed below.
var Folders = []string{"/usr/local/bin", "/opt/cni/bin", "/usr/local/lib/muster"}

// MaxComponents bounds a list of components.
const MaxComponents = 64

// Component is one checked entry of a list of components.
type Component struct {
	url     string
	sha256  [32]byte
	folder  string // of Folders
	rel     string // below folder; "." for an archive that unpacks into the folder itself
	mode    fs.FileMode
	extract bool
}

// Name is how progress and errors call the component: its path on the machine.
func (c Component) Name() string { return path.Join(c.folder, c.rel) }

// Parse checks a list. It refuses with REQUEST_INVALID or COMPONENT_PATH and names the
// entry.
func Parse(list []*initv1.Component) ([]Component, error) {
	if len(list) > MaxComponents {
		return nil, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "components: at most %d, not %d", MaxComponents, len(list))
	}
	out := make([]Component, 0, len(list))
	for i, p := range list {
		c, err := parse(p)
		if err != nil {
			return nil, attest.Refuse(attest.ReasonOf(err), "components[%d]: %w", i, err)
		}
		out = append(out, c)
	}
	return out, nil
}

func parse(p *initv1.Component) (Component, error) {
	c := Component{url: p.GetUrl(), extract: p.GetExtract(), mode: fs.FileMode(p.GetMode())}
	u, err := url.Parse(p.GetUrl())
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.User != nil || len(p.GetUrl()) > 2048 {
		return c, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "url: want http or https, without a user, at most 2,048 characters")
	}
	if len(p.GetSha256()) != len(c.sha256) {
		return c, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "sha256: want %d bytes, not %d", len(c.sha256), len(p.GetSha256()))
	}
	c.sha256 = [32]byte(p.GetSha256())
	if p.GetMode() > 0o777 || (!c.extract && p.GetMode() == 0) {
		return c, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "mode: want permission bits between 1 and 0777, not %#o", p.GetMode())
	}
	c.folder, c.rel, err = place(p.GetPath(), c.extract)
	return c, err
}

// place finds the allowed folder that holds name (B4).
func place(name string, extract bool) (folder, rel string, err error) {
	if path.IsAbs(name) && path.Clean(name) == name && !strings.ContainsRune(name, 0) {
		for _, f := range Folders {
			if name == f && extract {
				return f, ".", nil
			}
			if rel, ok := strings.CutPrefix(name, f+"/"); ok {
				return f, rel, nil
			}
		}
	}
	return "", "", attest.Refuse(attestv1.Reason_REASON_COMPONENT_PATH, "path %q is not below %s", name, strings.Join(Folders, ", "))
}

// where is the component's source without what may follow a "?".
func (c Component) where() string {
	u, err := url.Parse(c.url)
	if err != nil {
		return "its URL"
	}
	return fmt.Sprintf("%s://%s%s", u.Scheme, u.Host, u.EscapedPath())
}
