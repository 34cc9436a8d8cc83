package provider

import (
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// credentialName is the name of the systemd credential with the machine's documents.
const credentialName = "muster.machine"

const (
	// systemCredentials is where systemd, if it is the first program, puts what it has imported (systemd.exec(5)).
	systemCredentials = "/run/credentials/@system"
	// firmwareConfig has the items of QEMU's fw_cfg device, by name (Linux, Documentation/ABI/testing/sysfs-firmware-qemu_fw_cfg).
	firmwareConfig = "firmware/qemu_fw_cfg/by_name/opt/io.systemd.credentials/" + credentialName + "/raw"
	// oemStrings has the structures of type 11 (Linux, Documentation/ABI/testing/sysfs-firmware-dmi-entries).
	oemStrings = "firmware/dmi/entries/11-*/raw"
	// maxStructure bounds an SMBIOS structure, in bytes: base64 makes a document longer by a third.
	maxStructure = 2 * MaxDocument
)

// credential reads the systemd credential "muster.machine", as systemd takes it from a virtual machine's host (systemd-creds(1)): one that systemd has imported,
// or QEMU's fw_cfg, or an SMBIOS OEM string.
func (m Machine) credential() (*Found, error) {
	for _, from := range []struct {
		name string
		read func() ([]byte, error)
	}{
		{"imported by systemd", func() ([]byte, error) {
			if m.Credentials == "" {
				return nil, ErrAbsent
			}
			return fileOf(filepath.Join(m.Credentials, credentialName), MaxDocument)
		}},
		{"QEMU's fw_cfg", func() ([]byte, error) { return fileOf(filepath.Join(m.Sys, firmwareConfig), MaxDocument) }},
		{"SMBIOS type 11", m.oemString},
	} {
		b, err := from.read()
		if errors.Is(err, ErrAbsent) {
			continue
		}
		f := &Found{}
		f.From = "credential " + credentialName + ", " + from.name
		if err == nil {
			err = f.setDocuments(b)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.From, err)
		}
		return f, nil
	}
	return nil, ErrAbsent
}

func fileOf(name string, limit int64) ([]byte, error) {
	f, err := os.Open(name)
	if missing(err) {
		return nil, ErrAbsent
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readBounded(f, filepath.Base(name), limit)
}

// oemString returns the credential in the OEM strings: io.systemd.credential:NAME=TEXT, or io.systemd.credential.binary:NAME=BASE64.
func (m Machine) oemString() ([]byte, error) {
	files, err := filepath.Glob(filepath.Join(m.Sys, oemStrings))
	if err != nil {
		return nil, err
	}
	slices.Sort(files)
	var found []byte
	for _, name := range files {
		b, err := fileOf(name, maxStructure)
		if err != nil {
			return nil, err
		}
		for _, s := range structureStrings(b) {
			var value []byte
			if text, ok := strings.CutPrefix(s, "io.systemd.credential:"+credentialName+"="); ok {
				value = []byte(text)
			} else if text, ok := strings.CutPrefix(s, "io.systemd.credential.binary:"+credentialName+"="); ok {
				if value, err = base64.StdEncoding.DecodeString(text); err != nil {
					return nil, fmt.Errorf("it is no base64: %w", err)
				}
			} else {
				continue
			}
			if found != nil {
				return nil, errors.New("it is there twice")
			}
			found = value
		}
	}
	if found == nil {
		return nil, ErrAbsent
	}
	return found, nil
}

// structureStrings returns the strings of an SMBIOS structure (DMTF DSP0134, 6.1.3): after the formatted area, whose length is the second byte, each with a
// zero byte at its end, and an empty one at the end of all.
func structureStrings(b []byte) []string {
	if len(b) < 4 || len(b) < int(b[1]) {
		return nil
	}
	all, _, _ := strings.Cut(string(b[b[1]:]), "\x00\x00")
	return strings.Split(all, "\x00")
}

// dmi returns a text of the firmware's tables; empty if there is none.
func (m Machine) dmi(name string) string {
	b, err := os.ReadFile(filepath.Join(m.Sys, "class/dmi/id", name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
