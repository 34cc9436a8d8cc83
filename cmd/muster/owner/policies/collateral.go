package policies

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/policyfile"
	"github.com/muster-k8s/muster/trust/attest"
)

const (
	// maxAnswer is the largest answer of a vendor, in bytes.
	maxAnswer = 128 << 10
	// maxCollateralFile is the largest file with collateral: 128 KiB in base64, with names.
	maxCollateralFile = 256 << 10
	// vendorTimeout bounds one request.
	vendorTimeout = 30 * time.Second
)

// CollateralSource configures what is fetched from the vendors of processors.
type CollateralSource struct {
	// AMD is the address of the Key Distribution Service, Intel that of the Provisioning Certification Service, IntelRoot that
	// of the list of Intel's root.
	AMD, Intel, IntelRoot string
	// Products are lines of AMD's processors: Milan, Genoa, Turin.
	Products []string
	// FMSPCs are models of Intel's processors: 12 hexadecimal digits each.
	FMSPCs []string
}

var (
	productName = regexp.MustCompile(`^(Milan|Genoa|Turin)$`)
	fmspcDigits = regexp.MustCompile(`^[0-9A-Fa-f]{12}$`)
)

// FetchCollateral fetches what the vendors publish, and checks that it is theirs, valid at now, and what was requested.
func FetchCollateral(ctx context.Context, s CollateralSource, now time.Time) (*attestv1.Collateral, []attest.CollateralEnd, error) {
	c := &attestv1.Collateral{}
	for _, p := range s.Products {
		if !productName.MatchString(p) {
			return nil, nil, fmt.Errorf("product %q: want Milan, Genoa (also for Bergamo and Siena) or Turin", p)
		}
		for _, key := range []string{"vcek", "vlek"} { // one root signs both lists
			crl, _, err := fetchAnswer(ctx, s.AMD+"/"+key+"/v1/"+p+"/crl", "")
			if err != nil {
				return nil, nil, err
			}
			c.AmdCrls = append(c.AmdCrls, crl)
		}
	}
	for _, f := range s.FMSPCs {
		if !fmspcDigits.MatchString(f) {
			return nil, nil, fmt.Errorf("FMSPC %q: want 12 hexadecimal digits", f)
		}
		info, chain, err := fetchAnswer(ctx, s.Intel+"/tdx/certification/v4/tcb?fmspc="+f, "TCB-Info-Issuer-Chain")
		if err != nil {
			return nil, nil, err
		}
		c.TcbInfos, c.TcbInfoChain = append(c.TcbInfos, info), chain
	}
	if len(s.FMSPCs) > 0 {
		var err error
		if c.QeIdentity, c.QeIdentityChain, err = fetchAnswer(ctx, s.Intel+"/tdx/certification/v4/qe/identity", "SGX-Enclave-Identity-Issuer-Chain"); err != nil {
			return nil, nil, err
		}
		for _, address := range []string{s.IntelRoot, s.Intel + "/sgx/certification/v4/pckcrl?ca=platform&encoding=der", s.Intel + "/sgx/certification/v4/pckcrl?ca=processor&encoding=der"} {
			crl, _, err := fetchAnswer(ctx, address, "")
			if err != nil {
				return nil, nil, err
			}
			c.IntelCrls = append(c.IntelCrls, crl)
		}
	}
	ends, err := attest.CheckFetchedCollateral(c, s.Products, s.FMSPCs, now)
	return c, ends, err
}

// fetchAnswer returns an answer, and the header of that name, decoded: certificates in PEM.
func fetchAnswer(ctx context.Context, address, header string) (body, chain []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, vendorTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, nil, err
	}
	rsp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = rsp.Body.Close() }()
	if rsp.StatusCode != http.StatusOK {
		return nil, nil, fmt.Errorf("%s: %s", address, rsp.Status)
	}
	if body, err = io.ReadAll(io.LimitReader(rsp.Body, maxAnswer+1)); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", address, err)
	}
	if len(body) == 0 || len(body) > maxAnswer {
		return nil, nil, fmt.Errorf("%s: the answer has %d bytes or more, want 1 to %d", address, len(body), maxAnswer)
	}
	if header == "" {
		return body, nil, nil
	}
	decoded, err := url.PathUnescape(rsp.Header.Get(header))
	if err != nil || decoded == "" {
		return nil, nil, fmt.Errorf("%s: the answer has no certificates in the header %s", address, header)
	}
	return body, []byte(decoded), nil
}

// ReadCollateral reads a file that `muster collateral fetch` has written, and checks it.
func ReadCollateral(text []byte, now time.Time) (*attestv1.Collateral, []attest.CollateralEnd, error) {
	if len(text) > maxCollateralFile {
		return nil, nil, fmt.Errorf("it has %d bytes, more than %d", len(text), maxCollateralFile)
	}
	c := &attestv1.Collateral{}
	if err := protojson.Unmarshal(text, c); err != nil {
		return nil, nil, err
	}
	ends, err := attest.CheckCollateral(c, now)
	return c, ends, err
}

// WithCollateral returns a policy with other collateral and another serial. It also returns the reasons, as texts, why the
// collateral is worse than that of the policy: it lacks data that the rules need, or has older data. If there are reasons and
// allowWorse is not set, it returns an error.
func WithCollateral(text []byte, serial uint64, c *attestv1.Collateral, allowWorse bool) (policy []byte, worse []string, err error) {
	if worse, err = policyfile.WorseCollateral(text, c); err != nil {
		return nil, nil, err
	}
	if len(worse) > 0 && !allowWorse {
		return nil, worse, fmt.Errorf("the collateral is worse than that of the policy, so reports would be refused, or accepted by outdated data:\n- %s\nFetch it again, from the vendor itself if you used a mirror, with all lines of processors and models in one file; or give --allow-worse",
			strings.Join(worse, "\n- "))
	}
	policy, err = policyfile.SetCollateral(text, serial, c)
	return policy, worse, err
}
