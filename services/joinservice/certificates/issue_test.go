package certificates

import (
	"context"
	"slices"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/muster-k8s/muster/internal/service/clusterview"
)

func (c *counting) DeleteAllOf(_ context.Context, _ client.Object, options ...client.DeleteAllOfOption) error {
	o := &client.DeleteAllOfOptions{}
	o.ApplyOptions(options)
	window, _ := o.LabelSelector.RequiresExactMatch(clusterview.TicketWindow)
	c.deleted = append(c.deleted, window)
	return nil
}

// A request that was just filed has the label of its minute: it is deleted with those of that minute, so not before the minute is over.
func TestNoRequestOfTheCurrentMinuteIsDeleted(t *testing.T) {
	minute := time.Date(2026, 11, 25, 10, 0, 0, 0, time.UTC)
	for name, tt := range map[string]struct {
		now, seen time.Time
		want      []string
	}{
		"its minute is not over": {minute.Add(59 * time.Second), minute.Add(time.Second), nil},
		"its minute is over":     {minute.Add(60 * time.Second), minute.Add(time.Second), []string{"2026-11-25T10.00"}},
		"it was seen lately":     {minute.Add(60 * time.Second), minute.Add(31 * time.Second), nil},
	} {
		t.Run(name, func(t *testing.T) {
			api := &counting{}
			_, _, k := parts(api, func() time.Time { return tt.now })
			k.Sign = signTimeout
			k.tickets["muster-w1-client-0011223344556677"] = ticketRequest{"2026-11-25T10.00", tt.seen}
			k.Discard(t.Context())
			if !slices.Equal(api.deleted, tt.want) {
				t.Errorf("deleted %q, want %q", api.deleted, tt.want)
			}
		})
	}
}
