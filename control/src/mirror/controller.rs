//! Mirrors the exported Services of a linked cluster while this process is the leader.

#[cfg(test)]
mod tests;
mod watched;

use std::collections::{BTreeSet, HashMap};
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Secret, Service};
use kube::api::{Api, DynamicObject};
use kube::runtime::watcher;
use kube::{Client, ResourceExt as _};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{info, warn};
use tulle_core::error_chain::ErrorChain;
use tulle_core::metrics::{Counter, Gauge, Labels, Registry};
use tulle_core::names::label;

use self::watched::{LocalObjects, RemoteObjects, probe_service, wait_for_change};
use super::config::{Config, ControllerScope, LocalMembers};
use super::exported_endpoints::{prune_endpoints, prune_slice};
use super::gateway::{self, GatewayChannels, cluster_label};
use super::link::{ExportSelector, Link};
use super::link_events::{self, LinkEvents, LinkProblem};
use super::metrics::{ClusterSeries, Metrics, SeriesUsers, ZeroOnDrop};
use super::plan::federated::{clusters_without_link, members_without_ports};
use super::plan::inputs::{
    Exporter, ExportingCluster, GatewayState, Inputs, Linked, LocalCluster, Plan, Rejection, Step, Write,
};
use super::plan::{plan, plan_repairs};
use super::probe_service::new_probe_service;
use super::rejection_events::{LocalRejections, RejectionEvents};
use super::status::{self, LinkStatus};
use super::writer::{MAX_CONCURRENT_STEPS, WriteHistory, Writer};
use crate::kubernetes::credentials_expiry::ExpiryReport;
use crate::kubernetes::event_recorder::{self, EventPublisher, EventRecorder};
use crate::kubernetes::lease::{Leadership, Role};
use crate::kubernetes::request_layer::RequestRate;
use crate::kubernetes::watches::{SecretState, SecretWatch, WatchParams, Watches};
use crate::kubernetes::{self, remote_credentials};
use crate::resources::meta::NamespacedName;
use crate::resources::status::timestamp;

pub(super) struct Controller {
    client: Client,
    config: Config,
    scope: ControllerScope,
    registry: Registry,
    metrics: Metrics,
    writer: Writer,
    link_events: LinkEvents,
    shared: SharedState,
    /// Whether the Service through which the gateway is probed is created if it does not exist.
    creates_probe_service: bool,
}

/// What the controllers of several Links share in one process.
#[derive(Clone)]
pub(super) struct SharedState {
    /// The watched objects of this cluster, while a controller needs them.
    local: Arc<Mutex<Weak<LocalObjects>>>,
    series_users: SeriesUsers,
    /// Limits the steps that are executed at a time.
    step_permits: Arc<Semaphore>,
}

/// What the tasks of one Link share.
#[derive(Clone, Copy)]
struct LinkContext<'a> {
    local: &'a LocalObjects,
    link: &'a Link,
    gateway: &'a GatewayChannels,
    /// The number of comparisons of all mirrors with the exported Services.
    repairs: &'a Counter,
}

/// State that is kept from one plan to the next.
#[derive(Default)]
struct PlanState {
    writes: WriteHistory,
    rejections: RejectionEvents,
    /// The clusters of members of federated Services that have no Link, each with the time since which it has had none.
    unlinked_since: HashMap<String, Instant>,
    /// The time from which the status can be written again.
    next_status_at: Option<Instant>,
    /// The last reported cause why a cluster cannot be read.
    reported_cause: Option<String>,
}

/// An executed plan, and the objects that it was computed from.
struct WriteOutcome {
    planned: Plan,
    exporting: ExportingCluster,
    local_cluster: Arc<LocalCluster>,
    /// The time at which the next failed step must be retried.
    retry_at: Option<Instant>,
}

/// The outcome of a write of the status of a Link.
enum StatusWrite {
    Done,
    /// Another writer changed the Link.
    Conflict,
    Failed,
}

