package policyfile

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

// Listing is a machine with the field of a policy that lists it: "tpm2.machineIds", "tpm2.bareMachineIds",
// "tpm2.platformRoots[N].machineIds" or "tpm2.nitroRoots[N].machineIds".
type Listing struct {
	Field   string           `json:"list"`
	Machine attest.MachineID `json:"machine"`
}

var rootList = regexp.MustCompile(`^tpm2\.(platformRoots|nitroRoots)\[(0|[1-9][0-9]{0,2})\]\.machineIds$`)

// rootOf returns the field of the authorities, and the index of the one whose list a field is; an empty name if it is none.
func rootOf(name string) (string, int) {
	m := rootList.FindStringSubmatch(name)
	if m == nil {
		return "", -1
	}
	i, _ := strconv.Atoi(m[2]) // at most three digits
	return m[1], i
}

// listOf returns the list of that name; nil if the policy can't have it.
func listOf(t *attestv1.Tpm2Policy, name string) *[]string {
	switch roots, i := rootOf(name); {
	case t == nil:
		return nil
	case name == "tpm2.machineIds":
		return &t.MachineIds
	case name == "tpm2.bareMachineIds":
		return &t.BareMachineIds
	case roots == "platformRoots" && i < len(t.GetPlatformRoots()):
		return &t.PlatformRoots[i].MachineIds
	case roots == "nitroRoots" && i < len(t.GetNitroRoots()):
		return &t.NitroRoots[i].MachineIds
	}
	return nil
}

// Others describes which other parties have machines that an authority of a list certifies.
type Others string

// The authority certifies the owner's machines alone, or those of all customers of a cloud, or all TPMs of a vendor.
const (
	OthersNone           Others = ""
	OthersCloudCustomers Others = "customers of the cloud"
	OthersTPMBuyers      Others = "buyers of such a TPM"
)

// OthersOf returns who else could have a machine that lacks only its place in a list. root certifies its endorsement key; nil if it is not known.
func OthersOf(text []byte, list string, root *x509.Certificate) (Others, error) {
	m, err := message(text)
	if err != nil {
		return OthersNone, err
	}
	tpm := m.GetTpm2()
	switch roots, i := rootOf(list); {
	case roots == "nitroRoots", roots == "platformRoots" && i < len(tpm.GetPlatformRoots()) && len(tpm.GetPlatformRoots()[i].GetProjects()) == 0:
		return OthersCloudCustomers, nil
	case list == "tpm2.machineIds" && slices.ContainsFunc(tpm.GetEkRoots(), func(r *attestv1.EkRoot) bool { return !r.GetOperator() && (root == nil || isRoot(r, root)) }):
		return OthersTPMBuyers, nil
	}
	return OthersNone, nil
}

// isRoot reports whether an entry of ekRoots is of that authority. Of two certificates of one, either may be the one that a chain led to.
func isRoot(r *attestv1.EkRoot, c *x509.Certificate) bool {
	return bytes.Equal(keyOf(r.GetPem()), c.RawSubjectPublicKeyInfo)
}

// Lists reports whether the policy has the listing.
func Lists(text []byte, l Listing) (bool, error) {
	m, err := message(text)
	if err != nil {
		return false, err
	}
	list := listOf(m.GetTpm2(), l.Field)
	return list != nil && slices.Contains(*list, l.Machine.String()), nil
}

// ListMachines returns the policy with more listed machines and another serial; the rest, including comments, is unchanged.
// A machine that is listed already keeps its place. An error means that the text or the result is not a valid policy.
func ListMachines(text []byte, serial uint64, add []Listing) ([]byte, error) {
	want, err := message(text)
	if err != nil {
		return nil, err
	}
	doc, err := document(text)
	if err != nil {
		return nil, err
	}
	root := doc.Content[0]
	*field(root, "serial") = yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: strconv.FormatUint(serial, 10)}
	want.Serial = serial
	tpm := field(root, "tpm2")
	for _, l := range add {
		list := listOf(want.GetTpm2(), l.Field)
		if list == nil {
			return nil, fmt.Errorf("policy: it has no %s", l.Field)
		}
		if slices.Contains(*list, l.Machine.String()) {
			continue
		}
		*list = append(*list, l.Machine.String())
		node, err := listNode(tpm, l.Field)
		if err != nil {
			return nil, err
		}
		if node.Kind != yaml.SequenceNode { // missing, or null
			*node = yaml.Node{Kind: yaml.SequenceNode}
		}
		if len(node.Content) == 0 && root.Style&yaml.FlowStyle == 0 {
			node.Style = 0
		}
		node.Content = append(node.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Style: yaml.DoubleQuotedStyle, Value: l.Machine.String()})
	}
	out, err := encode(doc)
	if err != nil {
		return nil, err
	}
	if _, _, err := Parse(out); err != nil {
		return nil, err
	}
	if got, err := message(out); err != nil || !proto.Equal(got, want) {
		return nil, errors.Join(errors.New("policy: machine IDs and serial can't be changed in this file: write them by hand"), err)
	}
	return out, nil
}

// listNode returns the node of a list of the policy's file.
func listNode(tpm *yaml.Node, name string) (*yaml.Node, error) {
	of, i := rootOf(name)
	if of == "" {
		return field(tpm, name[len("tpm2."):]), nil
	}
	roots := field(tpm, of)
	if roots.Kind != yaml.SequenceNode || i >= len(roots.Content) || roots.Content[i].Kind != yaml.MappingNode {
		return nil, fmt.Errorf("policy: %s can't be changed in this file: write the machine IDs by hand", name)
	}
	return field(roots.Content[i], "machineIds"), nil
}

