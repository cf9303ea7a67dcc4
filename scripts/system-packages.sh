#!/bin/sh
# Installs the system programs that tests and the testbed use (iproute2: ip and tc; util-linux: unshare), where they are missing.
# Does nothing where they are present; without root or apt it says what to install and succeeds, because only the testbed needs them.
set -eu
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

missing=
for pair in ip:iproute2 tc:iproute2 unshare:util-linux; do
    program=${pair%%:*}
    package=${pair#*:}
    if ! command -v "$program" >/dev/null 2>&1; then
        case " $missing " in *" $package "*) ;; *) missing="$missing $package" ;; esac
    fi
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "system-packages: installing$missing"
    # shellcheck disable=SC2086  # one word per package
    if apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing; then
        exit 0
    fi
    echo "system-packages: apt-get failed" >&2
fi
echo "system-packages: 'phalanx testbed' needs the packages$missing; install them, for example: sudo apt-get install$missing" >&2
echo "system-packages: without them its tests are skipped, everything else works" >&2
