package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/ownerdir"
	"github.com/muster-k8s/muster/internal/policyfile"
)

func (a *app) addImageCommand() *cobra.Command {
	var (
		p      policyFlags
		policy string
	)
	cmd := &cobra.Command{
		Use:   "add-image MEASUREMENTS… [--policy FILE]",
		Short: "Accept a further image of machines, by the measurements of its build",
		Long: `Writes the image into the policy of the owner's folder, and increments its serial. Other images, machine classes and listed
machines are not changed. MEASUREMENTS are files of an image's build: measurements.json, and measurements-secureboot.json
for machines with Secure Boot.

It comes into force with muster policy apply. muster policy remove-image removes an image that no node runs any more.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			var add []policyfile.Measurements
			for _, path := range args {
				m, err := p.measurements(path)
				if err != nil {
					return err
				}
				add = append(add, m)
			}
			var names []string
			path, serial, err := a.changePolicy(policy, func(text []byte, serial uint64) (out []byte, err error) {
				out, names, err = policyfile.AddImages(text, serial, add)
				return out, err
			})
			if err != nil {
				return err
			}
			return a.imagesChanged(path, serial, names, "is")
		},
	}
	cmd.Flags().StringVar(&policy, "policy", "", "policy to change (default: that of the owner's folder)")
	p.addBuilder(cmd)
	return cmd
}

func (a *app) removeImageCommand() *cobra.Command {
	var policy string
	cmd := &cobra.Command{
		Use:   "remove-image NAME [--policy FILE]",
		Short: "Stop accepting an image of machines",
		Long: `Removes the image from the policy of the owner's folder, and increments its serial. It comes into force with muster policy apply,
which refuses it while a running node has the image. muster rollout status shows the names, and which nodes run which image.`,
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			path, serial, err := a.changePolicy(policy, func(text []byte, serial uint64) ([]byte, error) {
				return policyfile.RemoveImage(text, serial, args[0])
			})
			if err != nil {
				return err
			}
			return a.imagesChanged(path, serial, args, "is not")
		},
	}
	cmd.Flags().StringVar(&policy, "policy", "", "policy to change (default: that of the owner's folder)")
	return cmd
}

func (a *app) imagesChanged(path string, serial uint64, names []string, is string) error {
	if a.output == outputJSON {
		return a.json(map[string]any{"images": names, "policy": path, "serial": serial})
	}
	_, err := fmt.Fprintf(a.stdout, "Image %s %s in %s, whose serial is now %d. muster policy diff shows the changes; muster policy apply puts them in force.\n", strings.Join(names, ", "), is, path, serial)
	return err
}

// changePolicy changes the policy in a file, or that of the owner's folder if path is empty, and increments its serial.
// It returns the file and its new serial.
func (a *app) changePolicy(path string, change func(text []byte, serial uint64) ([]byte, error)) (string, uint64, error) {
	read, write := func() ([]byte, error) { return os.ReadFile(path) }, func(text []byte) error { return os.WriteFile(path, text, 0o600) }
	if path == "" {
		dir, err := a.open() // locks the folder against other commands
		if err != nil {
			return "", 0, err
		}
		defer func() { _ = dir.Close() }()
		path = dir.File(ownerdir.PolicyFile)
		read, write = func() ([]byte, error) { return dir.Read(ownerdir.PolicyFile) }, func(text []byte) error { return dir.Write(ownerdir.PolicyFile, text) }
	}
	text, serial, err := nextSerial(read)
	if err != nil {
		return "", 0, fmt.Errorf("%s: %w", path, err)
	}
	out, err := change(text, serial)
	if err != nil {
		return "", 0, fmt.Errorf("%s: %w", path, err)
	}
	return path, serial, write(out)
}

// nextSerial returns the text of a policy, whose classes may be missing, and the serial of the next one.
func nextSerial(read func() ([]byte, error)) ([]byte, uint64, error) {
	text, err := read()
	if err != nil {
		return nil, 0, err
	}
	p, err := policyfile.ParseForClass(text)
	if err != nil {
		return nil, 0, err
	}
	if p.Serial()+1 == 0 {
		return nil, 0, errors.New("its serial can't be increased")
	}
	return text, p.Serial() + 1, nil
}
