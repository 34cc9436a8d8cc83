package tpm_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/fxamacker/cbor/v2"
	gotpm "github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"

	"github.com/muster-k8s/muster/trust/attest"
	"github.com/muster-k8s/muster/trust/attest/attesttest"
	"github.com/muster-k8s/muster/trust/attest/tpm2"
	"github.com/muster-k8s/muster/trust/tpm"
	"github.com/muster-k8s/muster/trust/tpm/tpmtest"
)

const nitroIndex = 0x01804D56

// nitroTPM is swtpm with what AWS has added: the name, an NV index of 8 KiB, which swtpm is too small
// for, and the command that makes a document. The rest is swtpm's.
type nitroTPM struct {
	transport.TPM
	t       testing.TB
	vendor  string
	ca      *attesttest.CA
	answer  func(response []byte) []byte // changes the content of the index, after the command
	refuses gotpm.TPMRC                  // of that command; 0: none

	mu      sync.Mutex
	public  []byte // TPMS_NV_PUBLIC of the index; nil: it is not defined
	data    []byte
	defined int
}

func (n *nitroTPM) Close() error { return nil }

func response(tag uint16, rc gotpm.TPMRC, body []byte) []byte {
	out := binary.BigEndian.AppendUint16(nil, tag)
	out = binary.BigEndian.AppendUint32(out, uint32(10+len(body)))
	out = binary.BigEndian.AppendUint32(out, uint32(rc))
	return append(out, body...)
}

// done is the response to a command with a password.
func done(parameters []byte) []byte {
	body := append(binary.BigEndian.AppendUint32(nil, uint32(len(parameters))), parameters...)
	return response(uint16(gotpm.TPMSTSessions), 0, append(body, 0, 0, 1, 0, 0))
}

func sized(b []byte) []byte { return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...) }

// parametersOf returns what follows the handles and the authorization of a command.
func parametersOf(cmd []byte, handles int) []byte {
	rest := cmd[10+4*handles:]
	return rest[4+binary.BigEndian.Uint32(rest):]
}

// Send implements [transport.TPM].
func (n *nitroTPM) Send(cmd []byte) ([]byte, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	handle := func(i int) uint32 { return binary.BigEndian.Uint32(cmd[10+4*i:]) }
	switch cc := gotpm.TPMCC(binary.BigEndian.Uint32(cmd[6:])); {
	case cc == gotpm.TPMCCGetCapability && bytes.Equal(cmd[10:18], []byte{0, 0, 0, 6, 0, 0, 1, 6}): // TPM_PT_VENDOR_STRING_1
		body := []byte{1, 0, 0, 0, 6, 0, 0, 0, 2}
		for i := range 2 {
			body = append(binary.BigEndian.AppendUint32(body, uint32(0x106+i)), n.vendor[4*i:4*i+4]...)
		}
		return response(uint16(gotpm.TPMSTNoSessions), 0, body), nil
	case cc == gotpm.TPMCCNVDefineSpace && n.public == nil:
		n.defined++
		parameters := parametersOf(cmd, 1)[2:] // without the empty auth value
		n.public = bytes.Clone(parameters[2:])
		n.data = bytes.Repeat([]byte{0xFF}, int(binary.BigEndian.Uint16(n.public[len(n.public)-2:])))
		return done(nil), nil
	case cc == gotpm.TPMCCNVReadPublic && handle(0) == nitroIndex:
		if n.public == nil {
			return response(uint16(gotpm.TPMSTNoSessions), 0x18B, nil), nil // TPM_RC_HANDLE, handle 1
		}
		return response(uint16(gotpm.TPMSTNoSessions), 0, append(sized(n.public), sized(make([]byte, 34))...)), nil
	case cc == gotpm.TPMCCNVUndefineSpace && handle(1) == nitroIndex:
		n.public, n.data = nil, nil
		return done(nil), nil
	case cc == gotpm.TPMCCNVWrite && handle(1) == nitroIndex:
		parameters := parametersOf(cmd, 2)
		size := int(binary.BigEndian.Uint16(parameters))
		copy(n.data[binary.BigEndian.Uint16(parameters[2+size:]):], parameters[2:2+size])
		return done(nil), nil
	case cc == gotpm.TPMCCNVRead && handle(1) == nitroIndex:
		parameters := parametersOf(cmd, 2)
		size, offset := binary.BigEndian.Uint16(parameters), binary.BigEndian.Uint16(parameters[2:])
		return done(sized(n.data[offset : offset+size])), nil
	case cc == 0x20000001:
		return n.command(cmd), nil
	}
	return n.TPM.Send(cmd)
}

