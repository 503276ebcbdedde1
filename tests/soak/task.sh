# The task `soak` of `run`, which sources this file and defines the other functions and variables.
# shellcheck shell=bash disable=SC2154

# soak [--tests N] [--times N] [ARGS]: runs all tests once, or those that ARGS of nextest select, then the N slowest of them
# repeatedly. Slow tests wait for time, processes or clusters, so these are the ones that can fail at times.
soak() {
  local n_tests=100 times=20 report=target/nextest/soak/junit.xml filter
  while (($#)); do
    case "$1" in
      --tests) n_tests="${2:?--tests expects a number}" ;;
      --times) times="${2:?--times expects a number}" ;;
      *) break ;;
    esac
    shift 2
  done
  [[ "$n_tests" =~ ^[1-9][0-9]*$ ]] || fail "--tests expects a number above 0, not '$n_tests'"
  [[ "$times" =~ ^[1-9][0-9]*$ ]] || fail "--times expects a number above 0, not '$times'"
  setup_soak
  build_for_tests
  say "measuring how long the tests take"
  rm -f "$report"
  # A test that fails here is a candidate, too.
  run_for_report "$@"
  filter="$(tests/soak/report.py slowest "$n_tests" "$report")"
  say "running the slowest tests $times times"
  rm "$report"
  run_for_report --stress-count "$times" -E "$filter"
  tests/soak/report.py failures "$times" "$report" || fail "tests failed; their output is above, and in $report"
}

setup_soak() {
  setup_tests
  need python3
  need_python "${python_tools[@]}"
}

# Runs tests with the profile that writes a report. Failed tests are in the report; without one, no test has run.
run_for_report() {
  cargo nextest run --workspace --profile soak "$@" || [[ -e "$report" ]] || fail "nextest has written no report"
}
