package provider

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strings"

	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

const (
	// linkLocal is the address of the metadata services of all four clouds (RFC 3927). It is asked by number, so DNS has no part in it.
	linkLocal = "http://169.254.169.254"
	// maxJSON bounds an answer that describes the machine, in bytes. Azure's has the user data in base64.
	maxJSON = 128 << 10
	// maxValue bounds an answer that is one value, in bytes.
	maxValue = 512
	// maxHeader bounds the header of an answer, in bytes.
	maxHeader = 16 << 10
)

// services are the clouds' metadata services.
var services = map[string]func(context.Context, *client) (*Found, error){
	metadata.ProviderAWS: aws, metadata.ProviderGCP: gcp, metadata.ProviderAzure: azure, metadata.ProviderOpenStack: openStack,
}

func clouds() map[string]string {
	out := map[string]string{}
	for name := range services {
		out[name] = linkLocal
	}
	return out
}

// Cloud returns the cloud that the firmware's tables name; empty if there is none. The host writes the tables, as it writes the metadata.
func (m Machine) Cloud() string {
	product, tag := m.dmi("product_name"), m.dmi("chassis_asset_tag")
	switch {
	case m.dmi("sys_vendor") == "Amazon EC2":
		return metadata.ProviderAWS
	case product == "Google Compute Engine":
		return metadata.ProviderGCP
	case tag == "7783-7084-3265-9085-8269-3286-77": // "MSFT AZURE VM" in ASCII codes
		return metadata.ProviderAzure
	case product == "OpenStack Nova" || product == "OpenStack Compute":
		return metadata.ProviderOpenStack
	}
	return ""
}

// errNoAnswer means that the service has nothing at a path.
var errNoAnswer = errors.New("not found")

// client asks a metadata service. It uses no proxy, follows no redirect and decompresses nothing.
type client struct {
	base      string
	header    http.Header
	flavor    string // the value of Metadata-Flavor that each answer must have; empty if there is none
	transport *http.Transport
}

func newClient(base string) *client {
	return &client{base: base, header: http.Header{}, transport: &http.Transport{DisableCompression: true, MaxResponseHeaderBytes: maxHeader}}
}

func (c *client) close() { c.transport.CloseIdleConnections() }

// ask sends one request. An answer that is no success, has more than limit bytes or is a web page is an error; a missing one is [errNoAnswer].
func (c *client) ask(ctx context.Context, method, path string, limit int64) ([]byte, error) {
	fail := func(err error) ([]byte, error) {
		return nil, fmt.Errorf("%s %s: %w", method, path, err)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, http.NoBody)
	if err != nil {
		return fail(err)
	}
	req.Header = c.header.Clone()
	resp, err := c.transport.RoundTrip(req) // unlike a Client, it follows no redirect
	if err != nil {
		return fail(err)
	}
	defer resp.Body.Close()
	switch {
	case c.flavor != "" && resp.Header.Get("Metadata-Flavor") != c.flavor:
		return fail(errors.New("the answer lacks the header Metadata-Flavor: it is not from the metadata service"))
	case resp.StatusCode == http.StatusNotFound:
		return fail(errNoAnswer)
	case resp.StatusCode != http.StatusOK:
		return fail(fmt.Errorf("the service answered %d", resp.StatusCode))
	}
	if kind, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); err == nil && kind == "text/html" {
		return fail(errors.New("the answer is a web page: it is not from the metadata service"))
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		return fail(err)
	}
	if int64(len(b)) > limit {
		return fail(fmt.Errorf("the answer is longer than %d bytes", limit))
	}
	return b, nil
}

func (c *client) get(ctx context.Context, path string, limit int64) ([]byte, error) {
	return c.ask(ctx, http.MethodGet, path, limit)
}

// object reads a JSON object. Other fields than those of into are the service's own.
func (c *client) object(ctx context.Context, path string, into any) error {
	b, err := c.get(ctx, path, maxJSON)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, into); err != nil {
		return fmt.Errorf("GET %s: the answer is not the JSON that is expected: %w", path, err)
	}
	return nil
}

// value reads one value: printable ASCII. A missing one is empty.
func (c *client) value(ctx context.Context, path string) (string, error) {
	b, err := c.get(ctx, path, maxValue)
	if errors.Is(err, errNoAnswer) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return printable(path, b)
}

func printable(path string, b []byte) (string, error) {
	s := strings.TrimSpace(string(b))
	for i := range len(s) {
		if s[i] < 0x20 || s[i] > 0x7e {
			return "", fmt.Errorf("GET %s: the answer is no line of text", path)
		}
	}
	return s, nil
}

// userData reads the operator's documents from a path.
func (c *client) userData(ctx context.Context, path string, f *Found) error {
	b, err := c.get(ctx, path, MaxDocument)
	if errors.Is(err, errNoAnswer) {
		return fmt.Errorf("the machine has no user data: put its MachineMetadata there: %w", err)
	}
	if err != nil {
		return err
	}
	if err := f.setDocuments(b); err != nil {
		return fmt.Errorf("user data: %w", err)
	}
	return nil
}
