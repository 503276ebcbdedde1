//! Chooses among backends: by weight, or the first available one.

/// Weights of choices; at least one is not zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Weights {
    /// Cumulative sums; the last one is the total.
    sums: Box<[u64]>,
}

impl Weights {
    /// `None` when all weights are zero.
    pub(crate) fn new(weights: impl IntoIterator<Item = u32>) -> Option<Self> {
        let sum = |total: &mut u64, weight: u32| {
            *total += u64::from(weight);
            Some(*total)
        };
        let sums: Box<[u64]> = weights.into_iter().scan(0, sum).collect();
        sums.last().is_some_and(|total| *total > 0).then_some(Self { sums })
    }

    /// Maps a random number to a choice, in proportion to the weights.
    pub(crate) fn choose(&self, random: u32) -> usize {
        self.index_at(self.point(random))
    }

    /// As [`Self::choose`], but among the available choices; `None` if none of them has a weight above zero.
    pub(crate) fn choose_available(&self, random: u32, is_available: impl Fn(usize) -> bool) -> Option<usize> {
        let point = self.point(random);
        let choice = self.index_at(point);
        if is_available(choice) {
            return Some(choice);
        }
        let available = || (0..self.sums.len()).filter(|index| self.weight(*index) > 0 && is_available(*index));
        let total_available: u64 = available().map(|index| self.weight(index)).sum();
        // `point` is in the range of `choice`. Its position in this range is uniformly distributed, so the position selects
        // among the available choices.
        let position = point - (u128::from(self.sum_before(choice)) << u32::BITS);
        let mut remaining = (position * u128::from(total_available) / u128::from(self.weight(choice))) >> u32::BITS;
        available().find(|index| {
            let weight = u128::from(self.weight(*index));
            let is_hit = remaining < weight;
            remaining = remaining.saturating_sub(weight);
            is_hit
        })
    }

    /// Scales a random number to a number below the total of the weights. The result is a fixed-point number whose lowest 32
    /// bits are the fraction.
    fn point(&self, random: u32) -> u128 {
        u128::from(random) * u128::from(self.sums.last().copied().unwrap_or(0))
    }

    fn index_at(&self, point: u128) -> usize {
        let point = (point >> u32::BITS) as u64; // below the total, which is a `u64`
        self.sums.partition_point(|sum| *sum <= point)
    }

    fn weight(&self, index: usize) -> u64 {
        self.sums[index] - self.sum_before(index)
    }

    fn sum_before(&self, index: usize) -> u64 {
        index.checked_sub(1).map_or(0, |previous| self.sums[previous])
    }
}

/// The first available choice. If none is available, the first choice; the request then waits for it.
pub(crate) fn first_available(choices: usize, is_available: impl Fn(usize) -> bool) -> usize {
    (0..choices).find(|index| is_available(*index)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_selected_in_proportion_to_their_weights() {
        let weights = Weights::new([1, 0, 3]).unwrap();
        let mut hits = [0_u32; 3];
        for step in 0..1000_u32 {
            hits[weights.choose(step * (u32::MAX / 1000))] += 1;
        }
        assert_eq!(hits, [251, 0, 749]);
        assert_eq!(weights.choose(0), 0);
        assert_eq!(weights.choose(u32::MAX), 2);
    }

    #[test]
    fn weights_that_are_all_zero_are_refused() {
        for weights in [&[][..], &[0], &[0, 0]] {
            assert_eq!(Weights::new(weights.iter().copied()), None, "{weights:?}");
        }
    }

    #[test]
    fn large_weights_do_not_overflow() {
        let weights = Weights::new([u32::MAX, u32::MAX, u32::MAX]).unwrap();
        let choices = [0, u32::MAX / 2, u32::MAX].map(|random| weights.choose(random));
        assert_eq!(choices, [0, 1, 2]);
    }

    #[test]
    fn the_share_of_an_unavailable_choice_is_divided_among_the_others_by_weight() {
        let weights = Weights::new([2, 1, 1, 0]).unwrap();
        let mut hits = [0_u32; 4];
        for step in 0..1000_u32 {
            let choice = weights
                .choose_available(step * (u32::MAX / 1000), |index| index != 0)
                .unwrap();
            hits[choice] += 1;
        }
        assert_eq!((hits[0], hits[3]), (0, 0));
        assert!(hits[1].abs_diff(hits[2]) <= 2, "{hits:?}");
        assert_eq!(
            weights.choose_available(5, |index| index == 3),
            None,
            "a choice of weight 0 gets no requests"
        );
        assert_eq!(weights.choose_available(5, |_| false), None);
        let large = Weights::new([u32::MAX; 3]).unwrap();
        assert_eq!(large.choose_available(u32::MAX, |index| index < 2), Some(1));
    }

    #[test]
    fn the_first_available_choice_is_selected_or_else_the_first() {
        assert_eq!(first_available(3, |index| index > 0), 1);
        assert_eq!(first_available(3, |_| false), 0);
    }
}
