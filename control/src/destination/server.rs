//! The streams of the methods Get and GetProfile.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, Stream};
use http::{Request, Response};
use smallvec::{SmallVec, smallvec};
use tokio::sync::watch;
use tokio::time::timeout;
use tonic::Status;
use tonic::body::Body;
use tulle_core::log_limit::LogLimiter;
use tulle_core::warn_limited;
use tulle_proto::destination::destination_server::SERVICE_NAME;
use tulle_proto::destination::{DestinationProfile, GetDestination};

use crate::cluster::publish::published_value::{EncoderId, EncodingKey, PublishedValue};
use crate::cluster::remote_clusters::{AllClusters, RemoteCluster, RemoteClusters};
use crate::cluster::union::{FallbackSupport, MemberEndpoints, UnionEndpoints, UnionSubscription, Unions};
use crate::cluster::views::{endpoints, profiles};
use crate::cluster::{Cluster, GaugeGuard, Subscription};
use crate::destination::config::Config;
use crate::destination::target::{self, ContextToken, Target, TargetError};
use crate::destination::translate::{self, ClientLocation};
use crate::grpc::{self, Caller, Methods};
use crate::model::endpoints::{Endpoints, Existence};
use crate::model::profile::Profile;
use crate::model::remote_discovery::{RemoteDiscovery, RemoteService};
use crate::resources::meta::NamespacedName;
use crate::tls::mesh_credentials::ClientCertificates;

/// The destination service. Clones share its state.
#[derive(Clone)]
pub struct Service {
    shared: Arc<Shared>,
}

/// The state that all streams share.
struct Shared {
    cluster: Cluster,
    remote_clusters: RemoteClusters,
    unions: Unions,
    client_certificates: ClientCertificates,
    config: Config,
    encoder_id: EncoderId,
    log_limiter: LogLimiter,
}

impl Service {
    pub(super) fn new(clusters: AllClusters, client_certificates: ClientCertificates, config: Config) -> Self {
        let encoder_id = clusters.local.new_encoder_id();
        Self {
            shared: Arc::new(Shared {
                cluster: clusters.local.clone(),
                remote_clusters: clusters.remote.clone(),
                unions: Unions::new(clusters),
                client_certificates,
                config,
                encoder_id,
                log_limiter: LogLimiter::default(),
            }),
        }
    }
}

impl Methods for Service {
    const SERVICE: &'static str = SERVICE_NAME;

    async fn call(self, method: &str, req: Request<Body>) -> Response<Body> {
        let Self { shared } = self;
        let caller = req.extensions().get::<Caller>().cloned();
        let caller = caller.as_ref();
        match method {
            "Get" => grpc::respond(match grpc::message(req).await {
                Ok(request) => shared.get(caller, request).await,
                Err(status) => Err(status),
            }),
            "GetProfile" => grpc::stream(req, |request: GetDestination| shared.get_profile(caller, &request)).await,
            _ => grpc::unimplemented(),
        }
    }
}

impl Shared {
    /// Parses the target and the context token of a request, and checks the client's namespace.
    fn parse_request(
        &self,
        caller: Option<&Caller>,
        request: &GetDestination,
    ) -> Result<(Target, ContextToken), Status> {
        if !self.cluster.is_synced() {
            // Proxies cache NotFound responses, but retry after Unavailable.
            return Err(Status::unavailable("the objects of the cluster are not loaded yet"));
        }
        let target = target::parse(&request.path, &self.cluster.config().cluster_domain)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        let client = self.parse_token(Caller::ip_or_loopback(caller), &request.context_token);
        if let (Some(namespace), Some(identities)) =
            (client.namespace(), self.client_certificates.identities_to_check(caller))
        {
            self.cluster
                .check_client_namespace(&namespace, identities)
                .map_err(|error| Status::permission_denied(error.to_string()))?;
        }
        Ok((target, client))
    }

    /// Parses a context token. An invalid token is counted and ignored.
    fn parse_token(&self, caller: IpAddr, token: &str) -> ContextToken {
        let log = &self.log_limiter;
        if ContextToken::is_deprecated(token) {
            warn_limited!(log, caller, "the context token has the deprecated form `ns:<namespace>`", %caller, token);
        }
        ContextToken::parse(token).unwrap_or_else(|reason| {
            self.cluster.count_invalid_context_token();
            warn_limited!(log, caller, "ignoring an invalid context token", %caller, token, %reason);
            ContextToken::default()
        })
    }