impl Controller {
    /// Also returns the task that publishes the Events. `shared` is the state that all controllers of this process share, if there is
    /// one for each Link. These controllers create the Service through which they probe the gateway, because no chart does.
    pub(super) fn new(
        client: Client,
        config: Config,
        scope: ControllerScope,
        registry: &Registry,
        shared: Option<SharedState>,
    ) -> (Self, EventPublisher) {
        let metrics = Metrics::new(registry);
        let (link_events, event_publisher) = LinkEvents::new(client.clone(), &config.lease_holder, registry);
        let creates_probe_service = shared.is_some();
        let shared = shared.unwrap_or_default();
        let controller = Self {
            writer: Writer {
                client: client.clone(),
                errors: metrics.errors.clone(),
                permits: shared.step_permits.clone(),
            },
            client,
            config,
            scope,
            registry: registry.clone(),
            metrics,
            link_events,
            creates_probe_service,
            shared,
        };
        (controller, event_publisher)
    }

    /// Mirrors while this process is the leader.
    pub(super) async fn run(&self, mut leadership: Leadership) -> Infallible {
        let mut role = leadership.role();
        loop {
            match role {
                Role::Leader => {
                    role = tokio::select! {
                        // The role is polled first, so that a process that was paused does not write after it has lost the lease.
                        biased;
                        role = leadership.changed() => role,
                        never = self.lead() => match never {},
                    };
                }
                Role::Follower => role = leadership.changed().await,
            }
        }
    }

    /// Mirrors until the returned future is dropped.
    async fn lead(&self) -> Infallible {
        let local = self.local_objects();
        let name = match &self.scope {
            ControllerScope::Link(name) => name,
            ControllerScope::ThisCluster(members) => match self.mirror_this_cluster(&local, members).await {},
        };
        let mut gateway = GatewayChannels::default();
        let (mut gateway_settings, mut has_reported_absence) = (None, false);
        let mut series: Option<ClusterSeries> = None;
        loop {
            let mut changes = local.watches.changes();
            let object = local.link_object(name);
            let current = local.link(name);
            let cluster = object.as_ref().map(|object| local.metrics_cluster(object));
            if series.as_ref().map(ClusterSeries::cluster) != cluster.as_deref() {
                series = cluster.map(|name| ClusterSeries::new(&self.registry, &self.shared.series_users, name));
            }
            match &current {
                Some(Ok(link)) => {
                    for warning in &link.warnings {
                        warn!(link = name, "{warning}");
                    }
                    if let Some(object) = &object {
                        self.link_events.record_warnings(object, &link.warnings);
                    }
                    // The state of the gateway stays if only other fields of the Link change.
                    let settings = Some((link.gateway.clone(), link.probe.clone()));
                    if gateway_settings != settings {
                        gateway = GatewayChannels::default();
                        gateway_settings = settings;
                    }
                    let repairs = self.metrics.repairs.get(&cluster_label(&link.cluster));
                    let context = LinkContext {
                        local: &local,
                        link,
                        gateway: &gateway,
                        repairs: &repairs,
                    };
                    tokio::select! {
                        () = local.wait_until_changed(name, &current) => info!(link = name, "the Link has changed"),
                        never = self.follow_link(context) => match never {},
                    }
                }
                Some(Err(cause)) => {
                    self.report_unreadable(&local, name, cause).await;
                    local.wait_until_changed(name, &current).await;
                }
                None => {
                    if local.are_links_listed() && !has_reported_absence {
                        let namespace = &self.config.namespace;
                        warn!(
                            namespace,
                            "there is no Link {name}; nothing is mirrored, and existing mirrors stay"
                        );
                    }
                    has_reported_absence = local.are_links_listed();
                    wait_for_change(&mut changes).await;
                    continue;
                }
            }
            has_reported_absence = false;
        }
    }

    /// The watched objects of this cluster. The watches are started unless another controller uses them.
    fn local_objects(&self) -> Arc<LocalObjects> {
        let mut shared = self.shared.local.lock();
        if let Some(local) = shared.upgrade() {
            return local;
        }
        let local = Arc::new(self.watch_local());
        *shared = Arc::downgrade(&local);
        local
    }

