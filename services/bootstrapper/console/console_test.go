package console_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/services/bootstrapper/console"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/trust/atls"
	"github.com/muster-k8s/muster/trust/attest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t *testing.T) (*console.Console, func() string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "console")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := console.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c, func() string {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
}

func TestALineIsToldOnceUntilItChanges(t *testing.T) {
	c, text := open(t)
	for range 3 {
		c.Print("one")
	}
	c.Print("two")
	c.Print("one")
	if got := text(); got != "muster: one\r\nmuster: two\r\nmuster: one\r\n" {
		t.Errorf("%q", got)
	}
}

func TestWaitsReadLikeSentences(t *testing.T) {
	const e = "192.168.77.11:30090"
	refusal := func(r attestv1.Reason, remote bool) error {
		return &attest.Refusal{Reason: r, Remote: remote, Err: errors.New("PCR 4 is 00")}
	}
	for want, w := range map[string]console.Wait{
		"waiting: POLICY_REFUSED by 192.168.77.11:30090 (this machine's measurements are not in the owner's policy), which was not attested as a joinservice; next try in 8 s":                                                                                  {Err: &atls.ExchangeError{Err: refusal(attestv1.Reason_REASON_POLICY_REFUSED, true)}, By: e, Next: 8200 * time.Millisecond},
		"waiting: POLICY_REFUSED by 192.168.77.11:30090 (this machine's measurements are not in the owner's policy); next try in 9 s":                                                                                                                           {Err: &atls.ExchangeError{Accepted: true, Err: refusal(attestv1.Reason_REASON_POLICY_REFUSED, true)}, By: e, Next: 9 * time.Second},
		"waiting: POLICY_REFUSED by 192.168.77.11:30090 (this machine's measurements are not in the owner's policy); next try in 8 s":                                                                                                                           {Err: refusal(attestv1.Reason_REASON_POLICY_REFUSED, true), By: e, Next: 8200 * time.Millisecond},
		"waiting: this machine does not accept what 192.168.77.11:30090 answers: POLICY_REFUSED (its measurements are not in the owner's policy); next try in 1 s":                                                                                              {Err: refusal(attestv1.Reason_REASON_POLICY_REFUSED, false), By: e, Next: time.Millisecond},
		"waiting: no joinservice can be reached at 192.168.77.11:30090, 192.168.77.12:30090; next try in 5 s":                                                                                                                                                   {Err: errors.Join(discovery.ErrUnreachable, &net.OpError{}), Asked: []string{e, "192.168.77.12:30090"}, Next: 5 * time.Second},
		"waiting: the metadata name no joinservice (joinEndpoints); `muster init` can; next try in 5 s":                                                                                                                                                         {Err: discovery.ErrNoJoinservice, Also: "`muster init` can", Next: 5 * time.Second},
		"waiting: STATE_DISK (the state disk can't be used): PCR 4 is 00; next try in 10 min":                                                                                                                                                                   {Err: refusal(attestv1.Reason_REASON_STATE_DISK, false), Next: 10 * time.Minute},
		"waiting: NOT_ENROLLED by 192.168.77.11:30090 (the owner has not enrolled this control plane: muster enroll); next try in 1 s":                                                                                                                          {Err: refusal(attestv1.Reason_REASON_NOT_ENROLLED, true), By: e},
		"waiting: NOT_ENROLLED by 192.168.77.11:30090 (this machine is no longer enrolled, for example after muster forget: it joins as new with an empty state disk, or continues with this one if the owner enrolls it again with its disk); next try in 1 s": {Err: refusal(attestv1.Reason_REASON_NOT_ENROLLED, true), By: e, Was: true},
		"waiting: BANNED by 192.168.77.11:30090 (the owner has banned this machine); next try in 1 s":                                                                                                                                                           {Err: refusal(attestv1.Reason_REASON_BANNED, true), By: e, Was: true},
		"waiting: SIGNATURE_INVALID by 192.168.77.11:30090; next try in 1 s":                                                                                                                                                                                    {Err: refusal(attestv1.Reason_REASON_SIGNATURE_INVALID, true), By: e},
	} {
		c, text := open(t)
		w.For = "waiting"
		c.Waits(w)
		w.Next += time.Minute // no new line
		c.Waits(w)
		if got := text(); got != "muster: "+want+"\r\n" {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// A machine that nobody can log in to shows why an image can't be pulled: the image and the cause, however long the text between is.
func TestTheErrorOfAnOwnStepIsShown(t *testing.T) {
	c, text := open(t)
	c.Waits(console.Wait{For: "waiting", By: "a:1", Next: time.Second,
		Err: attest.Refuse(attestv1.Reason_REASON_COMPONENT_UNAVAILABLE, "image registry/kube-proxy can't be pulled: %s: file exists", strings.Repeat("x", 9999))})
	got := text()
	if !strings.HasPrefix(got, "muster: waiting: COMPONENT_UNAVAILABLE (a listed file or image can't be fetched): image registry/kube-proxy can't be pulled: xxx") ||
		!strings.Contains(got, "xxx: file exists; next try in 1 s") || len(got) > 800 {
		t.Errorf("%d bytes: %q", len(got), got)
	}
}

// A machine without a clock battery finds every certificate invalid: the line shows its time.
func TestAWrongClockCanBeSeen(t *testing.T) {
	c, text := open(t)
	c.Waits(console.Wait{For: "waiting", Err: attest.Refuse(attestv1.Reason_REASON_EK_UNTRUSTED, "x509: not yet valid"), By: "a:1"})
	if got := text(); !strings.Contains(got, "or the clock of this machine is wrong (it shows "+time.Now().UTC().Format("2006-01-02 ")) {
		t.Errorf("%q", got)
	}
}

func TestNothingThatOthersChoseControlsTheTerminal(t *testing.T) {
	c, text := open(t)
	c.Print("node \x1b[2J\r\n\u202e" + strings.Repeat("x", 9999))
	got := text()
	if strings.ContainsAny(strings.TrimSuffix(got, "\r\n"), "\x1b\r\n\u202e") || len(got) > 900 {
		t.Errorf("%d bytes: %.80q", len(got), got)
	}
}

func TestWithoutAConsoleNothingIsTold(t *testing.T) {
	for _, path := range []string{"", filepath.Join(t.TempDir(), "none")} {
		c, err := console.Open(path)
		if err != nil || c != nil {
			t.Fatalf("%v, %v", c, err)
		}
		c.Print("no reader gets this")
		c.Waits(console.Wait{For: "waiting", Err: discovery.ErrNoJoinservice})
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := console.Open(t.TempDir()); err == nil {
		t.Error("a folder is no console")
	}
}

// A stopped terminal takes no text, and must not stop the machine.
func TestAConsoleThatIsStoppedStopsNobody(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	c, err := console.Open("/proc/self/fd/" + fdOf(t, w))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 133 { // more than a pipe of 64 KiB takes
			c.Print(strings.Repeat("x", 490) + strings.Repeat("y", i%7))
		}
	}()
	select {
	case <-done:
	case <-time.After(5 * time.Minute):
		t.Fatal("it hangs")
	}
}

func fdOf(t *testing.T, f *os.File) string {
	t.Helper()
	raw, err := f.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var out string
	if err := raw.Control(func(fd uintptr) { out = strconv.Itoa(int(fd)) }); err != nil {
		t.Fatal(err)
	}
	return out
}
