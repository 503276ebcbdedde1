//! Subscribers of the control plane, with the states that they have received. Loads compare these states, and measure their delays.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use futures_util::{Stream, StreamExt as _};
use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tulle_control::tls::client::Channel;
use tulle_proto::destination::destination_client::DestinationClient;
use tulle_proto::destination::{DestinationProfile, WeightedAddr};
use tulle_proto::inbound::inbound_server_policies_client::InboundServerPoliciesClient;
use tulle_proto::inbound::{PortSpec, Server};
use tulle_proto::outbound::outbound_policies_client::OutboundPoliciesClient;
use tulle_proto::outbound::{OutboundPolicy, TrafficSpec, traffic_spec};

use super::cluster;
use super::cluster::Pod;
use crate::scale::control_plane::Ports;
use crate::scale::destination::{self, ClientPod, STREAMS_PER_CONNECTION};

/// A subscription, such as a proxy has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Subscription {
    /// The endpoints of a Service, as a client on this node gets them.
    Endpoints {
        service: usize,
        node: usize,
    },
    Profile {
        service: usize,
    },
    OutboundPolicy {
        service: usize,
    },
    InboundPolicy {
        pod: Pod,
    },
}

/// The last state that a stream has delivered.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ReceivedState {
    Endpoints(BTreeMap<SocketAddr, WeightedAddr>),
    Profile(Box<DestinationProfile>),
    OutboundPolicy(Box<OutboundPolicy>),
    InboundPolicy(Box<Server>),
}

/// The open streams of all subscriptions, and the last state that each has delivered.
pub(super) struct Subscribers {
    received: Arc<Mutex<Received>>,
    _tasks: JoinSet<()>,
}

#[derive(Default)]
struct Received {
    states: BTreeMap<Subscription, ReceivedState>,
    /// Time of the last message of each stream.
    received_at: BTreeMap<Subscription, Instant>,
    n_messages: u64,
    /// The streams that have ended, each with the reason.
    ended: Vec<String>,
}

impl Subscribers {
    /// Opens all streams and waits until each has a state.
    pub(super) async fn open(ports: Ports, subscriptions: &[Subscription]) -> anyhow::Result<Self> {
        let received = Arc::new(Mutex::new(Received::default()));
        let mut tasks = JoinSet::new();
        for subscriptions in subscriptions.chunks(STREAMS_PER_CONNECTION) {
            let channels = Channels {
                destination: destination::connect(ports.destination).await?,
                policy: destination::connect(ports.policy).await?,
            };
            for &subscription in subscriptions {
                let (channels, received) = (channels.clone(), received.clone());
                tasks.spawn(async move {
                    let ended = match channels.follow(subscription, &received).await {
                        Ok(()) => "without an error".to_owned(),
                        Err(status) => status.to_string(),
                    };
                    received.lock().ended.push(format!("{subscription:?} ended {ended}"));
                });
            }
        }
        let subscribers = Self {
            received,
            _tasks: tasks,
        };
        let deadline = Instant::now() + OPEN_TIMEOUT;
        while subscribers.received.lock().states.len() < subscriptions.len() {
            subscribers.check_open()?;
            if Instant::now() > deadline {
                let n_received = subscribers.received.lock().states.len();
                bail!(
                    "{n_received} of {} streams have a message after {OPEN_TIMEOUT:?}",
                    subscriptions.len()
                );
            }
            sleep(POLL_INTERVAL).await;
        }
        Ok(subscribers)
    }

    /// Waits until no message has arrived for two seconds, then returns the state of each stream.
    pub(super) async fn wait_until_settled(&self) -> anyhow::Result<BTreeMap<Subscription, ReceivedState>> {
        let mut n_messages = self.n_messages();
        let mut quiet_since = Instant::now();
        while quiet_since.elapsed() < QUIET_TIME {
            sleep(POLL_INTERVAL).await;
            if n_messages != self.n_messages() {
                n_messages = self.n_messages();
                quiet_since = Instant::now();
            }
        }
        self.check_open()?;
        Ok(self.received.lock().states.clone())
    }

