package tpm

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/hex"
	"errors"

	gotpm "github.com/google/go-tpm/tpm2"
)

// akMarker is hashed into the attestation key's authPolicy. No policy session can satisfy it and
// none is needed (userWithAuth). It only makes the key differ from the keys of other agents on the
// machine, which sign any nonce that they receive (A5).
const akMarker = "muster-atls/1 attestation key"

// AKTemplate returns the public area of the attestation key, without its unique part: ECC P-256
// with ECDSA and SHA-256, or RSA-2048 with RSASSA and SHA-256. A key made from it in the
// endorsement hierarchy is the same after each boot.
func AKTemplate(rsaKey bool) gotpm.TPMTPublic {
	marker := sha256.Sum256([]byte(akMarker))
	public := gotpm.TPMTPublic{
		Type:    gotpm.TPMAlgECC,
		NameAlg: gotpm.TPMAlgSHA256,
		ObjectAttributes: gotpm.TPMAObject{
			FixedTPM:            true, // never leaves this TPM
			FixedParent:         true,
			SensitiveDataOrigin: true, // made by the TPM, not imported
			UserWithAuth:        true,
			NoDA:                true,
			Restricted:          true, // signs only what the TPM itself made
			SignEncrypt:         true,
		},
		AuthPolicy: gotpm.TPM2BDigest{Buffer: marker[:]},
		Parameters: gotpm.NewTPMUPublicParms(gotpm.TPMAlgECC, &gotpm.TPMSECCParms{
			Symmetric: gotpm.TPMTSymDefObject{Algorithm: gotpm.TPMAlgNull},
			Scheme: gotpm.TPMTECCScheme{
				Scheme:  gotpm.TPMAlgECDSA,
				Details: gotpm.NewTPMUAsymScheme(gotpm.TPMAlgECDSA, &gotpm.TPMSSigSchemeECDSA{HashAlg: gotpm.TPMAlgSHA256}),
			},
			CurveID: gotpm.TPMECCNistP256,
			KDF:     gotpm.TPMTKDFScheme{Scheme: gotpm.TPMAlgNull},
		}),
		Unique: gotpm.NewTPMUPublicID(gotpm.TPMAlgECC, &gotpm.TPMSECCPoint{}),
	}
	if rsaKey {
		public.Type = gotpm.TPMAlgRSA
		public.Parameters = gotpm.NewTPMUPublicParms(gotpm.TPMAlgRSA, &gotpm.TPMSRSAParms{
			Symmetric: gotpm.TPMTSymDefObject{Algorithm: gotpm.TPMAlgNull},
			Scheme: gotpm.TPMTRSAScheme{
				Scheme:  gotpm.TPMAlgRSASSA,
				Details: gotpm.NewTPMUAsymScheme(gotpm.TPMAlgRSASSA, &gotpm.TPMSSigSchemeRSASSA{HashAlg: gotpm.TPMAlgSHA256}),
			},
			KeyBits: 2048,
		})
		public.Unique = gotpm.NewTPMUPublicID(gotpm.TPMAlgRSA, &gotpm.TPM2BPublicKeyRSA{})
	}
	return public
}

// ErrEKKind means that no template here makes an endorsement key of that kind.
var ErrEKKind = errors.New("endorsement key is none of ECC P-256, ECC P-384, RSA 2048")

// ekKind is a set of algorithms of the TCG EK Credential Profile for TPM 2.0 (version 2.5, section
// B). A credential for an EK needs exactly these. They are the same for the low range and the high
// range of a kind.
type ekKind struct {
	nameAlg gotpm.TPMIAlgHash
	symBits uint16
	curve   gotpm.TPMECCCurve // zero: RSA
	rsaBits uint16
	// policyB is PolicyB of the profile (B.6.3): PolicyOR of PolicySecret(endorsement)
	// and PolicyAuthorizeNV; the high range's authPolicy.
	policyB string
}

var (
	kindP256    = ekKind{nameAlg: gotpm.TPMAlgSHA256, symBits: 128, curve: gotpm.TPMECCNistP256, policyB: policyBSHA256}
	kindP384    = ekKind{nameAlg: gotpm.TPMAlgSHA384, symBits: 256, curve: gotpm.TPMECCNistP384, policyB: policyBSHA384}
	kindRSA2048 = ekKind{nameAlg: gotpm.TPMAlgSHA256, symBits: 128, rsaBits: 2048, policyB: policyBSHA256}
)

// kindOf returns the kind of an endorsement key with that public part.
func kindOf(key crypto.PublicKey) (ekKind, error) {
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		switch k.Curve {
		case elliptic.P256():
			return kindP256, nil
		case elliptic.P384():
			return kindP384, nil
		}
	case *rsa.PublicKey:
		if k.N.BitLen() == 2048 && k.E == 65537 {
			return kindRSA2048, nil
		}
	}
	return ekKind{}, ErrEKKind
}

// EncapsulationKey returns an endorsement key, known from its certificate, in the form that
// gotpm.CreateCredential needs: with the name algorithm and cipher of its template. It returns
// [ErrEKKind] for other keys than ECC P-256, ECC P-384 and RSA 2048.
func EncapsulationKey(key crypto.PublicKey) (gotpm.LabeledEncapsulationKey, error) {
	kind, err := kindOf(key)
	if err != nil {
		return nil, err
	}
	unique, err := uniqueOf(key)
	if err != nil {
		return nil, err
	}
	public := kind.template(true, unique)
	return gotpm.ImportEncapsulationKey(&public)
}

