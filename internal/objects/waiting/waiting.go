// Package waiting is the list of machines that asked to join and were refused, for the owner: the ConfigMap
// muster-system/muster-waiting, with one key for each machine. joinservice writes it, the owner's program reads it. No
// decision depends on it.
//
// Only machines whose evidence is genuine are listed. They are of two kinds, each with places of its own, since any peer can
// make an endorsement that lacks nothing but a place in a list of the policy ([Entry.List]): such machines have at most
// [MaxUnlisted] places, and those of one source at most [MaxOfSource]. The others have [Max].
package waiting

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/muster-k8s/muster/trust/peerlimit"
)

// ConfigMap is its name, in the namespace muster-system. The chart creates it.
const ConfigMap = "muster-waiting"

const (
	// Max is the maximum number of machines whose endorsement the policy accepts.
	Max = 64
	// MaxUnlisted is the maximum number of machines that a list of the policy lacks.
	MaxUnlisted = 64
	// MaxOfSource is that of one source among them: an IPv4 address or an IPv6 /64.
	MaxOfSource = 8
	// lives is how long a machine is listed after its last request.
	lives = time.Hour
	// MaxSize bounds one entry, in bytes.
	MaxSize = 2048
	// maxText bounds a text that a machine or its certificate chooses, in bytes.
	maxText = 256
)

// Entry is one machine.
type Entry struct {
	// Machine is its ID, the key in the ConfigMap; the value does not repeat it.
	Machine string `json:"-"`
	// Node and Role are the requested ones; empty if it was refused before it could send them, and is not enrolled.
	Node string `json:"node,omitempty"`
	Role string `json:"role,omitempty"`
	// Reason is the reason code (R1).
	Reason string `json:"reason"`
	// Address is its address, without the port.
	Address string `json:"address,omitempty"`
	// Endorsement is why its attestation key is believed, Instance the virtual machine that its certificate names.
	Endorsement string `json:"endorsement,omitempty"`
	Instance    string `json:"instance,omitempty"`
	// Image and Class are the policy's names of the image and of the firmware that it booted, or of the most similar ones.
	Image string `json:"image,omitempty"`
	Class string `json:"class,omitempty"`
	// List is the field of the policy that would have to list the machine; empty if that is not why it was refused.
	List string `json:"list,omitempty"`
	// Differs describes why the policy would refuse the machine even if a list had it; empty if it would not.
	Differs string `json:"differs,omitempty"`
	// Since is when it was first refused for this reason, Last when it last was; rounded to about a minute.
	Since time.Time `json:"since"`
	Last  time.Time `json:"last"`
}

// Expired reports whether the machine has not asked for [lives].
func (e Entry) Expired(now time.Time) bool { return now.Sub(e.Last) > lives }

// Listable reports whether the policy would accept the machine if a list had it.
func (e Entry) Listable() bool { return e.List != "" && e.Differs == "" }

// source returns what is charged for the entry.
func (e Entry) source() netip.Prefix {
	return peerlimit.SourceOfAddress(net.JoinHostPort(e.Address, "0"))
}

// Short returns the entry with its texts of a machine's choice shortened.
func (e Entry) Short() Entry {
	for _, text := range []*string{&e.Instance, &e.Differs} {
		*text = strings.ToValidUTF8((*text)[:min(len(*text), maxText)], "")
	}
	return e
}

// Encode returns the value.
func (e Entry) Encode() (string, error) {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // it would be up to six times as long
	err := enc.Encode(e)
	if err == nil && b.Len() > MaxSize {
		err = fmt.Errorf("an entry of %d bytes is longer than %d", b.Len(), MaxSize)
	}
	return strings.TrimSuffix(b.String(), "\n"), err
}

// Room reports whether an entry for one more machine has room beside those that are listed, by machine. evict is the machine
// whose entry must be removed for it; empty if there is none.
//
// Entries stay, so that many machines can't displace the owner's. But of machines that a list of the policy lacks, a source
// with more entries loses its newest to one that would still have fewer.
func Room(listed map[string]Entry, e Entry) (evict string, ok bool) {
	same, sources := 0, map[netip.Prefix]int{}
	for _, o := range listed {
		if (o.List != "") == (e.List != "") {
			same++
			sources[o.source()]++
		}
	}
	if e.List == "" {
		return "", same < Max
	}
	mine := sources[e.source()]
	switch {
	case mine >= MaxOfSource:
		return "", false
	case same < MaxUnlisted:
		return "", true
	}
	largest := slices.MaxFunc(slices.Collect(maps.Keys(sources)), func(a, b netip.Prefix) int {
		return cmp.Or(cmp.Compare(sources[a], sources[b]), cmp.Compare(a.String(), b.String()))
	})
	if sources[largest] <= mine+1 {
		return "", false
	}
	var newest Entry
	for machine, o := range listed {
		if o.Machine = machine; o.List != "" && o.source() == largest && (newest.Machine == "" || older(newest, o) < 0) {
			newest = o
		}
	}
	return newest.Machine, true
}

// older compares when two entries began.
func older(a, b Entry) int {
	return cmp.Or(a.Since.Compare(b.Since), a.Last.Compare(b.Last), cmp.Compare(a.Machine, b.Machine))
}

// Parse reads the entries, oldest first, expired ones included. It skips unreadable entries and returns their keys in bad.
func Parse(data map[string]string) (entries []Entry, bad []string) {
	for machine, value := range data {
		e := Entry{}
		if err := json.Unmarshal([]byte(value), &e); err != nil || len(value) > MaxSize || e.Reason == "" {
			bad = append(bad, machine)
			continue
		}
		e.Machine = machine
		entries = append(entries, e)
	}
	slices.Sort(bad)
	slices.SortFunc(entries, older)
	return entries, bad
}
