#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Takes a server out of HAProxy and waits until its requests have ended, or takes it back; needs socat:
#   deploy/haproxy/server.sh drain a
#   deploy/haproxy/server.sh ready a
set -eu

ask() { echo "$1" | socat - "${HAPROXY_SOCKET:-/tmp/haproxy.sock}"; }

for backend in gateways tritons; do
    refusal=$(ask "set server $backend/$2 state $1")
    if [ -n "$refusal" ]; then
        echo "$refusal" >&2
        exit 1
    fi
done
if [ "$1" = drain ]; then
    while ask "show stat" | grep -E "^(gateways|tritons),$2," | cut -d, -f5 | grep -qv '^0$'; do sleep 1; done
fi