    pub(super) fn n_messages(&self) -> u64 {
        self.received.lock().n_messages
    }

    /// Returns the state of a stream.
    pub(super) fn state(&self, subscription: Subscription) -> Option<ReceivedState> {
        self.received.lock().states.get(&subscription).cloned()
    }

    /// Waits until a stream has received a message after `written_at`. Returns the time of its latest message.
    pub(super) async fn wait_for_message_after(
        &self,
        subscription: Subscription,
        written_at: Instant,
    ) -> anyhow::Result<Instant> {
        loop {
            match self.received.lock().received_at.get(&subscription) {
                Some(&at) if at > written_at => return Ok(at),
                _ if written_at.elapsed() > UPDATE_TIMEOUT => {
                    bail!("{subscription:?} has no message for {UPDATE_TIMEOUT:?}")
                }
                _ => {}
            }
            self.check_open()?;
            sleep(POLL_INTERVAL).await;
        }
    }

    fn check_open(&self) -> anyhow::Result<()> {
        match self.received.lock().ended.first() {
            Some(ended) => bail!("{ended}"),
            None => Ok(()),
        }
    }
}

#[derive(Clone)]
struct Channels {
    destination: Channel,
    policy: Channel,
}

impl Channels {
    /// Opens a stream and stores its state until it ends.
    async fn follow(&self, subscription: Subscription, received: &Mutex<Received>) -> Result<(), tonic::Status> {
        let request = |service, node| ClientPod { name: "client", node }.request(&cluster::service_name(service));
        let mut client = DestinationClient::new(self.destination.clone());
        match subscription {
            Subscription::Endpoints { service, node } => {
                let updates = client.get(request(service, node)).await?.into_inner();
                let mut endpoints = BTreeMap::new();
                store_states(subscription, received, updates, |update| {
                    destination::apply_update(&mut endpoints, update);
                    ReceivedState::Endpoints(endpoints.clone())
                })
                .await
            }
            Subscription::Profile { service } => {
                let profiles = client.get_profile(request(service, 0)).await?.into_inner();
                store_states(subscription, received, profiles, |profile| {
                    ReceivedState::Profile(Box::new(profile))
                })
                .await
            }
            Subscription::OutboundPolicy { service } => {
                let request = TrafficSpec {
                    source_workload: r#"{"ns":"scale","pod":"client"}"#.to_owned(),
                    target: Some(traffic_spec::Target::Authority(destination::authority(
                        &cluster::service_name(service),
                    ))),
                };
                let mut policies = OutboundPoliciesClient::new(self.policy.clone());
                let policies = policies.watch(request).await?.into_inner();
                store_states(subscription, received, policies, |policy| {
                    ReceivedState::OutboundPolicy(Box::new(policy))
                })
                .await
            }
            Subscription::InboundPolicy { pod } => {
                let request = PortSpec {
                    workload: format!(r#"{{"ns":"scale","pod":"{}"}}"#, pod.name()),
                    port: 8080,
                };
                let mut policies = InboundServerPoliciesClient::new(self.policy.clone());
                let policies = policies.watch_port(request).await?.into_inner();
                store_states(subscription, received, policies, |server| {
                    ReceivedState::InboundPolicy(Box::new(server))
                })
                .await
            }
        }
    }
}

/// Stores the state after each message of a stream.
async fn store_states<M>(
    subscription: Subscription,
    received: &Mutex<Received>,
    mut messages: impl Stream<Item = Result<M, tonic::Status>> + Unpin,
    mut to_state: impl FnMut(M) -> ReceivedState,
) -> Result<(), tonic::Status> {
    while let Some(message) = messages.next().await {
        let state = to_state(message?);
        let mut received = received.lock();
        received.n_messages += 1;
        received.received_at.insert(subscription, Instant::now());
        received.states.insert(subscription, state);
    }
    Ok(())
}

const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
const UPDATE_TIMEOUT: Duration = Duration::from_secs(30);
const QUIET_TIME: Duration = Duration::from_secs(2);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
