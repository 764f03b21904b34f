#!/bin/sh
# Writes the files for installing by kubectl alone: install-MINOR.yaml, with the newest
# kube-scheduler of that minor that the tests run, and install-default-scheduler.yaml, which has none.
. "$(dirname "$0")/common.sh"
kubectl=$("$root/tests/control-plane/build.sh")/kubectl

# write OVERLAY MINOR
write() {
    patch=$(sed -n 's,^.*k8s.io/kubernetes \(v[^ ]*\)$,\1,p' "$root/tests/control-plane/$2/go.mod" | head -1)
    file=$dist/install-$2.yaml
    "$kubectl" kustomize "$root/manifests/$1" |
        sed "s,\(image: registry.k8s.io/kube-scheduler:\).*,\1$patch," >"$file"
    grep -q "kube-scheduler:$patch\$" "$file" || fail "$file: no kube-scheduler of $patch"
}

rm -f "$dist"/install-*.yaml
for minor in 1.34 1.35 1.36 1.37; do
    write base "$minor"
done
"$kubectl" kustomize "$root/manifests/overlays/default-scheduler" >"$dist/install-default-scheduler.yaml"
! grep -hE 'image: ghcr.io/gpustow/' "$dist"/install-*.yaml | grep -v ":$tag\$" ||
    fail "an image above is not of $tag"
for file in "$dist"/install-*.yaml; do
    echo "$file"
done
