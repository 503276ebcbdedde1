//! The intervals of leader election.

use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTiming {
    /// Time after the last observed renewal until candidates can acquire the lease.
    pub duration: Duration,
    /// Interval of renewals.
    pub renew_interval: Duration,
    /// Time after the last successful renewal was sent until the holder stops leading.
    pub renew_deadline: Duration,
    /// Interval of reads by candidates, and of retries of a failed renewal.
    pub retry_interval: Duration,
}

impl LeaseTiming {
    /// Duration 30 s, renewed every 2 s, leadership ends after 10 s without a renewal, retries after 2 s.
    pub const FREQUENT: Self = Self {
        duration: Duration::from_secs(30),
        renew_interval: Duration::from_secs(2),
        renew_deadline: Duration::from_secs(10),
        retry_interval: Duration::from_secs(2),
    };

    /// Candidates wait and read as with [`FREQUENT`](Self::FREQUENT). The holder renews a fifth as often, and stops leading after
    /// 20 s without a renewal.
    pub const SPARSE: Self = Self {
        renew_interval: Duration::from_secs(10),
        renew_deadline: Duration::from_secs(20),
        ..Self::FREQUENT
    };
}
