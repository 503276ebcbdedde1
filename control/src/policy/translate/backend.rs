//! Converts backends to protobuf.

use std::time::Duration;

use tulle_proto::convert::wire_duration;
use tulle_proto::destination::WeightedAddr;
use tulle_proto::outbound::backend::balance_p2c::{Load, PeakEwma, PenaltyPeakEwma};
use tulle_proto::outbound::backend::{BalanceP2c, EndpointDiscovery, endpoint_discovery};
use tulle_proto::outbound::{Backend, Queue, backend};

use crate::model::outbound as model;
use crate::model::outbound::BackendTarget;
use crate::policy::translate::metadata;

pub(super) fn backend(backend: &model::Backend) -> Backend {
    let kind = match &backend.target {
        BackendTarget::Balance { path, load } => Some(backend::Kind::Balancer(balancer(path, *load))),
        BackendTarget::Forward(addr) => {
            let forward = WeightedAddr {
                addr: Some((*addr).into()),
                weight: 1,
                ..WeightedAddr::default()
            };
            Some(backend::Kind::Forward(forward))
        }
        BackendTarget::Failing => None,
    };
    Backend {
        metadata: Some(metadata(&backend.reference)),
        queue: Some(queue()),
        kind,
    }
}

fn balancer(path: &str, load: model::Load) -> BalanceP2c {
    let (default_rtt, decay) = (Some(wire_duration(DEFAULT_RTT)), Some(wire_duration(EWMA_DECAY)));
    let load = match load {
        model::Load::PeakEwma => Load::PeakEwma(PeakEwma { default_rtt, decay }),
        model::Load::Penalized {
            penalty,
            max_retry_after,
        } => Load::PenaltyPeakEwma(PenaltyPeakEwma {
            default_rtt,
            decay,
            penalty: Some(wire_duration(penalty)),
            max_retry_after: Some(wire_duration(max_retry_after)),
            penalty_decay: Some(wire_duration(EWMA_DECAY)),
        }),
    };
    let get = endpoint_discovery::DestinationGet { path: path.to_owned() };
    BalanceP2c {
        discovery: Some(EndpointDiscovery {
            kind: Some(endpoint_discovery::Kind::Dst(get)),
        }),
        load: Some(load),
    }
}

fn queue() -> Queue {
    Queue {
        capacity: 100,
        failfast_timeout: Some(wire_duration(Duration::from_secs(3))),
    }
}

/// The assumed RTT of an endpoint without measurements.
const DEFAULT_RTT: Duration = Duration::from_millis(30);

/// Decay time of latencies and penalties.
const EWMA_DECAY: Duration = Duration::from_secs(10);
