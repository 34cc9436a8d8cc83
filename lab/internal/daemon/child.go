package daemon

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"

	"github.com/muster-k8s/muster/lab/internal/host"
	"github.com/muster-k8s/muster/lab/internal/machine"
)

// A child is a process that the daemon started, with the two pipes of package machine.
type child struct {
	cmd     *exec.Cmd
	process host.Process
	report  *bufio.Scanner
	pipe    *os.File // report's read end
	plug    *os.File
	logPath string
	done    chan struct{} // closed when the process has ended
}

// start starts cmd with its output in the file logPath.
func (d *Daemon) start(_ context.Context, cmd *exec.Cmd, logPath string, adjust ...func(*exec.Cmd)) (*child, error) {
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	reportR, reportW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer reportW.Close()
	plugR, plugW, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, reportR.Close())
	}
	defer plugR.Close()
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{reportW, plugR}
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	for _, a := range adjust {
		a(cmd)
	}
	if err := d.spawn(cmd); err != nil {
		return nil, errors.Join(err, reportR.Close(), plugW.Close())
	}
	c := &child{cmd: cmd, report: bufio.NewScanner(reportR), pipe: reportR, plug: plugW, logPath: logPath, done: make(chan struct{})}
	c.process, err = host.ProcessOf(cmd.Process.Pid)
	go func() {
		_ = cmd.Wait() // how it ended is in its log
		close(c.done)
	}()
	if err != nil {
		return nil, errors.Join(err, cmd.Process.Kill())
	}
	return c, nil
}

// next waits for the child's next report.
func (c *child) next(ctx context.Context) (machine.Report, error) {
	defer context.AfterFunc(ctx, func() { _ = c.pipe.Close() })()
	var r machine.Report
	if !c.report.Scan() {
		return r, errors.Join(fmt.Errorf("it ended early; its last words in %s:\n%s", c.logPath, lastLines(c.logPath)), c.report.Err(), ctx.Err())
	}
	if err := json.Unmarshal(c.report.Bytes(), &r); err != nil {
		return r, err
	}
	if r.Error != "" {
		return r, errors.New(r.Error)
	}
	return r, nil
}

// boot signals that the cable is in and waits until the child is ready.
func (c *child) boot(ctx context.Context) error {
	defer c.pipe.Close()
	_, err := c.plug.Write([]byte{1})
	if err := errors.Join(err, c.plug.Close()); err != nil {
		return err
	}
	for {
		r, err := c.next(ctx)
		if err != nil || r.Ready {
			return err
		}
	}
}

// end kills the child and waits for it.
func (c *child) end(ctx context.Context) error {
	if err := c.process.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	select {
	case <-c.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("process %d doesn't end: %w", c.process.PID, ctx.Err())
	}
}

func lastLines(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	const most = 2000
	if fi, err := f.Stat(); err == nil && fi.Size() > most {
		_, _ = f.Seek(-most, io.SeekEnd)
	}
	b, err := io.ReadAll(f)
	if err != nil {
		return err.Error()
	}
	return string(b)
}
