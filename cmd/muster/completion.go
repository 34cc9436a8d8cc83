package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-k8s/muster/cmd/muster/owner/access"
)

// completionTimeout is the longest wait after the tab key.
const completionTimeout = 2 * time.Second

// completeNodes returns the names of the cluster's nodes and enrollments; none if the cluster does not answer in
// time.
func (a *app) completeNodes(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	none := cobra.ShellCompDirectiveNoFileComp
	if len(args) > 0 {
		return nil, none
	}
	dir, err := a.view()
	if err != nil {
		return nil, none
	}
	defer func() { _ = dir.Close() }()
	kube, err := access.Connect(dir)
	if err != nil {
		return nil, none
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTimeout)
	defer cancel()
	names, err := kube.NodeNames(ctx)
	if err != nil {
		return nil, none
	}
	return names, none
}

// completeWords completes a flag that takes one of a list of words.
func completeWords(words ...string) cobra.CompletionFunc {
	return cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)
}

// completions adds shell completion to flags.
func (a *app) completions(root *cobra.Command) {
	must := func(err error) {
		if err != nil {
			panic(err) // a flag that does not exist
		}
	}
	must(root.RegisterFlagCompletionFunc("output", completeWords(outputAuto, outputPlain, outputJSON)))
	must(root.MarkPersistentFlagDirname("directory"))
	for _, c := range root.Commands() {
		for flag, complete := range map[string]cobra.CompletionFunc{
			"role": completeWords("worker", "control-plane"), "purpose": completeWords("machine", "joinservice", "kms"),
		} {
			if c.Flags().Lookup(flag) != nil {
				must(c.RegisterFlagCompletionFunc(flag, complete))
			}
		}
		if c.Flags().Lookup("policy") != nil {
			must(c.MarkFlagFilename("policy", "yaml", "yml", "json"))
		}
	}
}
