package envtest

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const (
	auditLog    = "requests.jsonl"
	auditPolicy = `{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived", "ResponseStarted"], "rules": [{"level": "Metadata"}]}`
)

// Request is what the API server's audit log says of one.
type Request struct {
	Verb      string `json:"verb"`
	UserAgent string `json:"userAgent"`
	Object    struct {
		Resource    string `json:"resource"`
		Subresource string `json:"subresource"`
		Name        string `json:"name"`
	} `json:"objectRef"`
	Status struct {
		Code int `json:"code"`
	} `json:"responseStatus"`
}

// Requests lists those that clients whose User-Agent begins with agent have made and that were
// answered; watches are there once they have ended.
func (c *Cluster) Requests(t testing.TB, agent string) []Request {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(c.Dir, auditLog))
	if err != nil {
		t.Fatal(err)
	}
	var out []Request
	for line := range bytes.Lines(b) {
		var r Request
		if json.Unmarshal(line, &r) == nil && strings.HasPrefix(r.UserAgent, agent) {
			out = append(out, r)
		}
	}
	return out
}
