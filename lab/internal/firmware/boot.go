package firmware

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
)

func errDigest(f File) error {
	return fmt.Errorf("the manifest's SHA-256 of %s is %q, not 64 hex digits: build the image again", f.Path, f.SHA256)
}

func errPCR(f File) error {
	return fmt.Errorf("the manifest wants %s in PCR %d; files go to %d, %d or %d", f.Path, f.PCR, PCRBoot, PCRLoaded, PCRConfig)
}

// Hash hashes the files below root that a manifest lists, as they are there: it does not use the manifest's own
// hashes. A missing file is not measured, and so missing in the PCR's value too.
func Hash(root string, listed []File) ([]File, error) {
	var found []File
	for _, f := range listed {
		sum, size, err := hashFile(filepath.Join(root, f.Path))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("measure: %w", err)
		}
		found = append(found, File{Path: f.Path, PCR: f.PCR, SHA256: sum, Size: size})
	}
	return found, nil
}

func hashFile(path string) (string, int64, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", 0, err
	}
	defer f.Close()
	h := sha256.New()
	n, err := io.Copy(h, f)
	return hex.EncodeToString(h.Sum(nil)), n, err
}

// Boot measures: it extends the events of these files into the TPM and writes the log
// (mode 0444) to the path log.
func Boot(t transport.TPM, files []File, log string) error {
	events, err := Events(files)
	if err != nil {
		return err
	}
	for _, e := range events {
		if _, err := (tpm2.PCRExtend{
			PCRHandle: tpm2.AuthHandle{Handle: tpm2.TPMHandle(e.PCR), Auth: tpm2.PasswordAuth(nil)},
			Digests:   tpm2.TPMLDigestValues{Digests: []tpm2.TPMTHA{{HashAlg: tpm2.TPMAlgSHA256, Digest: e.Digest[:]}}},
		}).Execute(t); err != nil {
			return fmt.Errorf("extend PCR %d: %w", e.PCR, err)
		}
	}
	if err := os.MkdirAll(filepath.Dir(log), 0o755); err != nil {
		return err
	}
	return os.WriteFile(log, Log(events), 0o444)
}

// ReadPCRs returns the SHA-256 values of some PCRs (at most 8, what TPM2_PCR_Read gives
// in one answer), lower-case hex.
func ReadPCRs(t transport.TPM, pcrs ...uint) (map[uint]string, error) {
	values := map[uint]string{}
	for _, i := range pcrs {
		r, err := (tpm2.PCRRead{PCRSelectionIn: tpm2.TPMLPCRSelection{PCRSelections: []tpm2.TPMSPCRSelection{
			{Hash: tpm2.TPMAlgSHA256, PCRSelect: tpm2.PCClientCompatible.PCRs(i)},
		}}}).Execute(t)
		if err != nil {
			return nil, fmt.Errorf("read PCR %d: %w", i, err)
		}
		if len(r.PCRValues.Digests) != 1 {
			return nil, fmt.Errorf("read PCR %d: the TPM has no SHA-256 bank", i)
		}
		values[i] = hex.EncodeToString(r.PCRValues.Digests[0].Buffer)
	}
	return values, nil
}
