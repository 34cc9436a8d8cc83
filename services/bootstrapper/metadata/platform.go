package metadata

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// Source is the origin of a machine's metadata. The machine writes it into the file, and refuses it in what it reads.
type Source struct {
	// Provider is one of [ProviderNames].
	Provider string `json:"provider"`
	// From is the volume, the credential or the address.
	From string `json:"from"`
	// Platform are the fields that the platform filled in, because the document had none.
	Platform []string `json:"platform,omitempty"`
	// Ignored are facts of the platform that the machine did not take, because they are malformed.
	Ignored []string `json:"ignored,omitempty"`
}

// Platform is what a platform knows of a machine by itself. Each field may be empty.
type Platform struct {
	// Hostname is a DNS name; its first label becomes the node name.
	Hostname string
	// Addresses are the machine's IP addresses, the main one first.
	Addresses []string
	// ProviderID is the ID that the platform's controllers in a cluster use.
	ProviderID string
	// Region, Zone and InstanceType become labels of the Node.
	Region, Zone, InstanceType string
}

// Complete fills into a document what it leaves out and the platform knows, and returns the complete file and its content. A malformed fact of the platform
// is left out; name and addresses are then missing, which is an error.
func Complete(document []byte, p Platform, s Source) ([]byte, *Machine, error) {
	f, err := parseMachineFile(document)
	if err != nil {
		return nil, nil, err
	}
	if f.Source != nil {
		return nil, nil, errors.New("source: the machine writes this field itself: remove it")
	}
	s.Platform, s.Ignored = nil, nil
	fill := func(field, value string, missing, valid bool, set func()) {
		switch {
		case !missing || value == "":
		case !valid:
			s.Ignored = append(s.Ignored, field)
		default:
			s.Platform = append(s.Platform, field)
			set()
		}
	}
	name, _, _ := strings.Cut(strings.ToLower(p.Hostname), ".")
	fill("name", name, f.Name == "", dnsLabel.MatchString(name), func() { f.Name = name })
	addresses := usable(p.Addresses)
	fill("addresses", strings.Join(p.Addresses, " "), len(f.Addresses) == 0, len(addresses) > 0, func() { f.Addresses = addresses })
	fill("providerID", p.ProviderID, f.ProviderID == "", len(p.ProviderID) <= maxProviderID && providerID.MatchString(p.ProviderID), func() { f.ProviderID = p.ProviderID })
	for _, l := range []struct{ key, value string }{
		{LabelRegion, p.Region}, {LabelZone, p.Zone}, {LabelInstanceType, p.InstanceType},
	} {
		_, has := f.Labels[l.key]
		fill(l.key, l.value, !has, checkLabel(l.key, l.value) == nil, func() {
			if f.Labels == nil {
				f.Labels = map[string]string{}
			}
			f.Labels[l.key] = l.value
		})
	}
	if f.Name == "" && slices.Contains(s.Ignored, "name") {
		return nil, nil, fmt.Errorf("name: the platform's host name %.80q does not begin with a DNS label: write a name into the document", p.Hostname)
	}
	if len(f.Addresses) == 0 && slices.Contains(s.Ignored, "addresses") {
		return nil, nil, fmt.Errorf("addresses: this machine can have none of the platform's addresses, %.160q: write addresses into the document", p.Addresses)
	}
	f.Source = &s
	out, err := yaml.Marshal(f)
	if err != nil {
		return nil, nil, err
	}
	m, err := ParseMachine(out)
	return out, m, err
}

// usable returns the addresses that a machine can have, each once and at most [maxAddresses].
func usable(addresses []string) (out []string) {
	for _, s := range addresses {
		a, err := netip.ParseAddr(s)
		if err != nil || !ofMachine(a) || a.IsLinkLocalUnicast() || slices.Contains(out, a.String()) || len(out) == maxAddresses {
			continue
		}
		out = append(out, a.String())
	}
	return out
}

// String describes the source for a person.
func (s *Source) String() string {
	out := s.Provider + " (" + s.From + ")"
	if len(s.Platform) > 0 {
		out += ", which gave " + strings.Join(s.Platform, ", ")
	}
	if len(s.Ignored) > 0 {
		out += fmt.Sprintf("; malformed and not taken: %s", strings.Join(s.Ignored, ", "))
	}
	return out
}
