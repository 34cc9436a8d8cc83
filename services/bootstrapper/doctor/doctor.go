// Package doctor checks on a machine itself what could keep it from becoming or staying a node. It only reads, runs beside the bootstrapper, and does
// not depend on it.
package doctor

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/muster-k8s/muster/internal/checkup"
	"github.com/muster-k8s/muster/services/bootstrapper/discovery"
	"github.com/muster-k8s/muster/services/bootstrapper/journal"
	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
	"github.com/muster-k8s/muster/services/bootstrapper/renewal"
	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/attest/tpm2/eventlog"
	"github.com/muster-k8s/muster/trust/tpm"
)

// These are the names of the checks, in their order.
const (
	CheckImage        = "image.yaml"
	CheckMetadata     = "metadata.yaml"
	CheckTPM          = "TPM"
	CheckEK           = "EK certificate"
	CheckEventLog     = "event log"
	CheckJournal      = "journal"
	CheckLock         = "node lock"
	CheckClock        = "clock"
	CheckJoinservices = "joinservices"
	CheckDisk         = "disk space"
	CheckPorts        = "ports"
	CheckCertificates = "certificates"
	CheckKernel       = "kernel"
	CheckUnits        = "units"
)

// These bound disk space, in bytes: for Kubernetes' images, and for a journal that must always be writable.
const (
	lowSpace = 2 << 30
	noSpace  = 256 << 20
)

// Clocks that differ by more than these cause a warning or a failure; see docs/status-and-doctor.md.
const (
	warnSkew = time.Minute
	failSkew = 5 * time.Minute
)

// TPM is the part of the TPM that the checks use.
type TPM interface {
	tpm2.Endorser
	ReadPCR(ctx context.Context, bank tpm.Bank, pcr int) ([]byte, error)
	CertificateIndex(ctx context.Context) (tpm.CertificateIndex, error)
}

// Config configures the checks. All fields are required but Roots.
type Config struct {
	// Root is the folder that has a control plane's certificates and the kernel's files: "/" on a machine.
	Root string
	// Image and Metadata are the paths of the two files, Found that of metadata which the machine has found itself, Journal that of the journal.
	Image, Metadata, Found, Journal string
	// OpenTPM opens the TPM that the image names.
	OpenTPM func(*metadata.Image) (TPM, error)
	// Roots certify EK certificates, as in the owner's policy; empty: the image's roots.
	Roots []*x509.Certificate
	// Folders must have free space.
	Folders []string
	// Ports must be free before the machine is a node, for kubeadm.
	Ports []int
	// Built is a time that the machine's clock can't be before: the time of the program's file.
	Built time.Time
	// Now returns the time.
	Now func() time.Time
}

type doctor struct {
	Config
	checkup.Report
	image  *metadata.Image
	meta   *metadata.Machine
	record *journal.Record
	device TPM
	bank   tpm.Bank
}

// Examine makes all possible checks.
func Examine(ctx context.Context, cfg Config) *checkup.Report {
	d := &doctor{Config: cfg}
	d.files()
	d.memory()
	if d.image != nil {
		d.tpm(ctx)
	}
	if d.device != nil {
		d.eventLog(ctx)
		d.lock(ctx)
	}
	d.clock()
	if d.meta != nil {
		d.joinservices(ctx)
	}
	d.space()
	d.ports(ctx)
	d.certificates()
	d.kernel()
	d.kubeletUnit()
	return &d.Report
}

