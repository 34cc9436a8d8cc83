package clusterapi

import (
	"context"
	"time"
)

// ServerTime returns the API server's clock, in whole seconds. What the cluster has recorded is compared with it: this computer's clock may be wrong.
func (c *Client) ServerTime(ctx context.Context) (time.Time, error) { return c.serverTime(ctx) }