// command replaces the request in the index by the response.
func (n *nitroTPM) command(cmd []byte) []byte {
	want := "\x80\x02\x00\x00\x00\x1f\x20\x00\x00\x01\x01\x80\x4d\x56\x01\x80\x4d\x56\x00\x00\x00\x09\x40\x00\x00\x09\x00\x00\x00\x00\x00"
	if string(cmd) != want {
		n.t.Errorf("command %x, want %x", cmd, want)
	}
	if n.refuses != 0 {
		return response(uint16(gotpm.TPMSTNoSessions), n.refuses, nil)
	}
	var q map[string]map[string][]byte
	if _, err := cbor.UnmarshalFirst(n.data, &q); err != nil || len(q) != 1 || len(q["Attestation"]) != 3 {
		n.t.Errorf("request %v, %v", q, err)
	}
	ask := q["Attestation"]
	document := attesttest.NitroDocument(n.t, n.ca, attesttest.Nitro{Payload: func(f map[string]any) { f["nitrotpm_pcrs"] = n.pcrs() }}, ask["user_data"], ask["nonce"], ask["public_key"])
	answer, err := cbor.Marshal(map[string]map[string][]byte{"Attestation": {"document": document}})
	if err != nil {
		n.t.Error(err)
	}
	if n.answer != nil {
		answer = n.answer(answer)
	}
	n.data = bytes.Repeat([]byte{0xFF}, len(n.data))
	copy(n.data, answer)
	return done(nil)
}

func (n *nitroTPM) pcrs() map[uint64][]byte {
	out := map[uint64][]byte{}
	for i := range uint64(24) {
		selected := []byte{0, 0, 0}
		selected[i/8] = 1 << (i % 8)
		rsp, err := gotpm.PCRRead{PCRSelectionIn: gotpm.TPMLPCRSelection{PCRSelections: []gotpm.TPMSPCRSelection{{Hash: gotpm.TPMAlgSHA384, PCRSelect: selected}}}}.Execute(n.TPM)
		if err != nil || len(rsp.PCRValues.Digests) != 1 {
			n.t.Errorf("PCR %d: %v", i, err)
			return out
		}
		out[i] = rsp.PCRValues.Digests[0].Buffer
	}
	return out
}

func newNitroTPM(t testing.TB) *nitroTPM {
	t.Helper()
	e := tpmtest.SWTPM(t, tpmtest.Bare(), tpmtest.Banks("sha256,sha384"))
	return &nitroTPM{TPM: raw(t, e), t: t, vendor: "NitroTPM", ca: attesttest.NewCA(t)}
}

func (n *nitroTPM) open() *tpm.TPM {
	return tpm.New(func() (transport.TPMCloser, error) { return n, nil })
}

