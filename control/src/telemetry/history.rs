//! Metrics pages of a sidecar over the last minutes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::counts::{Rates, SidecarValues};

/// Pages of one sidecar, oldest first. Recent pages are closer together than older ones, so that a long window needs
/// few pages.
#[derive(Clone, Debug, Default)]
pub(super) struct History(VecDeque<(Instant, Arc<SidecarValues>)>);

impl History {
    /// Adds a page read at `now`. Removes pages that are too old or too close to another, and the oldest beyond
    /// `max_pages`.
    pub(super) fn push(&mut self, now: Instant, counts: SidecarValues, max_pages: usize) {
        let mut last = None;
        self.0.retain(|(at, _)| {
            let age = now - *at;
            let min_distance = if age > RECENT_PERIOD {
                OLDER_SAMPLE_INTERVAL
            } else {
                RECENT_SAMPLE_INTERVAL
            };
            let keep = age <= MAX_HISTORY + OLDER_SAMPLE_INTERVAL && last.is_none_or(|last| *at - last >= min_distance);
            if keep {
                last = Some(*at);
            }
            keep
        });
        self.0.push_back((now, Arc::new(counts)));
        self.0.drain(..self.0.len().saturating_sub(max_pages));
    }

    /// Returns the time of the latest page.
    pub(super) fn latest(&self) -> Option<Instant> {
        self.0.back().map(|(at, _)| *at)
    }

    /// Returns whether there are two pages, the minimum for a rate.
    pub(super) fn has_two_pages(&self) -> bool {
        match (self.0.front(), self.0.back()) {
            (Some((first, _)), Some((last, _))) => last > first,
            _ => false,
        }
    }

    /// Returns the rates per second, and the length of the interval in seconds: the available interval closest to `window`.
    /// `None` with fewer than two pages.
    pub(super) fn rates(&self, window: Duration) -> Option<(Rates, f64)> {
        let (now, latest) = self.0.back()?;
        let earlier = self.0.iter().take(self.0.len() - 1);
        let (at, before) = earlier.min_by_key(|(at, _)| window.abs_diff(*now - *at))?;
        let seconds = (*now - *at).as_secs_f64();
        (seconds > 0.0).then(|| (latest.rates_since(before, seconds), seconds))
    }
}

/// Maximum window of a query.
pub(super) const MAX_HISTORY: Duration = Duration::from_secs(300);
/// Minimum distance of pages that are at most [`RECENT_PERIOD`] old.
pub(super) const RECENT_SAMPLE_INTERVAL: Duration = Duration::from_secs(10);
const RECENT_PERIOD: Duration = Duration::from_secs(60);
/// Minimum distance of older pages.
const OLDER_SAMPLE_INTERVAL: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    fn page(n: u64) -> SidecarValues {
        SidecarValues::parse(&format!(
            "tulle_failures_total{{direction=\"inbound\",cause=\"loop\"}} {n}\n"
        ))
    }

    #[tokio::test(start_paused = true)]
    async fn ten_minutes_of_pages_are_thinned_and_cover_every_window() {
        let mut history = History::default();
        let start = Instant::now();
        for second in (0..=600).step_by(2) {
            history.push(start + Duration::from_secs(second), page(second * 3), 100);
        }
        assert!(history.0.len() <= 14, "{}", history.0.len());
        for (window, least, most) in [(10, 8.0, 20.0), (60, 50.0, 70.0), (300, 240.0, 360.0)] {
            let (rates, seconds) = history.rates(Duration::from_secs(window)).unwrap();
            assert!((least..=most).contains(&seconds), "{seconds} for {window}");
            assert_eq!(rates.per_second.failures.values().copied().collect::<Vec<_>>(), [3.0]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn rates_need_two_pages() {
        let mut history = History::default();
        assert!(history.rates(MAX_HISTORY).is_none());
        let start = Instant::now();
        history.push(start, page(0), 2);
        assert!(history.rates(MAX_HISTORY).is_none());
        history.push(start + Duration::from_secs(2), page(8), 2);
        let (rates, seconds) = history.rates(MAX_HISTORY).unwrap();
        assert_eq!(
            (rates.per_second.failures.values().copied().next(), seconds),
            (Some(4.0), 2.0)
        );
        history.push(start + Duration::from_secs(12), page(8), 2);
        assert_eq!(history.0.len(), 2);
    }
}
