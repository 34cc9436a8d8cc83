package owner

import (
	"crypto"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
)

// trusts makes the folder's admin.conf one that trusts these authorities.
func (o *lost) trusts(t *testing.T, list ...authority) {
	t.Helper()
	text, err := o.Read(ownerdir.AdminConf)
	if err != nil {
		t.Fatal(err)
	}
	conf, err := clientcmd.Load(text)
	if err != nil {
		t.Fatal(err)
	}
	conf.Clusters["c"].CertificateAuthorityData = nil
	for _, a := range list {
		conf.Clusters["c"].CertificateAuthorityData = append(conf.Clusters["c"].CertificateAuthorityData, pemOf(a.cert)...)
	}
	if text, err = clientcmd.Write(*conf); err != nil {
		t.Fatal(err)
	}
	if err := writeAdminConf(o.Dir, text); err != nil {
		t.Fatal(err)
	}
}

// K5: a backup is verified by the authority of its time, and a restore on a machine by the one that has signed it.
func TestABackupOfAFormerAuthorityIsVerified(t *testing.T) {
	o := newLost(t)
	owner, err := o.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	made := func(by crypto.Signer) string { return writeBackup(t, publicOf(owner), by, o.manifest(t)) }
	first, second, third := newAuthority(t), newAuthority(t), newAuthority(t)
	for _, tt := range []struct {
		now, verify, refuse []authority
	}{
		{[]authority{first}, []authority{first}, []authority{second, third}},
		{[]authority{first, second}, []authority{first, second}, []authority{third}},
		{[]authority{second, first}, []authority{first, second}, []authority{third}},
		{[]authority{second}, []authority{first, second}, []authority{third}},
		{[]authority{third}, []authority{first, second, third}, nil},
		{[]authority{first}, []authority{first, second, third}, nil}, // a restore of the oldest backup
	} {
		o.trusts(t, tt.now...)
		for _, by := range tt.verify {
			path := made(by.key)
			info, err := VerifyBackup(o.Dir, path)
			if err != nil {
				t.Fatalf("with %d authorities: %v", len(tt.now), err)
			}
			dropped := !slices.ContainsFunc(tt.now, func(a authority) bool { return a.cert.Equal(by.cert) })
			if got := slices.ContainsFunc(info.Since, func(s string) bool { return strings.Contains(s, "has dropped the certificate authority") }); got != dropped {
				t.Errorf("the authority was dropped: %v, and it says %q", dropped, info.Since)
			}
			i := &initializer{InitConfig: InitConfig{Dir: o.Dir}}
			if _, _, err := i.openBackup(RestoreConfig{Dir: o.Dir, File: path}); err != nil || string(i.backup.GetAuthority()) != string(by.cert.Raw) {
				t.Errorf("the machine is given another authority than the one that has signed: %v", err)
			}
		}
		for _, by := range tt.refuse {
			if _, err := VerifyBackup(o.Dir, made(by.key)); err == nil || !strings.Contains(err.Error(), "not signed by this cluster's certificate authority") {
				t.Errorf("of somebody else: %v", err)
			}
		}
	}
	former, err := formerAuthorities(o.Dir)
	if err != nil || len(former) != 4 { // the folder's own, and each of these once
		t.Errorf("%d former authorities, %v", len(former), err)
	}
}

func TestARenewedKubeconfigLeavesNoFormerAuthority(t *testing.T) {
	o := newLost(t)
	text, err := o.Read(ownerdir.AdminConf)
	if err != nil {
		t.Fatal(err)
	}
	if err := writeAdminConf(o.Dir, slices.Concat(text, []byte("\n"))); err != nil {
		t.Fatal(err)
	}
	if _, err := o.Read(ownerdir.FormerAuthorities); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
}
