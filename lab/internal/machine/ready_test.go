package machine

import (
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"
)

// notifyReady is the main function of a service with Type=notify.
func notifyReady() int {
	c, err := net.Dial("unixgram", os.Getenv("NOTIFY_SOCKET"))
	if err == nil {
		_, err = c.Write([]byte("STATUS=here\nREADY=1\n"))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM)
	<-end
	return 0
}
