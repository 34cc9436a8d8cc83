#!/usr/bin/env bash
# Installs the Debian packages that tests and the demonstration use, if any is missing. Needs root.
set -euo pipefail
packages=(
	build-essential libssl-dev                              # the TPM simulator in tests (cgo)
	swtpm swtpm-tools                                       # software TPMs
	runc containernetworking-plugins nftables iptables      # what a node runs
	conntrack ethtool socat iproute2 util-linux kmod        # what kubeadm and kubelet look for
	ca-certificates curl jq
)
missing=()
for p in "${packages[@]}"; do
	dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	echo "missing packages: ${missing[*]}: install them, or run as root on Debian" >&2
	exit 1
fi
echo "installing ${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
