package statecheck

import (
	"bytes"
	"encoding/pem"
	"slices"
)

// inOrder returns the wanted keys or certificates, in PEM, in the order of those that the machine has: its private keys belong to the first of them. more
// reports that the machine has others too, or something that is no PEM.
func inOrder(is, want []byte) (_ []byte, more bool) {
	have, rest := blocks(is)
	wanted, _ := blocks(want)
	if len(wanted) == 0 {
		return want, true
	}
	more = len(rest) > 0 || len(have) == 0
	var out []string
	for _, b := range have {
		if slices.Contains(wanted, b) {
			out = append(out, b)
		} else {
			more = true
		}
	}
	for _, b := range wanted {
		if !slices.Contains(out, b) {
			out = append(out, b)
		}
	}
	var text []byte
	for _, b := range out {
		text = append(text, b...)
	}
	return text, more
}

// blocks returns the blocks of a file in PEM, each in its usual form, and what is left of it.
func blocks(text []byte) (list []string, rest []byte) {
	for {
		block, after := pem.Decode(text)
		if block == nil {
			return list, bytes.TrimSpace(text)
		}
		list, text = append(list, string(pem.EncodeToMemory(block))), after
	}
}
