package clusterinfo

import (
	"slices"
	"testing"
)

func TestAHistoryHasTheLastEpochs(t *testing.T) {
	var h History
	for n := uint64(1); n <= MaxHistory+10; n++ {
		h = h.Next(n)
	}
	if len(h) != MaxHistory || h[0].Number != 11 || h.ID(10) != "" || h.ID(11) == "" {
		t.Errorf("%d epochs, from %d on", len(h), h[0].Number)
	}
	again, err := ParseHistory(h.String())
	if err != nil || !slices.Equal(again, h) {
		t.Errorf("it is read as another one: %v", err)
	}
	if len(h.String()) > 150<<10 {
		t.Errorf("%d bytes", len(h.String()))
	}
	if h := h.Next(20); h[len(h)-1].Number != 20 || h.ID(21) != "" {
		t.Errorf("counted on from 19: %v", h)
	}
	for _, text := range []string{"1", "1:", "1:00", "x:0011223344556677", "2:0011223344556677 1:0011223344556677", "1:0011223344556677\n1:0011223344556677"} {
		if h, err := ParseHistory(text); err == nil {
			t.Errorf("%q is read as %v", text, h)
		}
	}
}

// B7: the numbers of a restored cluster catch up, its IDs don't.
func TestAHistoryThatWasPutBackLacksWhatWasSeen(t *testing.T) {
	var h History
	for n := range uint64(5) {
		h = h.Next(n + 1)
	}
	back := h[:3:3]
	seen := HistoryEpoch{5, h.ID(5)}
	for what, tt := range map[string]struct {
		h     History
		seen  HistoryEpoch
		lacks bool
	}{
		"the same":                      {h, seen, false},
		"it has gone on":                {h.Next(6), seen, false},
		"it was put back":               {back, seen, true},
		"it has counted on from there":  {back.Next(4).Next(5), seen, true},
		"beyond what was seen":          {back.Next(4).Next(5).Next(6).Next(7), seen, true},
		"a number was left out":         {back.Next(9), seen, true},
		"what was seen is of before":    {back.Next(4).Next(5), HistoryEpoch{2, h.ID(2)}, false},
		"of before epochs had IDs":      {back, HistoryEpoch{5, ""}, false},
		"older than the whole history":  {h[3:], HistoryEpoch{2, h.ID(2)}, false},
		"there is no history any more":  {nil, seen, true},
		"the owner has begun a new one": {History(nil).Next(101).Next(102), seen, false},
	} {
		if got := tt.h.Lacks(tt.seen); (got != "") != tt.lacks {
			t.Errorf("%s: %q", what, got)
		}
	}
}

func TestAnEpochIsReadAsItIsWritten(t *testing.T) {
	for text, want := range map[string]HistoryEpoch{"7": {Number: 7}, "7:0011223344556677": {7, "0011223344556677"}} {
		if got, err := ParseEpoch(text); err != nil || got != want || got.String() != text {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "7:", "-1", "7:zz", "7:00"} {
		if got, err := ParseEpoch(text); err == nil {
			t.Errorf("%q is read as %+v", text, got)
		}
	}
}