func TestANitroTPMAttests(t *testing.T) {
	n := newNitroTPM(t)
	n.public = []byte{1} // what a killed process has left
	dev := n.open()
	if err := dev.Measure(t.Context(), 15, []byte("lock")); err != nil {
		t.Fatal(err)
	}
	a, err := tpm2.NewAttester(tpm2.Config{TPM: dev, Purpose: attest.PurposeMachine, Bank: tpm.SHA384})
	if err != nil {
		t.Fatal(err)
	}
	var id attest.MachineID
	for range 2 { // the second time from what is cached
		c, err := attesttest.Claims(t.Context(), a, attesttest.Verifier(t, n.ca), attest.PurposeMachine, attest.Binding{1})
		if err != nil {
			t.Fatal(err)
		}
		if c.Endorsement() != "nitro-tpm" || c.Instance().Name != "i-0123456789abcdef0" || id != (attest.MachineID{}) && c.Machine() != id {
			t.Errorf("%s, %+v, %s after %s", c.Endorsement(), c.Instance(), c.Machine(), id)
		}
		id = c.Machine()
		if n.public != nil {
			t.Error("the buffer was not deleted")
		}
	}
	if own, name, err := tpm2.Identity(t.Context(), dev); err != nil || own != id || name != "nitro-tpm" {
		t.Errorf("%s, %q, %v", own, name, err)
	}
	if n.defined != 3 {
		t.Errorf("%d requests", n.defined)
	}
}

func TestAnotherTPMIsAskedForNoDocument(t *testing.T) {
	n := newNitroTPM(t)
	for _, vendor := range []string{"SW   TPM", "NitroTPm", "NitrSW  "} {
		n.vendor = vendor
		dev := n.open()
		for range 2 {
			if _, err := dev.NitroDocument(t.Context(), [32]byte{1}); !errors.Is(err, tpm.ErrNoNitroTPM) {
				t.Errorf("%q: %v", vendor, err)
			}
		}
	}
	if n.defined != 0 {
		t.Errorf("%d requests", n.defined)
	}
	n.vendor = "NitroTPM"
	if d, err := n.open().NitroDocument(t.Context(), [32]byte{1}); err != nil || len(d) == 0 {
		t.Error(err)
	}
}

func TestResponsesOfANitroTPMThatAreRefused(t *testing.T) {
	n := newNitroTPM(t)
	encode := func(v any) func([]byte) []byte {
		b, err := cbor.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return func([]byte) []byte { return b }
	}
	for name, tt := range map[string]struct {
		answer  func([]byte) []byte
		refuses gotpm.TPMRC
		want    string // part of the error; empty: none
	}{
		"a document":            {nil, 0, ""},
		"followed by zeros":     {func(b []byte) []byte { return append(b, make([]byte, 8192)...) }, 0, ""},
		"followed by more":      {func(b []byte) []byte { return append(b, 1) }, 0, "more follows"},
		"an error":              {encode(map[string]string{"Error": "InvalidOperation"}), 0, `"InvalidOperation"`},
		"an empty document":     {encode(map[string]any{"Attestation": map[string][]byte{"document": {}}}), 0, "refused"},
		"a document as text":    {encode(map[string]any{"Attestation": map[string]string{"document": "x"}}), 0, "malformed"},
		"another response":      {encode(map[string]any{"GetRandom": map[string][]byte{"random": {1}}}), 0, "refused"},
		"no response":           {func([]byte) []byte { return nil }, 0, "malformed"},
		"cut short":             {func(b []byte) []byte { return b[:20] }, 0, "malformed"},
		"a TPM without it":      {nil, gotpm.TPMRCCommandCode, "0x20000001"},
		"a wrong index":         {nil, 0x282, "0x20000001"},
		"a document, once more": {nil, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			n.answer, n.refuses = tt.answer, tt.refuses
			_, err := n.open().NitroDocument(t.Context(), [32]byte{1})
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want an error about %q", err, tt.want)
			}
			if n.public != nil {
				t.Error("the buffer was not deleted")
			}
		})
	}
}

func TestTheDeviceForCommandsOfTheVendor(t *testing.T) {
	for path, want := range map[string]string{"/dev/tpmrm0": "/dev/tpm0", "/dev/tpmrm12": "/dev/tpm12", "/dev/tpm0": "", "/run/tpm.sock": "", "/dev/tpmrm": "", "/dev/xtpmrm0x": ""} {
		if got, ok := tpm.DirectPath(path); got != want || ok != (want != "") {
			t.Errorf("%s: %q, %v", path, got, ok)
		}
	}
}