    async fn get(
        self: Arc<Self>,
        caller: Option<&Caller>,
        request: GetDestination,
    ) -> Result<impl Stream<Item = Bytes> + Send + use<>, Status> {
        let (target, client) = self
            .parse_request(caller, &request)
            .map_err(|status| invalid_authority(status, &request.path))?;
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
        let fallback = match request.accepts_fallback {
            true => FallbackSupport::Supported,
            false => FallbackSupport::Unsupported,
        };
        let (key, mut subscription) = self.cluster.endpoints_with_key(&key);
        let first = subscription.current();
        let (source, first) = match first.remote.as_deref() {
            Some(discovery) => self.open_union(&key, fallback, discovery, &request.path).await?,
            None => {
                check_existence(first.existence, &key.service, &request.path)?;
                (EndpointSource::Local(subscription), EndpointState::Local(first))
            }
        };
        let node: Option<Box<str>> = client.node().map(Box::from);
        // Subscribes before reading the zone, so that no change is missed.
        let node_changes = self.cluster.node_changes();
        let zone = node.as_deref().and_then(|node| self.cluster.node_zone(node));
        let state = EndpointStream {
            shared: self,
            source,
            latest: first,
            is_latest_sent: false,
            key,
            fallback,
            node_changes,
            location: ClientLocation { node, zone },
        };
        Ok(stream::unfold(state, async |mut state| {
            let messages = state.next().await;
            Some((messages, state))
        }))
    }

    /// Subscribes to a Service with endpoints in other clusters, and waits until these endpoints are known.
    async fn open_union(
        &self,
        key: &endpoints::Key,
        fallback: FallbackSupport,
        discovery: &RemoteDiscovery,
        path: &str,
    ) -> Result<(EndpointSource, EndpointState), Status> {
        let mirrored = match discovery {
            RemoteDiscovery::Unnamed => {
                let message = format!("Remote discovery service missing remote service name {path}");
                return Err(Status::failed_precondition(message));
            }
            RemoteDiscovery::Mirror(service) => Some(service),
            RemoteDiscovery::Federated(_) => None,
        };
        let mut union = self.unions.subscribe(key, fallback);
        let is_linked =
            |service: &RemoteService| !matches!(self.remote_clusters.get(&service.cluster), RemoteCluster::Unlinked);
        let first_state = async {
            loop {
                let first = union.changed().await;
                // A mirror has no member if its cluster was not linked when the value was computed. If the cluster is linked now,
                // another value follows.
                if !first.members.is_empty() || !mirrored.is_some_and(is_linked) {
                    break first;
                }
            }
        };
        let Ok(first) = timeout(REMOTE_CLUSTER_TIMEOUT, first_state).await else {
            let clusters: Vec<_> = discovery
                .remote_services()
                .iter()
                .map(|service| &*service.cluster)
                .collect();
            let message = format!(
                "the endpoints in the clusters {} are not known yet",
                clusters.join(", ")
            );
            return Err(Status::unavailable(message));
        };
        if let Some(RemoteService { cluster, .. }) = mirrored {
            if first.members.is_empty() {
                return Err(Status::not_found(format!("Remote cluster not found: {cluster}")));
            }
            if let [member] = &first.members[..]
                && member.endpoints.existence == Existence::ExternalName
            {
                check_existence(Existence::ExternalName, &member.service, path)?;
            }
        }
        Ok((EndpointSource::Union(union), EndpointState::Union(first)))
    }

    fn get_profile(
        self: Arc<Self>,
        caller: Option<&Caller>,
        request: &GetDestination,
    ) -> Result<impl Stream<Item = Bytes> + Send + use<>, Status> {
        let (target, client) = self.parse_request(caller, request)?;
        let client_namespace = client.namespace();
        // Get has no such restriction: a gateway requests profile and policy of the name in a request first, and then the endpoints
        // of the backends of its routes, which need not be exported.
        let exported_services = client.exported_services();
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
                exported_services,
            },
            Target::Instance {
                service,
                hostname,
                port,
            } => profiles::Key::Instance {
                service,
                hostname,
                port,
                exported_services,
            },
        };
        let mut subscription = self.cluster.profile(key);
        let profile = subscription.current();
        let first = self.profile(&profile).map_err(|error| error.status(&request.path))?;
        let gauge_guard = match &**profile {
            Profile::Service(profile) => Some(
                self.cluster
                    .count_service_subscriber(&profile.namespace, &profile.service),
            ),
            _ => None,
        };
        let state = ProfileStream {
            shared: self,
            subscription,
            first: Some(first),
            _gauge_guard: gauge_guard,
        };
        Ok(stream::unfold(state, async |mut state| {
            let message = state.next().await;
            Some((message, state))
        }))
    }

    /// Returns the message for a profile. Streams with the same profile share the bytes.
    fn profile<'a>(&self, profile: &'a Arc<PublishedValue<Profile>>) -> Result<Bytes, ProfileError<'a>> {
        profile.try_encode_cached(&EncodingKey::for_all_subscribers(&self.encoder_id), || {
            profile_message(profile, &self.config).map(|message| grpc::encode(&[message]))
        })
    }
}

