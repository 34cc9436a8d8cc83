// Package buildinfo returns the build information of the running program.
package buildinfo

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// Set by the linker:
//
//	go build -ldflags "-X github.com/muster-k8s/muster/internal/buildinfo.version=v0.1.0
//	                   -X github.com/muster-k8s/muster/internal/buildinfo.commit=0123abc"
var (
	version string
	commit  string
)

// Info describes a build.
type Info struct {
	// Version is the release, as in v0.1.0; "dev" for a build without one.
	Version string `json:"version"`
	// Commit is the Git commit, empty if it is not known.
	Commit string `json:"commit,omitempty"`
	// Modified is whether files differed from the commit.
	Modified bool `json:"modified,omitempty"`
	// Go is the version of the Go toolchain.
	Go string `json:"go"`
	// Platform is GOOS/GOARCH.
	Platform string `json:"platform"`
}

// Read returns the running program's build.
func Read() Info {
	info := Info{Version: version, Commit: commit, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	if info.Version == "" {
		info.Version = "dev"
	}
	build, ok := debug.ReadBuildInfo()
	if !ok || info.Commit != "" {
		return info
	}
	for _, s := range build.Settings {
		switch s.Key {
		case "vcs.revision":
			info.Commit = s.Value
		case "vcs.modified":
			info.Modified = s.Value == "true"
		}
	}
	return info
}

// String returns one line for people, without a newline.
func (i Info) String() string {
	s := i.Version
	if i.Commit != "" {
		s += fmt.Sprintf(" (%.12s", i.Commit)
		if i.Modified {
			s += ", modified"
		}
		s += ")"
	}
	return s + " " + i.Go + " " + i.Platform
}
