//! Resident memory of sidecars.

use super::metric::{Metric, Sample};
use super::process::Process;
use super::setup::Side;

/// Resident memory of the sidecars at one point in time, in KiB.
pub(super) struct Memory(Vec<u64>);

impl Memory {
    pub(super) fn of(sides: &[(Side, &Process)]) -> anyhow::Result<Self> {
        let rss = sides.iter().map(|(_, process)| process.rss_kib());
        rss.collect::<anyhow::Result<_>>().map(Self)
    }

    /// Memory growth since `self` was read, per client.
    pub(super) fn grown(&self, sides: &[(Side, &Process)], clients: u32) -> anyhow::Result<Sample> {
        let now = Self::of(sides)?;
        let both = sides.iter().zip(self.0.iter().zip(now.0));
        let each = both.map(|((side, _), (before, now))| {
            let metric = match side {
                Side::Client => Metric::ClientKibPerConnection,
                Side::Server => Metric::ServerKibPerConnection,
            };
            (metric, (now as f64 - *before as f64) / f64::from(clients))
        });
        Ok(each.collect())
    }
}
