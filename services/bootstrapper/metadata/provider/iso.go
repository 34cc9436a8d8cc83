package provider

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
)

// The volumes that a platform attaches are ISO 9660 file systems with the names of Rock Ridge. This reads the little of it that is needed, in user space: the
// content is an attacker's, and a fault in the kernel's driver would be one of the machine. Sources: ECMA-119 (5th edition), sections 7.3, 8, 9 and 10; IEEE
// P1281 (SUSP); IEEE P1282 (Rock Ridge), 4.1.4.

const (
	isoSector = 2048 // bytes
	// firstDescriptor is the sector of the primary volume descriptor.
	firstDescriptor = 16
	// maxISOFolder bounds a folder, in bytes; one sector has about 15 entries.
	maxISOFolder = 64 << 10
	// maxISODepth bounds the folders of a path.
	maxISODepth = 4
)

var errISO = errors.New("malformed ISO 9660 file system")

// primary reads the primary volume descriptor (ECMA-119, 9.4).
func primary(r io.ReaderAt) ([]byte, error) {
	b := make([]byte, isoSector)
	if _, err := r.ReadAt(b, firstDescriptor*isoSector); err != nil {
		return nil, err
	}
	if b[0] != 1 || string(b[1:6]) != "CD001" {
		return nil, errors.New("no ISO 9660")
	}
	return b, nil
}

func isoLabel(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := primary(f)
	if err != nil {
		return "", err
	}
	return strings.TrimRight(string(b[40:72]), " "), nil
}

// isoEntry is a directory record (ECMA-119, 10.1).
type isoEntry struct {
	name        string
	folder      bool
	first, size int64 // sector; bytes
}

// readISO reads a file of at most limit bytes.
func readISO(r io.ReaderAt, path string, limit int64) ([]byte, error) {
	b, err := primary(r)
	if err != nil {
		return nil, err
	}
	if binary.LittleEndian.Uint16(b[128:]) != isoSector {
		return nil, fmt.Errorf("%w: blocks of another size", errISO)
	}
	at, err := parseRecord(b[156:190])
	if err != nil || !at.folder {
		return nil, errors.Join(fmt.Errorf("%w: no root", errISO), err)
	}
	names := strings.Split(path, "/")
	if len(names) > maxISODepth {
		return nil, fmt.Errorf("%s: more than %d folders", path, maxISODepth)
	}
	for i, name := range names {
		if at, err = lookup(r, at, name); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if at.folder == (i == len(names)-1) {
			return nil, fmt.Errorf("%s: %w: %s is of another kind", path, errISO, name)
		}
	}
	if at.size > limit {
		return nil, fmt.Errorf("%s: longer than %d bytes", path, limit)
	}
	return at.read(r)
}

func (e isoEntry) read(r io.ReaderAt) ([]byte, error) {
	b := make([]byte, e.size)
	if n, err := r.ReadAt(b, e.first*isoSector); n < len(b) {
		return nil, fmt.Errorf("%w: it ends early: %w", errISO, err)
	}
	return b, nil
}

// lookup finds an entry of a folder.
func lookup(r io.ReaderAt, folder isoEntry, name string) (isoEntry, error) {
	if folder.size > maxISOFolder || folder.size%isoSector != 0 {
		return isoEntry{}, fmt.Errorf("%w: a folder of %d bytes", errISO, folder.size)
	}
	b, err := folder.read(r)
	if err != nil {
		return isoEntry{}, err
	}
	for ; len(b) > 0; b = b[isoSector:] { // no record is in two sectors
		for s := b[:isoSector]; len(s) > 0 && s[0] > 0; s = s[s[0]:] {
			if len(s) < int(s[0]) {
				return isoEntry{}, fmt.Errorf("%w: a record of %d bytes", errISO, s[0])
			}
			e, err := parseRecord(s[:s[0]])
			if err != nil {
				return isoEntry{}, err
			}
			if e.name == name {
				return e, nil
			}
		}
	}
	return isoEntry{}, fmt.Errorf("%w (only names of Rock Ridge count: write the volume with the option -rock, not with Joliet alone)", fs.ErrNotExist)
}

// parseRecord parses a directory record. Its name is that of Rock Ridge, or empty.
func parseRecord(b []byte) (e isoEntry, err error) {
	const fixed = 33 // bytes before the identifier
	if len(b) <= fixed || len(b) < fixed+int(b[32]) {
		return e, fmt.Errorf("%w: a record of %d bytes", errISO, len(b))
	}
	le := binary.LittleEndian
	e.first, e.size, e.folder = int64(le.Uint32(b[2:])), int64(le.Uint32(b[10:])), b[25]&2 != 0
	if b[25]&0x80 != 0 || b[26] != 0 || b[1] != 0 {
		return e, fmt.Errorf("%w: a file in several extents", errISO)
	}
	system := b[fixed+int(b[32]):] // the system use area, after the identifier and a byte that makes its end even
	if b[32]%2 == 0 && len(system) > 0 {
		system = system[1:]
	}
	for len(system) >= 4 {
		n := int(system[2])
		if n < 4 || n > len(system) {
			break // padding
		}
		if field := system[:n]; bytes.HasPrefix(field, []byte("NM")) && n > 5 {
			if field[4] != 0 { // the name continues, or is "." or ".."
				return e, nil
			}
			e.name = string(field[5:])
		}
		system = system[n:]
	}
	return e, nil
}