/// Replaces the message of an InvalidArgument status by one that contains the path: as in Linkerd, Get has one message for all
/// invalid paths, and GetProfile has several. Other statuses are returned unchanged.
fn invalid_authority(status: Status, path: &str) -> Status {
    if status.code() == tonic::Code::InvalidArgument {
        return Status::invalid_argument(TargetError::Authority(path.to_owned()).to_string());
    }
    status
}

/// Returns an error if a Service does not exist or is an ExternalName. A stream can follow every other Service.
fn check_existence(existence: Existence, service: &NamespacedName, path: &str) -> Result<(), Status> {
    match existence {
        Existence::Missing => {
            let NamespacedName { namespace, name } = service;
            Err(Status::not_found(format!("Service {name}.{namespace} not found")))
        }
        Existence::ExternalName => {
            let message = TargetError::Authority(path.to_owned()).to_string();
            Err(Status::invalid_argument(message))
        }
        Existence::Present => Ok(()),
    }
}

/// A Get stream. It has no queue: a slow client receives the difference to the latest state.
struct EndpointStream {
    shared: Arc<Shared>,
    source: EndpointSource,
    /// The last state that was sent, or the first state if none was sent. The first state is translated only when the client reads
    /// the stream: otherwise thousands of streams that open together would keep their first messages in memory.
    latest: EndpointState,
    is_latest_sent: bool,
    key: Arc<endpoints::Key>,
    fallback: FallbackSupport,
    /// Notifies of possible zone changes of the client's node.
    node_changes: watch::Receiver<()>,
    location: ClientLocation,
}

/// The subscription of a stream. When a Service gets members in other clusters, the stream changes to `Union` and keeps it.
enum EndpointSource {
    Local(Subscription<Endpoints>),
    Union(UnionSubscription),
}

impl EndpointSource {
    async fn changed(&mut self) -> EndpointState {
        match self {
            Self::Local(subscription) => EndpointState::Local(subscription.changed().await),
            Self::Union(subscription) => EndpointState::Union(subscription.changed().await),
        }
    }
}

enum EndpointState {
    Local(Arc<PublishedValue<Endpoints>>),
    Union(Arc<PublishedValue<UnionEndpoints>>),
}

impl EndpointState {
    fn members<'a>(&'a self, service: &'a NamespacedName) -> SmallVec<[translate::Member<'a>; 1]> {
        match self {
            Self::Local(endpoints) => smallvec![translate::Member {
                service,
                cluster: None,
                endpoints,
                is_fallback: false,
            }],
            Self::Union(union) => {
                let member = |member: &'a MemberEndpoints| translate::Member {
                    service: &member.service,
                    cluster: member.cluster.as_deref(),
                    endpoints: &member.endpoints,
                    is_fallback: member.is_fallback,
                };
                union.members.iter().map(member).collect()
            }
        }
    }

    /// Whether a Service whose endpoints were all in this cluster has got members in other clusters.
    fn has_become_union(&self) -> bool {
        matches!(self, Self::Local(endpoints) if endpoints.remote.is_some())
    }

    fn is_node_scoped(&self) -> bool {
        match self {
            Self::Local(endpoints) => endpoints.is_node_scoped(),
            Self::Union(union) => {
                let is_scoped =
                    |member: &MemberEndpoints| member.cluster.is_none() && member.endpoints.is_node_scoped();
                union.members.iter().any(is_scoped)
            }
        }
    }
}

impl EndpointStream {
    /// Waits for the next messages.
    async fn next(&mut self) -> Bytes {
        loop {
            let messages = if self.is_latest_sent {
                // Both branches are cancel-safe: a watch receiver keeps an unseen change.
                let now = tokio::select! {
                    now = self.source.changed() => now,
                    Ok(()) = self.node_changes.changed() => {
                        match self.zone_change() {
                            Some(messages) => return messages,
                            None => continue,
                        }
                    }
                };
                if now.has_become_union() {
                    self.source = EndpointSource::Union(self.shared.unions.subscribe(&self.key, self.fallback));
                    continue;
                }
                let messages = self.difference(Some(&self.latest), &now);
                self.latest = now;
                messages
            } else {
                self.is_latest_sent = true;
                self.difference(None, &self.latest)
            };
            // No messages: the change does not affect this client.
            if !messages.is_empty() {
                return messages;
            }
        }
    }