    fn watch_local(&self) -> LocalObjects {
        let client = &self.client;
        let size = |kind: &str| self.cache_size(kind, "local");
        let all = watcher::Config::default();
        let services = WatchParams::new(Api::all(client.clone()), all.clone(), prune_service);
        let written = all.clone().labels(label::MIRRORED_CLUSTER);
        let endpoints = WatchParams::new(Api::all(client.clone()), written, |_| {});
        let namespaces = WatchParams::new(Api::all(client.clone()), all.clone(), |_| {});
        let links = |api: Api<DynamicObject>| WatchParams {
            api,
            kind: Link::resource(),
            config: all.clone(),
            prune: |_| {},
        };
        let namespace = self.config.namespace.clone();
        let all_links = links(Api::all_with(client.clone(), &Link::resource()));
        let own_links = links(Api::namespaced_with(client.clone(), &namespace, &Link::resource()));
        let mut watches = Watches::new("local");
        let (links, own_links) =
            watches.watch_permitted(client.clone(), (all_links, size("link")), (own_links, size("link")));
        LocalObjects {
            services: watches.watch(services, size("service")),
            endpoints: match self.scope {
                ControllerScope::Link(_) => Some(watches.watch(endpoints, size("endpoints"))),
                ControllerScope::ThisCluster(_) => None,
            },
            namespaces: watches.watch(namespaces, size("namespace")),
            links,
            own_links,
            namespace,
            watches,
            snapshot: Mutex::default(),
        }
    }

    /// Mirrors the cluster of a Link, and probes its gateway. The gateway is probed with or without access to the API server of the
    /// other cluster: the gateway can work while the API server does not.
    async fn follow_link(&self, context: LinkContext<'_>) -> Infallible {
        tokio::select! {
            never = self.mirror_link(context) => never,
            never = self.resolve_gateway(context.link, &context.gateway.addresses) => never,
            never = self.probe_gateway(context.link, context.gateway) => never,
        }
    }

    /// Mirrors with the credentials in the Link's Secret. Starts again after each change of the Secret.
    async fn mirror_link(&self, context: LinkContext<'_>) -> Infallible {
        let LinkContext { local, link, .. } = context;
        let (namespace, name) = (&self.config.namespace, &link.credentials_secret);
        let mut watch = SecretWatch::new(self.client.clone(), namespace, name);
        loop {
            let state = watch.state();
            let mirroring = async {
                let cause = match &state {
                    SecretState::Present(secret) => Some(self.mirror_with_credentials(context, secret).await),
                    SecretState::Absent => Some(format!("there is no Secret {namespace}/{name}")),
                    SecretState::Unreadable(cause) => Some(cause.clone()),
                    SecretState::Unknown => None,
                };
                if let Some(cause) = cause {
                    self.report_unreadable(local, &link.name, &cause).await;
                }
                self.plan_link(context, None).await
            };
            tokio::select! {
                () = watch.changed_from(&state) => {}
                never = mirroring => match never {},
            }
        }
    }

    /// Mirrors with these credentials. Returns only if they give no access, with the cause.
    async fn mirror_with_credentials(&self, context: LinkContext<'_>, secret: &Secret) -> String {
        let (local, link, secret_name) = (context.local, context.link, secret.name_any());
        let cause = match remote_credentials::read(secret).await {
            Ok(access) => {
                let server = access.config.cluster_url.to_string();
                match kubernetes::remote_client(access.config, REMOTE_REQUEST_RATE, &self.registry, &link.cluster) {
                    Ok(client) => {
                        info!(link = link.name, cluster = link.cluster, server, "mirroring a cluster");
                        let never = tokio::select! {
                            never = self.report_expiry(local, link, &secret_name, access.expires_at) => never,
                            never = self.mirror_exported_services(context, &client) => never,
                        };
                        match never {}
                    }
                    Err(err) => ErrorChain(&err).to_string(),
                }
            }
            Err(err) => ErrorChain(&err).to_string(),
        };
        format!("the Secret {secret_name} gives no access to {}: {cause}", link.cluster)
    }

