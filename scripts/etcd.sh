#!/bin/sh
# Puts the etcd server of the distribution's packages into .etcd/ (Debian, Ubuntu), for the tests of the etcd engine, which are skipped without it. Installs nothing, starts nothing,
# needs no root. Does nothing where `etcd` is on the PATH or was fetched before. Prints where the program is.
set -eu
cd "$(dirname "$0")/.."
program=.etcd/root/usr/bin/etcd
if command -v etcd >/dev/null 2>&1; then
    command -v etcd
    exit 0
fi
if [ ! -x "$program" ]; then
    if ! command -v apt-get >/dev/null 2>&1 || ! command -v dpkg >/dev/null 2>&1; then
        echo "etcd: neither etcd nor apt-get is here; install etcd, and its tests will find it on the PATH" >&2
        exit 1
    fi
    mkdir -p .etcd
    # A root in a container may not be allowed to become the user _apt: then apt says so and fetches as root.
    if ! (cd .etcd && apt-get download -q etcd-server >/dev/null 2>&1 && dpkg -x etcd-server_*.deb root); then
        echo "etcd: apt-get could not fetch etcd-server (is the package list there? apt-get update)" >&2
        exit 1
    fi
    rm -f .etcd/etcd-server_*.deb
fi
echo "$program"
