package doctor

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/muster-k8s/muster/internal/checkup"
)

// bracketed matches the level in force, in the file of kernel_lockdown(7).
var bracketed = regexp.MustCompile(`\[(\w+)\]`)

// kernel checks whether root of the running system can change the measured kernel (B6), and whether containers have an AppArmor profile. Muster's image
// passes all of these checks.
func (d *doctor) kernel() {
	level := "none"
	if m := bracketed.FindStringSubmatch(d.value("/sys/kernel/security/lockdown")); m != nil {
		level = m[1]
	}
	if level == "none" {
		d.Add(CheckKernel, checkup.Warn, "Add lockdown=confidentiality to the image's command line (kernel_lockdown(7)).", "it is not locked down: root can change the kernel, and evidence still shows what was booted")
	}
	for _, c := range []struct{ file, want, remedy, detail string }{
		{"/sys/module/module/parameters/sig_enforce", "Y", "Add module.sig_enforce=1 to the image's command line.", "it loads modules without a signature"},
		{"/proc/sys/kernel/kexec_load_disabled", "1", "Add sysctl.kernel.kexec_load_disabled=1 to the image's command line.", "root can start another kernel by kexec, and evidence still shows what was booted"},
		{"/sys/module/apparmor/parameters/enabled", "Y", "Add apparmor to lsm= in the image's command line.", "AppArmor is off: no profile confines containers"},
	} {
		if d.value(c.file) != c.want {
			d.Add(CheckKernel, checkup.Warn, c.remedy, "%s", c.detail)
		}
	}
	if _, err := os.Stat(filepath.Join(d.Root, "/sbin/apparmor_parser")); err != nil { // where containerd looks for it
		d.Add(CheckKernel, checkup.Warn, "Put Debian's package apparmor, or another one with /sbin/apparmor_parser, into the image.", "without AppArmor's parser containerd gives containers no profile: %v", err)
	}
	if d.Clean(CheckKernel) {
		d.OK(CheckKernel, "lockdown: %s; modules are signed, no kexec, AppArmor is on", level)
	}
}

// value returns a file of the kernel's without the end of its line; empty if it can't be read.
func (d *doctor) value(name string) string {
	b, err := os.ReadFile(filepath.Join(d.Root, name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
