package main

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"syscall"
)

// setRoute adds or replaces the IPv4 route to dst by way of via: one RTM_NEWROUTE
// message with NLM_F_REPLACE (rtnetlink(7)).
func setRoute(dst netip.Prefix, via netip.Addr) error {
	if !dst.Addr().Is4() || !via.Is4() {
		return errors.New("the lab's pod network is IPv4 only")
	}
	fd, err := syscall.Socket(syscall.AF_NETLINK, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, syscall.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer func() { _ = syscall.Close(fd) }() // a socket: nothing is lost
	if err := syscall.Sendto(fd, routeMessage(dst, via), 0, &syscall.SockaddrNetlink{Family: syscall.AF_NETLINK}); err != nil {
		return err
	}
	answer := make([]byte, 4096)
	n, _, err := syscall.Recvfrom(fd, answer, 0)
	if err != nil {
		return err
	}
	if n < 20 || binary.NativeEndian.Uint16(answer[4:]) != syscall.NLMSG_ERROR {
		return errors.New("unexpected answer from rtnetlink")
	}
	if e := int32(binary.NativeEndian.Uint32(answer[16:])); e != 0 { // 0 is the acknowledgement
		return syscall.Errno(-e)
	}
	return nil
}

func routeMessage(dst netip.Prefix, via netip.Addr) []byte {
	attr := func(kind uint16, v []byte) []byte {
		b := make([]byte, 4, 4+len(v))
		binary.NativeEndian.PutUint16(b, uint16(4+len(v)))
		binary.NativeEndian.PutUint16(b[2:], kind)
		return append(b, v...)
	}
	body := []byte{ // struct rtmsg
		syscall.AF_INET, byte(dst.Bits()), 0, 0,
		syscall.RT_TABLE_MAIN, syscall.RTPROT_STATIC, syscall.RT_SCOPE_UNIVERSE, syscall.RTN_UNICAST, 0, 0, 0, 0,
	}
	body = append(body, attr(syscall.RTA_DST, dst.Masked().Addr().AsSlice())...)
	body = append(body, attr(syscall.RTA_GATEWAY, via.AsSlice())...)
	head := make([]byte, 16) // struct nlmsghdr
	binary.NativeEndian.PutUint32(head, uint32(16+len(body)))
	binary.NativeEndian.PutUint16(head[4:], syscall.RTM_NEWROUTE)
	binary.NativeEndian.PutUint16(head[6:], syscall.NLM_F_REQUEST|syscall.NLM_F_ACK|syscall.NLM_F_CREATE|syscall.NLM_F_REPLACE)
	return slices.Concat(head, body)
}
