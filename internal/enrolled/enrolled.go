// Package enrolled is the language of the ConfigMap muster-enrolled, which says who may write to the
// API as a node. The chart's admission policy muster-enrolled-nodes reads it, joinservice and the
// owner's program write it.
//
// A key that is a node's name has its machine as value. Beside it there may be a retirement, under
// [Key] of the name: certificates outlive what they were issued for, so when a name leaves a machine,
// only the certificates that are listed there write under that name from then on.
package enrolled

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"
)

// ConfigMap is its name, in the namespace of Muster's services.
const ConfigMap = "muster-enrolled"

// Unattested stands where a machine should for a node that was in its cluster before Muster: it may
// go on writing, and nobody ever judged it.
const Unattested = "unattested"

// CredentialID is where a user's extra information says which certificate it authenticated with
// (Kubernetes' authentication.kubernetes.io/credential-id).
const CredentialID = "authentication.kubernetes.io/credential-id"

// CertificateLife is how long a node's certificate is good at most: clusters that Muster made sign no
// longer, and ask for no longer.
const CertificateLife = 24 * time.Hour

// margin is for clocks that differ, and for a signer that was just at it.
const margin = 15 * time.Minute

// maxCertificates bounds a retirement: a machine that joins again and again needs its latest only.
const maxCertificates = 8

// suffix has a character that no node name has (RFC 1123).
const suffix = "_certificates"

// ControlPlanes is the key of the names of control planes, enrolled ones and [Unattested] ones, with a space between two of them. The admission policies
// muster-pods-of-workers and muster-pods-of-nodes read it: who may show static pods in the API, and who gets pods of Muster's services.
const ControlPlanes = "_control-planes"

// Key is where the retirement of a node's older certificates stands.
func Key(node string) string { return node + suffix }

// requests is the suffix of the key of a node that files no certificate requests for now.
const requests = "_requests"

// TooMany is the value of such a key.
const TooMany = "too-many"

// RequestsKey returns the key of a node that files certificate requests faster than joinservice deletes them. While it is there, the admission policy
// muster-node-requests refuses the node's requests.
func RequestsKey(node string) string { return node + requests }

// FilesTooMany returns the node of such a key, and whether it is one.
func FilesTooMany(key string) (node string, ok bool) { return strings.CutSuffix(key, requests) }

// IsNode says whether a key of the ConfigMap is a node's name.
func IsNode(key string) bool { return !strings.Contains(key, "_") }

// Retirement names the certificates that may still write under a name.
type Retirement struct {
	// Until is when every certificate that is not listed has expired.
	Until time.Time
	// Certificates are credential IDs, as [ID] gives them.
	Certificates []string
}

// Retire begins a retirement: no certificate of before now writes under the name.
func Retire(now time.Time) Retirement {
	return Retirement{Until: now.Add(CertificateLife + margin).UTC().Truncate(time.Second)}
}

// ForeignLife is how long a certificate of a node that was in its cluster before Muster may be good: whatever
// signed it, as long as the cluster's CA is by kubeadm's defaults.
const ForeignLife = 10 * 366 * 24 * time.Hour

// RetireForeign is [Retire] for a name that was [Unattested].
func RetireForeign(now time.Time) Retirement {
	return Retirement{Until: now.Add(ForeignLife + margin).UTC().Truncate(time.Second)}
}

// ParseRetirement reads what [Retirement.String] wrote.
func ParseRetirement(s string) (Retirement, error) {
	words := strings.Fields(s)
	if len(words) == 0 {
		return Retirement{}, fmt.Errorf("a retirement begins with the time until which it lasts")
	}
	until, err := time.Parse(time.RFC3339, words[0])
	if err != nil {
		return Retirement{}, fmt.Errorf("retirement: %w", err)
	}
	return Retirement{Until: until, Certificates: words[1:]}, nil
}

// String is the value in the ConfigMap: the time, then the certificates. The admission policy looks
// for a whole word of it.
func (r Retirement) String() string {
	return strings.Join(append([]string{r.Until.UTC().Format(time.RFC3339)}, r.Certificates...), " ")
}

// Lapsed says whether the retirement has nothing to keep out any more.
func (r Retirement) Lapsed(now time.Time) bool { return now.After(r.Until) }

// Admits says whether one of the credential IDs is listed.
func (r Retirement) Admits(ids ...string) bool {
	return slices.ContainsFunc(ids, func(id string) bool { return slices.Contains(r.Certificates, id) })
}

// With is r with one more certificate; the oldest gives way if there are too many.
func (r Retirement) With(id string) Retirement {
	all := append(slices.Clone(r.Certificates), id)
	return Retirement{Until: r.Until, Certificates: all[max(0, len(all)-maxCertificates):]}
}

// ID is the credential ID that the API server gives to whoever authenticates with the certificate.
func ID(c *x509.Certificate) string {
	sum := sha256.Sum256(c.Raw)
	return "X509SHA256=" + hex.EncodeToString(sum[:])
}
