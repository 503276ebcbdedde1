//! The cost of a request in instructions and allocations, as `tulle-bench` counts them.

use std::path::Path;
use std::process::Command;

use tulle_tests::programs::static_binaries_dir;

use crate::testbed::can_run;

#[test]
fn a_request_costs_no_more_than_its_baseline_and_nothing_for_disabled_features() {
    costs(&[]);
}

#[test]
fn a_tap_of_one_in_a_hundred_costs_less_than_three_percent() {
    costs(&["--tap-one-in", "100"]);
}

fn costs(args: &[&str]) {
    if !can_run(&["valgrind", "h2load"]) {
        return;
    }
    // The static binaries are built as a release, but without fat LTO, with 16 codegen units instead of one, and without
    // profile-guided optimization.
    let output = Command::new(static_binaries_dir().unwrap().join("tulle-bench"))
        .arg("costs")
        .args(args)
        .arg("--baseline")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/costs.json"))
        .output()
        .unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{out}{err}");
}
