//! Get and GetProfile streams.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::{self, Stream};
use http::{Request, Response};
use tokio::sync::watch;
use tonic::Status;
use tonic::body::Body;
use tulle_core::drain;
use tulle_proto::destination::destination_server::SERVICE_NAME;
use tulle_proto::destination::{DestinationProfile, GetDestination};

use crate::cluster::answer::{Answer, Encoder, For};
use crate::cluster::{Cluster, Follower, Subscription, endpoints, profiles};
use crate::destination::Config;
use crate::destination::target::{self, Client, Target, TargetError};
use crate::destination::translate::{self, Place};
use crate::grpc::{self, Methods};
use crate::model::endpoints::{Endpoints, Existence};
use crate::model::profile::Profile;
use crate::resources::meta::Name;

/// The service; clones share what it stands on.
#[derive(Clone)]
pub struct Service {
    shared: Arc<Shared>,
}

/// Also shared by all streams.
struct Shared {
    cluster: Cluster,
    config: Config,
    drain: drain::Watch,
    encoder: Encoder,
}

impl Service {
    pub(super) fn new(cluster: Cluster, config: Config, drain: drain::Watch) -> Self {
        let encoder = cluster.encoder();
        Self {
            shared: Arc::new(Shared {
                cluster,
                config,
                drain,
                encoder,
            }),
        }
    }
}

impl Methods for Service {
    const SERVICE: &'static str = SERVICE_NAME;

    async fn call(self, method: &str, req: Request<Body>) -> Response<Body> {
        let Self { shared } = self;
        match method {
            "Get" => grpc::stream(req, |request: GetDestination| shared.get(request)).await,
            "GetProfile" => grpc::stream(req, |request: GetDestination| shared.get_profile(&request)).await,
            _ => grpc::unimplemented(),
        }
    }
}

impl Shared {
    fn parse(&self, request: &GetDestination) -> Result<(Target, Client), Status> {
        if !self.cluster.is_synced() {
            // NotFound would be remembered by proxies; this makes them come again.
            return Err(Status::unavailable("the state of the cluster is not known yet"));
        }
        let target = target::parse(&request.path, &self.cluster.config().cluster_domain)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        Ok((target, Client::parse(&request.context_token)))
    }

    fn get(self: Arc<Self>, request: GetDestination) -> Result<impl Stream<Item = Bytes> + Send + use<>, Status> {
        let (target, client) = self
            .parse(&request)
            .map_err(|status| as_authority(status, &request.path))?;
        let key = match target {
            Target::Address(addr) => {
                let message = format!("IP queries not supported by Get API: host={}", addr.ip());
                return Err(Status::invalid_argument(message));
            }
            Target::Service { name, port, .. } => endpoints::Key {
                service: name,
                port,
                hostname: None,
            },
            Target::Instance {
                service,
                hostname,
                port,
            } => endpoints::Key {
                service,
                port,
                hostname: Some(hostname),
            },
        };
        let service = key.service.clone();
        let mut subscription = self.cluster.endpoints(key);
        let first = subscription.current();
        match first.existence {
            Existence::Missing => {
                let Name { namespace, name } = &service;
                return Err(Status::not_found(format!("Service {name}.{namespace} not found")));
            }
            Existence::ExternalName => {
                return Err(Status::invalid_argument(
                    TargetError::Authority(request.path).to_string(),
                ));
            }
            Existence::Present => {}
        }
        let node: Option<Box<str>> = client.node().map(Box::from);
        // Subscribed before the zone is read, so that no change is missed.
        let nodes = self.cluster.node_changes();
        let zone = node.as_deref().and_then(|node| self.cluster.node_zone(node));
        let following = Following {
            shared: self,
            subscription,
            first: Some(first),
            service,
            nodes,
            place: Place { node, zone },
            sent: None,
        };
        Ok(stream::unfold(following, async |mut following| {
            let messages = following.next().await?;
            Some((messages, following))
        }))
    }

    fn get_profile(
        self: Arc<Self>,
        request: &GetDestination,
    ) -> Result<impl Stream<Item = Bytes> + Send + use<>, Status> {
        let (target, client) = self.parse(request)?;
        let client_namespace = client.namespace();
        let key = match target {
            Target::Address(addr) => profiles::Key::Address {
                addr: tulle_core::addr::canonical(addr),
                client_namespace,
            },
            Target::Service { name, port, host } => profiles::Key::Service {
                service: name,
                port,
                fqn: host,
                client_namespace,
            },
            Target::Instance {
                service,
                hostname,
                port,
            } => profiles::Key::Instance {
                service,
                hostname,
                port,
            },
        };
        let mut subscription = self.cluster.profile(key);
        let profile = subscription.current();
        let first = self
            .profile(&profile)
            .map_err(|refusal| refusal.status(&request.path))?;
        let follower = match &**profile {
            Profile::Service(profile) => Some(self.cluster.follow_service(&profile.namespace, &profile.service)),
            _ => None,
        };
        let following = FollowingProfile {
            shared: self,
            subscription,
            first: Some(first),
            _follower: follower,
        };
        Ok(stream::unfold(following, async |mut following| {
            let message = following.next().await?;
            Some((message, following))
        }))
    }