    /// Exports the time until the credentials expire, and reports a week before that they do.
    async fn report_expiry(
        &self,
        local: &LocalObjects,
        link: &Link,
        secret: &str,
        expires_at: Option<u64>,
    ) -> Infallible {
        let Some(expires_at) = expires_at else {
            return std::future::pending().await;
        };
        let label = ("target_cluster_name", link.cluster.clone());
        let mut report = ExpiryReport::new(expires_at, self.metrics.credentials_expiry.clone(), label);
        let warn = |hours: u64| {
            let message =
                format!("the credentials in the Secret {secret} expire in {hours} hours; create the Secret again");
            warn!(link = link.name, "{message}");
            if let Some(object) = local.link_object(&link.name) {
                self.link_events
                    .record(&object, LinkProblem::CredentialsExpire, &message);
            }
        };
        report.run(warn).await
    }

    async fn mirror_exported_services(&self, context: LinkContext<'_>, client: &Client) -> Infallible {
        let reporter = link_events::reporter(&self.config.lease_holder);
        let (events, mut publisher) = event_recorder::new_recorder(client.clone(), reporter, &self.registry);
        let remote = self.watch_remote(context.link, client, events);
        tokio::select! {
            never = publisher.publish() => never,
            never = self.plan_link(context, Some(&remote)) => never,
        }
    }

    async fn resolve_gateway(&self, link: &Link, addresses: &watch::Sender<Option<Vec<IpAddr>>>) -> Infallible {
        match &link.gateway {
            Some(gateway) => gateway::resolve(gateway, self.config.refresh_period, addresses).await,
            None => std::future::pending().await,
        }
    }

    async fn probe_gateway(&self, link: &Link, gateway: &GatewayChannels) -> Infallible {
        match (&link.gateway, &link.probe) {
            (Some(_), Some(spec)) => gateway::probe(&link.cluster, spec, gateway, &self.metrics.gateway).await,
            _ => std::future::pending().await,
        }
    }

    fn watch_remote(&self, link: &Link, client: &Client, events: EventRecorder) -> RemoteObjects {
        let size = |kind: &str| self.cache_size(kind, &link.cluster);
        let all = watcher::Config::default();
        let services = WatchParams::new(Api::all(client.clone()), all.clone(), prune_service);
        let slices = WatchParams::new(Api::all(client.clone()), all.clone(), prune_slice);
        let endpoints = WatchParams::new(Api::all(client.clone()), all, prune_endpoints);
        let mut watches = Watches::new(&link.cluster);
        let services = watches.watch(services, size("service"));
        let (slices, endpoints) = watches.watch_permitted(
            client.clone(),
            (slices, size("endpointslices")),
            (endpoints, size("endpoints")),
        );
        RemoteObjects {
            watches,
            services,
            slices,
            endpoints,
            events,
        }
    }

    /// Compares the mirrors with the exported Services after each change, and at least once per refresh period. While the other
    /// cluster cannot be read, the last known exported Services are used. If none are known, or without `remote`, only the
    /// Endpoints of existing mirrors follow the gateway.
    async fn plan_link(&self, context: LinkContext<'_>, remote: Option<&RemoteObjects>) -> Infallible {
        let LinkContext {
            local, link, gateway, ..
        } = context;
        let synced = ZeroOnDrop(self.metrics.synced.get(&cluster_label(&link.cluster)));
        let mut state = PlanState::default();
        let (mut addresses, mut alive) = (gateway.addresses.subscribe(), gateway.is_alive.subscribe());
        let mut local_changes = local.watches.changes();
        let mut remote_changes = remote.map(|remote| remote.watches.changes());
        loop {
            let own_failure = local.watches.failure();
            let can_write = local.is_listed() && own_failure.is_none();
            let failure = remote.and_then(|remote| remote.watches.failure()).or(own_failure);
            let is_readable = can_write && failure.is_none() && remote.is_some_and(RemoteObjects::is_listed);
            synced.0.set(is_readable.into());
            let mut retry_at = Instant::now() + self.config.refresh_period;
            let watches = remote.map(|remote| &remote.watches).into_iter().chain([&local.watches]);
            let failures = watches.filter_map(Watches::next_failure_report_at);
            retry_at = failures.fold(retry_at, Instant::min);
            if can_write {
                // While a watch fails, mirrors follow the gateway, but what is known of the exported Services can be outdated.
                let outcome = self.write_mirrors(context, remote, &mut state).await;
                retry_at = retry_at.min(outcome.retry_at.unwrap_or(retry_at));
                if let Some(remote) = remote.filter(|_| is_readable) {
                    let WriteOutcome {
                        planned,
                        exporting,
                        local_cluster,
                        ..
                    } = outcome;
                    state.rejections.record(&remote.events, &planned, &exporting);
                    let status = link_status(planned, &exporting, &local_cluster, &state);
                    let next = self.write_status(local, link, &status, &mut state).await;
                    retry_at = retry_at.min(next.unwrap_or(retry_at));
                }
            }
            if failure.is_some() && failure != state.reported_cause {
                let cause = failure.as_deref().unwrap_or_default();
                let cause = format!("the mirrors keep their last known state: {cause}");
                self.report_unreadable(local, &link.name, &cause).await;
            }
            state.reported_cause = failure;
            tokio::select! {
                () = wait_for_change(&mut local_changes) => {}
                () = wait_for_remote_change(&mut remote_changes) => {}
                () = wait_for_change(&mut addresses) => {}
                () = wait_for_change(&mut alive) => {}
                () = sleep_until(retry_at) => {}
            }
            // Changes that follow each other closely are planned together.
            sleep(PLAN_DELAY).await;
        }
    }

