package daemon

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
)

func TestWhatAVirtualMachineMustHave(t *testing.T) {
	good := VMRequest{Name: "node7", Number: 7, Image: "/image.raw"}
	if err := good.check(); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*VMRequest){
		"no image": func(r *VMRequest) { r.Image = "" }, "an image that depends on who asks": func(r *VMRequest) { r.Image = "image.raw" },
		"a name that is a path": func(r *VMRequest) { r.Name = "../x" }, "no number": func(r *VMRequest) { r.Number = 0 },
	} {
		r := good
		spoil(&r)
		if r.check() == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

// booting is a lab with virtual machines that boot, each abort of which is reported.
func booting(names ...string) (*Daemon, chan string) {
	d, aborted := &Daemon{machines: map[string]*running{}}, make(chan string, len(names))
	for _, n := range names {
		v := newVirtual("/nowhere", VMRequest{Name: n})
		v.abort = func(error) { aborted <- n }
		d.machines[n] = &running{Machine: Machine{Name: n}, virtual: v}
	}
	return d, aborted
}

func TestAThirdVirtualMachineStaysOffUntilOneOfTheOthersIs(t *testing.T) {
	d, _ := booting("node7", "node8")
	d.machines["node1"] = &running{Machine: Machine{Name: "node1"}} // not a virtual one
	third := &running{Machine: Machine{Name: "node9"}, virtual: newVirtual("/nowhere", VMRequest{Name: "node9"})}
	d.machines["node9"] = third
	abort := func(error) {}
	if err := d.takePower(third, abort); err == nil || !strings.Contains(err.Error(), "lab vm kill") || !strings.Contains(err.Error(), "node9 stays off") {
		t.Errorf("%v", err)
	}
	if third.virtual.powered() {
		t.Error("it was refused, and counts as powered")
	}
	d.machines["node8"].virtual.abort = nil // its boot is over, and QEMU has ended
	if err := d.takePower(third, abort); err != nil {
		t.Error(err)
	}
	if !third.virtual.powered() {
		t.Error("it boots, and doesn't count")
	}
	if err := d.takePower(d.machines["node7"], abort); err != nil {
		t.Errorf("a machine was counted against itself: %v", err)
	}
}

func TestAPowerCutEndsABoot(t *testing.T) {
	d, aborted := booting("node7")
	v := d.machines["node7"].virtual
	v.slot <- struct{}{} // as a boot does
	ended := make(chan error)
	go func() { ended <- d.kill(t.Context(), "node7") }()
	if name := <-aborted; name != "node7" {
		t.Errorf("%s lost its power", name)
	}
	<-v.slot
	if err := <-ended; err != nil {
		t.Error(err)
	}
	v.slot <- struct{}{} // a boot that doesn't end
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := v.end(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

func TestCommandsForVirtualMachinesSayWhenThereIsNone(t *testing.T) {
	d, _ := booting()
	d.machines["node1"] = &running{Machine: Machine{Name: "node1"}}
	for _, name := range []string{"node1", "node2"} {
		if _, err := d.rebootVM(t.Context(), name, BootRequest{}); err == nil || !strings.Contains(err.Error(), "no virtual machine") {
			t.Errorf("reboot %s: %v", name, err)
		}
		if err := d.stopVM(t.Context(), name); err == nil || !strings.Contains(err.Error(), "no virtual machine") {
			t.Errorf("stop %s: %v", name, err)
		}
	}
	d.machines["node7"] = &running{Machine: Machine{Name: "node7"}, virtual: newVirtual("/nowhere", VMRequest{})}
	if err := d.stopVM(t.Context(), "node7"); err == nil || !strings.Contains(err.Error(), "no power") {
		t.Errorf("stop a machine that is off: %v", err)
	}
	if _, err := d.rebootVM(t.Context(), "node7", BootRequest{Image: "image.raw"}); err == nil || !strings.Contains(err.Error(), "absolute") {
		t.Errorf("%v", err)
	}
}
