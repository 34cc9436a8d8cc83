package kubetest

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const (
	auditLog    = "requests.jsonl"
	auditPolicy = `{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived", "ResponseStarted"], "rules": [{"level": "Metadata"}]}`
)

// Request is a request in the API server's audit log.
type Request struct {
	Received  time.Time `json:"requestReceivedTimestamp"`
	Verb      string    `json:"verb"`
	UserAgent string    `json:"userAgent"`
	User      struct {
		Name string `json:"username"`
	} `json:"user"`
	Object struct {
		Group       string `json:"apiGroup"`
		Namespace   string `json:"namespace"`
		Resource    string `json:"resource"`
		Subresource string `json:"subresource"`
		Name        string `json:"name"`
	} `json:"objectRef"`
	Status struct {
		Code int `json:"code"`
	} `json:"responseStatus"`
	// Annotations include the authorizer's decision, under [Decision].
	Annotations map[string]string `json:"annotations"`
}

// Decision is the annotation whose value is "allow" or "forbid".
const Decision = "authorization.k8s.io/decision"

// Requests returns the answered requests of clients whose User-Agent begins with agent; watches are included after they
// have ended.
func (c *Cluster) Requests(t testing.TB, agent string) []Request {
	t.Helper()
	out, err := c.AllRequests(func(r Request) bool { return strings.HasPrefix(r.UserAgent, agent) })
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// AllRequests returns the matching requests since the cluster's start.
func (c *Cluster) AllRequests(fits func(Request) bool) ([]Request, error) {
	b, err := os.ReadFile(filepath.Join(c.Dir, auditLog))
	if err != nil {
		return nil, err
	}
	var out []Request
	for line := range bytes.Lines(b) {
		var r Request
		if json.Unmarshal(line, &r) == nil && fits(r) {
			out = append(out, r)
		}
	}
	return out, nil
}