    /// Executes a plan for the mirrors of a Link, or only repairs of existing mirrors if the exported Services are not known.
    async fn write_mirrors(
        &self,
        context: LinkContext<'_>,
        remote: Option<&RemoteObjects>,
        state: &mut PlanState,
    ) -> WriteOutcome {
        let LinkContext { link, gateway, .. } = context;
        let local_cluster = context.local.cluster();
        let probe_name = self.config.probe_service.as_ref();
        let probe_name = probe_name.map(|name| NamespacedName::new(&*self.config.namespace, &**name));
        let service = probe_name.as_ref().and_then(|name| local_cluster.services.get(name));
        gateway.probe_service.send_replace(probe_service(service));
        let remote = remote.filter(|remote| remote.is_listed());
        let exporting = remote.map_or_else(ExportingCluster::default, RemoteObjects::cluster);
        let addresses = gateway.addresses.borrow().clone();
        let linked = Linked {
            link,
            gateway: GatewayState {
                addresses: addresses.as_deref(),
                is_alive: *gateway.is_alive.borrow(),
            },
            probe_service: probe_name.as_ref(),
        };
        let inputs = self.inputs(linked, &exporting, &local_cluster, &state.writes.source_versions);
        let mut planned = match remote {
            Some(_) => {
                context.repairs.inc();
                plan(&inputs)
            }
            None => plan_repairs(&inputs),
        };
        if let Some(name) = probe_name.filter(|name| !local_cluster.services.contains_key(name)) {
            planned.steps.extend(self.probe_service_step(context, name));
        }
        let retry_at = self.writer.execute(&link.cluster, &planned, &mut state.writes).await;
        WriteOutcome {
            planned,
            exporting,
            local_cluster,
            retry_at,
        }
    }

    /// The step that creates the Service through which the gateway is probed, if it does not exist and no chart creates it. The next
    /// plan contains its Endpoints.
    fn probe_service_step(&self, context: LinkContext<'_>, name: NamespacedName) -> Option<Step> {
        let LinkContext { local, link, .. } = context;
        if !self.creates_probe_service || link.gateway.is_none() || link.probe.is_none() {
            return None;
        }
        let object = local.link_object(&link.name)?;
        let service = new_probe_service(&object, &name)?;
        Some(Step {
            name,
            writes: vec![Write::PutService(Box::new(service))],
            source_version: None,
        })
    }