func (d *doctor) files() {
	var err error
	if d.image, err = metadata.LoadImage(d.Image); err != nil {
		d.Err(CheckImage, "Correct the image's configuration and rebuild the image: the file is measured.", err)
	} else {
		d.OK(CheckImage, "valid, state disk %s", d.image.StateDisk.Mode)
		const remedy = "Put ownerKeys into the image, so that its machines verify joinservices by their owner's policy."
		if err := d.image.KnowsOwner(); err != nil {
			d.Err(CheckImage, remedy, err)
		} else if d.image.NoOwnerKey {
			d.Add(CheckImage, checkup.Warn, remedy, "insecure.noOwnerKey: joinservices are only compared with what this machine booted, so a worker could pose as one")
		}
		if d.image.StateDisk.Integrity == metadata.IntegrityNone {
			d.Add(CheckImage, checkup.Warn, "Build the image with stateDisk.integrity: hmac-sha256, and reset its machines, so that they format their disks again.", "stateDisk.integrity is none: a change of the state disk by an attacker is not detected")
		}
	}
	if d.meta, err = metadata.LoadMachine(d.Metadata, d.Found); err != nil {
		d.Err(CheckMetadata, "Correct the machine's metadata; the bootstrapper reads them again at each attempt, and on a machine without the file it looks for them (docs/metadata.md).", err)
		return
	}
	from := d.Metadata
	if d.meta.Source != nil {
		from = d.meta.Source.String()
	}
	d.OK(CheckMetadata, "valid: %s, %s, %s; from %s", d.meta.Name, d.meta.Role, d.meta.Addresses[0], from)
	if len(d.meta.JoinEndpoints) == 0 && d.meta.InitSecretHash == nil {
		d.Add(CheckMetadata, checkup.Fail, "Name joinEndpoints, or initSecretHash on the machine that becomes the first.", "they name no joinEndpoints and allow no init, so nothing will happen")
	}
}

func (d *doctor) memory() {
	rec, err := journal.Open(d.Journal).Load()
	if err != nil {
		d.Err(CheckJournal, "Look at the disk. To start over, "+discovery.StartOver+".", err)
		return
	}
	d.record = &rec
	disk := ""
	if rec.DiskID != "" {
		disk = ", with the state disk " + rec.DiskID
	}
	d.OK(CheckJournal, "the machine is at the step %s%s", rec.Step, disk)
}

func (d *doctor) tpm(ctx context.Context) {
	device, err := d.OpenTPM(d.image)
	if err == nil {
		d.bank, err = tpm.ParseBank(d.image.TPM.Bank)
	}
	if err == nil {
		_, err = device.ReadPCR(ctx, d.bank, 0)
	}
	if err != nil {
		d.Err(CheckTPM, "Switch the TPM 2.0 on in the firmware, and check tpm.device and tpm.bank of image.yaml.", err)
		return
	}
	d.device = device
	d.OK(CheckTPM, "%s answers, bank %s", d.image.TPM.Device, d.bank)
	id, endorsement, err := tpm2.Identity(ctx, device)
	if endorsement != "nitro-tpm" { // which no certificate in the TPM endorses
		d.index(ctx)
	}
	if err != nil {
		d.Err(CheckEK, "Look at the certificates in the TPM's NV memory: the machine does not attest with one that does not fit its key.", err)
		return
	}
	switch endorsement {
	case "platform-ak":
		d.platformKey(ctx, id)
		return
	case "nitro-tpm":
		if d.bank != tpm.SHA384 {
			d.Add(CheckEK, checkup.Fail, "Set tpm.bank of image.yaml to sha384, build the image, and take its measurements and machine classes in this bank.", "AWS's documents have PCRs of the bank sha384 alone, so this machine (nitro-tpm, %s) can't attest with %s", id, d.bank)
			return
		}
		d.OK(CheckEK, "not used: NitroTPM's document endorses machine %s (nitro-tpm), by a rule in tpm2.nitroRoots of the policy", id)
		return
	case "bare-ek":
		d.Add(CheckEK, checkup.Warn, "List the machine in tpm2.bareMachineIds of the policy, if you know that this is its ID; or have the TPM's maker or your own authority issue a certificate and write it into the TPM's NV memory (TCG EK Credential Profile, section 2.2.1).", "the TPM holds none (bare-ek, machine %s): only a policy that lists the machine accepts it", id)
		return
	}
	ek, err := device.EndorsementKey(ctx)
	var leaf *x509.Certificate
	if err == nil {
		leaf, err = x509.ParseCertificate(ek.Certificates[0])
	}
	if err != nil {
		d.Err(CheckEK, "Have its maker or your own authority issue one and write it into the TPM's NV memory (TCG EK Credential Profile, section 2.2.1).", err)
		return
	}
	d.chain(leaf, ek.Certificates[1:])
}

