#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Lays Debian's prometheus, promtool, haproxy and socat into the folder of the first argument, for tests/server. Needs no root and
# installs nothing. Where there is no apt-get or no network, it says so, and the tests of a program are skipped.
set -u

mkdir -p "$1/bin" "$1/lib"
cd "$1" || exit 1
mkdir -p lists/partial cache/archives/partial
options="-o Dir::State::Lists=$PWD/lists -o Dir::Cache=$PWD/cache -o APT::Sandbox::User="
apt-get -qq $options update

# Keeps the programs and libraries of a package.
unpack() {
    apt-get -qq $options download "$1" && dpkg-deb -x ./*.deb unpacked || return 1
    find unpacked/usr/bin unpacked/usr/sbin -type f -exec mv {} bin/ \; 2> /dev/null
    find unpacked -name '*.so.*' -exec mv {} lib/ \;
    rm -rf unpacked ./*.deb
}

unpack prometheus || echo "no Prometheus could be had from apt-get: the tests that need it are skipped" >&2
for package in haproxy socat libwrap0 liblua5.3-0 liblua5.4-0 libopentracing-c-wrapper0 libopentracing1; do  # what some releases need
    unpack $package 2> /dev/null
done
LD_LIBRARY_PATH=$PWD/lib bin/haproxy -v > /dev/null || {
    echo "no HAProxy could be had from apt-get: the tests that need it are skipped" >&2
    rm -f bin/haproxy
}
rm -rf lists cache