    /// The message for a profile, as bytes that all who follow it share.
    fn profile<'a>(&self, profile: &'a Answer<Profile>) -> Result<Bytes, Refusal<'a>> {
        profile.try_encoded(&For::all(self.encoder), || {
            profile_message(profile, &self.config).map(|message| grpc::encode(&[message]))
        })
    }
}

/// Get names the path where it cannot be read, whatever part of it.
fn as_authority(status: Status, path: &str) -> Status {
    if status.code() == tonic::Code::InvalidArgument {
        return Status::invalid_argument(TargetError::Authority(path.to_owned()).to_string());
    }
    status
}

/// One Get stream. It has no queue to overflow: a slow client gets the difference to the latest state.
struct Following {
    shared: Arc<Shared>,
    subscription: Subscription<Endpoints>,
    /// Translated once the client takes messages: thousands of streams that open together would otherwise hold their
    /// first messages together.
    first: Option<Arc<Answer<Endpoints>>>,
    service: Name,
    /// Tells when the client's node may be in another zone.
    nodes: watch::Receiver<()>,
    place: Place,
    /// What the client has been told; none before the first message.
    sent: Option<Arc<Answer<Endpoints>>>,
}

impl Following {
    /// The next messages, or nothing when the control plane shuts down.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            let now = match self.first.take() {
                Some(first) => first,
                // Both watches keep a change until somebody waits again.
                None => tokio::select! {
                    now = self.subscription.changed() => now,
                    Ok(()) = self.nodes.changed() => {
                        match self.moved() {
                            Some(messages) => return Some(messages),
                            None => continue,
                        }
                    }
                    () = self.shared.drain.signaled() => return None,
                },
            };
            let messages = self.difference(&now);
            self.sent = Some(now);
            // Not every change is one for this client.
            if !messages.is_empty() {
                return Some(messages);
            }
        }
    }

    /// The messages for a client whose node is in another zone than before; nothing for all others.
    fn moved(&mut self) -> Option<Bytes> {
        let node = self.place.node.as_deref();
        let zone = node.and_then(|node| self.shared.cluster.node_zone(node));
        if zone == self.place.zone {
            return None;
        }
        let place = Place {
            node: self.place.node.clone(),
            zone,
        };
        let before = self.sent.as_ref()?;
        let told = Some((&***before, &self.place));
        // Of the endpoints as they were told: if they are others by now, their watch says so next.
        let messages = translate::difference(told, before, &self.service, &place, &self.shared.config);
        self.place = place;
        (!messages.is_empty()).then(|| grpc::encode(&messages))
    }

    fn difference(&self, now: &Answer<Endpoints>) -> Bytes {
        let before = self.sent.as_ref();
        let encode = || {
            let before = before.map(|before| (&***before, &self.place));
            let messages = translate::difference(before, now, &self.service, &self.place, &self.shared.config);
            grpc::encode(&messages)
        };
        if before.is_some_and(|before| before.is_by_node()) || now.is_by_node() {
            // Clients of one service on one node are few.
            return encode();
        }
        let followers = For {
            by: self.shared.encoder,
            after: before,
            zone: self.place.zone.as_deref(),
        };
        now.encoded(&followers, encode)
    }
}

/// One GetProfile stream.
struct FollowingProfile {
    shared: Arc<Shared>,
    subscription: Subscription<Profile>,
    first: Option<Bytes>,
    _follower: Option<Follower>,
}

impl FollowingProfile {
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        loop {
            let now = tokio::select! {
                now = self.subscription.changed() => now,
                () = self.shared.drain.signaled() => return None,
            };
            // What has become unanswerable leaves the client with the last answer.
            if let Ok(message) = self.shared.profile(&now) {
                return Some(message);
            }
        }
    }
}

/// Why a profile cannot be given.
enum Refusal<'a> {
    ServiceMissing,
    ExternalName,
    HostnameMissing,
    Ambiguous(&'a str),
}

impl Refusal<'_> {
    fn status(&self, path: &str) -> Status {
        match self {
            Self::ServiceMissing => Status::unknown(format!("service of {path} not found")),
            Self::ExternalName => Status::invalid_argument(format!("invalid service: {path} is an ExternalName")),
            Self::HostnameMissing => Status::not_found(format!("no pod of the service has the hostname in {path}")),
            Self::Ambiguous(reason) => Status::failed_precondition(*reason),
        }
    }
}

fn profile_message<'a>(profile: &'a Profile, config: &Config) -> Result<DestinationProfile, Refusal<'a>> {
    match profile {
        Profile::Service(profile) => Ok(translate::service_profile(profile)),
        Profile::Endpoint { endpoint, opacity } => Ok(translate::endpoint_profile(endpoint, *opacity, config)),
        Profile::UndefinedPort => Ok(DestinationProfile::default()),
        Profile::ServiceMissing => Err(Refusal::ServiceMissing),
        Profile::ExternalName => Err(Refusal::ExternalName),
        Profile::HostnameMissing => Err(Refusal::HostnameMissing),
        Profile::Ambiguous(reason) => Err(Refusal::Ambiguous(reason)),
    }
}
