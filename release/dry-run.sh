#!/bin/sh
# A release from its first step to its last, against a registry on this machine that goes when it ends, with
# a key made for the run: what would be pushed is pushed, pulled back and verified. Says at the end what only
# a hosted runner can do.
. "$(dirname "$0")/common.sh"
cd "$root"
server=$(tool registry)
cosign=$(tool cosign)
work=$(mktemp -d)
pid=
end() {
    [ -z "$pid" ] || kill "$pid" 2>/dev/null || true
    rm -rf "$work"
}
trap end EXIT
trap 'exit 1' INT TERM

cat >"$work/registry.yaml" <<YAML
version: 0.1
log: {level: info}
storage: {filesystem: {rootdirectory: $work/registry}}
http: {addr: "127.0.0.1:0"}
YAML
"$server" serve "$work/registry.yaml" >"$work/registry.log" 2>&1 &
pid=$!
port=
while [ -z "$port" ]; do
    kill -0 "$pid" || { cat "$work/registry.log" >&2; fail "the registry does not run"; }
    port=$(sed -n 's/.*listening on 127\.0\.0\.1:\([0-9]*\).*/\1/p' "$work/registry.log" | head -1)
    [ -n "$port" ] || sleep 0.1
done

# Nothing of the user's: not what they are logged in to, and no key of theirs.
export HOME="$work" DOCKER_CONFIG="$work/docker" COSIGN_PASSWORD=
export REGISTRY="localhost:$port/gpustow"
registry=$REGISTRY
(cd "$work" && "$cosign" generate-key-pair >&2)
export COSIGN_KEY="$work/cosign.key"

rm -rf "$dist" "$pushed"
mkdir -p "$dist"
for step in version push plugin manifests; do
    release/$step.sh
done
PARTIAL=1 release/index.sh
release/sign.sh
COSIGN_PUB="$work/cosign.pub" release/verify.sh

# A verification that nothing fails is none.
mkdir "$work/other"
(cd "$work/other" && "$cosign" generate-key-pair >&2)
! "$cosign" verify --key "$work/other/cosign.pub" --insecure-ignore-tlog=true "$registry/gpustow:$tag" \
    >/dev/null 2>&1 || fail "another key verifies $registry/gpustow:$tag"
! "$cosign" verify --key "$work/cosign.pub" --insecure-ignore-tlog=true "$registry/charts/gpustow:artifacthub.io" \
    >/dev/null 2>&1 || fail "$registry/charts/gpustow:artifacthub.io verifies, and it was not signed"
echo "ok  another key, and what was not signed, are refused"

cat <<END
not run  keyless signatures and their transparency log: they take a hosted runner's identity
not run  kubectl-gpustow-darwin-arm64.tar.gz: it is built on macOS; krew's entry lacks it here
not run  the release's page on GitHub, ghcr.io, krew's index, Artifact Hub
not run  programs for architectures other than this machine's were pulled, not started
END
[ -n "${TAG:-}" ] || echo "not run  CHANGELOG.md's section: there is no tag (TAG=$tag asks for it)"