// index warns of a certificate's NV index that root on this machine could have defined, in an earlier boot too: with junk in it, the
// machine does not attest any more.
func (d *doctor) index(ctx context.Context) {
	i, err := d.device.CertificateIndex(ctx)
	switch {
	case errors.Is(err, tpm.ErrNoCertificate):
	case err != nil:
		d.Err(CheckEK, "Look at the NV indices of the TPM (tpm2_nvreadpublic).", err)
	case !i.PlatformCreated:
		d.Add(CheckEK, checkup.Warn, fmt.Sprintf("If neither you nor your cloud has written it, remove it from a system that you trust: tpm2_nvundefine -C o 0x%08x (docs/endorsements.md#a-certificate-that-is-not-the-makers).", i.Index),
			"NV index 0x%08x decides by which key this machine is known, and the platform has not created it: whoever was root here may have", i.Index)
	}
}

// platformKey reports when the certificate of the cloud's platform key ends. After that, each verifier refuses the machine.
func (d *doctor) platformKey(ctx context.Context, id attest.MachineID) {
	chain, err := d.device.PlatformCertificates(ctx)
	var leaf *x509.Certificate
	if err == nil {
		leaf, err = x509.ParseCertificate(chain[0])
	}
	if err != nil {
		d.Err(CheckEK, "Look at the certificates in the TPM's NV memory: the machine does not attest with one that does not fit its key.", err)
		return
	}
	const (
		remedy = "Only the cloud can renew it. If it does not, replace the machine by a new one, whose key gets a new certificate (docs/endorsements.md#platform-ak)."
		what   = "not used: the cloud's platform key endorses machine %s (platform-ak), by a rule in tpm2.platformRoots of the policy; its certificate "
	)
	end := leaf.NotAfter.UTC().Format(time.RFC3339)
	switch now := d.Now(); {
	case now.After(leaf.NotAfter):
		d.Add(CheckEK, checkup.Fail, remedy, what+"ended at %s, so the machine is refused with EK_UNTRUSTED", id, end)
	case leaf.NotAfter.Sub(now) < leaf.NotAfter.Sub(leaf.NotBefore)/10: // as the alert MusterCertificateExpires
		d.Add(CheckEK, checkup.Warn, remedy, what+"ends at %s", id, end)
	default:
		d.OK(CheckEK, what+"ends at %s", id, end)
	}
}

