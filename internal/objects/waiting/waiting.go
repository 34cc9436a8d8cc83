// Package waiting is the list of machines that knocked and were refused, for the owner to see: the
// ConfigMap muster-system/muster-waiting, with one key for each machine. joinservice writes it, the
// owner's program reads it. It decides nothing.
//
// Only machines whose evidence is genuine get into it, so strangers can't fill it, and it holds
// [Max] of them at most.
package waiting

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

// ConfigMap is its name, in the namespace muster-system. The chart makes it.
const ConfigMap = "muster-waiting"

const (
	// Max is how many machines are listed.
	Max = 64
	// lives is how long a machine is listed after it last knocked.
	lives = time.Hour
	// MaxSize bounds one entry, in bytes.
	MaxSize = 1024
)

// Entry is one machine.
type Entry struct {
	// Machine is its ID, the key in the ConfigMap; the value does not repeat it.
	Machine string `json:"-"`
	// Node and Role are what it wants to be; empty if it was refused before it could say, and is not
	// enrolled.
	Node string `json:"node,omitempty"`
	Role string `json:"role,omitempty"`
	// Reason is the reason code (R1).
	Reason string `json:"reason"`
	// Address is where it came from, without the port.
	Address string `json:"address,omitempty"`
	// Since is when it was first refused for this reason, Last when it last was; rounded to a minute or so.
	Since time.Time `json:"since"`
	Last  time.Time `json:"last"`
}

// Expired says whether the machine has not come for [lives].
func (e Entry) Expired(now time.Time) bool { return now.Sub(e.Last) > lives }

// Encode gives the value.
func (e Entry) Encode() (string, error) {
	b, err := json.Marshal(e)
	if err == nil && len(b) > MaxSize {
		err = fmt.Errorf("an entry of %d bytes is longer than %d", len(b), MaxSize)
	}
	return string(b), err
}

// Parse reads what is there, oldest first, expired entries included. What can't be read is left out,
// and its keys are given.
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
