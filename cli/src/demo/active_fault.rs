use tokio::time::Instant;

/// A fault that is injected and from which the mesh has not recovered yet.
pub(super) struct ActiveFault {
    pub(super) target: Target,
    pub(super) since: Instant,
    /// When the demo repairs the fault. `None` while it only waits for recovery: after the repair, and always for the issuer,
    /// which needs no repair.
    pub(super) repair_at: Option<Instant>,
    /// Failures on permitted edges before the fault.
    pub(super) failed_before: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Target {
    ControlPlane,
    /// The application of this workload.
    Replica(String),
    /// The issuer, replaced at this Unix time in seconds.
    Issuer {
        replaced_at: f64,
    },
}

impl Target {
    pub(super) fn name(&self) -> &str {
        match self {
            Self::ControlPlane => "the control plane",
            Self::Replica(name) => name,
            Self::Issuer { .. } => "the issuer",
        }
    }

    /// What is wrong until the mesh has recovered.
    pub(super) fn problem(&self) -> String {
        match self {
            Self::ControlPlane => "the control plane is down".to_owned(),
            Self::Replica(name) => format!("{name}'s application is down"),
            Self::Issuer { .. } => "not all sidecars hold certificates of the new issuer".to_owned(),
        }
    }

    /// The log name of the stopped process; `None` if the fault stops no process.
    pub(super) fn process(&self) -> Option<String> {
        match self {
            Self::ControlPlane => Some("control".to_owned()),
            Self::Replica(name) => Some(format!("{name}-app")),
            Self::Issuer { .. } => None,
        }
    }

    pub(super) fn recovery_message(&self) -> String {
        match self {
            Self::ControlPlane => "control plane ready again".to_owned(),
            Self::Replica(name) => format!("{name}'s application started again"),
            Self::Issuer { .. } => "all sidecars hold certificates of the new issuer".to_owned(),
        }
    }
}