func (d *doctor) chain(leaf *x509.Certificate, more [][]byte) {
	roots := d.Roots
	if len(roots) == 0 {
		roots = d.image.EKRoots
	}
	id := attest.MachineIDOf(leaf.RawSubjectPublicKeyInfo)
	if len(roots) == 0 {
		d.OK(CheckEK, "present, of machine %s; name the owner's EK roots to verify it (--ek-roots)", id)
		return
	}
	// Critical extensions that x509 does not know, as TCG's names in the SAN, are left to the verifier.
	c := *leaf
	c.UnhandledCriticalExtensions = nil
	opts := x509.VerifyOptions{Roots: x509.NewCertPool(), Intermediates: x509.NewCertPool(), CurrentTime: d.Now(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}
	for _, r := range roots {
		opts.Roots.AddCert(r)
	}
	for _, der := range more {
		if i, err := x509.ParseCertificate(der); err == nil {
			opts.Intermediates.AddCert(i)
		}
	}
	if _, err := c.Verify(opts); err != nil {
		d.Err(CheckEK, "Add the authority that issued it to tpm2.ekRoots of the policy, if it is one of yours; an authority in between belongs beside the certificate in the TPM.", fmt.Errorf("of machine %s, issued by %q: %w", id, leaf.Issuer, err))
		return
	}
	d.OK(CheckEK, "of machine %s, certified by a root", id)
}

func (d *doctor) eventLog(ctx context.Context) {
	log, err := eventlog.Read(d.image.TPM.EventLog, d.bank)
	if err != nil {
		d.Err(CheckEventLog, "Check tpm.eventLog of image.yaml. A machine whose log is not there, or too long, can't attest; one whose log does not follow the specification is accepted only by a class that lists values of PCRs.", err)
		return
	}
	var pcrs [tpm.PCRCount][]byte
	for i := range pcrs {
		if pcrs[i], err = d.device.ReadPCR(ctx, d.bank, i); err != nil {
			d.Err(CheckTPM, "Look at the kernel's log for the TPM.", err)
			return
		}
	}
	r, err := eventlog.Replay(log, pcrs)
	if err != nil {
		d.Err(CheckEventLog, "Reboot the machine. If the error persists, its firmware's log does not match its PCR values: update the firmware.", err)
		return
	}
	fw, err := r.Firmware()
	if err != nil {
		d.Add(CheckEventLog, checkup.Warn, "Accept this machine by a class that lists values of PCRs (muster policy add-class), not by one with rules over the event log.", "%v", err)
		return
	}
	d.OK(CheckEventLog, "%d events lead to the PCR values; Secure Boot is %s; %d drivers from outside the firmware", len(r.Events), map[bool]string{true: "on", false: "off"}[fw.SecureBoot], len(fw.Drivers))
}

// lock compares PCR 15 with the journal (B1).
func (d *doctor) lock(ctx context.Context) {
	hash, ok := d.bank.Hash()
	if d.record == nil || !ok {
		return
	}
	now, err := d.device.ReadPCR(ctx, d.bank, attest.LockPCR)
	if err != nil {
		d.Err(CheckTPM, "Look at the kernel's log for the TPM.", err)
		return
	}
	zero := len(strings.Trim(string(now), "\x00")) == 0
	switch {
	case zero && !d.record.Locked():
		d.OK(CheckLock, "unlocked")
	case d.record.Locked() && string(now) == string(attest.LockValue(hash, [32]byte(d.record.ClusterID))):
		d.OK(CheckLock, "locked to cluster %x", []byte(d.record.ClusterID[:8]))
	case zero:
		d.Add(CheckLock, checkup.Warn, "Reboot the machine, which then takes the lock again: `muster reboot NODE`.", "the journal has the state locked, but PCR 15 is zero")
	default:
		d.Add(CheckLock, checkup.Fail, "Reboot the machine: it was locked to another cluster since it booted.", "PCR 15 is %x, which is not what the journal's cluster gives", now)
	}
}

func (d *doctor) clock() {
	if now := d.Now(); now.Before(d.Built.Add(-24 * time.Hour)) {
		d.Add(CheckClock, checkup.Fail, "Set the clock (NTP): certificates are not valid yet at such a time.", "it shows %s, and the bootstrapper was built at %s", now.UTC().Format(time.RFC3339), d.Built.UTC().Format(time.RFC3339))
	}
}

// joinservices checks that each joinservice answers, as any HTTPS client does. The bootstrapper verifies whether it is the right one.
func (d *doctor) joinservices(ctx context.Context) {
	var order discovery.Order
	if err := order.Update(ctx, d.meta, nil, slog.New(slog.DiscardHandler)); err != nil {
		d.Err(CheckJoinservices, "Check joinEndpoints in the metadata, the SRV records there (dig SRV NAME), and the machine's name servers.", err)
		return
	}
	reached := 0
	for _, e := range order.List() {
		theirs, took, err := ask(ctx, e)
		if err != nil {
			d.Add(CheckJoinservices, checkup.Warn, "Check the network to there, and on the control plane that muster-joinservice is ready.", "%s: %v", e, err)
			continue
		}
		reached++
		off := max(0, theirs.Sub(d.Now()).Abs()-took-time.Second).Round(time.Second)
		const remedy = "Set both clocks by NTP: with wrong ones, certificates are not yet or no longer valid."
		switch {
		case off > failSkew:
			d.Add(CheckClock, checkup.Fail, remedy, "%s off that of %s", off, e)
		case off > warnSkew:
			d.Add(CheckClock, checkup.Warn, remedy, "%s off that of %s", off, e)
		}
	}
	switch n := len(order.List()); {
	case n > 0 && reached == 0:
		d.Add(CheckJoinservices, checkup.Fail, "Check joinEndpoints in the metadata, the network, and that the cluster runs.", "none of %d answers", n)
	case n > 0:
		d.OK(CheckJoinservices, "%d of %d answer", reached, n)
	}
	if d.Clean(CheckClock) {
		d.OK(CheckClock, "%s, plausible", d.Now().UTC().Format(time.RFC3339))
	}
}

// ask returns the time of a joinservice's clock.
func ask(ctx context.Context, endpoint string) (theirs time.Time, took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	//nolint:gosec // the certificate says nothing, and nothing is believed but the time
	t := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}}
	defer t.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+endpoint+"/grpc.health.v1.Health/Check", strings.NewReader("{}"))
	if err != nil {
		return theirs, 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	began := time.Now()
	resp, err := t.RoundTrip(req)
	if err != nil {
		return theirs, 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	theirs, err = http.ParseTime(resp.Header.Get("Date"))
	return theirs, time.Since(began), err
}

func (d *doctor) space() {
	for _, dir := range d.Folders {
		var st syscall.Statfs_t
		if err := syscall.Statfs(dir, &st); err != nil {
			if !errors.Is(err, os.ErrNotExist) {
				d.Err(CheckDisk, "Look at the file system.", fmt.Errorf("%s: %w", dir, err))
			}
			continue
		}
		if st.Type == unix.SQUASHFS_MAGIC || st.Type == unix.EROFS_SUPER_MAGIC_V1 { // an image's root, which is read-only
			continue
		}
		free := st.Bavail * uint64(st.Bsize)
		switch {
		case free < noSpace:
			d.Add(CheckDisk, checkup.Fail, "Make room: without it the journal can't be written and no image be unpacked.", "%s has %d MiB left", dir, free>>20)
		case free < lowSpace:
			d.Add(CheckDisk, checkup.Warn, "Make room: Kubernetes' images take about 2 GiB.", "%s has %d MiB left", dir, free>>20)
		}
	}
	if d.Clean(CheckDisk) {
		d.OK(CheckDisk, "at least %d GiB are free", lowSpace>>30)
	}
}

// ports checks that the ports are free before the machine is a node, since kubeadm's preflight requires that.
func (d *doctor) ports(ctx context.Context) {
	if d.record == nil || d.record.Step >= journal.StepKubeadm {
		return
	}
	for _, port := range d.Ports {
		l, err := new(net.ListenConfig).Listen(ctx, "tcp", fmt.Sprintf(":%d", port))
		if err != nil {
			d.Add(CheckPorts, checkup.Fail, "Find what has it (ss -ltnp), and stop it: an older kubelet or control plane, most likely.", "port %d is not free: %v", port, err)
			continue
		}
		_ = l.Close()
	}
	if d.Clean(CheckPorts) {
		d.OK(CheckPorts, "those that Kubernetes needs are free")
	}
}

// certificates checks a control plane's certificates. The kubelet renews its own.
func (d *doctor) certificates() {
	list := renewal.Read(d.Root)
	if len(list) == 0 {
		return // a worker, or no node yet
	}
	remedy := "A machine whose certificates have expired renews them at its boot: `muster reboot NODE`, or switch it off and on. " + checkup.Journal("NODE", "muster-renewal")
	first := list[0]
	for _, c := range list {
		switch now := d.Now(); {
		case c.Unreadable != "":
			d.Add(CheckCertificates, checkup.Fail, "Restore it from a backup of this machine, or recreate it with kubeadm (kubeadm init phase).", "%s", c.Unreadable)
		case now.After(c.NotAfter):
			d.Add(CheckCertificates, checkup.Fail, remedy, "%s ended at %s", c.Name, c.NotAfter.UTC().Format(time.RFC3339))
		case c.NotAfter.Sub(now) < c.NotAfter.Sub(c.DueAt())/2:
			d.Add(CheckCertificates, checkup.Warn, remedy, "%s ends at %s, and should have been renewed at %s", c.Name, c.NotAfter.UTC().Format(time.RFC3339), c.DueAt().UTC().Format(time.RFC3339))
		}
		if c.NotAfter.Before(first.NotAfter) {
			first = c
		}
	}
	if d.Clean(CheckCertificates) {
		d.OK(CheckCertificates, "%d of this control plane; the first to end is %s, at %s", len(list), first.Name, first.NotAfter.UTC().Format(time.RFC3339))
	}
}