// symmetric is the cipher that encrypts secrets sent to the EK.
func (k ekKind) symmetric() gotpm.TPMTSymDefObject {
	return gotpm.TPMTSymDefObject{
		Algorithm: gotpm.TPMAlgAES,
		KeyBits:   gotpm.NewTPMUSymKeyBits(gotpm.TPMAlgAES, gotpm.TPMKeyBits(k.symBits)),
		Mode:      gotpm.NewTPMUSymMode(gotpm.TPMAlgAES, gotpm.TPMAlgCFB),
	}
}

// template returns the kind's template of the high range (its use authorized by an empty
// auth value or PolicyB) or the low range (by PolicyA).
func (k ekKind) template(high bool, unique gotpm.TPMUPublicID) gotpm.TPMTPublic {
	public := gotpm.TPMTPublic{
		Type:    gotpm.TPMAlgECC,
		NameAlg: k.nameAlg,
		ObjectAttributes: gotpm.TPMAObject{
			FixedTPM:            true,
			FixedParent:         true,
			SensitiveDataOrigin: true,
			UserWithAuth:        high,
			AdminWithPolicy:     true,
			Restricted:          true,
			Decrypt:             true,
		},
		AuthPolicy: gotpm.TPM2BDigest{Buffer: unhex(policyA)},
		Unique:     unique,
	}
	if high {
		public.AuthPolicy.Buffer = unhex(k.policyB)
	}
	if k.rsaBits != 0 {
		public.Type = gotpm.TPMAlgRSA
		public.Parameters = gotpm.NewTPMUPublicParms(gotpm.TPMAlgRSA, &gotpm.TPMSRSAParms{
			Symmetric: k.symmetric(),
			Scheme:    gotpm.TPMTRSAScheme{Scheme: gotpm.TPMAlgNull},
			KeyBits:   gotpm.TPMKeyBits(k.rsaBits),
		})
		return public
	}
	public.Parameters = gotpm.NewTPMUPublicParms(gotpm.TPMAlgECC, &gotpm.TPMSECCParms{
		Symmetric: k.symmetric(),
		Scheme:    gotpm.TPMTECCScheme{Scheme: gotpm.TPMAlgNull},
		CurveID:   k.curve,
		KDF:       gotpm.TPMTKDFScheme{Scheme: gotpm.TPMAlgNull},
	})
	return public
}

// unique returns the unique part that the kind's templates carry: the low range a buffer
// of zero bytes as long as the key's, the high range an empty one (B.3, B.4).
func (k ekKind) unique(high bool) gotpm.TPMUPublicID {
	size := 0
	if k.rsaBits != 0 {
		if !high {
			size = int(k.rsaBits / 8)
		}
		return gotpm.NewTPMUPublicID(gotpm.TPMAlgRSA, &gotpm.TPM2BPublicKeyRSA{Buffer: make([]byte, size)})
	}
	if !high {
		size = 32
	}
	return gotpm.NewTPMUPublicID(gotpm.TPMAlgECC, &gotpm.TPMSECCPoint{
		X: gotpm.TPM2BECCParameter{Buffer: make([]byte, size)},
		Y: gotpm.TPM2BECCParameter{Buffer: make([]byte, size)},
	})
}

// uniqueOf returns a key as TPMU_PUBLIC_ID.
func uniqueOf(key crypto.PublicKey) (gotpm.TPMUPublicID, error) {
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		point, err := k.Bytes() // 4 || x || y, both padded (SEC 1, 2.3.3)
		if err != nil {
			return gotpm.TPMUPublicID{}, err
		}
		half := len(point) / 2
		return gotpm.NewTPMUPublicID(gotpm.TPMAlgECC, &gotpm.TPMSECCPoint{
			X: gotpm.TPM2BECCParameter{Buffer: point[1 : 1+half]},
			Y: gotpm.TPM2BECCParameter{Buffer: point[1+half:]},
		}), nil
	case *rsa.PublicKey:
		return gotpm.NewTPMUPublicID(gotpm.TPMAlgRSA, &gotpm.TPM2BPublicKeyRSA{Buffer: k.N.Bytes()}), nil
	}
	return gotpm.TPMUPublicID{}, ErrEKKind
}

// authPolicy values of the profile's templates (B.6), in hexadecimal digits.
const (
	// policyA is PolicySecret(TPM_RH_ENDORSEMENT), SHA-256.
	policyA       = "837197674484b3f81a90cc8d46a5d724fd52d76e06520b64f2a1da1b331469aa"
	policyASHA384 = "8bbf2266537c171cb56e403c4dc1d4b64f432611dc386e6f532050c3278c930e143e8bb1133824ccb431053871c6db53"
	// policyC is PolicyAuthorizeNV(the owner's Policy Index).
	policyCSHA256 = "3767e2edd43ff45a3a7e1eaefcef78643dca964632e7aad82c673a30d8633fde"
	policyCSHA384 = "d6032ce61f2fb3c240eb3cf6a33237ef2b6a16f4293c22b455e261cffd217ad5b4947c2d73e63005eed2dc2b3593d165"
	// policyB is PolicyOR(PolicyA, PolicyC).
	policyBSHA256 = "ca3d0a99a2b93906f7a3342414efcfb3a385d44cd1fd459089d19b5071c0b7a0"
	policyBSHA384 = "b26e7d28d11a50bc53d882bcf5fd3a1a074148bb35d3b4e4cb1c0ad9bde419cacb47ba09699646150f9fc000f3f80e12"
)

func unhex(s string) []byte {
	b, err := hex.DecodeString(s)
	if err != nil {
		panic("tpm: constant: " + err.Error())
	}
	return b
}
