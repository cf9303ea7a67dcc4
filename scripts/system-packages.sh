#!/bin/sh
# Installs system programs that tests use, where they are missing. Does nothing where they are present; without root or apt it says what to install and succeeds:
# tests that need them are skipped and say so, everything else works. Argument:
#   (none)   what the testbed needs: ip and tc, unshare. `make test` calls it
#   lab      also a browser, SLURM and Prometheus, which the tests of the page, of jobs and of alerts start for themselves, and tmux. `make lab-packages` and CI; no service is left running
set -eu
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

wanted="ip:iproute2 tc:iproute2 unshare:util-linux"
case "${1:-}" in
'') ;;
lab) wanted="$wanted tmux:tmux chromium:chromium fc-match:fontconfig slurmctld:slurmctld slurmd:slurmd srun:slurm-client munged:munge prometheus:prometheus prometheus-alertmanager:prometheus-alertmanager" ;;
*) echo "$0: '$1' is not known; give lab, or nothing" >&2 && exit 2 ;;
esac

missing=
for pair in $wanted; do
    program=${pair%%:*}
    package=${pair#*:}
    if ! command -v "$program" >/dev/null 2>&1; then
        case " $missing " in *" $package "*) ;; *) missing="$missing $package" ;; esac
    fi
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "system-packages: installing$missing"
    # RUNLEVEL=1: no package starts its service. One word per package:
    # shellcheck disable=SC2086
    if apt-get update -q && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing; then
        exit 0
    fi
    echo "system-packages: apt-get failed" >&2
fi
echo "system-packages: some tests need the packages$missing; install them, for example: sudo apt-get install$missing" >&2
echo "system-packages: without them those tests are skipped, everything else works" >&2
