package eventlog

import (
	"encoding/binary"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf16"
)

// Type is the kind of an event (PC Client Platform Firmware Profile, section 10.4.1).
type Type uint32

// The types that this package knows by name.
const (
	Separator               = Type(0x00000004)
	Action                  = Type(0x00000005)
	EventTag                = Type(0x00000006)
	SCRTMContents           = Type(0x00000007)
	SCRTMVersion            = Type(0x00000008)
	IPL                     = Type(0x0000000D)
	EFIVariableDriverConfig = Type(0x80000001)
	EFIVariableBoot         = Type(0x80000002)
	EFIBootApplication      = Type(0x80000003)
	EFIBootServicesDriver   = Type(0x80000004)
	EFIAction               = Type(0x80000007)
	EFIFirmwareBlob         = Type(0x80000008)
	EFIVariableAuthority    = Type(0x800000E0)
)

var typeNames = map[Type]string{
	0x00000000:              "EV_PREBOOT_CERT",
	0x00000001:              "EV_POST_CODE",
	Separator:               "EV_SEPARATOR",
	Action:                  "EV_ACTION",
	EventTag:                "EV_EVENT_TAG",
	SCRTMContents:           "EV_S_CRTM_CONTENTS",
	SCRTMVersion:            "EV_S_CRTM_VERSION",
	0x00000009:              "EV_CPU_MICROCODE",
	0x0000000A:              "EV_PLATFORM_CONFIG_FLAGS",
	0x0000000B:              "EV_TABLE_OF_DEVICES",
	0x0000000C:              "EV_COMPACT_HASH",
	IPL:                     "EV_IPL",
	0x0000000E:              "EV_IPL_PARTITION_DATA",
	0x0000000F:              "EV_NONHOST_CODE",
	0x00000010:              "EV_NONHOST_CONFIG",
	0x00000011:              "EV_NONHOST_INFO",
	0x00000012:              "EV_OMIT_BOOT_DEVICE_EVENTS",
	0x00000013:              "EV_POST_CODE2",
	EFIVariableDriverConfig: "EV_EFI_VARIABLE_DRIVER_CONFIG",
	EFIVariableBoot:         "EV_EFI_VARIABLE_BOOT",
	EFIBootApplication:      "EV_EFI_BOOT_SERVICES_APPLICATION",
	EFIBootServicesDriver:   "EV_EFI_BOOT_SERVICES_DRIVER",
	0x80000005:              "EV_EFI_RUNTIME_SERVICES_DRIVER",
	0x80000006:              "EV_EFI_GPT_EVENT",
	EFIAction:               "EV_EFI_ACTION",
	EFIFirmwareBlob:         "EV_EFI_PLATFORM_FIRMWARE_BLOB",
	0x80000009:              "EV_EFI_HANDOFF_TABLES",
	0x8000000A:              "EV_EFI_PLATFORM_FIRMWARE_BLOB2",
	0x8000000B:              "EV_EFI_HANDOFF_TABLES2",
	0x8000000C:              "EV_EFI_VARIABLE_BOOT2",
	0x8000000D:              "EV_EFI_GPT_EVENT2",
	0x80000010:              "EV_EFI_HCRTM_EVENT",
	EFIVariableAuthority:    "EV_EFI_VARIABLE_AUTHORITY",
	0x800000E1:              "EV_EFI_SPDM_FIRMWARE_BLOB",
	0x800000E2:              "EV_EFI_SPDM_FIRMWARE_CONFIG",
}

// String returns the name in the specification, or the number.
func (t Type) String() string {
	if n, ok := typeNames[t]; ok {
		return n
	}
	return fmt.Sprintf("0x%08x", uint32(t))
}

// coversData reports whether the digest must be the hash of the data. The specification requires it
// for other types too, but they are left out because existing firmware hashes only parts of them.
func (t Type) coversData() bool {
	switch t {
	case Separator, Action, EFIAction:
		return true
	default:
		return false
	}
}

// globalVariable is EFI_GLOBAL_VARIABLE, 8be4df61-93ca-11d2-aa0d-00e098032b8c, as stored in the
// log.
const globalVariable = "\x61\xdf\xe4\x8b\xca\x93\xd2\x11\xaa\x0d\x00\xe0\x98\x03\x2b\x8c"

const maxVariableName = 128 // UTF-16 code units

// variable is UEFI_VARIABLE_DATA (section 10.2.6).
type variable struct {
	guid, name string
	data       []byte
}

func parseVariable(b []byte) (variable, bool) {
	if len(b) < 32 {
		return variable{}, false
	}
	units, size := binary.LittleEndian.Uint64(b[16:]), binary.LittleEndian.Uint64(b[24:])
	rest := b[32:]
	if units > maxVariableName || 2*units > uint64(len(rest)) || size != uint64(len(rest))-2*units {
		return variable{}, false
	}
	return variable{guid: string(b[:16]), name: fromUTF16(rest[:2*units]), data: rest[2*units:]}, true
}

func fromUTF16(b []byte) string {
	u := make([]uint16, 0, len(b)/2)
	for i := 0; i+1 < len(b); i += 2 {
		u = append(u, binary.LittleEndian.Uint16(b[i:]))
	}
	return string(utf16.Decode(u))
}

const maxText = 256 // characters

// text returns an event's data in readable form. It need not be the data that was hashed.
func text(e Event) string {
	switch e.Type {
	case EFIVariableDriverConfig, EFIVariableBoot, EFIVariableAuthority, 0x8000000C:
		if v, ok := parseVariable(e.Data); ok {
			if len(v.data) == 1 {
				return printable(fmt.Sprintf("%s=%d", v.name, v.data[0]))
			}
			return printable(fmt.Sprintf("%s, %d bytes", v.name, len(v.data)))
		}
	case EFIBootApplication, EFIBootServicesDriver, 0x80000005:
		if path := devicePath(e.Data); path != "" {
			return printable(path)
		}
	case Separator:
		return fmt.Sprintf("%x", e.Data[:min(4, len(e.Data))])
	default:
	}
	b := e.Data[:min(len(e.Data), 4*maxText)]
	if len(b) >= 4 && b[1] == 0 && b[3] == 0 { // systemd and shim write UTF-16
		return printable(fromUTF16(b))
	}
	return printable(string(b))
}

// devicePath finds the files in a UEFI_IMAGE_LOAD_EVENT (section 10.2.3): four fields of 8 bytes,
// then nodes of type, subtype, length (2 bytes) (UEFI 2.10, 10.3.1).
func devicePath(b []byte) string {
	if len(b) < 32 {
		return ""
	}
	var files []string
	for b = b[32:]; len(b) >= 4; {
		n := int(binary.LittleEndian.Uint16(b[2:]))
		if n < 4 || n > len(b) {
			break
		}
		if b[0] == 4 && b[1] == 4 { // media, file path
			files = append(files, fromUTF16(b[4:n]))
		}
		b = b[n:]
	}
	return strings.Join(files, "")
}

// printable keeps at most maxText printable characters.
func printable(s string) string {
	var out strings.Builder
	n := 0
	for _, r := range strings.TrimRight(s, "\x00\r\n ") {
		if n++; n > maxText {
			break
		}
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			r = '.'
		}
		out.WriteRune(r)
	}
	return out.String()
}
