package metadata

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"

	yamlv3 "go.yaml.in/yaml/v3"
	"sigs.k8s.io/yaml"
)

// maxDepth bounds the mappings and lists of a document that are in each other: the time of encoding grows with its square.
const maxDepth = 100

// Documents returns the documents of a YAML stream that are not empty, without comments. Its time and memory are proportional to the length of b. Four
// things that YAML allows are errors:
//
//   - anchors and aliases: a decoder expands an alias each time, so 64 KiB can become gigabytes;
//   - a key that is twice in a mapping, also with other case, which JSON's decoder ignores;
//   - a key that is no text;
//   - more than [maxDepth] mappings and lists in each other.
func Documents(b []byte) ([]*yamlv3.Node, error) {
	var out []*yamlv3.Node
	for d := yamlv3.NewDecoder(bytes.NewReader(b)); ; {
		// Into a Node, since a Node holds an alias as it is written, and since decoding into a struct compares each key with each other one.
		doc := &yamlv3.Node{}
		switch err := d.Decode(doc); {
		case errors.Is(err, io.EOF):
			return out, nil
		case err != nil:
			return nil, err
		}
		if err := plain(doc, 0); err != nil {
			return nil, err
		}
		if len(doc.Content) > 0 && doc.Content[0].Tag != "!!null" {
			out = append(out, doc)
		}
	}
}

// plain removes the comments of a node and of those below it, and refuses what [Documents] does not accept.
func plain(n *yamlv3.Node, depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("line %d: more than %d mappings and lists in each other", n.Line, maxDepth)
	}
	if n.Anchor != "" { // there is no alias without one
		return fmt.Errorf("line %d: anchors (&) and aliases (*) are not accepted: write the value where it is used", n.Line)
	}
	n.HeadComment, n.LineComment, n.FootComment = "", "", ""
	seen := map[string]bool{}
	for i, c := range n.Content {
		if n.Kind == yamlv3.MappingNode && i%2 == 0 {
			if c.Kind != yamlv3.ScalarNode {
				return fmt.Errorf("line %d: want text as key", c.Line)
			}
			folded := strings.ToLower(strings.ToUpper(c.Value))
			if seen[folded] {
				return fmt.Errorf("line %d: key %.40q is already set in this mapping: remove one; upper and lower case are the same", c.Line, c.Value)
			}
			seen[folded] = true
		}
		if err := plain(c, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// Field returns the text of a field of a document of [Documents]; empty if there is no such field. A document that is no mapping is an error.
func Field(doc *yamlv3.Node, name string) (string, error) {
	fields := doc.Content[0]
	if fields.Kind != yamlv3.MappingNode {
		return "", fmt.Errorf("line %d: want fields, as in %q", fields.Line, name+": …")
	}
	for i := 0; i < len(fields.Content); i += 2 {
		if value := fields.Content[i+1]; fields.Content[i].Value == name {
			if value.Kind != yamlv3.ScalarNode {
				return "", fmt.Errorf("line %d: %s: want text", value.Line, name)
			}
			return value.Value, nil
		}
	}
	return "", nil
}

// Text returns a document of [Documents] as YAML.
func Text(doc *yamlv3.Node) ([]byte, error) { return yamlv3.Marshal(doc) }

// Unmarshal decodes a YAML stream of one document. Unknown fields, further documents and what [Documents] refuses are errors.
func Unmarshal(b []byte, into any) error {
	docs, err := Documents(b)
	if err != nil {
		return err
	}
	if len(docs) > 1 {
		return fmt.Errorf("line %d: want one document, not %d: remove the others", docs[1].Line, len(docs))
	}
	if len(docs) == 0 {
		return nil // into keeps its zero values, which no caller accepts
	}
	// What is decoded is what was checked, and not b: two parsers could disagree about b.
	text, err := Text(docs[0])
	if err != nil {
		return err
	}
	return yaml.UnmarshalStrict(text, into, yaml.DisallowUnknownFields)
}
