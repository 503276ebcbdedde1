# The task `conformance` of `run`, which sources this file and defines the other functions and variables.
# shellcheck shell=bash disable=SC2154

# The namespaces of the suite's workloads.
readonly conformance_namespaces=(gateway-conformance-mesh gateway-conformance-mesh-consumer)

# conformance [--write] [TEST]: runs the whole suite, or one test.
conformance() {
  local write=false dir="$CARGO_TARGET_DIR/conformance" report
  if [[ "${1:-}" == --write ]]; then
    write=true
    shift
  fi
  local name="${1:-}"
  [[ -z "$name" || "$write" == false ]] || fail "--write needs the results of all tests: ./run conformance --write"
  need go
  check_conformance_test "$name"
  need_packages "${cluster_packages[@]}"
  same_version
  build quick
  say "building the conformance tests and their workload"
  CGO_ENABLED=0 go build -C tools/echo -ldflags "-s -w" -o "$dir/echo/" tool
  go test -C tests/conformance -c -o "$dir/conformance.test"
  mesh_for_conformance "$dir"
  report="$dir/gateway-api-$(version_in gateway-api sigs.k8s.io/gateway-api).yaml"
  run_conformance "$dir" "$name" "$report"
  [[ -z "$name" ]] || return 0
  as_root chmod a+r "$report" # the suite writes it for its user only
  if [[ "$write" == true ]]; then
    mkdir -p docs/conformance
    cp --no-preserve=mode "$report" docs/conformance/
    report="docs/conformance/${report##*/}"
  fi
  say "passed; the report is $report"
}

# Fails if the suite has no test of this name for meshes. An empty name stands for all.
check_conformance_test() {
  local suite=sigs.k8s.io/gateway-api/conformance module names
  [[ -n "$1" ]] || return 0
  go mod download -C tests/conformance "$suite"
  module="$(go list -C tests/conformance -m -f '{{.Dir}}' "$suite")"
  names="$(sed -nE 's/^\s+ShortName:\s+"(.*)",$/\1/p' "$module"/tests/mesh/*.go)"
  grep -qFx -e "$1" <<<"$names" || fail "unknown test '$1'; expected one of: ${names//$'\n'/ }"
}

# Starts a cluster with the charts and the images of this build, or updates the running one. A cluster that was started here is
# stopped at the end.
mesh_for_conformance() {
  local dir="$1" image credentials
  if cluster status 2>/dev/null; then
    say "loading the images of this build into the running cluster"
    tulle_cluster images "$dir/images" "$binaries"
    for image in controller proxy; do tulle_cluster load-image "$dir/images/$image.tar"; done
  else
    say "starting a cluster"
    cluster up --nodes 2
    trap 'tulle_cluster down' EXIT
  fi
  tulle_cluster echo-image "$dir/echo.tar" "$dir/echo"
  tulle_cluster load-image "$dir/echo.tar"

  say "installing the charts"
  local install=(tulle_cluster exec helm upgrade --install --namespace linkerd)
  "${install[@]}" --create-namespace tulle-crds charts/tulle-crds --set installGatewayAPI=true >/dev/null
  install+=(tulle-control-plane charts/tulle-control-plane)
  if tulle_cluster exec helm status --namespace linkerd tulle-control-plane >/dev/null 2>&1; then
    "${install[@]}" --reset-then-reuse-values >/dev/null
    # Running pods have an earlier image of the same name.
    tulle_cluster kubectl rollout restart deployment --namespace linkerd
  else
    credentials="$dir/credentials"
    rm -rf "$credentials"
    mkdir "$credentials"
    "$binaries/tulle" trust create-anchor --cert "$credentials/ca.crt" --key "$credentials/ca.key"
    "$binaries/tulle" trust create-issuer --anchor-cert "$credentials/ca.crt" --anchor-key "$credentials/ca.key" \
      --dir "$credentials"
    "${install[@]}" --set-file "identityTrustAnchorsPEM=$credentials/ca.crt" \
      --set-file "identity.issuer.tls.crtPEM=$credentials/crt.pem" \
      --set-file "identity.issuer.tls.keyPEM=$credentials/key.pem" >/dev/null
  fi
  tulle_cluster kubectl rollout status deployment --namespace linkerd --timeout=2m
  # The API server ignores an injector that it cannot reach yet.
  local deadline=$((SECONDS + 120))
  until tulle_cluster kubectl run probe --image=probe --annotations=linkerd.io/inject=enabled --dry-run=server \
    --output='jsonpath={.spec.initContainers[*].name}' | grep -q linkerd-proxy; do
    ((SECONDS < deadline)) || fail "a new pod gets no sidecar; see ./run cluster kubectl logs -n linkerd deploy/linkerd-proxy-injector"
  done
}

# run_conformance DIR TEST REPORT: prints the result of each test as soon as it ends. TEST is empty for all tests, whose report
# is written to REPORT.
run_conformance() {
  local log="$1/${2:-all}.log" arguments=(-test.run='^TestConformance$' -test.v=test2json -test.timeout=30m "--version=$version")
  if [[ -n "$2" ]]; then arguments+=("--run-test=$2"); else arguments+=("--report-output=$3"); fi
  # The suite does not wait for the deletion of its namespaces.
  tulle_cluster kubectl delete namespace --ignore-not-found --timeout=2m "${conformance_namespaces[@]}"
  say "running ${2:-all conformance tests}"
  # With -test.v=test2json, each result is printed at once, after a control character; otherwise all are printed at the end.
  # Not shown: tests that are skipped because they need a gateway, and durations, which do not include parallel parts.
  if ! tulle_cluster exec "$1/conformance.test" "${arguments[@]}" 2>&1 | tee "$log" |
    sed -nuE "s|^\x16? *--- (PASS\|FAIL\|SKIP): TestConformance/(${2:-Mesh[^/ ]+}) [^/]*$|\1 \2|p"; then
    fail "tests failed; their output is in $log"
  fi
}
