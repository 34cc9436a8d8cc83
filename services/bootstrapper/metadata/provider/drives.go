package provider

import (
	"encoding/json"
	"fmt"

	"github.com/muster-k8s/muster/services/bootstrapper/metadata"
)

// noCloud reads a NoCloud volume (cloud-init, reference/datasources/nocloud): user-data, and meta-data (YAML) with the host name.
func (m Machine) noCloud() (*Found, error) {
	v, err := m.one("cidata")
	if err != nil {
		return nil, err
	}
	f := &Found{}
	f.From = v.device
	return f, m.with(v, func(read reader) error {
		b, err := read("user-data", MaxDocument)
		if err != nil {
			return noUserData(err)
		}
		if err := f.setDocuments(b); err != nil {
			return fmt.Errorf("user-data: %w", err)
		}
		b, err = read("meta-data", MaxDocument)
		if missing(err) {
			return nil
		}
		if err != nil {
			return err
		}
		if f.Hostname, err = localHostname(b); err != nil {
			return fmt.Errorf("meta-data: %w", err)
		}
		return nil
	})
}

func noUserData(err error) error {
	if missing(err) {
		return fmt.Errorf("the machine has no user data: give it a document of kind MachineMetadata as its user data: %w", err)
	}
	return err
}

// localHostname returns the host name in NoCloud's meta-data. Tools add keys of their own.
func localHostname(b []byte) (string, error) {
	docs, err := metadata.Documents(b)
	if err != nil || len(docs) == 0 {
		return "", err
	}
	if len(docs) > 1 {
		return "", fmt.Errorf("line %d: want one YAML document, not %d", docs[1].Line, len(docs))
	}
	return metadata.Field(docs[0], "local-hostname")
}

// configDrive reads an OpenStack config drive (nova, user/metadata): openstack/latest/user_data and meta_data.json, and what EC2's format adds.
func (m Machine) configDrive() (*Found, error) {
	v, err := m.one("config-2")
	if err != nil {
		return nil, err
	}
	f := &Found{}
	f.From = v.device
	return f, m.with(v, func(read reader) error {
		b, err := read("openstack/latest/user_data", MaxDocument)
		if err != nil {
			return noUserData(err)
		}
		if err := f.setDocuments(b); err != nil {
			return fmt.Errorf("openstack/latest/user_data: %w", err)
		}
		if b, err = read("openstack/latest/meta_data.json", MaxDocument); err != nil {
			return err
		}
		if err := f.setOpenStack(b); err != nil {
			return fmt.Errorf("openstack/latest/meta_data.json: %w", err)
		}
		b, err = read("ec2/latest/meta-data.json", MaxDocument)
		if missing(err) {
			return nil
		}
		if err != nil {
			return err
		}
		var ec2 struct {
			Address string `json:"local-ipv4"`
			Type    string `json:"instance-type"`
		}
		if err := json.Unmarshal(b, &ec2); err != nil {
			return fmt.Errorf("ec2/latest/meta-data.json: %w", err)
		}
		f.setEC2(ec2.Address, ec2.Type)
		return nil
	})
}

// setOpenStack takes the facts of meta_data.json. OpenStack has no region in it.
func (f *Found) setOpenStack(b []byte) error {
	var meta struct {
		UUID     string `json:"uuid"`
		Hostname string `json:"hostname"`
		Zone     string `json:"availability_zone"`
		Type     string `json:"instance_type"` // KubeVirt's
	}
	if err := json.Unmarshal(b, &meta); err != nil {
		return err
	}
	f.Hostname, f.Zone, f.InstanceType = meta.Hostname, meta.Zone, meta.Type
	if meta.UUID != "" {
		f.ProviderID = "openstack:///" + meta.UUID // as cloud-provider-openstack has it
	}
	return nil
}

// setEC2 takes facts that OpenStack has only in EC2's format.
func (f *Found) setEC2(address, kind string) {
	if address != "" {
		f.Addresses = []string{address}
	}
	if kind != "" {
		f.InstanceType = kind
	}
}
