//! Power of two choices: of two candidates drawn at random, the cheaper one.

/// The cheaper of two candidates drawn among those that are available.
///
/// `cost` is `None` where a candidate is unavailable; `draw(n)` is a random number below `n`.
/// Constant time while most candidates are available.
pub(crate) fn choose(
    candidates: usize,
    mut draw: impl FnMut(usize) -> usize,
    cost: impl Fn(usize) -> Option<f64>,
) -> Option<usize> {
    if candidates < 2 {
        return (0..candidates).find(|index| cost(*index).is_some());
    }
    for _ in 0..DRAWS {
        let (first, second) = two_below(candidates, &mut draw);
        if let (Some(first_cost), Some(second_cost)) = (cost(first), cost(second)) {
            return Some(if second_cost < first_cost { second } else { first });
        }
    }
    // An available one must not win only because its rival was not: two are drawn among the available.
    let available = || (0..candidates).filter_map(|index| Some((index, cost(index)?)));
    match available().count() {
        0 => None,
        1 => available().next().map(|(index, _)| index),
        n => {
            let (first, second) = two_below(n, &mut draw);
            let drawn = available()
                .enumerate()
                .filter(|(rank, _)| *rank == first || *rank == second);
            drawn
                .map(|(_, found)| found)
                .min_by(|(_, a), (_, b)| a.total_cmp(b))
                .map(|(index, _)| index)
        }
    }
}

/// Two distinct numbers below `n`, which is at least 2.
fn two_below(n: usize, draw: &mut impl FnMut(usize) -> usize) -> (usize, usize) {
    let first = draw(n);
    let second = draw(n - 1);
    (first, if second >= first { second + 1 } else { second })
}

/// Pairs to draw before all candidates are looked at.
const DRAWS: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(costs: &[Option<f64>]) -> Vec<f64> {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut hits = vec![0_u32; costs.len()];
        for _ in 0..30_000 {
            if let Some(index) = choose(costs.len(), |n| rng.usize(..n), |index| costs[index]) {
                hits[index] += 1;
            }
        }
        hits.into_iter().map(|hits| f64::from(hits) / 30_000.0).collect()
    }

    #[test]
    fn the_dearest_is_never_chosen_and_the_cheapest_most() {
        for (costs, expected) in [
            (vec![Some(1.0), Some(2.0), Some(3.0)], vec![2.0 / 3.0, 1.0 / 3.0, 0.0]),
            (vec![Some(1.0)], vec![1.0]),
            (vec![Some(1.0), None], vec![1.0, 0.0]),
            (vec![None, None, None], vec![0.0, 0.0, 0.0]),
            (vec![None, Some(2.0), Some(1.0), None], vec![0.0, 0.0, 1.0, 0.0]),
            (
                vec![None, Some(1.0), Some(2.0), Some(3.0)],
                vec![0.0, 2.0 / 3.0, 1.0 / 3.0, 0.0],
            ),
            (vec![], vec![]),
        ] {
            let found = shares(&costs);
            let near = found
                .iter()
                .zip(&expected)
                .all(|(found, expected)| (found - expected).abs() < 0.02);
            assert!(near, "{costs:?}: {found:?}, not {expected:?}");
        }
    }

    #[test]
    fn equals_share_equally() {
        for share in shares(&[Some(1.0); 4]) {
            assert!((share - 0.25).abs() < 0.02, "{share}");
        }
    }
}
