//! What a sidecar had counted at some moments of the last minutes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::counts::Counts;

/// Pages of one sidecar, the oldest first: the nearer the denser, so that long windows cost little more than short ones.
#[derive(Clone, Debug, Default)]
pub(super) struct History(VecDeque<(Instant, Arc<Counts>)>);

impl History {
    /// Adds a page that was read now, and leaves out what is too old or too near to another, and the oldest where there would be
    /// more than `most`.
    pub(super) fn push(&mut self, now: Instant, counts: Counts, most: usize) {
        let mut last = None;
        self.0.retain(|(at, _)| {
            let age = now - *at;
            let apart = if age > NEAR { FAR_APART } else { NEAR_APART };
            let keep = age <= LONGEST + FAR_APART && last.is_none_or(|last| *at - last >= apart);
            if keep {
                last = Some(*at);
            }
            keep
        });
        self.0.push_back((now, Arc::new(counts)));
        self.0.drain(..self.0.len().saturating_sub(most));
    }

    /// When the latest page was read.
    pub(super) fn latest(&self) -> Option<Instant> {
        self.0.back().map(|(at, _)| *at)
    }

    /// Whether there are two pages, which is what a rate takes.
    pub(super) fn shows_growth(&self) -> bool {
        match (self.0.front(), self.0.back()) {
            (Some((first, _)), Some((last, _))) => last > first,
            _ => false,
        }
    }

    /// What happens in each second, and over how many seconds that was measured: over this window, or over what comes
    /// nearest to it. Nothing before there are two pages.
    pub(super) fn rates(&self, window: Duration) -> Option<(Counts, f64)> {
        let (now, latest) = self.0.back()?;
        let earlier = self.0.iter().take(self.0.len() - 1);
        let (at, before) = earlier.min_by_key(|(at, _)| window.abs_diff(*now - *at))?;
        let seconds = (*now - *at).as_secs_f64();
        (seconds > 0.0).then(|| (latest.since(before, seconds), seconds))
    }
}

/// The longest window that there is.
pub(super) const LONGEST: Duration = Duration::from_secs(300);
/// How far apart pages are that are no older than [`NEAR`].
pub(super) const NEAR_APART: Duration = Duration::from_secs(10);
const NEAR: Duration = Duration::from_secs(60);
/// How far apart older ones are.
const FAR_APART: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    fn page(n: u64) -> Counts {
        Counts::parse(&format!(
            "tulle_failures_total{{direction=\"inbound\",cause=\"loop\"}} {n}\n"
        ))
    }

    #[tokio::test(start_paused = true)]
    async fn ten_minutes_of_pages_are_kept_as_few_and_answer_for_any_window() {
        let mut history = History::default();
        let start = Instant::now();
        for second in (0..=600).step_by(2) {
            history.push(start + Duration::from_secs(second), page(second * 3), 100);
        }
        assert!(history.0.len() <= 14, "{}", history.0.len());
        for (window, least, most) in [(10, 8.0, 20.0), (60, 50.0, 70.0), (300, 240.0, 360.0)] {
            let (counts, seconds) = history.rates(Duration::from_secs(window)).unwrap();
            assert!((least..=most).contains(&seconds), "{seconds} for {window}");
            assert_eq!(counts.failures.values().copied().collect::<Vec<_>>(), [3.0]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_page_tells_nothing_and_two_do() {
        let mut history = History::default();
        assert!(history.rates(LONGEST).is_none());
        let start = Instant::now();
        history.push(start, page(0), 2);
        assert!(history.rates(LONGEST).is_none());
        history.push(start + Duration::from_secs(2), page(8), 2);
        let (counts, seconds) = history.rates(LONGEST).unwrap();
        assert_eq!((counts.failures.values().copied().next(), seconds), (Some(4.0), 2.0));
        history.push(start + Duration::from_secs(12), page(8), 2);
        assert_eq!(history.0.len(), 2);
    }
}