// listsOf returns the names of a policy's lists of machines.
func listsOf(t *attestv1.Tpm2Policy) []string {
	names := []string{"tpm2.machineIds", "tpm2.bareMachineIds"}
	for i := range t.GetPlatformRoots() {
		names = append(names, fmt.Sprintf("tpm2.platformRoots[%d].machineIds", i))
	}
	for i := range t.GetNitroRoots() {
		names = append(names, fmt.Sprintf("tpm2.nitroRoots[%d].machineIds", i))
	}
	return names
}

// DroppedMachines returns the machines that the policy before lists and the policy after does not list anywhere.
func DroppedMachines(before, after []byte) (dropped []Listing, err error) {
	old, err := message(before)
	if err != nil {
		return nil, err
	}
	next, err := message(after)
	if err != nil {
		return nil, err
	}
	var kept []string
	for _, name := range listsOf(next.GetTpm2()) {
		if list := listOf(next.GetTpm2(), name); list != nil {
			kept = append(kept, *list...)
		}
	}
	for _, name := range listsOf(old.GetTpm2()) {
		list := listOf(old.GetTpm2(), name)
		if list == nil {
			continue
		}
		for _, s := range *list {
			id, err := attest.ParseMachineID(s)
			if err != nil {
				return nil, err
			}
			if !slices.Contains(kept, s) {
				dropped = append(dropped, Listing{Field: name, Machine: id})
			}
		}
	}
	return dropped, nil
}

// OpenedLists returns the lists of the policy after that are empty, and so accept every machine that their authorities certify, where
// the policy before lists machines. A policy before that is not valid lists none.
func OpenedLists(before, after []byte) (opened []string, err error) {
	next, err := message(after)
	if err != nil {
		return nil, err
	}
	old, err := message(before)
	if err != nil {
		return nil, nil //nolint:nilerr // it is about to be replaced
	}
	was, is := old.GetTpm2(), next.GetTpm2()
	if len(was.GetMachineIds()) > 0 && len(is.GetMachineIds()) == 0 && len(is.GetEkRoots()) > 0 {
		opened = append(opened, "tpm2.machineIds")
	}
	for i, r := range is.GetPlatformRoots() {
		same := func(o *attestv1.PlatformRoot) bool { return sameKey(o.GetPem(), r.GetPem()) }
		open := func(o *attestv1.PlatformRoot) bool {
			return same(o) && len(o.GetMachineIds()) == 0 && slices.Equal(o.GetProjects(), r.GetProjects()) && slices.Equal(o.GetZones(), r.GetZones())
		}
		listed := func(o *attestv1.PlatformRoot) bool { return same(o) && len(o.GetMachineIds()) > 0 }
		if all := was.GetPlatformRoots(); len(r.GetMachineIds()) == 0 && slices.ContainsFunc(all, listed) && !slices.ContainsFunc(all, open) {
			opened = append(opened, fmt.Sprintf("tpm2.platformRoots[%d].machineIds", i))
		}
	}
	for i, r := range is.GetNitroRoots() {
		same := func(o *attestv1.NitroRoot) bool { return sameKey(o.GetPem(), r.GetPem()) }
		open := func(o *attestv1.NitroRoot) bool { return same(o) && len(o.GetMachineIds()) == 0 }
		if all := was.GetNitroRoots(); len(r.GetMachineIds()) == 0 && slices.ContainsFunc(all, same) && !slices.ContainsFunc(all, open) {
			opened = append(opened, fmt.Sprintf("tpm2.nitroRoots[%d].machineIds", i))
		}
	}
	return opened, nil
}

// sameKey reports whether two certificates in PEM have the same public key.
func sameKey(a, b string) bool {
	k := keyOf(a)
	return k != nil && bytes.Equal(k, keyOf(b))
}

// keyOf returns the public key of a certificate in PEM; nil if it is none.
func keyOf(text string) []byte {
	p, _ := pem.Decode([]byte(text))
	if p == nil {
		return nil
	}
	c, err := x509.ParseCertificate(p.Bytes)
	if err != nil {
		return nil
	}
	return c.RawSubjectPublicKeyInfo
}

// Empty reports whether a list has no machine, and so accepts every one that its authorities certify; tpm2.bareMachineIds, which
// accepts none then, is none of these lists.
func Empty(text []byte, list string) (bool, error) {
	m, err := message(text)
	if err != nil {
		return false, err
	}
	l := listOf(m.GetTpm2(), list)
	return l != nil && len(*l) == 0 && list != "tpm2.bareMachineIds", nil
}

// MoreMachines returns the machines that the policy after lists and the policy before does not. only reports whether the two
// differ in nothing else but the serial, which is higher in after.
func MoreMachines(before, after []byte) (more []Listing, only bool, err error) {
	old, err := message(before)
	if err != nil {
		return nil, false, err
	}
	next, err := message(after)
	if err != nil {
		return nil, false, err
	}
	if next.GetSerial() <= old.GetSerial() {
		return nil, false, nil
	}
	for _, name := range listsOf(next.GetTpm2()) {
		have, list := listOf(old.GetTpm2(), name), listOf(next.GetTpm2(), name)
		if have == nil || list == nil {
			return nil, false, nil
		}
		for _, s := range *list {
			id, err := attest.ParseMachineID(s)
			if err != nil {
				return nil, false, err
			}
			if !slices.Contains(*have, s) {
				more = append(more, Listing{Field: name, Machine: id})
			}
		}
		*list = slices.DeleteFunc(*list, func(s string) bool { return !slices.Contains(*have, s) })
	}
	next.Serial = old.GetSerial()
	return more, proto.Equal(old, next), nil
}
