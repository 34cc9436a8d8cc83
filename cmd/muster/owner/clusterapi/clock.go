package clusterapi

import (
	"context"
	"time"
)

// ServerTime returns the API server's clock, in whole seconds. Times in the cluster's records are compared with it, because
// this computer's clock may be wrong.
func (c *Client) ServerTime(ctx context.Context) (time.Time, error) { return c.serverTime(ctx) }
