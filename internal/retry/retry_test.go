package retry

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestPausesGrowWithinBoundsAndTheHintWins(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		lo := time.Duration(rapid.Int64Range(1, int64(time.Second)).Draw(rt, "min"))
		hi := lo * time.Duration(rapid.Int64Range(1, 1000).Draw(rt, "factor"))
		b := Backoff{Min: lo, Max: hi}
		want := lo
		for range rapid.IntRange(1, 80).Draw(rt, "attempts") {
			hint := time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(rt, "hint"))
			got := b.Next(hint)
			if got < want/2 || got < hint {
				rt.Fatalf("%s, want at least %s and %s", got, want/2, hint)
			}
			if got > want && got > hint+hint/4 {
				rt.Fatalf("%s, want at most %s or the hint %s and a quarter", got, want, hint)
			}
			want = min(want*2, hi)
		}
		b.Reset()
		if got := b.Next(0); got > lo {
			rt.Fatalf("%s after Reset", got)
		}
	})
}

func TestWaitEndsWithItsContext(t *testing.T) {
	stop := errors.New("stopped")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(stop)
	if err := Wait(ctx, time.Hour); !errors.Is(err, stop) {
		t.Fatal(err)
	}
	if err := Wait(t.Context(), time.Millisecond); err != nil {
		t.Fatal(err)
	}
}
