// Package nodeaccess reads and writes the ConfigMap muster-node-access: the nodes that may not write to the Kubernetes API,
// or only with some of their certificates.
//
// Every certificate of a node was issued by joinservice (J5), so a node needs an entry only if that is not enough: its
// machine is banned, its ticket was returned, or its name was taken from the machine while certificates of it are still
// valid (J4), or its Node had other addresses than the enrollment. A cluster where none of that has happened lists its control
// planes alone, and a worker's join does not write the list.
//
// The admission policies of the chart read the ConfigMap for every write of every node. The API server converts a ConfigMap
// at each evaluation, at a cost that grows with the number of its keys, and not with their length. So each kind of entry is
// one key, and its value is one line of text for each node. docs/performance.md has the measurements.
package nodeaccess

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// ConfigMap is its name, in the namespace of Muster's services.
const ConfigMap = "muster-node-access"

// The keys of the ConfigMap. Each value is a list of lines with a line feed before the first and after the last one; a line begins with the
// name of a node. The expressions of the admission policies look for "\nNAME\n" or "\nNAME ".
const (
	// KeySuspended lists nodes that may write nothing.
	KeySuspended = "suspended"
	// KeyRevoked lists nodes whose older certificates may write nothing: NAME TIME [CREDENTIAL-ID...]. Until that time (RFC 3339), only the
	// certificates that follow may write.
	KeyRevoked = "revoked-certificates"
	// KeyControlPlanes lists control planes: they may show static pods in the API, and get pods of Muster's services.
	KeyControlPlanes = "control-planes"
	// KeyUnattested lists nodes that are older than Muster and continue without attestation.
	KeyUnattested = "unattested"
	// KeyMembers lists the nodes that may write, in a cluster whose certificate authority issued certificates of nodes
	// before Muster was installed; elsewhere the key is missing. In such a cluster a join writes the ConfigMap.
	KeyMembers = "members"
	// KeyPaused lists nodes that file certificate requests faster than joinservice deletes them: admission refuses their
	// requests for now.
	KeyPaused = "requests-paused"
	// KeyAddresses lists nodes whose Node once had other internal addresses than the enrollment, and banned nodes: NAME ADDRESS.... The addresses are those of the
	// enrollment. A kubelet may add only these to its Node.
	KeyAddresses = "addresses"
)

const (
	// CredentialID is the key of a user's extra information for the certificate that authenticated it (Kubernetes'
	// authentication.kubernetes.io/credential-id).
	CredentialID = "authentication.kubernetes.io/credential-id"
	// CertificateLife is the longest life of a node's certificate that joinservice issues.
	CertificateLife = 24 * time.Hour
	// ForeignLife is the longest validity of a certificate that a cluster issued before Muster was installed: with
	// kubeadm's defaults that of the cluster's certificate authority.
	ForeignLife = 10 * 366 * 24 * time.Hour
	// margin is for clocks that differ, and for a signer that signs at the moment of a revocation.
	margin = 15 * time.Minute
	// maxCertificates bounds the certificates of one line: a machine that joins repeatedly needs only its latest ones.
	maxCertificates = 8
	// maxSize is the largest list, in bytes. Kubernetes accepts 1 MiB for a ConfigMap; suspensions may use the rest, so
	// that a ban can always be written.
	maxSize, maxSizeSuspended = 900 << 10, 1000 << 10
)

// Revocation revokes a name's previous certificates, except those listed.
type Revocation struct {
	// Until is when every certificate that is not listed has expired.
	Until time.Time
	// Allowed are credential IDs, as [ID] returns them.
	Allowed []string
}

// Lapsed reports whether every revoked certificate has expired.
func (r *Revocation) Lapsed(now time.Time) bool { return now.After(r.Until) }

// Allows reports whether one of the credential IDs is listed.
func (r *Revocation) Allows(ids ...string) bool {
	return slices.ContainsFunc(ids, func(id string) bool { return slices.Contains(r.Allowed, id) })
}

// Entry is the list's data on one node. The zero value is that of a node that may write.
type Entry struct {
	Suspended, ControlPlane, Unattested, Member, Paused bool
	// Addresses are the IP addresses that the node may add to its Node, separated by a space; empty: none.
	Addresses string
	// Revoked is nil unless older certificates of the name are revoked.
	Revoked *Revocation
}

// Equal reports whether two entries are equal.
func (e Entry) Equal(o Entry) bool {
	a, b := e, o
	a.Revoked, b.Revoked = nil, nil
	if a != b || (e.Revoked == nil) != (o.Revoked == nil) {
		return false
	}
	return e.Revoked == nil || e.Revoked.Until.Equal(o.Revoked.Until) && slices.Equal(e.Revoked.Allowed, o.Revoked.Allowed)
}

// Revoke returns the entry of a name that was taken from its machine at that time: no earlier certificate may write under
// it (J4). A revocation that ends later keeps its end.
func (e Entry) Revoke(now time.Time) Entry {
	life := CertificateLife
	if e.Unattested {
		life = ForeignLife
	}
	until := now.Add(life + margin).UTC().Truncate(time.Second)
	if e.Revoked != nil && e.Revoked.Until.After(until) && e.Revoked.Until.Before(now.Add(2*ForeignLife)) {
		until = e.Revoked.Until
	}
	return Entry{Revoked: &Revocation{Until: until}, Suspended: e.Suspended}
}

// Allow returns the entry with a certificate that may write although older ones of the name are revoked; the oldest is
// removed if there are too many. An entry without a revocation is returned unchanged.
func (e Entry) Allow(id string) Entry {
	if e.Revoked == nil || e.Revoked.Allows(id) {
		return e
	}
	all := append(slices.Clone(e.Revoked.Allowed), id)
	e.Revoked = &Revocation{Until: e.Revoked.Until, Allowed: all[max(0, len(all)-maxCertificates):]}
	return e
}

