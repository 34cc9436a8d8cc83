// Package firmware replaces measured-boot firmware for a machine of the lab: before anything starts, it hashes the
// files that the machine boots, extends the hashes into the machine's TPM, and writes an event log that explains the
// PCRs.
//
// One function, [Events], determines the event for each file. The firmware calls it with the hashes of the present
// files; [Expected] calls it with the hashes of the image's build. So the values for a policy are known before any
// machine has started, and a changed file is detected, whatever the image claims.
package firmware

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"slices"
	"strconv"
	"unicode/utf16"
)

// PCRs that the lab's firmware uses as real boot chains do: the boot loader or first
// program in 4, what it loads in 9, what configures it in 11.
const (
	PCRBoot   = 4
	PCRLoaded = 9
	PCRConfig = 11
)

// policyPCRs are the PCRs of a machine's policy; those without events stay zero.
var policyPCRs = []int{4, 8, 9, 11, 12, 13, 14}

// Event types: TCG PC Client Platform Firmware Profile (PFP) 1.06, section 10.4.1.
const (
	evNoAction       = 0x00000003
	evSeparator      = 0x00000004
	evSCRTMVersion   = 0x00000008
	evIPL            = 0x0000000d
	evEFIVariable    = 0x80000001 // EV_EFI_VARIABLE_DRIVER_CONFIG
	evEFIApplication = 0x80000003 // EV_EFI_BOOT_SERVICES_APPLICATION
	evEFIAction      = 0x80000007
)

// algSHA256 is TPM_ALG_SHA256 (TPM 2.0 Part 2, section 6.3), the one bank of the lab's TPMs.
const algSHA256 = 0x000b

// A File is one file that gets measured.
type File struct {
	Path   string `json:"path"`   // in the machine
	PCR    int    `json:"pcr"`    // [PCRBoot], [PCRLoaded] or [PCRConfig]
	SHA256 string `json:"sha256"` // lower-case hex
	Size   int64  `json:"size"`   // bytes
}

// An Event is one measurement: the PCR is extended with digest, and the log has data as its description.
type Event struct {
	PCR    int
	Type   uint32
	Digest [sha256.Size]byte
	Data   []byte
}

// Events returns the events of a boot with these files, in the order of measuring.
func Events(files []File) ([]Event, error) {
	events := []Event{ofData(0, evSCRTMVersion, utf16z("muster lab 1"))}
	// The lab has no Secure Boot, and its log records that as PFP section 3.3.4.8 requires.
	for _, v := range []struct {
		name, guid string
		data       []byte
	}{{"SecureBoot", globalVariable, []byte{0}}, {"PK", globalVariable, nil}, {"KEK", globalVariable, nil}, {"db", securityDatabase, nil}, {"dbx", securityDatabase, nil}} {
		events = append(events, ofData(7, evEFIVariable, variable(v.guid, v.name, v.data)))
	}
	events = append(events, ofData(4, evEFIAction, []byte("Calling EFI Application from Boot Option")))
	for pcr := range 8 { // PFP section 3.3.2.2: what is measured before and after the hand-over is kept apart
		events = append(events, ofData(pcr, evSeparator, make([]byte, 4)))
	}
	files = slices.Clone(files)
	slices.SortFunc(files, func(a, b File) int { return cmp.Or(cmp.Compare(a.PCR, b.PCR), cmp.Compare(a.Path, b.Path)) })
	for _, f := range files {
		digest, err := hex.DecodeString(f.SHA256)
		if err != nil || len(digest) != sha256.Size {
			return nil, errDigest(f)
		}
		e := Event{PCR: f.PCR, Digest: [sha256.Size]byte(digest)}
		switch f.PCR {
		case PCRBoot:
			e.Type, e.Data = evEFIApplication, imageLoad(f)
		case PCRLoaded, PCRConfig:
			// As boot loaders do: the digest is of the file, the data is its name.
			e.Type, e.Data = evIPL, append([]byte(f.Path), 0)
		default:
			return nil, errPCR(f)
		}
		events = append(events, e)
	}
	return events, nil
}

// ofData makes an event whose digest is the hash of its data.
func ofData(pcr int, kind uint32, data []byte) Event {
	return Event{PCR: pcr, Type: kind, Digest: sha256.Sum256(data), Data: data}
}

// Measurements are the values for a policy.
type Measurements struct {
	Version int               `json:"version"` // 1
	Bank    string            `json:"bank"`    // "sha256"
	Image   string            `json:"image"`
	PCRs    map[string]string `json:"pcrs"` // PCR index, decimal → value, lower-case hex
}

// Class are the values of the lab's firmware itself, in the format of muster policy from-measurements --class.
type Class struct {
	Version int               `json:"version"` // 1
	Bank    string            `json:"bank"`    // "sha256"
	PCRs    map[string]string `json:"pcrs"`
}