    /// The inputs of the plan for the Services of a linked cluster.
    fn inputs<'a>(
        &'a self,
        linked: Linked<'a>,
        exporting: &'a ExportingCluster,
        local: &'a LocalCluster,
        source_versions: &'a HashMap<NamespacedName, String>,
    ) -> Inputs<'a> {
        let link = linked.link;
        Inputs {
            exporter: Exporter::Linked(linked),
            federated_selector: &link.federated_selector,
            excluded_labels: &link.excluded_labels,
            excluded_annotations: &link.excluded_annotations,
            exporting,
            local,
            may_create_namespaces: self.config.may_create_namespaces,
            mirrors_pods: self.config.mirrors_pods,
            source_versions,
        }
    }

    /// Adds the Services of this cluster to federated Services, and removes the members of clusters without a Link.
    async fn mirror_this_cluster(&self, local: &LocalObjects, members: &LocalMembers) -> Infallible {
        let selector = ExportSelector::new(members.selector.clone());
        let mut state = PlanState::default();
        let mut rejections = LocalRejections::new(self.link_events.recorder(), &self.registry);
        let mut changes = local.watches.changes();
        loop {
            let mut retry_at = Instant::now() + self.config.refresh_period;
            if local.is_listed() {
                let local_cluster = local.cluster();
                let exporting = ExportingCluster {
                    services: local_cluster.services.clone(),
                    endpoints: HashMap::new(),
                };
                let unlinked = state.unlinked_clusters(&local_cluster);
                let ends = state.unlinked_since.values().map(|since| *since + UNLINK_DELAY);
                retry_at = ends.filter(|end| *end > Instant::now()).fold(retry_at, Instant::min);
                let inputs = Inputs {
                    exporter: Exporter::ThisCluster { unlinked: &unlinked },
                    federated_selector: &selector,
                    excluded_labels: &members.excluded_labels,
                    excluded_annotations: &members.excluded_annotations,
                    exporting: &exporting,
                    local: &local_cluster,
                    may_create_namespaces: false,
                    mirrors_pods: false,
                    source_versions: &state.writes.source_versions,
                };
                let planned = plan(&inputs);
                rejections.report(&planned, &exporting);
                retry_at = retry_at.min(
                    self.writer
                        .execute("local", &planned, &mut state.writes)
                        .await
                        .unwrap_or(retry_at),
                );
            }
            tokio::select! {
                () = wait_for_change(&mut changes) => {}
                () = sleep_until(retry_at) => {}
            }
            sleep(PLAN_DELAY).await;
        }
    }

    /// Writes the status of the Link, at most once per second. Returns the time at which the next write is due.
    async fn write_status(
        &self,
        local: &LocalObjects,
        link: &Link,
        status: &LinkStatus,
        state: &mut PlanState,
    ) -> Option<Instant> {
        let object = local.link_object(&link.name)?;
        let patch = status::patch(&object, status, &timestamp())?;
        let now = Instant::now();
        if let Some(next) = state.next_status_at.filter(|next| now < *next) {
            return Some(next);
        }
        let delay = match self.send_status(&link.name, &patch).await {
            StatusWrite::Done | StatusWrite::Conflict => STATUS_INTERVAL,
            StatusWrite::Failed => STATUS_RETRY_DELAY,
        };
        state.next_status_at = Some(now + delay);
        // If the watch has reported the write by this time, the next call finds no difference.
        Some(now + delay)
    }

    /// Reports why the Secret of a Link cannot be read. Called while no process holds the lease of the Link. The metrics stay until
    /// the returned future is dropped.
    pub(super) async fn report_unreadable_secret(&self, link: &str, cause: &str) -> Infallible {
        let local = self.local_objects();
        let mut changes = local.watches.changes();
        let object = loop {
            match local.link_object(link) {
                Some(object) => break object,
                None => wait_for_change(&mut changes).await,
            }
        };
        let cluster = local.metrics_cluster(&object);
        let _series = ClusterSeries::new(&self.registry, &self.shared.series_users, cluster);
        self.report_unreadable(&local, link, &cause).await;
        std::future::pending().await
    }

    /// Reports in the status of the Link, an Event, the log and a metric why the exported Services cannot be read.
    async fn report_unreadable(&self, local: &LocalObjects, link: &str, cause: &(dyn std::fmt::Display + Sync)) {
        let cause = cause.to_string();
        warn!(link, "{cause}");
        // A Link that was deleted meanwhile has neither a status nor metrics.
        let Some(object) = local.link_object(link) else { return };
        self.link_events.record(&object, LinkProblem::Unreadable, &cause);
        let labels = cluster_label(&local.metrics_cluster(&object));
        self.metrics.synced.get(&labels).set(0);
        self.metrics.errors.get(&labels.with("reason", "Unreadable")).inc();
        for _ in 0..MAX_STATUS_ATTEMPTS {
            let object = local.link_object(link);
            let patch = object.and_then(|object| status::unreadable_patch(&object, &cause, &timestamp()));
            let Some(patch) = patch else { return };
            match self.send_status(link, &patch).await {
                // The watch is about to report the change of the other writer.
                StatusWrite::Conflict => sleep(STATUS_INTERVAL).await,
                StatusWrite::Done | StatusWrite::Failed => return,
            }
        }
    }

    async fn send_status(&self, link: &str, patch: &serde_json::Value) -> StatusWrite {
        let links = Api::namespaced_with(self.client.clone(), &self.config.namespace, &Link::resource());
        match status::write(&links, link, patch).await {
            Ok(()) => StatusWrite::Done,
            Err(kube::Error::Api(status)) if status.code == 409 => StatusWrite::Conflict,
            Err(err) => {
                warn!(
                    link,
                    error = &err as &dyn std::error::Error,
                    "writing the status of the Link failed"
                );
                StatusWrite::Failed
            }
        }
    }

    fn cache_size(&self, kind: &str, cluster: &str) -> Arc<Gauge> {
        let family = self
            .registry
            .gauge(&format!("{kind}_cache_size"), "Objects of this kind that are known.");
        family.get(&Labels::new().with("cluster", cluster))
    }
}

