//! Policies of inbound ports and of outbound targets, from the policy service.

use std::sync::Arc;
use std::time::Duration;

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

use crate::api::channel::{Channel, IdentityCheck, MAX_MESSAGE_BYTES, Security};
use crate::api::retry_signal::RetrySignal;
use crate::api::watch::{StreamLimits, WatchParams, WatchState, spawn_watch};

/// A client of the policy service; clones share its channel.
#[derive(Clone)]
pub(crate) struct Policies {
    inbound: InboundServerPoliciesClient<Channel>,
    outbound: OutboundPoliciesClient<Channel>,
    shared: Arc<Shared>,
}

/// How a policy is kept up to date.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WatchMode {
    /// By a stream that stays open.
    Watch,
    /// By a stream that the proxy closes after the first message, and opens again after this interval.
    Poll(Duration),
}

/// Settings of all lookups.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// Text that identifies this workload to the control plane; it is sent unchanged.
    pub workload: String,
    /// Limits of streams; not used for a control plane on this host.
    pub limits: StreamLimits,
    pub inbound_backoff: Backoff,
    pub outbound_backoff: Backoff,
}

struct Shared {
    channel: Channel,
    config: Config,
    runtime: Handle,
}

impl Policies {
    pub(crate) fn new(channel: Channel, runtime: Handle, mut config: Config) -> Self {
        if channel.target().security == Security::Loopback {
            config.limits = StreamLimits::default();
        }
        Self {
            inbound: InboundServerPoliciesClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES),
            outbound: OutboundPoliciesClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES),
            shared: Arc::new(Shared {
                channel,
                config,
                runtime,
            }),
        }
    }

    /// False while attempts to connect to the control plane fail.
    pub(crate) fn is_reachable(&self) -> bool {
        !self.shared.channel.is_failing()
    }

    /// Makes the channel reconnect soon if it has no connection, and the watch whose signal is `retry` reopen its stream soon.
    pub(crate) fn retry_soon(&self, retry: &RetrySignal) {
        self.shared.channel.retry_soon();
        retry.retry_soon();
    }

    /// Watches the policy of an inbound port.
    pub(crate) fn inbound<T: Send + Sync + 'static>(
        &self,
        port: u16,
        mode: WatchMode,
        retry: RetrySignal,
        mut decode: impl FnMut(inbound::Server) -> T + Send + 'static,
    ) -> watch::Receiver<WatchState<T>> {
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
        let mut params = self.watch_params(
            format!("policy of port {port}"),
            self.shared.config.inbound_backoff,
            INBOUND_REFUSAL_CODES,
            retry,
        );
        params.identity_check = IdentityCheck::Workload;
        if let WatchMode::Poll(interval) = mode {
            // The stream is closed after its first message, and opened again after the interval.
            params.limits.idle = Some(Duration::ZERO);
            params.refusal_codes = POLL_REFUSAL_CODES;
            params.backoff = Backoff {
                min: interval,
                max: interval,
                jitter: POLL_JITTER,
            };
        }
        spawn_watch(&self.shared.runtime, params, open, move |_, message| decode(message))
    }

    /// Watches the policy of an outbound target.
    ///
    /// If the policy is refused with `NotFound` or `Unimplemented`, the caller uses the endpoint in the target's profile. If the
    /// profile has no endpoint, the caller uses the target's address.
    pub(crate) fn outbound<T: Send + Sync + 'static>(
        &self,
        target: &Addr,
        mut decode: impl FnMut(outbound::OutboundPolicy) -> T + Send + 'static,
    ) -> watch::Receiver<WatchState<T>> {
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
        let params = self.watch_params(
            format!("policy of {target}"),
            self.shared.config.outbound_backoff,
            OUTBOUND_REFUSAL_CODES,
            RetrySignal::default(),
        );
        spawn_watch(&self.shared.runtime, params, open, move |_, message| decode(message))
    }

    fn watch_params(
        &self,
        description: String,
        backoff: Backoff,
        refusals: &'static [Code],
        retry: RetrySignal,
    ) -> WatchParams {
        WatchParams {
            channel: self.shared.channel.clone(),
            description,
            limits: self.shared.config.limits,
            backoff,
            retry,
            identity_check: IdentityCheck::Namespace,
            refusal_codes: refusals,
        }
    }
}

