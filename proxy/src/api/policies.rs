//! Policies of inbound ports and of outbound targets, from the policy service.

use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tonic::Code;
use tulle_core::addr::Addr;
use tulle_core::backoff::Backoff;
use tulle_proto::inbound;
use tulle_proto::inbound::inbound_server_policies_client::InboundServerPoliciesClient;
use tulle_proto::outbound;
use tulle_proto::outbound::outbound_policies_client::OutboundPoliciesClient;
use tulle_proto::outbound::traffic_spec::Target;

use crate::api::channel::{Channel, Security};
use crate::api::watch::{self as stream, StreamLimits, Terms, Watched};

/// A client of the policy service; clones share its channel.
#[derive(Clone)]
pub(crate) struct Policies {
    inbound: InboundServerPoliciesClient<Channel>,
    outbound: OutboundPoliciesClient<Channel>,
    shared: Arc<Shared>,
}

/// What every lookup has in common.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// Sent verbatim, so that the control plane knows whose ports they are.
    pub workload: String,
    /// They do not hold for a control plane on this machine.
    pub limits: StreamLimits,
    pub inbound_backoff: Backoff,
    pub outbound_backoff: Backoff,
}

struct Shared {
    config: Config,
    runtime: Handle,
}

impl Policies {
    pub(crate) fn new(channel: Channel, runtime: Handle, mut config: Config) -> Self {
        if channel.target().security == Security::Loopback {
            config.limits = StreamLimits::default();
        }
        Self {
            inbound: InboundServerPoliciesClient::new(channel.clone()),
            outbound: OutboundPoliciesClient::new(channel),
            shared: Arc::new(Shared { config, runtime }),
        }
    }

    /// Watches who may use a port of ours.
    pub(crate) fn inbound<T: Send + Sync + 'static>(
        &self,
        port: u16,
        mut decode: impl FnMut(inbound::Server) -> T + Send + 'static,
    ) -> watch::Receiver<Watched<T>> {
        let (client, workload) = (self.inbound.clone(), self.shared.config.workload.clone());
        let open = move || {
            let (mut client, workload) = (client.clone(), workload.clone());
            async move {
                client
                    .watch_port(inbound::PortSpec {
                        workload,
                        port: port.into(),
                    })
                    .await
            }
        };
        let terms = self.terms(
            format!("policy of port {port}"),
            self.shared.config.inbound_backoff,
            INBOUND_FINALS,
        );
        stream::spawn(&self.shared.runtime, terms, open, move |_, message| decode(message))
    }

    /// Watches how a target is reached.
    ///
    /// Refused with `NotFound` or `Unimplemented`, it is reached as it was dialled, or as its profile says.
    pub(crate) fn outbound<T: Send + Sync + 'static>(
        &self,
        target: &Addr,
        mut decode: impl FnMut(outbound::OutboundPolicy) -> T + Send + 'static,
    ) -> watch::Receiver<Watched<T>> {
        let spec = outbound::TrafficSpec {
            source_workload: self.shared.config.workload.clone(),
            target: Some(match target {
                Addr::Socket(addr) => Target::Addr((*addr).into()),
                Addr::Name(name) => Target::Authority(name.to_string()),
            }),
        };
        let client = self.outbound.clone();
        let open = move || {
            let (mut client, spec) = (client.clone(), spec.clone());
            async move { client.watch(spec).await }
        };
        let terms = self.terms(
            format!("policy of {target}"),
            self.shared.config.outbound_backoff,
            OUTBOUND_FINALS,
        );
        stream::spawn(&self.shared.runtime, terms, open, move |_, message| decode(message))
    }

    fn terms(&self, what: String, backoff: Backoff, finals: &'static [Code]) -> Terms {
        Terms {
            what,
            limits: self.shared.config.limits,
            backoff,
            finals,
        }
    }
}

const INBOUND_FINALS: &[Code] = &[Code::InvalidArgument, Code::FailedPrecondition];
const OUTBOUND_FINALS: &[Code] = &[
    Code::InvalidArgument,
    Code::FailedPrecondition,
    Code::NotFound,
    Code::Unimplemented,
];
