package policyfile

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v3"

	"github.com/muster-k8s/muster/trust/attest"
)

// ControlPlane is a machine of a policy's controlPlanes, with the node name from the comment beside it.
type ControlPlane struct {
	Machine attest.MachineID
	Name    string
}

// ListControlPlanes returns the policy with other control planes and another serial; the rest, including comments, is
// unchanged. Machines in add that are listed already keep their place. An error means that the text or the result is not a
// valid policy.
func ListControlPlanes(text []byte, serial uint64, add []ControlPlane, remove []attest.MachineID) ([]byte, error) {
	before, _, err := Parse(text)
	if err != nil {
		return nil, err
	}
	doc, err := document(text)
	if err != nil {
		return nil, err
	}
	root := doc.Content[0]
	*field(root, "serial") = yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: strconv.FormatUint(serial, 10)}
	list := field(root, "controlPlanes")
	if list.Kind != yaml.SequenceNode { // missing, or null
		*list = yaml.Node{Kind: yaml.SequenceNode}
	}
	if root.Style&yaml.FlowStyle == 0 {
		list.Style = 0
	}
	list.Content = slices.DeleteFunc(list.Content, func(n *yaml.Node) bool {
		return slices.ContainsFunc(remove, func(m attest.MachineID) bool { return m.String() == n.Value })
	})
	want := slices.DeleteFunc(before.ControlPlanes(), func(m attest.MachineID) bool { return slices.Contains(remove, m) })
	for _, c := range add {
		if slices.Contains(want, c.Machine) {
			continue
		}
		want = append(want, c.Machine)
		item := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Style: yaml.DoubleQuotedStyle, Value: c.Machine.String()}
		if c.Name != "" && root.Style&yaml.FlowStyle == 0 {
			item.LineComment = "# " + c.Name
		}
		list.Content = append(list.Content, item)
	}
	out, err := encode(doc)
	if err != nil {
		return nil, err
	}
	after, _, err := Parse(out)
	if err != nil {
		return nil, err
	}
	if after.Serial() != serial || !slices.Equal(after.ControlPlanes(), want) {
		return nil, errors.New("policy: controlPlanes and serial can't be changed in this file: write them by hand")
	}
	return out, nil
}

// document reads a policy with its comments.
func document(text []byte) (*yaml.Node, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal(text, &doc); err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	if len(doc.Content) != 1 || doc.Content[0].Kind != yaml.MappingNode {
		return nil, errors.New("policy: want one object with fields")
	}
	return &doc, nil
}

func encode(doc *yaml.Node) ([]byte, error) {
	var out bytes.Buffer
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	if err := errors.Join(enc.Encode(doc), enc.Close()); err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	return out.Bytes(), nil
}

// field returns the value of a mapping's key, which is added at the end if it is missing.
func field(m *yaml.Node, key string) *yaml.Node {
	for i := 0; i+1 < len(m.Content); i += 2 {
		if m.Content[i].Value == key {
			return m.Content[i+1]
		}
	}
	value := &yaml.Node{}
	m.Content = append(m.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: key}, value)
	return value
}

// SetSerial returns the policy with another serial; the rest, including comments, is unchanged.
func SetSerial(text []byte, serial uint64) ([]byte, error) {
	doc, err := document(text)
	if err != nil {
		return nil, err
	}
	*field(doc.Content[0], "serial") = yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: strconv.FormatUint(serial, 10)}
	out, err := encode(doc)
	if err != nil {
		return nil, err
	}
	_, _, err = Parse(out)
	return out, err
}
