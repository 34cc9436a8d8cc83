package provider

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"strings"
)

// aws asks the instance metadata service of EC2, version 2 (AWS, EC2 User Guide, "Instance metadata"): each request needs a token, which a PUT returns.
func aws(ctx context.Context, c *client) (*Found, error) {
	const tokenPath = "/latest/api/token" //nolint:gosec // a path
	c.header.Set("X-Aws-Ec2-Metadata-Token-Ttl-Seconds", "60")
	b, err := c.ask(ctx, http.MethodPut, tokenPath, maxValue)
	if err != nil {
		return nil, err
	}
	token, err := printable(tokenPath, b)
	if err != nil || token == "" {
		return nil, errors.Join(errors.New("the service returned no token"), err)
	}
	c.header = http.Header{"X-Aws-Ec2-Metadata-Token": {token}}
	f := &Found{}
	if err := c.userData(ctx, "/latest/user-data", f); err != nil {
		return nil, err
	}
	var doc struct {
		Region  string `json:"region"`
		Zone    string `json:"availabilityZone"`
		ID      string `json:"instanceId"`
		Type    string `json:"instanceType"`
		Address string `json:"privateIp"`
	}
	if err := c.object(ctx, "/latest/dynamic/instance-identity/document", &doc); err != nil {
		return nil, err
	}
	f.Region, f.Zone, f.InstanceType, f.Addresses = doc.Region, doc.Zone, doc.Type, []string{doc.Address}
	if doc.Zone != "" && doc.ID != "" {
		f.ProviderID = "aws:///" + doc.Zone + "/" + doc.ID // as cloud-provider-aws has it
	}
	if f.Hostname, err = c.value(ctx, "/latest/meta-data/local-hostname"); err != nil {
		return nil, err
	}
	six, err := c.value(ctx, "/latest/meta-data/ipv6")
	if err != nil {
		return nil, err
	}
	f.Addresses = append(f.Addresses, six)
	return f, nil
}

// gcp asks the metadata server of Compute Engine (Google, "About VM metadata"). The documents are the attribute user-data of the instance.
func gcp(ctx context.Context, c *client) (*Found, error) {
	const instance = "/computeMetadata/v1/instance/"
	c.header.Set("Metadata-Flavor", "Google")
	c.flavor = "Google" // an answer of a proxy that took the request has no such header
	f := &Found{}
	if err := c.userData(ctx, instance+"attributes/user-data", f); err != nil {
		return nil, err
	}
	var project, name, zone, kind, address string
	var err error
	for _, v := range []struct {
		path string
		into *string
	}{
		{"/computeMetadata/v1/project/project-id", &project}, {instance + "name", &name}, {instance + "zone", &zone},
		{instance + "machine-type", &kind}, {instance + "network-interfaces/0/ip", &address},
	} {
		if *v.into, err = c.value(ctx, v.path); err != nil {
			return nil, err
		}
	}
	f.Hostname, f.Zone, f.InstanceType, f.Addresses = name, last(zone), last(kind), []string{address}
	if i := strings.LastIndexByte(f.Zone, '-'); i > 0 {
		f.Region = f.Zone[:i]
	}
	if project != "" && f.Zone != "" && name != "" {
		f.ProviderID = "gce://" + project + "/" + f.Zone + "/" + name // as cloud-provider-gcp has it
	}
	return f, nil
}

// last returns the last part of a resource's path.
func last(path string) string { return path[strings.LastIndexByte(path, '/')+1:] }

// azure asks the instance metadata service of Azure (Microsoft, "Azure Instance Metadata Service"). The documents are the machine's user data, which the answer
// has in base64.
func azure(ctx context.Context, c *client) (*Found, error) {
	c.header.Set("Metadata", "true")
	var doc struct {
		Compute struct {
			Name     string `json:"name"`
			Location string `json:"location"`
			Zone     string `json:"zone"`
			Size     string `json:"vmSize"`
			ID       string `json:"resourceId"`
			UserData string `json:"userData"`
			Profile  struct {
				Hostname string `json:"computerName"`
			} `json:"osProfile"`
		} `json:"compute"`
		Network struct {
			Interfaces []struct {
				V4 azureAddresses `json:"ipv4"`
				V6 azureAddresses `json:"ipv6"`
			} `json:"interface"`
		} `json:"network"`
	}
	// Its first version with user data.
	if err := c.object(ctx, "/metadata/instance?api-version=2021-01-01&format=json", &doc); err != nil {
		return nil, err
	}
	if doc.Compute.UserData == "" {
		return nil, errors.New("the machine has no user data: put its MachineMetadata there")
	}
	b, err := base64.StdEncoding.DecodeString(doc.Compute.UserData)
	if err != nil {
		return nil, fmt.Errorf("user data: %w", err)
	}
	f := &Found{}
	if err := f.setDocuments(b); err != nil {
		return nil, fmt.Errorf("user data: %w", err)
	}
	f.Hostname, f.Region, f.InstanceType = doc.Compute.Name, strings.ToLower(doc.Compute.Location), doc.Compute.Size
	if doc.Compute.Profile.Hostname != "" { // a scale set's machines have names with "_"
		f.Hostname = doc.Compute.Profile.Hostname
	}
	if doc.Compute.Zone != "" {
		f.Zone = f.Region + "-" + doc.Compute.Zone // as cloud-provider-azure has it
	}
	if doc.Compute.ID != "" {
		f.ProviderID = "azure://" + lowerGroup(doc.Compute.ID)
	}
	if len(doc.Network.Interfaces) > 0 {
		for _, a := range []azureAddresses{doc.Network.Interfaces[0].V4, doc.Network.Interfaces[0].V6} {
			for _, ip := range a.Addresses {
				f.Addresses = append(f.Addresses, ip.Private)
			}
		}
	}
	return f, nil
}

// lowerGroup writes a resource ID as cloud-provider-azure does: with the resource group in lower case.
func lowerGroup(id string) string {
	parts := strings.Split(id, "/")
	for i := 1; i < len(parts); i++ {
		if strings.EqualFold(parts[i-1], "resourceGroups") {
			parts[i] = strings.ToLower(parts[i])
		}
	}
	return strings.Join(parts, "/")
}

type azureAddresses struct {
	Addresses []struct {
		Private string `json:"privateIpAddress"`
	} `json:"ipAddress"`
}

// openStack asks nova's metadata service (nova, user/metadata), and in EC2's format for what only that has.
func openStack(ctx context.Context, c *client) (*Found, error) {
	f := &Found{}
	if err := c.userData(ctx, "/openstack/latest/user_data", f); err != nil {
		return nil, err
	}
	b, err := c.get(ctx, "/openstack/latest/meta_data.json", maxJSON)
	if err != nil {
		return nil, err
	}
	if err := f.setOpenStack(b); err != nil {
		return nil, fmt.Errorf("meta_data.json: %w", err)
	}
	address, err := c.value(ctx, "/latest/meta-data/local-ipv4")
	if err != nil {
		return nil, err
	}
	kind, err := c.value(ctx, "/latest/meta-data/instance-type")
	f.setEC2(address, kind)
	return f, err
}
