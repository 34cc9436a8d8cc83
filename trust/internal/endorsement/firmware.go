package endorsement

import (
	"fmt"
	"regexp"
	"strconv"
)

var firmwareVersion = regexp.MustCompile(`^0x[0-9a-f]{16}$`)

// FormatFirmwareVersion returns a TPM's firmware version as a policy has it: "0x" and 16 hexadecimal digits.
func FormatFirmwareVersion(v uint64) string { return fmt.Sprintf("0x%016x", v) }

// ParseFirmwareVersion reads it; 0 if it is empty.
func ParseFirmwareVersion(s string) (uint64, error) {
	if s == "" {
		return 0, nil
	}
	if !firmwareVersion.MatchString(s) {
		return 0, fmt.Errorf("%q is not 0x and 16 lower-case hexadecimal digits", s)
	}
	return strconv.ParseUint(s[2:], 16, 64)
}
