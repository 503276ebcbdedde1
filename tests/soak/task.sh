# The task `soak` of `run`, which sources this file and defines the other functions and variables.
# shellcheck shell=bash disable=SC2154

# soak [--minutes N] [--tests N] [--times N] [ARGS]: runs all tests, or those that ARGS of nextest select, in rounds; the last round
# begins within N minutes. Then it runs the N slowest tests more often: they wait for time, processes or clusters, so they include
# most of the tests that fail only sometimes.
soak() {
  local minutes="${TULLE_SOAK_MINUTES:-120}" n_tests=100 times=20 failed=0 filter
  local report=target/nextest/soak/junit.xml rounds_report=target/nextest/soak/rounds.xml
  while (($#)); do
    case "$1" in
      --help)
        sed -n '/^#   .\/run soak/,/^#   .\/run check/{/run check/!s/^# *//p}' run
        return
        ;;
      --minutes) minutes="${2:?--minutes expects a number}" ;;
      --tests) n_tests="${2:?--tests expects a number}" ;;
      --times) times="${2:?--times expects a number}" ;;
      *) break ;;
    esac
    shift 2
  done
  [[ "$minutes" =~ ^[1-9][0-9]*$ ]] || fail "--minutes and TULLE_SOAK_MINUTES expect a number above 0, not '$minutes'"
  [[ "$n_tests" =~ ^[1-9][0-9]*$ ]] || fail "--tests expects a number above 0, not '$n_tests'"
  [[ "$times" =~ ^[1-9][0-9]*$ ]] || fail "--times expects a number above 0, not '$times'"
  setup_soak
  build_for_tests
  say "running all tests in rounds, for $minutes minutes"
  rm -f "$report" "$rounds_report"
  run_for_report --stress-duration "${minutes}m" "$@"
  mv "$report" "$rounds_report"
  tests/soak/report.py failures "$rounds_report" || failed=1
  filter="$(tests/soak/report.py slowest "$n_tests" "$rounds_report")"
  say "running the slowest tests $times times"
  run_for_report --stress-count "$times" -E "$filter"
  tests/soak/report.py failures "$report" "$times" || failed=1
  ((!failed)) || fail "tests failed; their output is above, and in $rounds_report and $report"
}

setup_soak() {
  setup_tests
  need python3
  need_python "${python_tools[@]}"
}

# Runs tests with the profile that writes a report. Failed tests are in the report. A missing report is an error: no test has run.
run_for_report() {
  cargo nextest run --workspace --profile soak "$@" || [[ -e "$report" ]] || fail "nextest has written no report"
}
