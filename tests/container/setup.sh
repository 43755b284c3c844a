#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the packages of the container tests: a container engine and the tool that builds their base image.
# Does nothing if they are installed; names them if it has no right to install them.
set -eu

# Docker may be installed without a running daemon, so ask the daemon instead of looking for the command.
if docker info > /dev/null 2>&1; then
    needed="mmdebstrap debian-archive-keyring"
else
    needed="podman runc mmdebstrap debian-archive-keyring"
fi

missing=""
for package in $needed; do
    dpkg-query -W -f '${Status}' "$package" 2> /dev/null | grep -q "install ok installed" || missing="$missing $package"
done
if [ -z "$missing" ]; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
    echo "the container tests need:$missing (install them as root: apt-get install$missing)" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
exec 9< /var/lib/dpkg && flock 9 # the other set-up may run beside this one
apt-get update -q
# shellcheck disable=SC2086 # a list of names
apt-get install -q -y --no-install-recommends $missing
