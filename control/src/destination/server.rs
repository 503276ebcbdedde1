//! Get and GetProfile streams.

use std::collections::VecDeque;
use std::pin::Pin;

use futures_util::stream::{self, Stream};
use tonic::{Request, Response, Status};
use tulle_core::drain;
use tulle_proto::destination::destination_server::Destination;
use tulle_proto::destination::{DestinationProfile, GetDestination, Update};

use crate::cluster::{Cluster, Subscription, endpoints, profiles};
use crate::destination::Config;
use crate::destination::target::{self, Client, Target, TargetError};
use crate::destination::translate::{self, Place, Sent};
use crate::model::endpoints::{Endpoints, Existence};
use crate::model::profile::Profile;
use crate::resources::meta::Name;

pub struct Service {
    cluster: Cluster,
    config: Config,
    drain: drain::Watch,
}

type Messages<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Service {
    pub(super) fn new(cluster: Cluster, config: Config, drain: drain::Watch) -> Self {
        Self { cluster, config, drain }
    }

    fn parse(&self, request: &GetDestination) -> Result<(Target, Client), Status> {
        if !self.cluster.is_synced() {
            // NotFound would be remembered by proxies; this makes them come again.
            return Err(Status::unavailable("the state of the cluster is not known yet"));
        }
        let target = target::parse(&request.path, &self.cluster.config().cluster_domain)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        Ok((target, Client::parse(&request.context_token)))
    }
}

#[tonic::async_trait]
impl Destination for Service {
    type GetStream = Messages<Update>;
    type GetProfileStream = Messages<DestinationProfile>;

    async fn get(&self, request: Request<GetDestination>) -> Result<Response<Self::GetStream>, Status> {
        let request = request.into_inner();
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
        let node = client.node().map(str::to_owned);
        let zone = node.as_deref().and_then(|node| self.cluster.node_zone(node));
        let mut following = Following {
            subscription,
            service,
            place: Place { node, zone },
            config: self.config.clone(),
            drain: self.drain.clone(),
            sent: Sent::default(),
            queue: VecDeque::new(),
        };
        following.take(&first);
        let messages = stream::unfold(following, async |mut following| {
            let message = following.next().await?;
            Some((Ok(message), following))
        });
        Ok(Response::new(Box::pin(messages)))
    }

    async fn get_profile(&self, request: Request<GetDestination>) -> Result<Response<Self::GetProfileStream>, Status> {
        let (target, client) = self.parse(request.get_ref())?;
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
        let first = profile_message(&subscription.current(), &self.config)
            .map_err(|refusal| refusal.status(&request.get_ref().path))?;
        let following = FollowingProfile {
            subscription,
            config: self.config.clone(),
            drain: self.drain.clone(),
            next: Some(first),
        };
        let messages = stream::unfold(following, async |mut following| {
            let message = following.next().await?;
            Some((Ok(message), following))
        });
        Ok(Response::new(Box::pin(messages)))
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
    subscription: Subscription<Endpoints>,
    service: Name,
    place: Place,
    config: Config,
    drain: drain::Watch,
    sent: Sent,
    /// The rest of one difference, at most an addition, a removal and that there are none.
    queue: VecDeque<Update>,
}

impl Following {
    fn take(&mut self, now: &Endpoints) {
        self.queue.extend(translate::diff(
            &mut self.sent,
            now,
            &self.service,
            &self.place,
            &self.config,
        ));
    }

    /// The next message, or nothing when the control plane shuts down.
    async fn next(&mut self) -> Option<Update> {
        loop {
            if let Some(message) = self.queue.pop_front() {
                return Some(message);
            }
            let now = tokio::select! {
                now = self.subscription.changed() => now,
                () = self.drain.signaled() => return None,
            };
            self.take(&now);
        }
    }
}

/// One GetProfile stream.
struct FollowingProfile {
    subscription: Subscription<Profile>,
    config: Config,
    drain: drain::Watch,
    next: Option<DestinationProfile>,
}

impl FollowingProfile {
    async fn next(&mut self) -> Option<DestinationProfile> {
        loop {
            if let Some(message) = self.next.take() {
                return Some(message);
            }
            let now = tokio::select! {
                now = self.subscription.changed() => now,
                () = self.drain.signaled() => return None,
            };
            // What has become unanswerable leaves the client with the last answer.
            self.next = profile_message(&now, &self.config).ok();
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
