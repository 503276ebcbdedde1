//! Resident memory of sidecars.

use super::metric::{Metric, Sample};
use super::process::Process;
use super::setup::Side;

/// Resident memory of the sidecars at one point in time, in KiB.
pub(super) struct ResidentMemory(Vec<u64>);

impl ResidentMemory {
    pub(super) fn read(sides: &[(Side, &Process)]) -> anyhow::Result<Self> {
        let rss = sides.iter().map(|(_, process)| process.rss_kib());
        rss.collect::<anyhow::Result<_>>().map(Self)
    }

    /// Growth of the resident memory since `self` was read, per client.
    pub(super) fn growth_per_client(&self, sides: &[(Side, &Process)], clients: u32) -> anyhow::Result<Sample> {
        let now = Self::read(sides)?;
        let pairs = sides.iter().zip(self.0.iter().zip(now.0));
        let growth = pairs.map(|((side, _), (before, now))| {
            let metric = match side {
                Side::Client => Metric::ClientKibPerConnection,
                Side::Server => Metric::ServerKibPerConnection,
            };
            (metric, (now as f64 - *before as f64) / f64::from(clients))
        });
        Ok(growth.collect())
    }
}