// ExpectedClass computes the PCRs that the lab's firmware results in, independent of what it boots.
func ExpectedClass() (Class, error) {
	events, err := Events(nil)
	if err != nil {
		return Class{}, err
	}
	c := Class{Version: 1, Bank: "sha256", PCRs: map[string]string{}}
	values := Replay(events)
	for _, i := range []int{0, 2, 3, 7} {
		c.PCRs[strconv.Itoa(i)] = hex.EncodeToString(values[i][:])
	}
	return c, nil
}

// Expected computes the PCRs of a machine that boots exactly these files.
func Expected(image string, files []File) (Measurements, error) {
	events, err := Events(files)
	if err != nil {
		return Measurements{}, err
	}
	m := Measurements{Version: 1, Bank: "sha256", Image: image, PCRs: map[string]string{}}
	values := Replay(events)
	for _, i := range policyPCRs {
		m.PCRs[strconv.Itoa(i)] = hex.EncodeToString(values[i][:])
	}
	return m, nil
}

// Replay computes PCR values from events: each value is the hash of the one before it
// and the event's digest (TPM 2.0 Part 1, section 17.2).
func Replay(events []Event) [24][sha256.Size]byte {
	var pcrs [24][sha256.Size]byte
	for _, e := range events {
		pcrs[e.PCR] = sha256.Sum256(append(pcrs[e.PCR][:], e.Digest[:]...))
	}
	return pcrs
}

// Log writes events in the crypto-agile format (PFP section 10.2): a TCG_PCR_EVENT with
// the Spec ID event, then TCG_PCR_EVENT2 records, all little-endian.
func Log(events []Event) []byte {
	var b bytes.Buffer
	put := func(v any) { _ = binary.Write(&b, binary.LittleEndian, v) } // a bytes.Buffer takes all
	id := specID()
	put(uint32(0))
	put(uint32(evNoAction))
	put([20]byte{})
	put(uint32(len(id)))
	put(id)
	for _, e := range events {
		put(uint32(e.PCR))
		put(e.Type)
		put(uint32(1)) // TPML_DIGEST_VALUES.count
		put(uint16(algSHA256))
		put(e.Digest)
		put(uint32(len(e.Data)))
		put(e.Data)
	}
	return b.Bytes()
}

// specID is a TCG_EfiSpecIDEvent (PFP section 10.4.5.1).
func specID() []byte {
	var b bytes.Buffer
	put := func(v any) { _ = binary.Write(&b, binary.LittleEndian, v) }
	put([]byte("Spec ID Event03\x00"))
	put(uint32(0))            // platformClass: client
	put([]byte{0, 2, 106, 2}) // specVersionMinor, specVersionMajor, specErrata, uintnSize (64-bit)
	put(uint32(1))            // numberOfAlgorithms
	put(uint16(algSHA256))    // digestSizes[0].algorithmId
	put(uint16(sha256.Size))  // digestSizes[0].digestSize
	put(uint8(0))             // vendorInfoSize
	return b.Bytes()
}

// imageLoad is a UEFI_IMAGE_LOAD_EVENT (PFP section 10.2.3) whose device path is the
// file's path as a media file path node (UEFI 2.10, section 10.3.5.4).
func imageLoad(f File) []byte {
	name := utf16z(f.Path)
	var p, b bytes.Buffer
	path := func(v any) { _ = binary.Write(&p, binary.LittleEndian, v) }
	path([]byte{4, 4}) // media device path, file path
	path(uint16(4 + len(name)))
	path(name)
	path([]byte{0x7f, 0xff, 4, 0}) // end of the entire device path
	put := func(v any) { _ = binary.Write(&b, binary.LittleEndian, v) }
	put(uint64(0)) // ImageLocationInMemory: there is no one place
	put(uint64(f.Size))
	put(uint64(0)) // ImageLinkTimeAddress
	put(uint64(p.Len()))
	put(p.Bytes())
	return b.Bytes()
}

// GUIDs as UEFI stores them, the first three fields little-endian: EFI_GLOBAL_VARIABLE
// and EFI_IMAGE_SECURITY_DATABASE_GUID (UEFI 2.10, sections 3.3 and 32.6.1).
const (
	globalVariable   = "\x61\xdf\xe4\x8b\xca\x93\xd2\x11\xaa\x0d\x00\xe0\x98\x03\x2b\x8c"
	securityDatabase = "\xcb\xb2\x19\xd7\x3a\x3d\x96\x45\xa3\xbc\xda\xd0\x0e\x67\x65\x6f"
)

// variable is a UEFI_VARIABLE_DATA (PFP section 10.2.6).
func variable(guid, name string, data []byte) []byte {
	n := utf16.Encode([]rune(name))
	var b bytes.Buffer
	put := func(v any) { _ = binary.Write(&b, binary.LittleEndian, v) }
	put([]byte(guid))
	put(uint64(len(n)))
	put(uint64(len(data)))
	put(n)
	put(data)
	return b.Bytes()
}

func utf16z(s string) []byte {
	var b []byte
	for _, u := range append(utf16.Encode([]rune(s)), 0) {
		b = binary.LittleEndian.AppendUint16(b, u)
	}
	return b
}
