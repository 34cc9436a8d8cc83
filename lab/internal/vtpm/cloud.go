package vtpm

import (
	"context"
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
	"github.com/google/go-tpm/tpm2/transport/linuxudstpm"
)

// CloudProject and CloudZone are in the certificates of the lab's cloud.
const (
	CloudProject = "muster-lab"
	CloudZone    = "lab-a"
)

// NV indices of an ECC platform key's certificate and template (go-tpm-tools, client/handles.go).
const (
	nvCertificate = 0x01C10002
	nvTemplate    = 0x01C10003
	nvChunk       = 512 // bytes of one TPM2_NV_Write
)

// oidInstance is Google's extension with the identity of a virtual machine.
var oidInstance = asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 11129, 2, 1, 21}

// ManufactureCloud makes the TPM of a cloud's virtual machine: without EK certificates, with an attestation key that
// the cloud's ca certifies, as Google Cloud's are. The certificate names the machine.
func (t TPM) ManufactureCloud(ctx context.Context, ca CA, machine string) error {
	if err := t.ManufactureBare(ctx, ca); err != nil {
		return err
	}
	runtime.LockOSThread() // the TPM's process ends with the thread that starts it
	defer runtime.UnlockOSThread()
	cmd := t.Command()
	if err := cmd.Start(); err != nil {
		return err
	}
	err := t.provisionCloud(ctx, ca, machine)
	// It has stored each change when its answer came (swtpm writes its state with the command).
	if serr := cmd.Process.Signal(syscall.SIGTERM); serr != nil {
		err = errors.Join(err, serr)
	}
	_ = cmd.Wait() // terminated
	return errors.Join(err, os.RemoveAll(t.Socket()))
}

func (t TPM) provisionCloud(ctx context.Context, ca CA, machine string) error {
	if err := t.WaitReady(ctx); err != nil {
		return err
	}
	dev, err := linuxudstpm.Open(t.Socket())
	if err != nil {
		return err
	}
	err = certifyPlatformKey(dev, ca, machine)
	return errors.Join(err, dev.Close())
}

// certifyPlatformKey makes the platform key, and stores its certificate and template in NV memory.
func certifyPlatformKey(dev transport.TPM, ca CA, machine string) error {
	template := platformTemplate()
	key, err := tpm2.CreatePrimary{
		PrimaryHandle: tpm2.AuthHandle{Handle: tpm2.TPMRHEndorsement, Auth: tpm2.PasswordAuth(nil)}, InPublic: tpm2.New2B(template),
	}.Execute(dev)
	if err != nil {
		return fmt.Errorf("make the platform key: %w", err)
	}
	area, err := key.OutPublic.Contents()
	if err == nil {
		_, err = tpm2.FlushContext{FlushHandle: key.ObjectHandle}.Execute(dev)
	}
	if err != nil {
		return err
	}
	public, err := tpm2.Pub(*area)
	if err != nil {
		return err
	}
	certificate, err := ca.certifyMachine(public, machine)
	if err != nil {
		return err
	}
	return errors.Join(writeNV(dev, nvCertificate, certificate), writeNV(dev, nvTemplate, tpm2.Marshal(template)))
}

// platformTemplate is that of a restricted ECC P-256 signing key, as Google Cloud's.
func platformTemplate() tpm2.TPMTPublic {
	return tpm2.TPMTPublic{
		Type: tpm2.TPMAlgECC, NameAlg: tpm2.TPMAlgSHA256,
		ObjectAttributes: tpm2.TPMAObject{FixedTPM: true, FixedParent: true, SensitiveDataOrigin: true, UserWithAuth: true, NoDA: true, Restricted: true, SignEncrypt: true},
		Parameters: tpm2.NewTPMUPublicParms(tpm2.TPMAlgECC, &tpm2.TPMSECCParms{
			Symmetric: tpm2.TPMTSymDefObject{Algorithm: tpm2.TPMAlgNull},
			Scheme:    tpm2.TPMTECCScheme{Scheme: tpm2.TPMAlgECDSA, Details: tpm2.NewTPMUAsymScheme(tpm2.TPMAlgECDSA, &tpm2.TPMSSigSchemeECDSA{HashAlg: tpm2.TPMAlgSHA256})},
			CurveID:   tpm2.TPMECCNistP256,
			KDF:       tpm2.TPMTKDFScheme{Scheme: tpm2.TPMAlgNull},
		}),
		Unique: tpm2.NewTPMUPublicID(tpm2.TPMAlgECC, &tpm2.TPMSECCPoint{}),
	}
}

