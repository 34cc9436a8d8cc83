package metadata

import (
	"errors"
	"net"
	"net/netip"
	"regexp"
	"strconv"
)

var dnsName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$`)

// IsHost reports whether s is a DNS name in lower case (RFC 1123, at most 253 characters) or an IP address without a zone.
func IsHost(s string) bool {
	if a, err := netip.ParseAddr(s); err == nil {
		return a.Zone() == ""
	}
	return len(s) <= 253 && dnsName.MatchString(s)
}

// CheckHostPort returns an error unless s is HOST:PORT, with a host of [IsHost] and a port above zero.
func CheckHostPort(s string) error {
	host, port, err := net.SplitHostPort(s)
	n, perr := strconv.ParseUint(port, 10, 16)
	if err != nil || perr != nil || n == 0 || !IsHost(host) {
		return errors.New("want HOST:PORT")
	}
	return nil
}
