package tpm

import (
	"context"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/fxamacker/cbor/v2"
	gotpm "github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
)

// ErrNoNitroTPM means that the TPM is no NitroTPM of AWS.
var ErrNoNitroTPM = errors.New("the TPM is no NitroTPM")

// NitroUserData is the user_data of Muster's documents. It distinguishes them from documents that
// another program on the machine requests, perhaps with a nonce and a key from a peer.
const NitroUserData = "muster-atls/1 nitro-tpm"

// nitroBuffer is the NV index through which NitroTPM takes a request and returns the response. It is
// in the owner's range, as [CounterIndex] is, and exists only during a request.
const nitroBuffer = gotpm.TPMHandle(0x01804D56)

const (
	nitroBufferSize      = 8 << 10                 // bytes: AWS's own program (NitroTPM-Tools) defines as many
	nitroCommand         = gotpm.TPMCC(0x20000001) // bit 29: of the vendor (Part 2, 6.5.1)
	nitroVendor          = "NitroTPM"              // the first two vendor strings
	nvUndefined     byte = 0xFF                    // fills the buffer behind a response
)

// nitroRequest and nitroResponse are messages of the Nitro Security Module (crate
// aws-nitro-enclaves-nsm-api), in CBOR. They have a field for each kind of message.
type nitroRequest struct {
	Attestation struct {
		UserData  []byte `cbor:"user_data"`
		Nonce     []byte `cbor:"nonce"`
		PublicKey []byte `cbor:"public_key"`
	}
}

type nitroResponse struct {
	Attestation struct {
		Document cbor.ByteString `cbor:"document"`
	}
	Error string
}

// NitroDocument implements [Device].
func (t *TPM) NitroDocument(ctx context.Context, nonce [32]byte) (document []byte, err error) {
	t.mu.Lock()
	known := t.nitro
	t.mu.Unlock()
	if known != nil && !*known {
		return nil, ErrNoNitroTPM
	}
	err = t.sequence(ctx, "NitroTPM document", func(c *conn) error {
		nitro, err := c.isNitro()
		if err != nil {
			return err
		}
		t.mu.Lock()
		t.nitro = &nitro
		t.mu.Unlock()
		if !nitro {
			return ErrNoNitroTPM
		}
		document, err = c.nitroDocument(nonce)
		return err
	})
	return document, err
}

// isNitro reports whether the TPM's vendor strings begin with "NitroTPM" (Part 2, 6.13,
// TPM_PT_VENDOR_STRING_1): four characters each.
func (c *conn) isNitro() (bool, error) {
	rsp, err := gotpm.GetCapability{
		Capability: gotpm.TPMCapTPMProperties, Property: uint32(gotpm.TPMPTVendorString1), PropertyCount: 2,
	}.Execute(c.tpm)
	if err != nil {
		return false, fmt.Errorf("vendor string: %w", err)
	}
	properties, err := rsp.CapabilityData.Data.TPMProperties()
	if err != nil {
		return false, fmt.Errorf("vendor string: %w", err)
	}
	var name []byte
	for i, p := range properties.TPMProperty {
		if p.Property != gotpm.TPMPTVendorString1+gotpm.TPMPT(i) {
			return false, nil
		}
		name = binary.BigEndian.AppendUint32(name, p.Value)
	}
	return string(name) == nitroVendor, nil
}

// nitroDocument passes a request through the buffer, and deletes the buffer.
func (c *conn) nitroDocument(nonce [32]byte) (document []byte, err error) {
	ak, err := c.attestationKey()
	if err != nil {
		return nil, err
	}
	key, err := gotpm.Pub(ak.public)
	if err != nil {
		return nil, err
	}
	var q nitroRequest
	q.Attestation.UserData, q.Attestation.Nonce = []byte(NitroUserData), nonce[:]
	if q.Attestation.PublicKey, err = x509.MarshalPKIXPublicKey(key); err != nil {
		return nil, err
	}
	request, err := cbor.Marshal(q)
	if err != nil {
		return nil, err
	}
	if err := c.deleteNitroBuffer(); err != nil { // of a process that was killed
		return nil, err
	}
	if _, err := (gotpm.NVDefineSpace{
		AuthHandle: gotpm.AuthHandle{Handle: gotpm.TPMRHOwner, Auth: gotpm.PasswordAuth(nil)},
		PublicInfo: gotpm.New2B(gotpm.TPMSNVPublic{
			NVIndex: nitroBuffer, NameAlg: gotpm.TPMAlgSHA256, DataSize: nitroBufferSize,
			Attributes: gotpm.TPMANV{AuthRead: true, AuthWrite: true, NoDA: true},
		}),
	}).Execute(c.tpm); err != nil {
		return nil, fmt.Errorf("define 0x%08x (the owner hierarchy's auth value must be empty): %w", uint32(nitroBuffer), err)
	}
	defer func() { err = errors.Join(err, c.deleteNitroBuffer()) }()
	if err := c.writeNV(nitroBuffer, request); err != nil {
		return nil, err
	}
	if err := c.sendNitro(); err != nil {
		return nil, err
	}
	response, err := c.readNV(nitroBuffer, nitroBufferSize)
	if err != nil {
		return nil, fmt.Errorf("response: %w", err)
	}
	return parseNitro(response)
}