/// Maximum fraction that is added to the interval of a poll. The configured jitter is not used: it may be 100, and a changed
/// policy must take effect soon.
const POLL_JITTER: f64 = 0.1;
/// The refusals of a poll. They omit `PermissionDenied`: a denied poll waits for its interval, as after other failures.
const POLL_REFUSAL_CODES: &[Code] = &[Code::InvalidArgument, Code::FailedPrecondition];
const INBOUND_REFUSAL_CODES: &[Code] = &[Code::InvalidArgument, Code::FailedPrecondition, Code::PermissionDenied];
const OUTBOUND_REFUSAL_CODES: &[Code] = &[
    Code::InvalidArgument,
    Code::FailedPrecondition,
    Code::NotFound,
    Code::PermissionDenied,
    Code::Unimplemented,
];

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::pin::Pin;

    use futures_util::{Stream, StreamExt, stream};
    use hyper::body::Incoming;
    use inbound::inbound_server_policies_server::{InboundServerPolicies, InboundServerPoliciesServer};
    use outbound::outbound_policies_server::{OutboundPolicies, OutboundPoliciesServer};
    use tonic::body::Body;
    use tonic::{Request, Response, Status};
    use tulle_core::metrics::Registry;

    use super::*;
    use crate::api::tests::{CLIENT, CONTROL, Server, connector, mutual_tls, test_config, with_timeout};
    use crate::tls::tests::Authority;

    /// A policy service that returns the request's fields in its response.
    #[derive(Clone)]
    struct Echo;

    type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

    fn hold<T: Send + 'static>(answer: T) -> Result<Response<ResponseStream<T>>, Status> {
        Ok(Response::new(Box::pin(
            stream::iter([Ok(answer)]).chain(stream::pending()),
        )))
    }

    #[tonic::async_trait]
    impl InboundServerPolicies for Echo {
        type WatchPortStream = ResponseStream<inbound::Server>;

        async fn get_port(&self, _: Request<inbound::PortSpec>) -> Result<Response<inbound::Server>, Status> {
            Err(Status::unimplemented("proxies watch"))
        }

        async fn watch_port(&self, req: Request<inbound::PortSpec>) -> Result<Response<Self::WatchPortStream>, Status> {
            let spec = req.into_inner();
            let requested = format!("{} {}", spec.workload, spec.port);
            hold(inbound::Server {
                labels: [("requested".to_owned(), requested)].into(),
                ..Default::default()
            })
        }
    }

    #[tonic::async_trait]
    impl OutboundPolicies for Echo {
        type WatchStream = ResponseStream<outbound::OutboundPolicy>;

        async fn get(&self, _: Request<outbound::TrafficSpec>) -> Result<Response<outbound::OutboundPolicy>, Status> {
            Err(Status::unimplemented("proxies watch"))
        }

        async fn watch(&self, req: Request<outbound::TrafficSpec>) -> Result<Response<Self::WatchStream>, Status> {
            let spec = req.into_inner();
            match spec.target {
                Some(Target::Addr(_)) if spec.source_workload == WORKLOAD => hold(outbound::OutboundPolicy::default()),
                other => Err(Status::not_found(format!("{other:?}"))),
            }
        }
    }

    const WORKLOAD: &str = r#"{"ns":"shop","pod":"web"}"#;

    fn config() -> Config {
        let backoff = Backoff {
            min: Duration::from_millis(20),
            max: Duration::from_millis(50),
            jitter: 0.1,
        };
        Config {
            workload: WORKLOAD.to_owned(),
            limits: StreamLimits::default(),
            inbound_backoff: backoff,
            outbound_backoff: backoff,
        }
    }

    /// Starts a server of `service` with mutual TLS. Returns a client of it, and the server.
    async fn start_policy_server<S>(service: S, config: Config) -> (Policies, Server)
    where
        S: tower::Service<http::Request<Incoming>, Response = http::Response<Body>, Error = Infallible>,
        S: Clone + Send + 'static,
        S::Future: Send,
    {
        let (authority, addr) = (Authority::new(), ([127, 0, 0, 1], 0).into());
        let server = Server::start(addr, Some(authority.credentials(CONTROL)), service).await;
        let connector = connector(authority.credentials(CLIENT), &Registry::new());
        let channel = connector.channel(server.target(mutual_tls()), test_config());
        (Policies::new(channel, Handle::current(), config), server)
    }

    #[tokio::test]
    async fn ports_are_watched_with_the_workload_of_the_proxy() {
        let (policies, _server) = start_policy_server(InboundServerPoliciesServer::new(Echo), config()).await;
        let mut requested = policies.inbound(8080, WatchMode::Watch, RetrySignal::default(), |server| {
            server.labels["requested"].clone()
        });
        with_timeout(requested.wait_for(|requested| *requested == WatchState::Known(format!("{WORKLOAD} 8080"))))
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn ports_are_polled_without_the_jitter_of_failures() {
        let mut config = config();
        config.inbound_backoff.jitter = 1e9; // would add hours to each delay
        let (policies, _server) = start_policy_server(InboundServerPoliciesServer::new(Echo), config).await;
        let mode = WatchMode::Poll(Duration::from_millis(20));
        let mut polled = policies.inbound(8080, mode, RetrySignal::default(), |_| ());
        for _ in 0..3 {
            with_timeout(polled.changed()).await.unwrap();
        }
    }

    #[tokio::test]
    async fn targets_are_watched_by_address_and_by_name() {
        let (policies, _server) = start_policy_server(OutboundPoliciesServer::new(Echo), config()).await;
        let mut known = policies.outbound(&"10.0.0.1:80".parse().unwrap(), |policy| policy);
        let expected = WatchState::Known(outbound::OutboundPolicy::default());
        with_timeout(known.wait_for(|policy| *policy == expected))
            .await
            .unwrap();

        let mut unknown = policies.outbound(&"web.shop:80".parse().unwrap(), |policy| policy);
        let refused = with_timeout(unknown.wait_for(|policy| matches!(policy, WatchState::Refused(_))))
            .await
            .unwrap()
            .clone();
        let WatchState::Refused(refusal) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(
            (refusal.code, refusal.message.as_str()),
            (Code::NotFound, r#"Some(Authority("web.shop:80"))"#)
        );
    }
}
