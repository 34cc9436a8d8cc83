package keys

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
)

// hidden is the printed form of every secret.
const hidden = "[secret]"

// errHidden is the error of every attempt to marshal a secret.
var errHidden = errors.New("keys: a secret is not marshalled; call Expose where it is sent")

// secret keeps 32 bytes inside a function value, where fmt and reflection find no bytes, in any
// struct and with any verb (K3).
type secret struct{ get func() *[Size]byte }

func hide(b []byte) secret {
	v := [Size]byte(b)
	return secret{func() *[Size]byte { return &v }}
}

func (s secret) reveal() []byte {
	if s.get == nil {
		return nil
	}
	b := *s.get()
	return b[:]
}

// Format implements [fmt.Formatter]: all verbs print the type's name only.
func (r *Root) Format(w fmt.State, _ rune) { _, _ = io.WriteString(w, "keys.Root"+hidden) }

// LogValue implements [slog.LogValuer].
func (r *Root) LogValue() slog.Value { return slog.StringValue("keys.Root" + hidden) }

// MarshalJSON refuses.
func (r *Root) MarshalJSON() ([]byte, error) { return nil, errHidden }

// MarshalText refuses.
func (r *Root) MarshalText() ([]byte, error) { return nil, errHidden }

// MarshalBinary refuses.
func (r *Root) MarshalBinary() ([]byte, error) { return nil, errHidden }

// GobEncode refuses.
func (r *Root) GobEncode() ([]byte, error) { return nil, errHidden }

// Format implements [fmt.Formatter]: all verbs print the type's name only.
func (d Disk) Format(w fmt.State, _ rune) { _, _ = io.WriteString(w, "keys.Disk"+hidden) }

// LogValue implements [slog.LogValuer].
func (d Disk) LogValue() slog.Value { return slog.StringValue("keys.Disk" + hidden) }

// MarshalJSON refuses.
func (d Disk) MarshalJSON() ([]byte, error) { return nil, errHidden }

// MarshalText refuses.
func (d Disk) MarshalText() ([]byte, error) { return nil, errHidden }

// MarshalBinary refuses.
func (d Disk) MarshalBinary() ([]byte, error) { return nil, errHidden }

// GobEncode refuses.
func (d Disk) GobEncode() ([]byte, error) { return nil, errHidden }

// Format implements [fmt.Formatter]: all verbs print the type's name only.
func (e EtcdEncryption) Format(w fmt.State, _ rune) {
	_, _ = io.WriteString(w, "keys.EtcdEncryption"+hidden)
}

// LogValue implements [slog.LogValuer].
func (e EtcdEncryption) LogValue() slog.Value {
	return slog.StringValue("keys.EtcdEncryption" + hidden)
}

// MarshalJSON refuses.
func (e EtcdEncryption) MarshalJSON() ([]byte, error) { return nil, errHidden }

// MarshalText refuses.
func (e EtcdEncryption) MarshalText() ([]byte, error) { return nil, errHidden }

// MarshalBinary refuses.
func (e EtcdEncryption) MarshalBinary() ([]byte, error) { return nil, errHidden }

// GobEncode refuses.
func (e EtcdEncryption) GobEncode() ([]byte, error) { return nil, errHidden }

// Format implements [fmt.Formatter]: all verbs print the type's name only.
func (b BootSecret) Format(w fmt.State, _ rune) {
	_, _ = io.WriteString(w, "keys.BootSecret"+hidden)
}

// LogValue implements [slog.LogValuer].
func (b BootSecret) LogValue() slog.Value { return slog.StringValue("keys.BootSecret" + hidden) }

// MarshalJSON refuses.
func (b BootSecret) MarshalJSON() ([]byte, error) { return nil, errHidden }

// MarshalText refuses.
func (b BootSecret) MarshalText() ([]byte, error) { return nil, errHidden }

// MarshalBinary refuses.
func (b BootSecret) MarshalBinary() ([]byte, error) { return nil, errHidden }

// GobEncode refuses.
func (b BootSecret) GobEncode() ([]byte, error) { return nil, errHidden }
