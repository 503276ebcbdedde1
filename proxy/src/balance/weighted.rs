//! Choosing among backends: by weight, or the first that is available.

/// Weights of some choices; at least one is not zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Weights {
    /// Running sums, the last of which is the total.
    sums: Box<[u32]>,
}

impl Weights {
    /// `None` when all weights are zero, or do not fit in a `u32` together.
    pub(crate) fn new(weights: impl IntoIterator<Item = u32>) -> Option<Self> {
        let mut total = 0_u32;
        let mut sums = Vec::new();
        for weight in weights {
            total = total.checked_add(weight)?;
            sums.push(total);
        }
        (total > 0).then(|| Self { sums: sums.into() })
    }

    /// The choice that a random number falls to, each by its weight.
    pub(crate) fn choose(&self, random: u32) -> usize {
        self.owner(scale(random, self.total()))
    }

    /// The same among the available choices only, or none if none of those has a weight.
    pub(crate) fn choose_available(&self, random: u32, is_available: impl Fn(usize) -> bool) -> Option<usize> {
        let choice = self.choose(random);
        if is_available(choice) {
            return Some(choice);
        }
        let available = || (0..self.sums.len()).filter(|index| self.weight(*index) > 0 && is_available(*index));
        let total = available().map(|index| self.weight(index)).sum();
        let mut rest = scale(random, total);
        available().find(|index| {
            let weight = self.weight(*index);
            let is_hit = rest < weight;
            rest = rest.saturating_sub(weight);
            is_hit
        })
    }

    fn total(&self) -> u32 {
        self.sums.last().copied().unwrap_or(0)
    }

    fn weight(&self, index: usize) -> u32 {
        self.sums[index] - index.checked_sub(1).map_or(0, |before| self.sums[before])
    }

    fn owner(&self, point: u32) -> usize {
        self.sums.partition_point(|sum| *sum <= point)
    }
}

/// The first available choice, or the first at all: somebody has to wait for it.
pub(crate) fn first_available(choices: usize, is_available: impl Fn(usize) -> bool) -> usize {
    (0..choices).find(|index| is_available(*index)).unwrap_or(0)
}

/// A random number, brought below `n`.
fn scale(random: u32, n: u32) -> u32 {
    // The product of two 32-bit numbers, shifted by 32 bits, is below the second.
    ((u64::from(random) * u64::from(n)) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_chosen_by_its_weight() {
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
    fn nothing_to_choose_from_is_refused() {
        for weights in [&[][..], &[0], &[0, 0], &[u32::MAX, 1]] {
            assert_eq!(Weights::new(weights.iter().copied()), None, "{weights:?}");
        }
        assert!(Weights::new([u32::MAX]).is_some());
    }

    #[test]
    fn the_unavailable_leave_their_share_to_the_others() {
        let weights = Weights::new([2, 1, 1, 0]).unwrap();
        let mut hits = [0_u32; 4];
        for step in 0..1000_u32 {
            let choice = weights
                .choose_available(step * (u32::MAX / 1000), |index| index != 0)
                .unwrap();
            hits[choice] += 1;
        }
        assert_eq!((hits[0], hits[3]), (0, 0));
        assert!(hits[1] > 200 && hits[2] > 200, "{hits:?}");
        assert_eq!(
            weights.choose_available(5, |index| index == 3),
            None,
            "no weight, no requests"
        );
        assert_eq!(weights.choose_available(5, |_| false), None);
    }

    #[test]
    fn the_first_available_or_the_first() {
        assert_eq!(first_available(3, |index| index > 0), 1);
        assert_eq!(first_available(3, |_| false), 0);
    }
}
