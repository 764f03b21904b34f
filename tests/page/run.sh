#!/bin/sh
# Tests the page of `kubectl gpustow ui` in headless Chromium, or makes its screenshots:
#   tests/page/run.sh [--screenshots FOLDER]
set -eu

here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}
mkdir -p "$target/page"
work=$(cd "$target/page" && pwd)

fail() { echo "page: $*" >&2; exit 1; }
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) ||
    fail "no Chromium: apt-get install chromium"
{ command -v node && command -v npm; } >/dev/null || fail "no Node.js 20: apt-get install nodejs npm"

"$here/../programs.sh" kubectl-gpustow
cp "$here"/*.mjs "$here"/package*.json "$work"
cmp -s "$work/package-lock.json" "$work/installed" || {
    (cd "$work" && npm ci --silent --ignore-scripts --no-fund --no-audit)
    cp "$work/package-lock.json" "$work/installed"
}
[ "${1:-}" != --screenshots ] || set -- --screenshots "$(cd "$2" && pwd)"
exec node "$work/page.mjs" "$target/debug/kubectl-gpustow" "$browser" "$@"
