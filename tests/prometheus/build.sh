#!/bin/sh
# Builds the Prometheus and promtool that the tests run. Says what it does on stderr; the only line on stdout is the
# folder of both.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/tests/go-tools.sh"
# Without service discovery, which is most of the program.
tags=remove_all_sd
go_tools "$root/tests/prometheus" prometheus
echo "$out"
