#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs what the container tests need, once: a container engine and the tool that makes their base image.
# Quick when everything is there; says what to install where it cannot do so itself.
set -eu

# Docker may be installed without a daemon to talk to, so ask it instead of looking for the command.
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
apt-get update -q
# shellcheck disable=SC2086 # a list of names
apt-get install -q -y --no-install-recommends $missing
