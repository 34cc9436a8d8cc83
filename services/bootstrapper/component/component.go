// Package component installs what a node needs before kubeadm runs from any mirror: kubelet, kubeadm, CNI plugins and similar programs.
//
// A mirror is not trusted. A download goes to a temporary file, and its SHA-256 is compared with the one received over an attested channel before any
// byte is used. Then it is renamed to a path below a folder of a fixed list (B4). All headers of an archive are checked before its first file is placed,
// so an archive that tries to leave its folder writes nothing.
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

// Folders are the only folders that components may be installed below.
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

// File returns a file of mode 0600 that is in no list, in any folder. It refuses with REQUEST_INVALID.
func File(url string, sum []byte, folder, name string) (Component, error) {
	c := Component{folder: folder, rel: name, mode: 0o600}
	return c, c.from(url, sum)
}

// from sets where the content comes from, and its SHA-256. It refuses with REQUEST_INVALID.
func (c *Component) from(at string, sum []byte) error {
	u, err := url.Parse(at)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.User != nil || len(at) > 2048 {
		return attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "url: want http or https, without a user, at most 2,048 characters")
	}
	if len(sum) != len(c.sha256) {
		return attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "sha256: want %d bytes, not %d", len(c.sha256), len(sum))
	}
	c.url, c.sha256 = at, [32]byte(sum)
	return nil
}

// Name returns the component's path on the machine, for progress and errors.
func (c Component) Name() string { return path.Join(c.folder, c.rel) }

// Parse checks a list. It refuses an entry with REQUEST_INVALID or COMPONENT_PATH and names it.
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
	err := c.from(p.GetUrl(), p.GetSha256())
	if err != nil {
		return c, err
	}
	if p.GetMode() > 0o777 || (!c.extract && p.GetMode() == 0) {
		return c, attest.Refuse(attestv1.Reason_REASON_REQUEST_INVALID, "mode: want permission bits between 1 and 0777, not %#o", p.GetMode())
	}
	c.folder, c.rel, err = place(p.GetPath(), c.extract)
	return c, err
}

// place returns the allowed folder that holds name (B4).
func place(name string, extract bool) (folder, rel string, err error) {
	if path.IsAbs(name) && path.Clean(name) == name && !strings.ContainsRune(name, 0) {
		for _, f := range Folders {
			if name == f && extract {
				return f, ".", nil
			}
			if rel, ok := strings.CutPrefix(name, f+"/"); ok {
				return f, rel, notTooDeep(rel)
			}
		}
	}
	return "", "", attest.Refuse(attestv1.Reason_REASON_COMPONENT_PATH, "path %q is not below %s", name, strings.Join(Folders, ", "))
}

// maxNames is how many names a path below one of [Folders] may have. What is deeper than the walks of the initramfs and of [Installer.Sweep] is removed at
// each boot.
const maxNames = 10

// notTooDeep refuses a path of too many names with COMPONENT_PATH.
func notTooDeep(name string) error {
	if strings.Count(name, "/") >= maxNames {
		return attest.Refuse(attestv1.Reason_REASON_COMPONENT_PATH, "path %q has more than %d names", name, maxNames)
	}
	return nil
}

// where returns the component's URL without its query.
func (c Component) where() string {
	u, err := url.Parse(c.url)
	if err != nil {
		return "its URL"
	}
	return fmt.Sprintf("%s://%s%s", u.Scheme, u.Host, u.EscapedPath())
}
