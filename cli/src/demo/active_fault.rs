use tokio::time::Instant;

/// A fault that is injected and from which the mesh has not recovered yet.
pub(super) struct ActiveFault {
    pub(super) target: FaultTarget,
    pub(super) injected_at: Instant,
    /// The time at which the demo repairs the fault. `None` after the repair, while the demo waits for recovery, and always for the
    /// issuer, which needs no repair.
    pub(super) repair_at: Option<Instant>,
    /// Number of failures on permitted edges before the fault.
    pub(super) failed_before: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum FaultTarget {
    ControlPlane,
    /// The application of this workload.
    Replica(String),
    /// The issuer, replaced at this Unix time in seconds.
    Issuer {
        replaced_at: f64,
    },
}

impl FaultTarget {
    pub(super) fn name(&self) -> &str {
        match self {
            Self::ControlPlane => "the control plane",
            Self::Replica(name) => name,
            Self::Issuer { .. } => "the issuer",
        }
    }

    /// Describes the state of the mesh until it has recovered.
    pub(super) fn problem(&self) -> String {
        match self {
            Self::ControlPlane => "the control plane is down".to_owned(),
            Self::Replica(name) => format!("{name}'s application is down"),
            Self::Issuer { .. } => "not all sidecars hold certificates of the new issuer".to_owned(),
        }
    }

    /// The log name of the stopped process; `None` if the fault stops no process.
    pub(super) fn process_name(&self) -> Option<String> {
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
