#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the browser of the chat page's tests, which are skipped without one. Needs root and apt.
set -eu

if command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
    echo "the chat page's tests need a Chromium (install it as root: apt-get install chromium)" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
exec 9< /var/lib/dpkg && flock 9 # the other set-up may run beside this one
apt-get update -q
apt-get install -q -y --no-install-recommends chromium
