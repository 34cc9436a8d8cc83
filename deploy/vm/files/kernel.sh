#!/bin/sh
# Downloads the kernel that a package without content stands for, and the boot loader, by the same index
# that the root is made of. mmdebstrap runs it; after DEBS TO KERNEL LOADER comes the root's folder.
set -eu
debs=$1 to=$2 kernel=$3 loader=$4
export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
image=$(apt-cache depends --important "$kernel" | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)$/\1/p')
cd "$debs"
apt-get --print-uris download "$image" "$loader" | while read -r _ file _; do
	[ ! -e "$file" ] || cp "$file" "$to"
done
cd "$to"
# What is there already is compared with the index, and not asked for again.
apt-get -o APT::Sandbox::User=root --quiet download "$image" "$loader"
cp -- *.deb "$debs"
