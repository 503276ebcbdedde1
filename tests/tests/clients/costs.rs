//! What a request costs, by the bench's count of instructions and allocations.

use std::path::Path;
use std::process::Command;

use tulle_tests::programs::shipped;

use crate::scene::can_run;

#[test]
fn a_request_costs_no_more_than_is_noted_down_and_nothing_for_what_nobody_asked_for() {
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
    // The counts are of what is shipped, as far as it is optimised without the minutes that the last bit takes.
    let output = Command::new(shipped().unwrap().join("tulle-bench"))
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
