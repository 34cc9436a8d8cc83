package versions

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/url"
	"path"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"

	initv1 "github.com/muster-k8s/muster/gen/muster/init/v1"
)

// Limits of a component list.
const (
	maxComponents = 64
	maxURL        = 2048
)

// Component is one file or archive that a node needs.
type Component struct {
	// URL is http or https, at most 2,048 characters.
	URL string `json:"url"`
	// SHA256 of the content, 64 lower-case hexadecimal digits.
	SHA256 string `json:"sha256"`
	// Path on the machine, absolute and clean; for an archive the folder to unpack into.
	Path string `json:"path"`
	// Mode is the file's permission bits; 0 for an archive.
	Mode Mode `json:"mode,omitempty"`
	// Extract is whether the content is a tar archive, plain or compressed with gzip.
	Extract bool `json:"extract,omitempty"`
}

// Mode is a file's permission bits. In a file it is a string of octal digits ("0755"); YAML's own octal number 0755 means
// the same.
type Mode uint32

// MarshalJSON writes octal digits in a string.
func (m Mode) MarshalJSON() ([]byte, error) {
	return fmt.Appendf(nil, "%q", fmt.Sprintf("%04o", uint32(m))), nil
}

// UnmarshalJSON reads octal digits in a string, or a number.
func (m *Mode) UnmarshalJSON(b []byte) error {
	base, digits := 10, string(b)
	if unquoted, err := strconv.Unquote(digits); err == nil {
		base, digits = 8, unquoted
	}
	n, err := strconv.ParseUint(digits, base, 32)
	if err != nil || n > 0o777 {
		return fmt.Errorf("mode %s: want octal digits in quotes, at most \"0777\"", b)
	}
	*m = Mode(n)
	return nil
}

// List is a file that lists components.
type List struct {
	// APIVersion is muster.dev/v1alpha1.
	APIVersion string `json:"apiVersion"`
	// Kind is ComponentList.
	Kind string `json:"kind"`
	// Components in the order in which they are installed.
	Components []Component `json:"components"`
	// Images are the references that [ParseImages] reads.
	Images []string `json:"images"`
}

// NewList returns a list that [Parse] reads after images were added.
func NewList(components ...Component) List {
	return List{APIVersion: "muster.dev/v1alpha1", Kind: "ComponentList", Components: components}
}

// Parse reads a list, YAML or JSON. For an unknown field, or a component whose form the bootstrapper would refuse, it
// returns an error that names it.
func Parse(data []byte) (List, error) {
	l, err := ParseUnpinned(data)
	if err != nil {
		return List{}, err
	}
	if _, err := ParseImages(l.Images); err != nil {
		return List{}, fmt.Errorf("component list: %w", err)
	}
	return l, nil
}

// ParseUnpinned is [Parse] for a list without digests of images. It is only for code that adds them.
func ParseUnpinned(data []byte) (List, error) {
	var l List
	asJSON, err := yaml.YAMLToJSONStrict(data)
	if err != nil {
		return List{}, fmt.Errorf("component list: %w", err)
	}
	dec := json.NewDecoder(strings.NewReader(string(asJSON)))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&l); err != nil {
		return List{}, fmt.Errorf("component list: %w", err)
	}
	if want := NewList(); l.APIVersion != want.APIVersion || l.Kind != want.Kind {
		return List{}, fmt.Errorf("component list: apiVersion and kind are %q and %q, want %q and %q", l.APIVersion, l.Kind, want.APIVersion, want.Kind)
	}
	if len(l.Components) > maxComponents {
		return List{}, fmt.Errorf("component list: %d components, at most %d", len(l.Components), maxComponents)
	}
	for i, c := range l.Components {
		if err := c.check(); err != nil {
			return List{}, fmt.Errorf("component %d: %w", i+1, err)
		}
	}
	return l, nil
}

func (c Component) check() error {
	u, err := url.Parse(c.URL)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || len(c.URL) > maxURL {
		return fmt.Errorf("url %q: want http or https, at most %d characters", c.URL, maxURL)
	}
	if u.User != nil {
		return fmt.Errorf("url of %s: it holds credentials, which every joining machine would get (K3)", u.Host)
	}
	if b, err := hex.DecodeString(c.SHA256); err != nil || len(b) != 32 || hex.EncodeToString(b) != c.SHA256 {
		return fmt.Errorf("%s: sha256 %q: want 64 lower-case hexadecimal digits", c.URL, c.SHA256)
	}
	if !path.IsAbs(c.Path) || path.Clean(c.Path) != c.Path {
		return fmt.Errorf("%s: path %q: want an absolute path, without single and double dots", c.URL, c.Path)
	}
	if c.Extract != (c.Mode == 0) {
		return fmt.Errorf("%s: mode: a file needs one, an archive has none", c.URL)
	}
	return nil
}

// FromWire returns a list from the contents of a request. [Parse] reads it only if both are well formed.
func FromWire(components []*initv1.Component, images []string) List {
	l := NewList()
	for _, c := range components {
		l.Components = append(l.Components, Component{URL: c.GetUrl(), SHA256: hex.EncodeToString(c.GetSha256()), Path: c.GetPath(), Mode: Mode(c.GetMode()), Extract: c.GetExtract()})
	}
	l.Images = images
	return l
}

// Wire returns the components in the form of a request.
func (l List) Wire() []*initv1.Component {
	out := make([]*initv1.Component, 0, len(l.Components))
	for _, c := range l.Components {
		sum, _ := hex.DecodeString(c.SHA256) // Parse checked it; a wrong one is refused by the machine
		out = append(out, &initv1.Component{Url: c.URL, Sha256: sum, Path: c.Path, Mode: uint32(c.Mode), Extract: c.Extract})
	}
	return out
}
