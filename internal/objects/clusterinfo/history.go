package clusterinfo

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

// MaxHistory is how many of a cluster's last epochs its history has: 4,096 lines of at most 37 bytes, less than 150 KiB of the ConfigMap [EpochMap].
const MaxHistory = 4096

// epochIDSize is the length of an epoch's ID in bytes.
const epochIDSize = 8

// History is the last epochs of a cluster, oldest first. Each has a random ID beside its number: a cluster that was
// restored from an earlier copy, and has counted on from there, has the same numbers again, but other IDs (B7).
type History []HistoryEpoch

// HistoryEpoch is one epoch of a [History].
type HistoryEpoch struct {
	Number uint64
	// ID is 8 random bytes in hexadecimal digits.
	ID string
}

// String returns NUMBER:ID, or NUMBER for an epoch without an ID.
func (e HistoryEpoch) String() string {
	if e.ID == "" {
		return strconv.FormatUint(e.Number, 10)
	}
	return strconv.FormatUint(e.Number, 10) + ":" + e.ID
}

// ParseEpoch reads what [HistoryEpoch.String] has written.
func ParseEpoch(text string) (HistoryEpoch, error) {
	number, id, _ := strings.Cut(text, ":")
	n, err := strconv.ParseUint(number, 10, 64)
	raw, bad := hex.DecodeString(id)
	if err != nil || bad != nil || len(raw) != 0 && len(raw) != epochIDSize || strings.HasSuffix(text, ":") {
		return HistoryEpoch{}, fmt.Errorf("%q is not NUMBER:ID", text)
	}
	return HistoryEpoch{n, id}, nil
}

// ParseHistory reads what [History.String] has written. An empty text is a history without an epoch.
func ParseHistory(text string) (History, error) {
	var out History
	for word := range strings.FieldsSeq(text) {
		e, err := ParseEpoch(word)
		if err != nil || e.ID == "" {
			return nil, fmt.Errorf("history: %q is not NUMBER:ID", word)
		}
		if len(out) > 0 && e.Number <= out[len(out)-1].Number {
			return nil, fmt.Errorf("history: epoch %d comes after %d", e.Number, out[len(out)-1].Number)
		}
		out = append(out, e)
	}
	return out, nil
}

// String returns NUMBER:ID for each epoch, one in a line.
func (h History) String() string {
	words := make([]string, len(h))
	for i, e := range h {
		words[i] = e.String()
	}
	return strings.Join(words, "\n")
}

// Next returns the history with one more epoch, which gets a new ID. Epochs of that number or higher ones are removed from
// it.
func (h History) Next(number uint64) History {
	id := make([]byte, epochIDSize)
	_, _ = rand.Read(id) // never fails
	var out History
	for _, e := range h {
		if e.Number < number {
			out = append(out, e)
		}
	}
	out = append(out, HistoryEpoch{number, hex.EncodeToString(id)})
	return out[max(0, len(out)-MaxHistory):]
}

// ID returns the ID of an epoch; empty if it is not in the history.
func (h History) ID(number uint64) string {
	for _, e := range h {
		if e.Number == number {
			return e.ID
		}
	}
	return ""
}

// Lacks returns why an epoch that was seen before is not in this history: the cluster was restored to a time before it
// (B7). It is empty if the epoch is in the history, was seen before epochs had IDs, or is older than the whole history.
func (h History) Lacks(e HistoryEpoch) string {
	switch {
	case e.ID == "" || len(h) > 0 && e.Number < h[0].Number:
		return ""
	case h.ID(e.Number) == "":
		return fmt.Sprintf("its history has no epoch %d", e.Number)
	case h.ID(e.Number) != e.ID:
		return fmt.Sprintf("its epoch %d is another one than the one that was known", e.Number)
	}
	return ""
}
