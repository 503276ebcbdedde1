//! Power of two choices: draws two candidates at random and picks the cheaper one.

/// Draws two of the candidates that can be picked, and returns the index of the cheaper one.
///
/// `cost` is `None` if a candidate cannot be picked; `draw(n)` is a random number below `n`.
/// Constant time while most candidates can be picked.
pub(crate) fn choose(
    n_candidates: usize,
    mut draw: impl FnMut(usize) -> usize,
    cost: impl Fn(usize) -> Option<f64>,
) -> Option<usize> {
    if n_candidates < 2 {
        return (0..n_candidates).find(|index| cost(*index).is_some());
    }
    for _ in 0..MAX_SAMPLED_PAIRS {
        let (first, second) = two_distinct_below(n_candidates, &mut draw);
        if let (Some(first_cost), Some(second_cost)) = (cost(first), cost(second)) {
            return Some(if second_cost < first_cost { second } else { first });
        }
    }
    // In each sampled pair, at least one candidate cannot be picked. The other one is not picked either, because its cost was
    // compared with no other. Draw two of the candidates that can be picked.
    let pickable = || (0..n_candidates).filter_map(|index| Some((index, cost(index)?)));
    match pickable().count() {
        0 => None,
        1 => pickable().next().map(|(index, _)| index),
        n => {
            let (first, second) = two_distinct_below(n, &mut draw);
            let sampled = pickable()
                .enumerate()
                .filter(|(rank, _)| *rank == first || *rank == second);
            sampled
                .map(|(_, found)| found)
                .min_by(|(_, a), (_, b)| a.total_cmp(b))
                .map(|(index, _)| index)
        }
    }
}

/// Two distinct numbers below `n`, which is at least 2.
fn two_distinct_below(n: usize, random_below: &mut impl FnMut(usize) -> usize) -> (usize, usize) {
    let first = random_below(n);
    let second = random_below(n - 1);
    (first, if second >= first { second + 1 } else { second })
}

/// Maximum number of pairs to draw before all candidates are checked.
const MAX_SAMPLED_PAIRS: usize = 3;

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
    fn the_most_expensive_is_never_chosen_and_the_cheapest_most_often() {
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
    fn candidates_of_equal_cost_get_equal_shares() {
        for share in shares(&[Some(1.0); 4]) {
            assert!((share - 0.25).abs() < 0.02, "{share}");
        }
    }
}
