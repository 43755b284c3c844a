#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Lays Debian's prometheus and promtool into the folder of the first argument, for tests/server/test_metrics.py. Needs no
# root and installs nothing. Where there is no apt-get or no network, it says so, and those tests are skipped.
set -u

mkdir -p "$1"
cd "$1" || exit 1
mkdir -p lists/partial cache/archives/partial unpacked
apt="apt-get -qq -o Dir::State::Lists=$PWD/lists -o Dir::Cache=$PWD/cache -o APT::Sandbox::User="
if $apt update && $apt download prometheus && dpkg-deb -x prometheus_*.deb unpacked; then
    mkdir -p bin
    mv unpacked/usr/bin/prometheus unpacked/usr/bin/promtool bin/
else
    echo "no Prometheus could be had from apt-get: the tests that need it are skipped" >&2
fi
rm -rf lists cache unpacked prometheus_*.deb
