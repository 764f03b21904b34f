#!/bin/sh
# Pulls back what the other steps pushed and attached, and verifies it as a user would: by tag, and with the
# public key in COSIGN_PUB, or without one by the identity of the release's workflow.
. "$(dirname "$0")/common.sh"
cosign=$(tool cosign)
oras=$(tool oras)
helm=$("$root/tests/helm/build.sh")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ -n "${COSIGN_PUB:-}" ]; then
    set -- --key "$COSIGN_PUB" --insecure-ignore-tlog=true
else
    set -- --certificate-oidc-issuer https://token.actions.githubusercontent.com \
        --certificate-identity "$repository/.github/workflows/release.yaml@refs/tags/$tag"
fi
ok() { echo "ok  $*"; }

for name in $names; do
    reference=$registry/$name:$tag
    [ "$("$oras" resolve "$reference")" = "$(digest "$name")" ] || fail "$reference is not what was pushed"
    "$cosign" verify "$@" "$reference" >/dev/null
    ok "$reference: signature"
    "$cosign" verify-attestation "$@" --type slsaprovenance1 "$reference" >"$work/provenance"
    tr -d '"' <"$work/provenance" | sed 's/.*payload:\([^,}]*\).*/\1/' | base64 -d | tr -d ' \n' |
        grep -q "\"gitCommit\":\"$(git -C "$root" rev-parse HEAD)\"" || fail "$reference: provenance of another commit"
    ok "$reference: provenance names this commit"
    for arch in amd64 arm64; do
        one=$("$oras" resolve --platform "linux/$arch" "$reference")
        "$cosign" verify-attestation "$@" --type cyclonedx "$registry/$name@$one" >/dev/null
        layer=$("$oras" manifest fetch "$reference" --platform "linux/$arch" \
            --format go-template --template '{{(index .content.layers 0).digest}}')
        "$oras" blob fetch --no-tty "$registry/$name@$layer" --output "$work/layer" >/dev/null
        [ "sha256:$(sha256sum "$work/layer" | cut -d' ' -f1)" = "$layer" ] || fail "$reference, $arch: other bytes"
        tar -tzf "$work/layer" | grep -qx "$name" || fail "$reference, $arch: no /$name in it"
        ok "$reference: linux/$arch pulled, /$name in it, bill of materials"
    done
done

chart=$registry/charts/gpustow
"$cosign" verify "$@" "$chart@$(digest charts/gpustow)" >/dev/null
# shellcheck disable=SC2046
"$helm" pull "oci://$chart" --version "$version" --destination "$work" $(plain_http --plain-http) >&2
cmp "$work/gpustow-$version.tgz" "$dist/gpustow-$version.tgz"
# Helm generates a certificate each time, so the objects are compared without it.
objects() {
    "$helm" template gpustow "$1" --namespace gpustow-system --kube-version 1.36.3 \
        --set webhook.certificate=selfSigned
}
objects "$work/gpustow-$version.tgz" >"$work/pulled.yaml"
objects "$root/manifests/chart" >"$work/tree.yaml"
cmp "$work/pulled.yaml" "$work/tree.yaml"
ok "$chart:$version: signature, the same objects as the tree's chart"

cd "$dist"
"$cosign" verify-blob "$@" --bundle checksums.txt.sigstore.json checksums.txt >/dev/null 2>&1 ||
    fail "checksums.txt: its signature does not hold"
sha256sum --check --quiet checksums.txt
ok "checksums.txt: signature, and the sums of $(wc -l <checksums.txt) files"
for archive in kubectl-gpustow-*.tar.gz; do
    grep -A1 "/$tag/$archive\$" krew-gpustow.yaml | grep -q "sha256: $(sha256sum "$archive" | cut -d' ' -f1)" ||
        fail "krew-gpustow.yaml: not the sum of $archive"
done
ok "krew-gpustow.yaml: the plugin's sums"
case $(uname -s)-$(uname -m) in
Linux-x86_64) here=linux-amd64 ;;
Linux-aarch64) here=linux-arm64 ;;
*) exit 0 ;;
esac
tar -xzf "kubectl-gpustow-$here.tar.gz" -C "$work"
"$work/kubectl-gpustow" --version | grep -q " $version" || fail "the plugin for $here does not say $version"
ok "kubectl-gpustow-$here.tar.gz: runs and says $version"
