package main

import (
	"crypto"
	"errors"
	"fmt"
	"os"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/trust/attest"
)

// configOptions are the options of image.yaml.
type configOptions struct {
	file, ownerKeys, ekRoots string
	lowestSerial             uint64
	plain, noOwner           bool // insecure options
}

// make returns an image.yaml that the bootstrapper accepts, and the bank that its machines quote.
func (c configOptions) make() ([]byte, crypto.Hash, error) {
	b, err := c.text()
	if err != nil {
		return nil, 0, err
	}
	img, err := metadata.ParseImage(b)
	if err != nil {
		return nil, 0, fmt.Errorf("image.yaml: %w", err)
	}
	if img.StateDisk.Mode != metadata.DiskLUKS && !c.plain {
		return nil, 0, errors.New("image.yaml: stateDisk.mode is not luks: secrets of the cluster would lie on a disk that is not encrypted; -allow-plain-state builds such an image")
	}
	if img.NoOwnerKey && !c.noOwner {
		return nil, 0, errors.New("image.yaml: insecure.noOwnerKey: a machine would take the key of its disk from whoever boots this image on a machine that an EK root vouches for; -owner-keys KEY names the owner, -allow-no-owner-key builds such an image")
	}
	if err := img.KnowsOwner(); err != nil {
		return nil, 0, fmt.Errorf("image.yaml: %w; -owner-keys KEY names the owner, -allow-no-owner-key builds an image without", err)
	}
	bank, ok := attest.Banks[img.TPM.Bank]
	if !ok {
		return nil, 0, fmt.Errorf("image.yaml: tpm.bank %q is not known", img.TPM.Bank)
	}
	return b, bank, nil
}

func (c configOptions) text() ([]byte, error) {
	if c.file != "" {
		if c.ownerKeys != "" || c.ekRoots != "" || c.lowestSerial > 0 {
			return nil, errors.New("-config is the whole image.yaml: write the owner's key, the lowest serial and the EK roots there")
		}
		return os.ReadFile(c.file)
	}
	b, err := files.ReadFile("files/image.yaml")
	if err != nil {
		return nil, err
	}
	var conf map[string]any
	if err := yaml.Unmarshal(b, &conf); err != nil {
		return nil, err
	}
	if c.ownerKeys != "" {
		conf["ownerKeys"] = strings.Split(c.ownerKeys, ",")
	} else if c.noOwner {
		conf["insecure"] = map[string]any{"noOwnerKey": true}
	}
	if c.lowestSerial > 0 {
		conf["lowestPolicySerial"] = c.lowestSerial
	}
	if c.ekRoots != "" {
		roots, err := os.ReadFile(c.ekRoots)
		if err != nil {
			return nil, fmt.Errorf("-ek-roots: %w", err)
		}
		conf["ekRoots"] = string(roots)
	}
	return yaml.Marshal(conf)
}
