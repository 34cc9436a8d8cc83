// Package waiting is the list of machines that asked to join and were refused, for the owner: the ConfigMap
// muster-system/muster-waiting, with one key for each machine. joinservice writes it, the owner's program reads it. No
// decision depends on it.
//
// Only machines whose evidence is genuine are listed, so unattested peers can't fill it, and it holds at most [Max] of
// them.
package waiting

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

// ConfigMap is its name, in the namespace muster-system. The chart creates it.
const ConfigMap = "muster-waiting"

const (
	// Max is the maximum number of listed machines.
	Max = 64
	// lives is how long a machine is listed after its last request.
	lives = time.Hour
	// MaxSize bounds one entry, in bytes.
	MaxSize = 1024
)

// Entry is one machine.
type Entry struct {
	// Machine is its ID, the key in the ConfigMap; the value does not repeat it.
	Machine string `json:"-"`
	// Node and Role are what it asks for; empty if it was refused before it could send them, and is not enrolled.
	Node string `json:"node,omitempty"`
	Role string `json:"role,omitempty"`
	// Reason is the reason code (R1).
	Reason string `json:"reason"`
	// Address is its address, without the port.
	Address string `json:"address,omitempty"`
	// Since is when it was first refused for this reason, Last when it last was; rounded to about a minute.
	Since time.Time `json:"since"`
	Last  time.Time `json:"last"`
}

// Expired reports whether the machine has not asked for [lives].
func (e Entry) Expired(now time.Time) bool { return now.Sub(e.Last) > lives }

// Encode returns the value.
func (e Entry) Encode() (string, error) {
	b, err := json.Marshal(e)
	if err == nil && len(b) > MaxSize {
		err = fmt.Errorf("an entry of %d bytes is longer than %d", len(b), MaxSize)
	}
	return string(b), err
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
	slices.SortFunc(entries, func(a, b Entry) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Machine, b.Machine))
	})
	return entries, bad
}