impl Default for SharedState {
    fn default() -> Self {
        Self {
            local: Arc::default(),
            series_users: SeriesUsers::default(),
            step_permits: Arc::new(Semaphore::new(MAX_CONCURRENT_STEPS)),
        }
    }
}

impl PlanState {
    /// The clusters with members in federated Services that have had no Link for [`UNLINK_DELAY`].
    fn unlinked_clusters(&mut self, local: &LocalCluster) -> BTreeSet<String> {
        let now = Instant::now();
        let unlinked = clusters_without_link(local);
        self.unlinked_since.retain(|cluster, _| unlinked.contains(cluster));
        for cluster in unlinked {
            self.unlinked_since.entry(cluster).or_insert(now);
        }
        let lasting = self
            .unlinked_since
            .iter()
            .filter(|(_, since)| now - **since >= UNLINK_DELAY);
        lasting.map(|(cluster, _)| cluster.clone()).collect()
    }
}

/// The status of the Link: the planned outcome of each Service, or the cause if its step has failed.
fn link_status(planned: Plan, exporting: &ExportingCluster, local: &LocalCluster, state: &PlanState) -> LinkStatus {
    let mut status = LinkStatus {
        missing_ports: members_without_ports(&planned, exporting, local),
        mirrors: planned.mirrors,
        federated: planned.federated,
    };
    for entry in status.mirrors.iter_mut().chain(&mut status.federated) {
        if let Ok(mirror) = &entry.mirror
            && let Some(cause) = state.writes.cause_of_failure(mirror)
        {
            entry.mirror = Err(Rejection::Failed(cause.to_owned()));
        }
    }
    status
}

fn prune_service(service: &mut Service) {
    service.status = None;
}

/// Waits for a change in the other cluster. Never returns without a watch of it.
async fn wait_for_remote_change(changes: &mut Option<watch::Receiver<u64>>) {
    match changes {
        Some(changes) => wait_for_change(changes).await,
        None => std::future::pending().await,
    }
}

/// Time between a change and the next plan, so that one plan handles several changes.
const PLAN_DELAY: Duration = Duration::from_millis(100);
/// Minimum time between two writes of the status.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);
const MAX_STATUS_ATTEMPTS: u32 = 5;
const STATUS_RETRY_DELAY: Duration = Duration::from_secs(60);
/// Time for which a cluster must have had no Link before its members are removed. A Link that is replaced is absent for a moment.
const UNLINK_DELAY: Duration = Duration::from_secs(60);
const REMOTE_REQUEST_RATE: RequestRate = RequestRate { qps: 50.0, burst: 100 };
