package attest

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/internal/checked"
)

// MaxImages and MaxClasses are the largest numbers of images and machine classes in a policy.
const (
	MaxImages  = 64
	MaxClasses = 64
)

// PCRs that a policy appraises (TCG PC Client Platform Firmware Profile, section 3.3.4).
var (
	// imagePCRs are the PCRs of an image: 4, 9 and 11 hold what was booted; the others stay zero
	// unless the machine was tampered with.
	imagePCRs = []int{4, 8, 9, 11, 12, 13, 14}
	// firmwarePCRs are the PCRs that a class must list unless it has rules over the event log:
	// firmware, drivers from outside the firmware volume and their configuration, Secure Boot.
	firmwarePCRs = []int{0, 2, 3, 7}
	// classPCRs are the PCRs that a class may list.
	classPCRs = []int{0, 1, 2, 3, 5, 6, 7}
)

// boot is a named set of PCR values that belong together.
type boot struct {
	name string
	pcrs map[int][]byte
	log  *logRules // of a class; nil if only PCR values are compared
}

// logRules are the rules of a class over the event log.
type logRules struct {
	drivers    map[string]bool   // by digest
	secureBoot map[string][]byte // digests of PK, KEK and db; nil if not appraised
}

var bootName = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$`)

func (p *Policy) parseImages(list []*attestv1.Image) error {
	if len(list) == 0 || len(list) > MaxImages {
		return invalid("tpm2.images lists %d images, want 1 to %d", len(list), MaxImages)
	}
	for i, m := range list {
		field := fmt.Sprintf("tpm2.images[%d]", i)
		b, err := p.parseBoot(field, m.GetName(), m.GetPcrs(), p.images)
		if err != nil {
			return err
		}
		if got := slices.Sorted(maps.Keys(b.pcrs)); !slices.Equal(got, imagePCRs) {
			return invalid("%s.pcrs lists PCR %v, want %v", field, got, imagePCRs)
		}
		p.images = append(p.images, b)
	}
	return nil
}

func (p *Policy) parseClasses(list []*attestv1.MachineClass) error {
	p.anyFirmware = p.message.GetInsecure().GetAnyFirmware()
	if len(list) > MaxClasses {
		return invalid("tpm2.classes lists %d classes, more than %d", len(list), MaxClasses)
	}
	if len(list) == 0 && !p.anyFirmware { // A9
		return invalid("tpm2.classes is empty, so no machine could be accepted: firmware and its drivers run before what the image measures. Take the values of a machine that you trust (muster policy add-class NAME --from MACHINE:9000), or set insecure.anyFirmware")
	}
	for i, m := range list {
		field := fmt.Sprintf("tpm2.classes[%d]", i)
		b, err := p.parseBoot(field, m.GetName(), m.GetPcrs(), p.classes)
		if err != nil {
			return err
		}
		for pcr := range b.pcrs {
			if !slices.Contains(classPCRs, pcr) {
				return invalid("%s.pcrs lists PCR %d: a class may list %v", field, pcr, classPCRs)
			}
		}
		if b.log, err = p.parseLogRules(field, m.GetEventLog()); err != nil {
			return err
		}
		for _, pcr := range firmwarePCRs {
			if b.pcrs[pcr] == nil && b.log == nil {
				return invalid("%s.pcrs lacks PCR %d, and the class has no eventLog rules in its place", field, pcr)
			}
		}
		p.classes = append(p.classes, b)
	}
	return nil
}

func (p *Policy) parseBoot(field, name string, values []*attestv1.PcrValue, others []boot) (boot, error) {
	b := boot{name: name, pcrs: map[int][]byte{}}
	if !bootName.MatchString(name) {
		return boot{}, invalid("%s.name is %q: want 1 to 63 characters of a-z, 0-9, '-' and '.', letters or digits first and last", field, name)
	}
	if slices.ContainsFunc(others, func(o boot) bool { return o.name == name }) {
		return boot{}, invalid("%s.name: %q stands twice", field, name)
	}
	for _, v := range values {
		if v.GetIndex() >= LockPCR {
			return boot{}, invalid("%s.pcrs: PCR %d cannot be listed: policies may list PCR 0 to 14", field, v.GetIndex())
		}
		i := int(v.GetIndex())
		if b.pcrs[i] != nil {
			return boot{}, invalid("%s.pcrs lists PCR %d twice", field, i)
		}
		value, err := parseHex(v.GetValue(), p.bank.Size())
		if err != nil {
			return boot{}, invalid("%s.pcrs: value %q of PCR %d: %w", field, v.GetValue(), i, err)
		}
		b.pcrs[i] = value
	}
	return b, nil
}

func (p *Policy) parseLogRules(field string, m *attestv1.EventLogRules) (*logRules, error) {
	if m == nil {
		return nil, nil
	}
	r := &logRules{drivers: map[string]bool{}}
	for i, s := range m.GetDrivers() {
		d, err := parseHex(s, p.bank.Size())
		if err != nil {
			return nil, invalid("%s.eventLog.drivers[%d]: %q: %w", field, i, s, err)
		}
		r.drivers[string(d)] = true
	}
	if m.GetSecureBoot() == nil {
		return r, nil
	}
	r.secureBoot = map[string][]byte{}
	for name, s := range map[string]string{"PK": m.GetSecureBoot().GetPk(), "KEK": m.GetSecureBoot().GetKek(), "db": m.GetSecureBoot().GetDb()} {
		d, err := parseHex(s, p.bank.Size())
		if err != nil {
			return nil, invalid("%s.eventLog.secureBoot.%s: %q: %w", field, strings.ToLower(name), s, err)
		}
		r.secureBoot[name] = d
	}
	return r, nil
}

// fit returns the name of the image or class that the claims match, or how they differ from the
// most similar one: the one with the fewest different PCRs, because several rules may fail for one
// PCR.
func fit(kind string, all []boot, c Claims) (string, *MismatchError) {
	closest, least := -1, 0
	for i, b := range all {
		n := b.distance(c)
		if n == 0 {
			return b.name, nil
		}
		if i == 0 || n <= least { // of equally similar ones take the last, since new ones are appended
			closest, least = i, n
		}
	}
	bad := &MismatchError{Kind: kind} // A3: no match
	if closest >= 0 {
		bad.Name, bad.Others, bad.Mismatches = all[closest].name, len(all)-1, all[closest].differs(c)
	}
	return "", bad
}

// MayMatch returns nil if the policy may accept a machine with these PCR values, and otherwise EK_UNTRUSTED or POLICY_REFUSED. It is
// for an owner who knows only what the cluster has stored of a machine: its EK certificates, its TPM's firmware version and its event
// log count as accepted. Only [Policy.Appraise] decides.
func (p *Policy) MayMatch(m MachineID, values map[int][]byte) error {
	if p.revoked.keys[m] {
		return Refuse(attestv1.Reason_REASON_EK_UNTRUSTED, "the policy revokes the key %s (tpm2.revoked.keys)", m)
	}
	if !p.mayAccept(m) {
		return Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "machine %s is not listed in the policy", m)
	}
	for _, of := range []struct {
		kind string
		all  []boot
		any  bool
	}{{"image", p.images, false}, {"class", p.classes, p.anyFirmware}} {
		if !of.any && !slices.ContainsFunc(of.all, func(b boot) bool { return b.has(values) }) {
			return Refuse(attestv1.Reason_REASON_POLICY_REFUSED, "its PCRs have the values of no %s of the policy", of.kind)
		}
	}
	return nil
}

func (p *Policy) mayAccept(m MachineID) bool {
	for _, r := range p.rules {
		if r.MayAccept(m) {
			return true
		}
	}
	return false
}

// Images returns the names of the policy's images.
func (p *Policy) Images() (names []string) {
	for _, b := range p.images {
		names = append(names, b.name)
	}
	return names
}

// Names returns the policy's names of the image and of the class that have these PCR values, each empty if none has. Like [Policy.MayMatch]
// it ignores rules over the event log.
func (p *Policy) Names(values map[int][]byte) (image, class string) {
	first := func(all []boot) string {
		if i := slices.IndexFunc(all, func(b boot) bool { return b.has(values) }); i >= 0 {
			return all[i].name
		}
		return ""
	}
	return first(p.images), first(p.classes)
}

// has reports whether these are the values of the image or class.
func (b boot) has(values map[int][]byte) bool {
	for i, want := range b.pcrs {
		if !bytes.Equal(want, values[i]) {
			return false
		}
	}
	return true
}

// violation is a rule that a machine does not fulfill. Texts are made of those that are shown alone: who sends an event log
// chooses how many there are, before anything is known about that machine.
type violation struct {
	pcr      int            // -1: the event log as a whole
	expected []byte         // value of the PCR; nil if the rule is one over the event log
	event    *checked.Event // that violates the rule; nil if there is none
	rule     string
}

// violations yields what an image or class does not accept of a machine; nothing if the machine matches.
func (b boot) violations(c Claims) iter.Seq[violation] {
	return func(yield func(violation) bool) {
		for i := range LockPCR {
			if want := b.pcrs[i]; want != nil && !bytes.Equal(want, c.pcr(i)) && !yield(violation{pcr: i, expected: want}) { // A2: from the checked quote alone
				return
			}
		}
		if b.log != nil {
			b.log.violations(c, yield)
		}
	}
}

func (r *logRules) violations(c Claims, yield func(violation) bool) {
	fw, err := c.firmware()
	if err != nil {
		yield(violation{pcr: -1, rule: err.Error()})
		return
	}
	for i, e := range fw.Drivers {
		if !r.drivers[string(e.Digest)] && !yield(violation{pcr: e.PCR, event: &fw.Drivers[i], rule: " is not listed"}) {
			return
		}
	}
	for i, e := range fw.DriverConfig {
		if !yield(violation{pcr: e.PCR, event: &fw.DriverConfig[i], rule: ", want nothing"}) {
			return
		}
	}
	if r.secureBoot == nil {
		return
	}
	if !fw.SecureBoot && !yield(violation{pcr: 7, rule: "Secure Boot is off"}) {
		return
	}
	for _, name := range []string{"PK", "KEK", "db"} {
		if want, got := r.secureBoot[name], fw.Keys[name]; !bytes.Equal(want, got) && !yield(violation{pcr: 7, rule: fmt.Sprintf("the digest of %s is %x, want %x", name, got, want)}) {
			return
		}
	}
}

// distance returns how many PCRs differ, 0 if the machine matches; an event log that cannot be appraised counts as one.
func (b boot) distance(c Claims) int {
	seen := make([]int, 0, LockPCR+1)
	for v := range b.violations(c) {
		if !slices.Contains(seen, v.pcr) {
			seen = append(seen, v.pcr)
		}
	}
	return len(seen)
}

// differs describes what does not match: of each PCR at most maxMeasured events of the log.
func (b boot) differs(c Claims) (out []Mismatch) {
	events := map[int]int{} // by PCR
	for v := range b.violations(c) {
		m := Mismatch{PCR: v.pcr, Expected: v.expected, Seen: c.PCR(v.pcr), Why: v.rule}
		switch {
		case v.expected != nil:
			m.Why = c.measured(v.pcr)
		case v.event != nil:
			if events[v.pcr]++; events[v.pcr] > maxMeasured {
				continue
			}
			m.Why = describe(*v.event) + v.rule
		}
		out = append(out, m)
	}
	for _, pcr := range slices.Sorted(maps.Keys(events)) {
		if more := events[pcr] - maxMeasured; more > 0 {
			out = append(out, Mismatch{PCR: pcr, Seen: c.PCR(pcr), Why: fmt.Sprintf("%d more events that are not accepted", more)})
		}
	}
	return out
}

// Comparison compares a machine with the matching or most similar image or class of a policy.
type Comparison struct {
	// Kind is "image" or "class", Name is its name.
	Kind, Name string
	// Values are the required values, by PCR.
	Values map[int][]byte
	// Mismatches is empty if the machine matches.
	Mismatches []Mismatch
}

// Compare compares the machine with the policy's images and classes, for display; [Policy.Appraise]
// decides. It is empty for empty claims.
func (p *Policy) Compare(c Claims) (out []Comparison) {
	if !c.valid() || c.Bank() != p.bank {
		return nil
	}
	for _, of := range []struct {
		kind string
		all  []boot
	}{{"image", p.images}, {"class", p.classes}} {
		name, bad := fit(of.kind, of.all, c)
		cmp := Comparison{Kind: of.kind, Name: name}
		if bad != nil {
			cmp.Name, cmp.Mismatches = bad.Name, bad.Mismatches
		}
		if i := slices.IndexFunc(of.all, func(b boot) bool { return b.name == cmp.Name }); i >= 0 {
			cmp.Values = maps.Clone(of.all[i].pcrs)
			out = append(out, cmp)
		}
	}
	return out
}

// describe returns a readable name of an event.
func describe(e checked.Event) string {
	return fmt.Sprintf("%s %s, digest %s", e.Type, shorten(strconv.QuoteToASCII(e.Text)), hex.EncodeToString(e.Digest))
}

// Mismatch is a PCR with an unacceptable value.
type Mismatch struct {
	// PCR is the register's number; -1 means the event log as a whole.
	PCR int
	// Expected is the acceptable value, Seen the quoted one. Expected is nil if a rule over the
	// event log is violated.
	Expected, Seen []byte
	// Why is the violated rule, or the event log's entries for this PCR; empty without a log.
	Why string
}

func (m Mismatch) String() string {
	switch {
	case m.PCR < 0:
		return m.Why
	case m.Expected == nil:
		return fmt.Sprintf("PCR %d: %s", m.PCR, m.Why)
	default:
		return fmt.Sprintf("PCR %d is %x, want %x", m.PCR, m.Seen, m.Expected)
	}
}

// MismatchError describes how a machine differs from the most similar image or class of a policy.
// It is never sent to the peer.
type MismatchError struct {
	// Kind is "image" or "class", Name is its name, and Others is how many others there are, none
	// of which is more similar.
	Kind, Name string
	Others     int
	Mismatches []Mismatch
}

func (e *MismatchError) Error() string {
	if e.Name == "" {
		return fmt.Sprintf("the policy has no %s", e.Kind)
	}
	var differs, measured []string
	for _, m := range e.Mismatches {
		differs = append(differs, m.String())
		if m.Expected != nil && m.Why != "" {
			measured = append(measured, fmt.Sprintf("in PCR %d: %s", m.PCR, m.Why))
		}
	}
	s := fmt.Sprintf("%s %s differs", e.Kind, e.Name)
	if e.Others > 0 {
		s = fmt.Sprintf("none of %d fits; the closest, %s %s, differs", e.Others+1, e.Kind, e.Name)
	}
	s += ": " + strings.Join(differs, "; ")
	if len(measured) > 0 {
		s += "; the event log has " + strings.Join(measured, "; ")
	}
	return s
}

// MismatchesOf returns the PCRs that caused a refusal, nil if it has another cause.
func MismatchesOf(err error) []Mismatch {
	if m, ok := errors.AsType[*MismatchError](err); ok {
		return m.Mismatches
	}
	return nil
}
