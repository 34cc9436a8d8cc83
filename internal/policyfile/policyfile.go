// Package policyfile makes a policy from the measurements of an image build, which its owner can read and edit, and turns
// such a file into the bytes that are signed.
//
// The file is YAML, for its comments. Services never read YAML: what is signed and applied is JSON, made here.
package policyfile

import (
	"encoding/pem"
	"errors"
	"fmt"

	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/trust/attest"
)

// ToJSON returns the JSON of a policy in YAML or JSON. The same text always gives the same bytes. It does not check the
// policy's content; [attest.ParsePolicy] does.
func ToJSON(text []byte) ([]byte, error) {
	// The limit is four times that of a policy in JSON: comments and indentation.
	if len(text) > 4*attest.MaxPolicySize {
		return nil, fmt.Errorf("policy: the file has more than %d bytes", 4*attest.MaxPolicySize)
	}
	b, err := yaml.YAMLToJSONStrict(text)
	if err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	return b, nil
}

// Parse reads a policy in YAML or JSON, and returns it with the bytes to sign.
func Parse(text []byte) (*attest.Policy, []byte, error) {
	b, err := ToJSON(text)
	if err != nil {
		return nil, nil, err
	}
	p, err := attest.ParsePolicy(b)
	if err != nil {
		return nil, nil, err
	}
	return p, b, nil
}

// SplitPEM returns each certificate of a PEM file separately, as a policy requires them. Any other content of the file is
// an error.
func SplitPEM(text []byte) ([]string, error) {
	var out []string
	for {
		block, rest := pem.Decode(text)
		if block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("it holds a %s, want certificates only", block.Type)
		}
		out = append(out, string(pem.EncodeToMemory(&pem.Block{Type: block.Type, Bytes: block.Bytes})))
		text = rest
	}
	if len(out) == 0 {
		return nil, errors.New("it holds no certificate in PEM")
	}
	return out, nil
}
