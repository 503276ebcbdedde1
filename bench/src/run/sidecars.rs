//! Running sidecars.

use super::process::Process;
use super::setup::{Setup, Side, SidecarPath};
use super::testbed::{Redirect, Testbed};
use super::throttle::Throttle;

/// Running sidecars with their redirect rules.
pub(super) struct Sidecars {
    // Field order is drop order: processes end before their limits are removed.
    pub(super) client: Option<Process>,
    pub(super) server: Option<Process>,
    _throttles: Vec<Throttle>,
    /// The control plane of tulle. Its cost is not part of the measurement.
    _control: Option<Process>,
    _redirect: Redirect,
}

impl Sidecars {
    /// Starts the sidecars that the setup needs, the server's first. Then installs the redirect rules in the namespaces of the
    /// sidecars.
    pub(super) fn start(
        testbed: &Testbed,
        setup: &Setup,
        control: Option<Process>,
        start: impl Fn(Side) -> anyhow::Result<Process>,
    ) -> anyhow::Result<Self> {
        let server = (setup.path != SidecarPath::Outbound)
            .then(|| start(Side::Server))
            .transpose()?;
        let client = (setup.path != SidecarPath::Inbound)
            .then(|| start(Side::Client))
            .transpose()?;
        let throttle = |process| setup.throttle.map(|percent| Throttle::limit_threads(process, percent));
        Ok(Self {
            _throttles: [&client, &server]
                .into_iter()
                .flatten()
                .filter_map(throttle)
                .collect::<anyhow::Result<_>>()?,
            _redirect: testbed.redirect(setup)?,
            client,
            server,
            _control: control,
        })
    }

    pub(super) fn sides(&self) -> Vec<(Side, &Process)> {
        let client = self.client.iter().map(|process| (Side::Client, process));
        let server = self.server.iter().map(|process| (Side::Server, process));
        client.chain(server).collect()
    }
}
