# Functions of the task `publish` of `run`, which sources this file and defines the other functions and variables.
# shellcheck shell=bash disable=SC2154

# publish_signed DIR REGISTRY [COSIGN FLAGS]: pushes the images of all architectures, and the charts, which refer to images by
# digest. Signs images, charts, component lists and checksums. Logs in if REGISTRY_USER and REGISTRY_TOKEN are set.
publish_signed() {
  local dir="$1" registry="$2" signing=(--yes "${@:3}") name reference
  if [[ -n "${REGISTRY_TOKEN:-}" ]]; then
    crane auth login "${registry%%/*}" --username "$REGISTRY_USER" --password-stdin <<<"$REGISTRY_TOKEN"
  fi
  rm -f "$dir/DIGESTS"
  for name in "${images[@]}"; do publish_image "$dir" "$registry/$name:$version"; done
  charts "$dir"
  for name in "${charts[@]}"; do publish_chart "$dir/$name-$version.tgz" "$registry/charts"; done
  while read -r reference; do
    say "signing $reference"
    cosign sign "${signing[@]}" "$reference"
  done < <(references "$dir/DIGESTS")
  for name in "${images[@]}"; do attest_components "$dir" "$registry/$name:$version" "${signing[@]}"; done
  checksums "$dir"
  cosign sign-blob "${signing[@]}" --bundle "$dir/SHA256SUMS.sigstore.json" "$dir/SHA256SUMS"
  say "published: $(references "$dir/DIGESTS" | tr '\n' ' ')"
}

# Publishes to a temporary registry, and verifies that everything is present and signed.
try_publish() {
  local dir="$1" place port registry reference chart name file deadline
  # Only releases are added to the public transparency log.
  local verify=(--key "" --insecure-ignore-tlog=true) sign=(--key "" --tlog-upload=false --use-signing-config=false)
  place="$(mktemp -d)"
  cp -r "$dir" "$place/release"
  dir="$place/release"
  crane registry serve --address 127.0.0.1:0 >"$place/log" 2>&1 &
  # shellcheck disable=SC2064  # the names are known now, and locals are gone at exit
  trap "kill $!; rm -rf '$place'" EXIT
  deadline=$((SECONDS + 30))
  until port="$(sed -n 's/.*serving on port \([0-9]*\).*/\1/p' "$place/log")" && [[ -n "$port" ]]; do
    kill -0 $! || fail "the registry has not started: $(cat "$place/log")"
    ((SECONDS < deadline)) || fail "the registry does not print its port within 30 s: $(cat "$place/log")"
    sleep 0.1
  done
  registry="127.0.0.1:$port/tulle-mesh"
  COSIGN_PASSWORD="" cosign generate-key-pair --output-key-prefix "$place/key"
  sign[1]="$place/key.key" verify[1]="$place/key.pub"
  COSIGN_PASSWORD="" publish_signed "$dir" "$registry" "${sign[@]}"
  say "verifying what was published"
  while read -r reference; do
    cosign verify "${verify[@]}" "$reference" >/dev/null
  done < <(references "$dir/DIGESTS")
  for file in "$dir"/*_linux_*.cdx.json; do
    name="$(basename "${file%%_*}")"
    [[ " ${images[*]} " == *" $name "* ]] || continue
    reference="$registry/$name:$version-$(basename "${file##*_}" .cdx.json)"
    cosign verify-attestation "${verify[@]}" --type cyclonedx "$reference" >/dev/null
  done
  cosign verify-blob "${verify[@]}" --bundle "$dir/SHA256SUMS.sigstore.json" "$dir/SHA256SUMS"
  (cd "$dir" && sha256sum --quiet --check SHA256SUMS)
  for chart in "${charts[@]}"; do
    helm pull "oci://$registry/charts/$chart" --version "$version" --plain-http --untar --untardir "$place"
  done
  for name in controller proxy; do
    reference="@$(crane digest "$registry/$name:$version")"
    grep -q "$reference" "$place/tulle-control-plane/values.yaml" || fail "the chart does not name $name by its digest $reference"
  done
}

# Pushes the image of each architecture, and one manifest that lists them.
publish_image() {
  local dir="$1" reference="$2" file arch parts=() name
  name="$(basename "${reference%:*}")"
  for file in "$dir/${name}_${version}_linux_"*.tar; do
    [[ -e "$file" ]] || fail "$dir has no archive of the image $name: run ./run release $dir first, on each architecture"
    arch="${file##*_}"
    say "pushing $reference-${arch%.tar}"
    crane push "$file" "$reference-${arch%.tar}"
    parts+=(--manifest "$reference-${arch%.tar}")
  done
  crane index append --docker-empty-base "${parts[@]}" --tag "$reference"
  digest_of "$reference" >>"$dir/DIGESTS"
}

publish_chart() {
  local file="$1" registry="$2" name plain=()
  name="$(basename "$file" "-$version.tgz")"
  case "$registry" in localhost:* | 127.0.0.1:*) plain=(--plain-http) ;; esac
  helm push "$file" "oci://$registry" "${plain[@]}"
  digest_of "$registry/$name:$version" >>"${file%/*}/DIGESTS"
}

# Prints the digest of a reference, as a line of DIGESTS.
digest_of() {
  local digest
  digest="$(crane digest "$1")"
  echo "${digest#sha256:}  $1"
}

# The lines of DIGESTS as references by digest, without tags.
references() {
  sed -E 's|^([0-9a-f]+)  (.*):[^:]*$|\2@sha256:\1|' "$1"
}

# Attaches the component list to the image of each architecture.
attest_components() {
  local dir="$1" reference="$2" file arch digest name
  name="$(basename "${reference%:*}")"
  for file in "$dir/${name}_${version}_linux_"*.cdx.json; do
    arch="$(basename "${file##*_}" .cdx.json)"
    digest="$(crane digest --platform "linux/$arch" "$reference")"
    cosign attest "${@:3}" --type cyclonedx --predicate "$file" "${reference%:*}@$digest"
  done
}
