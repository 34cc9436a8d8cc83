package policyfile

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/internal/explain"
)

// AddImages returns the policy with those images that it lacks and another serial, and their names; the rest, including
// comments, is unchanged. It is an error if it lacks none.
func AddImages(text []byte, serial uint64, add []Measurements) (out []byte, names []string, err error) {
	images, err := imagesOf(add)
	if err != nil {
		return nil, nil, err
	}
	out, err = changeImages(text, serial, func(p *attestv1.Tpm2Policy, list *yaml.Node) error {
		if add[0].Bank != p.GetBank() {
			return fmt.Errorf("policy: the image was measured into bank %s, and tpm2.bank is %s", add[0].Bank, p.GetBank())
		}
		var has []string
		for _, image := range images {
			if i := slices.IndexFunc(p.GetImages(), func(have *attestv1.Image) bool { return sameValues(have, image) }); i >= 0 {
				has = append(has, p.GetImages()[i].GetName())
				continue
			}
			image.Name = freeName(p.GetImages(), image.GetName())
			var item yaml.Node
			if err := item.Encode(imageFields(image)); err != nil {
				return fmt.Errorf("policy: %w", err)
			}
			comment(&item)
			list.Style, list.Content = 0, append(list.Content, &item)
			p.Images = append(p.Images, image)
			names = append(names, image.GetName())
		}
		if len(names) == 0 {
			return fmt.Errorf("policy: it has these images already: %s", strings.Join(has, ", "))
		}
		return nil
	})
	return out, names, err
}

func sameValues(a, b *attestv1.Image) bool {
	return proto.Equal(&attestv1.Image{Pcrs: a.GetPcrs()}, &attestv1.Image{Pcrs: b.GetPcrs()})
}

// freeName returns the name, with a number behind it if an image has it already: the same build with Secure Boot is another image.
func freeName(images []*attestv1.Image, name string) string {
	free := name
	for n := 2; slices.ContainsFunc(images, func(have *attestv1.Image) bool { return have.GetName() == free }); n++ {
		free = fmt.Sprintf("%s-%d", name, n)
	}
	return free
}

// RemoveImage returns the policy without the image of that name, and with another serial; the rest, including comments, is
// unchanged.
func RemoveImage(text []byte, serial uint64, name string) ([]byte, error) {
	return changeImages(text, serial, func(p *attestv1.Tpm2Policy, list *yaml.Node) error {
		i := slices.IndexFunc(p.GetImages(), func(have *attestv1.Image) bool { return have.GetName() == name })
		if i < 0 {
			var have []string
			for _, image := range p.GetImages() {
				have = append(have, image.GetName())
			}
			return fmt.Errorf("policy: it has no image %q, it has %q", name, have)
		}
		p.Images, list.Content = slices.Delete(p.Images, i, i+1), slices.Delete(list.Content, i, i+1)
		return nil
	})
}

// changeImages has change edit the list of images, both as a message and in the file.
func changeImages(text []byte, serial uint64, change func(*attestv1.Tpm2Policy, *yaml.Node) error) ([]byte, error) {
	want, err := message(text)
	if err != nil {
		return nil, err
	}
	doc, err := document(text)
	if err != nil {
		return nil, err
	}
	root := doc.Content[0]
	if want.GetTpm2() == nil || field(root, "tpm2").Kind != yaml.MappingNode {
		return nil, errors.New("policy: tpm2 is missing: make the policy by muster policy from-measurements")
	}
	list := field(field(root, "tpm2"), "images")
	if list.Kind != yaml.SequenceNode || len(list.Content) != len(want.GetTpm2().GetImages()) {
		return nil, errors.New("policy: tpm2.images can't be changed in this file: write it by hand")
	}
	if err := change(want.Tpm2, list); err != nil {
		return nil, err
	}
	*field(root, "serial") = yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: strconv.FormatUint(serial, 10)}
	want.Serial = serial
	out, err := encode(doc)
	if err != nil {
		return nil, err
	}
	if _, err := parseIncomplete(out); err != nil { // its classes may follow
		return nil, err
	}
	if got, err := message(out); err != nil || !proto.Equal(got, want) {
		return nil, errors.Join(errors.New("policy: tpm2.images can't be changed in this file: write it by hand"), err)
	}
	return out, nil
}

// imageFields returns an image in the form of the policy's file.
func imageFields(image *attestv1.Image) any {
	type value struct {
		Index uint32 `yaml:"index"`
		Value string `yaml:"value"`
	}
	out := struct {
		Name string  `yaml:"name"`
		PCRs []value `yaml:"pcrs"`
	}{Name: image.GetName()}
	for _, v := range image.GetPcrs() {
		out.PCRs = append(out.PCRs, value{v.GetIndex(), v.GetValue()})
	}
	return out
}

// comment writes the values of an image in a line each, with what they measure, as [Build] does.
func comment(image *yaml.Node) {
	for _, v := range field(image, "pcrs").Content {
		v.Style = yaml.FlowStyle
		if i, err := strconv.Atoi(field(v, "index").Value); err == nil {
			v.LineComment = explain.Meanings[i]
		}
	}
}