// List is the content of the ConfigMap.
type List struct {
	entries map[string]Entry
	// MembersOnly is whether only members may write; see [KeyMembers].
	MembersOnly bool
	// controlPlanes is whether control planes have been listed: without the key, admission does not ask which nodes are.
	controlPlanes bool
}

// New returns the list of a new cluster. foreign is whether its certificate authority issued certificates of nodes before
// Muster was installed.
func New(foreign bool) *List { return &List{entries: map[string]Entry{}, MembersOnly: foreign} }

// Entry returns the entry of a node.
func (l *List) Entry(node string) Entry { return l.entries[node] }

// Set replaces the entry of a node.
func (l *List) Set(node string, e Entry) {
	if e.Equal(Entry{}) {
		delete(l.entries, node)
		return
	}
	l.entries[node] = e
}

// Nodes returns the names that have an entry, sorted.
func (l *List) Nodes() []string { return slices.Sorted(maps.Keys(l.entries)) }

// Clone returns an independent copy.
func (l *List) Clone() *List {
	return &List{maps.Clone(l.entries), l.MembersOnly, l.controlPlanes} // entries and revocations are replaced, never changed
}

// Parse reads the data of the ConfigMap. An error names the key and the line.
func Parse(data map[string]string) (*List, error) {
	_, members := data[KeyMembers]
	l := New(members)
	_, l.controlPlanes = data[KeyControlPlanes]
	for _, kind := range flags {
		for i, line := range lines(data[kind.key]) {
			if strings.Contains(line, " ") {
				return nil, fmt.Errorf("ConfigMap %s: key %s, line %d: a name has no space", ConfigMap, kind.key, i+1)
			}
			e := l.entries[line]
			*kind.of(&e) = true
			l.entries[line] = e
		}
	}
	for i, line := range lines(data[KeyAddresses]) {
		name, addresses, found := strings.Cut(line, " ")
		if !found {
			return nil, fmt.Errorf("ConfigMap %s: key %s, line %d: want a name and addresses", ConfigMap, KeyAddresses, i+1)
		}
		e := l.entries[name]
		e.Addresses = addresses
		l.entries[name] = e
	}
	for i, line := range lines(data[KeyRevoked]) {
		words := strings.Fields(line)
		if len(words) < 2 {
			return nil, fmt.Errorf("ConfigMap %s: key %s, line %d: want a name and a time", ConfigMap, KeyRevoked, i+1)
		}
		until, err := time.Parse(time.RFC3339, words[1])
		if err != nil {
			return nil, fmt.Errorf("ConfigMap %s: key %s, line %d: %w", ConfigMap, KeyRevoked, i+1, err)
		}
		e := l.entries[words[0]]
		e.Revoked = &Revocation{Until: until, Allowed: words[2:]}
		l.entries[words[0]] = e
	}
	return l, nil
}

// flags are the keys whose lines are names alone.
var flags = []struct {
	key string
	of  func(*Entry) *bool
}{
	{KeySuspended, func(e *Entry) *bool { return &e.Suspended }},
	{KeyControlPlanes, func(e *Entry) *bool { return &e.ControlPlane }},
	{KeyUnattested, func(e *Entry) *bool { return &e.Unattested }},
	{KeyMembers, func(e *Entry) *bool { return &e.Member }},
	{KeyPaused, func(e *Entry) *bool { return &e.Paused }},
}

func lines(value string) []string {
	return slices.DeleteFunc(strings.Split(value, "\n"), func(s string) bool { return strings.TrimSpace(s) == "" })
}

// ErrFull is the error of a list without room for an addition.
var ErrFull = errors.New("ConfigMap " + ConfigMap)

// Data returns the data of the ConfigMap. It returns an error that wraps [ErrFull] if the list is too large; then nothing
// may be written until entries have expired.
func (l *List) Data() (map[string]string, error) {
	data, all, suspended := map[string]string{}, 0, 0
	put := func(key string, text []string) {
		if len(text) == 0 && (key != KeyMembers || !l.MembersOnly) && (key != KeyControlPlanes || !l.controlPlanes) {
			return
		}
		value := "\n" + strings.Join(append(text, ""), "\n")
		data[key] = value
		all += len(value)
		if key == KeySuspended {
			suspended = len(value)
		}
	}
	names := l.Nodes()
	for _, kind := range flags {
		var text []string
		for _, name := range names {
			if e := l.entries[name]; *kind.of(&e) {
				text = append(text, name)
			}
		}
		put(kind.key, text)
	}
	var revoked, addresses []string
	ofSuspended := 0
	for _, name := range names {
		e := l.entries[name]
		if r := e.Revoked; r != nil {
			revoked = append(revoked, strings.Join(append([]string{name, r.Until.UTC().Format(time.RFC3339)}, r.Allowed...), " "))
		}
		if e.Addresses != "" {
			addresses = append(addresses, name+" "+e.Addresses)
			if e.Suspended {
				ofSuspended += len(name) + len(e.Addresses) + 2
			}
		}
	}
	put(KeyRevoked, revoked)
	put(KeyAddresses, addresses)
	if all-suspended-ofSuspended > maxSize || all > maxSizeSuspended {
		return nil, fmt.Errorf("%w: it would need %d KiB for %d nodes, most of them removed or banned with certificates that are still valid. Further removals are possible when the oldest entries have expired",
			ErrFull, all>>10, len(l.entries))
	}
	return data, nil
}

// ID returns the credential ID that the API server gives to a client with that certificate.
func ID(c *x509.Certificate) string {
	sum := sha256.Sum256(c.Raw)
	return "X509SHA256=" + hex.EncodeToString(sum[:])
}
