//! Mirrors for the pods of headless Services while the gateway fails.

use super::*;

#[test]
fn the_mirrors_of_pods_follow_the_gateway_and_the_headless_mirror_stays_ready() {
    let mut case = headless();
    set_pods(&mut case, &["db-0"], &[]);
    apply_all(&mut case);
    for is_alive in [false, true] {
        case.is_alive = is_alive;
        apply_all(&mut case);
        let readiness = |name: &str| {
            let subset = case.endpoints(name).unwrap()["subsets"][0].clone();
            ["addresses", "notReadyAddresses"].map(|field| subset[field].is_array())
        };
        assert_eq!(readiness("db-0-east"), [is_alive, !is_alive]);
        assert_eq!(readiness("web-east"), [true, false], "alive: {is_alive}");
    }
}
