#!/bin/sh
# Pushes the images, each for all its architectures under one tag, and the chart.
. "$(dirname "$0")/common.sh"
oras=$(tool oras)
helm=$("$root/tests/helm/build.sh")

: >"$pushed.new"
for name in $names; do
    [ -f "$images/$name.tar" ] || fail "no $images/$name.tar: make images"
    built=$("$oras" resolve --oci-layout "$images/$name.tar:$tag")
    "$oras" cp --no-tty --from-oci-layout "$images/$name.tar:$tag" "$registry/$name:$tag" >&2
    there=$("$oras" resolve "$registry/$name:$tag")
    [ "$built" = "$there" ] || fail "$registry/$name:$tag is $there, built was $built"
    echo "$name $there" >>"$pushed.new"
done

"$helm" package "$root/manifests/chart" --version "$version" --app-version "$tag" --destination "$dist" >&2
# shellcheck disable=SC2046
"$helm" push "$dist/gpustow-$version.tgz" "oci://$registry/charts" $(plain_http --plain-http) >&2
echo "charts/gpustow $("$oras" resolve "$registry/charts/gpustow:$version")" >>"$pushed.new"

# Who owns the chart, where Artifact Hub looks for it.
cd "$root"
"$oras" push --no-tty "$registry/charts/gpustow:artifacthub.io" \
    --config /dev/null:application/vnd.cncf.artifacthub.config.v1+yaml \
    artifacthub-repo.yml:application/vnd.cncf.artifacthub.repository-metadata.layer.v1.yaml >&2
mv "$pushed.new" "$pushed"
cat "$pushed"
