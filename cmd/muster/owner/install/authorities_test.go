package install

import (
	"crypto"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
	"github.com/muster-k8s/muster/cmd/muster/owner/backups"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/cmd/muster/owner/ownertest"
)

// K5: a backup is verified by the authority of its time, and a restore on a machine by the one that has signed it.
func TestABackupOfAFormerAuthorityIsVerified(t *testing.T) {
	o := ownertest.NewLost(t)
	owner, err := o.OwnerKey()
	if err != nil {
		t.Fatal(err)
	}
	made := func(by crypto.Signer) string {
		return ownertest.WriteBackup(t, access.PublicOf(owner), by, o.Manifest(t))
	}
	first, second, third := ownertest.NewAuthority(t), ownertest.NewAuthority(t), ownertest.NewAuthority(t)
	for _, tt := range []struct {
		now, verify, refuse []ownertest.Authority
	}{
		{[]ownertest.Authority{first}, []ownertest.Authority{first}, []ownertest.Authority{second, third}},
		{[]ownertest.Authority{first, second}, []ownertest.Authority{first, second}, []ownertest.Authority{third}},
		{[]ownertest.Authority{second, first}, []ownertest.Authority{first, second}, []ownertest.Authority{third}},
		{[]ownertest.Authority{second}, []ownertest.Authority{first, second}, []ownertest.Authority{third}},
		{[]ownertest.Authority{third}, []ownertest.Authority{first, second, third}, nil},
		{[]ownertest.Authority{first}, []ownertest.Authority{first, second, third}, nil}, // a restore of the oldest backup
	} {
		trusts(t, o, tt.now...)
		for _, by := range tt.verify {
			path := made(by.Key)
			info, err := backups.VerifyBackup(o.Dir, path)
			if err != nil {
				t.Fatalf("with %d authorities: %v", len(tt.now), err)
			}
			dropped := !slices.ContainsFunc(tt.now, func(a ownertest.Authority) bool { return a.Cert.Equal(by.Cert) })
			if got := slices.ContainsFunc(info.Since, func(s string) bool { return strings.Contains(s, "has dropped the certificate authority") }); got != dropped {
				t.Errorf("the authority was dropped: %v, and it says %q", dropped, info.Since)
			}
			i := &initializer{InitConfig: InitConfig{Dir: o.Dir}}
			if _, _, err := i.openBackup(RestoreConfig{Dir: o.Dir, File: path}); err != nil || string(i.backup.GetAuthority()) != string(by.Cert.Raw) {
				t.Errorf("the machine is given another authority than the one that has signed: %v", err)
			}
		}
		for _, by := range tt.refuse {
			if _, err := backups.VerifyBackup(o.Dir, made(by.Key)); err == nil || !strings.Contains(err.Error(), "not signed by this cluster's certificate authority") {
				t.Errorf("of somebody else: %v", err)
			}
		}
	}
	former, err := access.FormerAuthorities(o.Dir)
	if err != nil || len(former) != 4 { // the folder's own, and each of these once
		t.Errorf("%d former authorities, %v", len(former), err)
	}
}

func TestARenewedKubeconfigLeavesNoFormerAuthority(t *testing.T) {
	o := ownertest.NewLost(t)
	text, err := o.Read(ownerdir.AdminConf)
	if err != nil {
		t.Fatal(err)
	}
	if err := access.WriteAdminConf(o.Dir, slices.Concat(text, []byte("\n"))); err != nil {
		t.Fatal(err)
	}
	if _, err := o.Read(ownerdir.FormerAuthorities); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
}