// instance is the content of the extension (go-tpm-tools, proto/attest.proto: GCEInstanceInfo).
type instance struct {
	Zone          string `asn1:"utf8"`
	ProjectNumber int64
	ProjectID     string `asn1:"utf8"`
	InstanceID    int64
	InstanceName  string `asn1:"utf8"`
	Security      struct {
		Version    int  `asn1:"explicit,tag:0"`
		Production bool `asn1:"explicit,tag:1"`
	} `asn1:"explicit,tag:0"`
}

// certifyMachine returns the certificate of a machine's platform key.
func (c CA) certifyMachine(public crypto.PublicKey, machine string) ([]byte, error) {
	block, err := readPEM(filepath.Join(c.Dir, "key.pem"))
	if err != nil {
		return nil, err
	}
	key, err := x509.ParsePKCS8PrivateKey(block)
	if err != nil {
		return nil, err
	}
	if block, err = readPEM(c.CertPath()); err != nil {
		return nil, err
	}
	issuer, err := x509.ParseCertificate(block)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	id := instance{Zone: CloudZone, ProjectNumber: 1, ProjectID: CloudProject, InstanceID: now.UnixNano(), InstanceName: machine}
	id.Security.Production = true
	extension, err := asn1.Marshal(id)
	if err != nil {
		return nil, err
	}
	return x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(id.InstanceID), Subject: pkix.Name{CommonName: machine, Organization: []string{"Muster lab's cloud"}},
		NotBefore: now.Add(-time.Hour), NotAfter: now.AddDate(10, 0, 0), BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtraExtensions: []pkix.Extension{{Id: oidInstance, Value: extension}},
	}, issuer, public, key)
}

func readPEM(path string) ([]byte, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, fmt.Errorf("%s: no PEM", path)
	}
	return block.Bytes, nil
}

// writeNV defines an NV index that any program in the machine may read, and writes it.
func writeNV(dev transport.TPM, index tpm2.TPMHandle, data []byte) error {
	owner := tpm2.AuthHandle{Handle: tpm2.TPMRHOwner, Auth: tpm2.PasswordAuth(nil)}
	if _, err := (tpm2.NVDefineSpace{AuthHandle: owner, PublicInfo: tpm2.New2B(tpm2.TPMSNVPublic{
		NVIndex: index, NameAlg: tpm2.TPMAlgSHA256, DataSize: uint16(len(data)),
		Attributes: tpm2.TPMANV{OwnerWrite: true, OwnerRead: true, AuthRead: true, NoDA: true},
	})}).Execute(dev); err != nil {
		return fmt.Errorf("define NV index 0x%08x: %w", uint32(index), err)
	}
	for at := 0; at < len(data); at += nvChunk {
		public, err := tpm2.NVReadPublic{NVIndex: index}.Execute(dev) // the name changes with the first write
		if err == nil {
			_, err = tpm2.NVWrite{
				AuthHandle: owner, NVIndex: tpm2.NamedHandle{Handle: index, Name: public.NVName},
				Data: tpm2.TPM2BMaxNVBuffer{Buffer: data[at:min(at+nvChunk, len(data))]}, Offset: uint16(at),
			}.Execute(dev)
		}
		if err != nil {
			return fmt.Errorf("write NV index 0x%08x: %w", uint32(index), err)
		}
	}
	return nil
}