func parseNitro(response []byte) ([]byte, error) {
	var r nitroResponse
	rest, err := cbor.UnmarshalFirst(response, &r)
	if err != nil {
		return nil, fmt.Errorf("the response is malformed: %w", err)
	}
	for _, b := range rest {
		if b != nvUndefined && b != 0 {
			return nil, errors.New("the response is malformed: more follows it")
		}
	}
	if r.Error != "" || len(r.Attestation.Document) == 0 {
		return nil, fmt.Errorf("NitroTPM refused to make a document: %q", r.Error)
	}
	return []byte(r.Attestation.Document), nil
}

// deleteNitroBuffer deletes the buffer if there is one.
func (c *conn) deleteNitroBuffer() error {
	public, err := gotpm.NVReadPublic{NVIndex: nitroBuffer}.Execute(c.tpm)
	if errors.Is(err, gotpm.TPMRCHandle) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read public area of 0x%08x: %w", uint32(nitroBuffer), err)
	}
	if _, err := (gotpm.NVUndefineSpace{
		AuthHandle: gotpm.AuthHandle{Handle: gotpm.TPMRHOwner, Auth: gotpm.PasswordAuth(nil)},
		NVIndex:    gotpm.NamedHandle{Handle: nitroBuffer, Name: public.NVName},
	}).Execute(c.tpm); err != nil {
		return fmt.Errorf("undefine 0x%08x: %w", uint32(nitroBuffer), err)
	}
	return nil
}

// writeNV writes data to the start of an index with an empty auth value.
func (c *conn) writeNV(index gotpm.TPMHandle, data []byte) error {
	for offset := 0; offset < len(data); offset += nvBuffer {
		public, err := gotpm.NVReadPublic{NVIndex: index}.Execute(c.tpm) // the first write changes its name
		if err != nil {
			return fmt.Errorf("read public area of 0x%08x: %w", uint32(index), err)
		}
		if _, err := (gotpm.NVWrite{
			AuthHandle: gotpm.AuthHandle{Handle: index, Name: public.NVName, Auth: gotpm.PasswordAuth(nil)},
			NVIndex:    gotpm.NamedHandle{Handle: index, Name: public.NVName},
			Data:       gotpm.TPM2BMaxNVBuffer{Buffer: data[offset:min(len(data), offset+nvBuffer)]},
			Offset:     uint16(offset),
		}).Execute(c.tpm); err != nil {
			return fmt.Errorf("write 0x%08x: %w", uint32(index), err)
		}
	}
	return nil
}

// sendNitro has NitroTPM replace the request in the buffer by the response. go-tpm knows no commands of
// vendors, so this one is put together here (Part 1, 18): two handles, the buffer as what authorizes
// and as what is used, and an empty password.
func (c *conn) sendNitro() error {
	dev := c.tpm
	if open := c.owner.direct; open != nil {
		// The kernel's resource manager may refuse commands that it does not know.
		direct, err := open()
		if err != nil {
			return fmt.Errorf("open the TPM without the resource manager, for a command of its vendor (another program may have it open): %w", err)
		}
		defer direct.Close()
		dev = patient{direct}
	}
	return executeNitro(dev)
}

func executeNitro(dev transport.TPM) error {
	body := binary.BigEndian.AppendUint32(nil, uint32(nitroBuffer))
	body = binary.BigEndian.AppendUint32(body, uint32(nitroBuffer))
	auth := binary.BigEndian.AppendUint32(nil, uint32(gotpm.TPMRSPW))
	auth = append(auth, 0, 0, 0, 0, 0) // TPMS_AUTH_COMMAND: no nonce, no attributes, an empty password
	body = binary.BigEndian.AppendUint32(body, uint32(len(auth)))
	body = append(body, auth...)
	const header = 2 + 4 + 4
	command := binary.BigEndian.AppendUint16(nil, uint16(gotpm.TPMSTSessions))
	command = binary.BigEndian.AppendUint32(command, uint32(header+len(body)))
	command = binary.BigEndian.AppendUint32(command, uint32(nitroCommand))
	response, err := dev.Send(append(command, body...))
	if err != nil {
		return fmt.Errorf("command 0x%08x: %w", uint32(nitroCommand), err)
	}
	if len(response) < header {
		return fmt.Errorf("command 0x%08x: a response of %d bytes", uint32(nitroCommand), len(response))
	}
	if rc := gotpm.TPMRC(binary.BigEndian.Uint32(response[6:header])); rc != gotpm.TPMRCSuccess {
		return fmt.Errorf("command 0x%08x: %w", uint32(nitroCommand), rc)
	}
	return nil
}