    /// Returns the messages after a zone change of the client's node. `None` if there are none.
    fn zone_change(&mut self) -> Option<Bytes> {
        let node = self.location.node.as_deref();
        let zone = node.and_then(|node| self.shared.cluster.node_zone(node));
        if zone == self.location.zone {
            return None;
        }
        let location = ClientLocation {
            node: self.location.node.clone(),
            zone,
        };
        // Only the location changes here, so the endpoints before and after are the same. Changes of endpoints come through
        // `source`.
        let members = self.latest.members(&self.key.service);
        let before = Some((&members[..], &self.location));
        let messages = translate::difference(before, &members, &location, &self.shared.config);
        self.location = location;
        (!messages.is_empty()).then(|| grpc::encode(&messages))
    }

    fn difference(&self, before: Option<&EndpointState>, now: &EndpointState) -> Bytes {
        let encode = || {
            let before = before.map(|before| before.members(&self.key.service));
            let before = before.as_ref().map(|before| (&before[..], &self.location));
            let now = now.members(&self.key.service);
            grpc::encode(&translate::difference(
                before,
                &now,
                &self.location,
                &self.shared.config,
            ))
        };
        if before.is_some_and(EndpointState::is_node_scoped) || now.is_node_scoped() {
            // Few clients of a service are on the same node, so the encoding is not cached.
            return encode();
        }
        match (before, now) {
            (None, EndpointState::Local(now)) => now.encode_cached(&self.encoding_key(None), encode),
            (Some(EndpointState::Local(before)), EndpointState::Local(now)) => {
                now.encode_cached(&self.encoding_key(Some(before)), encode)
            }
            (None, EndpointState::Union(now)) => now.encode_cached(&self.encoding_key(None), encode),
            (Some(EndpointState::Union(before)), EndpointState::Union(now)) => {
                now.encode_cached(&self.encoding_key(Some(before)), encode)
            }
            // The Service has just got members in other clusters, which happens once for each stream.
            (Some(_), _) => encode(),
        }
    }

    fn encoding_key<'a, T>(&'a self, previous: Option<&'a Arc<PublishedValue<T>>>) -> EncodingKey<'a, T> {
        EncodingKey {
            encoder: &self.shared.encoder_id,
            previous,
            zone: self.location.zone.as_deref(),
        }
    }
}

struct ProfileStream {
    shared: Arc<Shared>,
    subscription: Subscription<Profile>,
    first: Option<Bytes>,
    _gauge_guard: Option<GaugeGuard>,
}

impl ProfileStream {
    async fn next(&mut self) -> Bytes {
        if let Some(first) = self.first.take() {
            return first;
        }
        loop {
            let now = self.subscription.changed().await;
            // If the new profile is an error, the client keeps the last one.
            if let Ok(message) = self.shared.profile(&now) {
                return message;
            }
        }
    }
}

/// Why a lookup returns no profile.
enum ProfileError<'a> {
    ServiceMissing,
    ExternalName,
    HostnameMissing,
    Ambiguous(&'a str),
}

impl ProfileError<'_> {
    fn status(&self, path: &str) -> Status {
        match self {
            // Linkerd returns Unknown here, although its Get returns NotFound.
            Self::ServiceMissing => Status::unknown(format!("service of {path} not found")),
            Self::ExternalName => Status::invalid_argument(format!("invalid service: {path} is an ExternalName")),
            Self::HostnameMissing => Status::not_found(format!("no pod of the service has the hostname in {path}")),
            Self::Ambiguous(reason) => Status::failed_precondition(*reason),
        }
    }
}

fn profile_message<'a>(profile: &'a Profile, config: &Config) -> Result<DestinationProfile, ProfileError<'a>> {
    match profile {
        Profile::Service(profile) => Ok(translate::service_profile(profile)),
        Profile::Endpoint { endpoint, is_opaque } => Ok(translate::endpoint_profile(endpoint, *is_opaque, config)),
        Profile::UndefinedPort | Profile::NotExported => Ok(DestinationProfile::default()),
        Profile::ServiceMissing => Err(ProfileError::ServiceMissing),
        Profile::ExternalName => Err(ProfileError::ExternalName),
        Profile::HostnameMissing => Err(ProfileError::HostnameMissing),
        Profile::Ambiguous(reason) => Err(ProfileError::Ambiguous(reason)),
    }
}

/// Maximum time that a request waits for endpoints in other clusters. After two seconds a union serves the known members; after
/// three seconds proxies stop waiting for the first message. Proxies keep their last endpoints when they get this error.
const REMOTE_CLUSTER_TIMEOUT: Duration = Duration::from_millis(2_500);
