//! Taps the requests of workloads: opens a stream to each of their sidecars by mutual TLS, and emits one line per
//! event.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tonic::Status;
use tracing::warn;
use tulle_core::addr::Addr;
use tulle_core::backoff::{Backoff, BackoffDelays};
use tulle_core::drain::Watch;
use tulle_core::error_chain::ErrorChain;
use tulle_proto::http_types::{HttpMethod, http_method};
use tulle_proto::tap::ObserveRequest;
use tulle_proto::tap::observe_request::{Extract, Match, extract, r#match as kinds};
use tulle_proto::tap::tap_client::TapClient;

use super::api::{ResourceName, UnreachableSidecar};
use super::events::{Headers, TapEvent, TapLine};
use super::rows::{self, Selection};
use super::scraper::SidecarScraper;
use crate::cluster::views::workload_list::{Sidecar, Workload};
use crate::resources::meta::NamespacedName;
use crate::tls::client::{self, TlsServer};
use crate::tls::mesh_credentials::MeshCredentials;

/// The parameters of a tap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TapRequest {
    pub(super) namespace: Option<String>,
    pub(super) selection: Selection,
    pub(super) method: Option<String>,
    /// Prefix of the path.
    pub(super) path: Option<String>,
    pub(super) authority: Option<String>,
    /// Required labels of the destination.
    pub(super) to: Vec<(String, String)>,
    pub(super) headers: Headers,
    /// Sampling: one of this many requests is reported.
    pub(super) one_in: u32,
}

/// Tap address and name of a sidecar. Both, because a new pod can reuse the address of an old one.
type SidecarKey = (SocketAddr, NamespacedName);

/// Opens taps on sidecars with the credentials of this process.
#[derive(Clone)]
pub(super) struct Tapper {
    pub(super) scraper: Arc<SidecarScraper>,
    pub(super) creds: Arc<MeshCredentials>,
}

/// Why a workload's sidecar is not tapped. The response names the workload before each message.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("this process has no certificate yet")]
    NoCertificate,
    #[error("the identity of its sidecar is unknown, because another control plane issues its certificate")]
    NoIdentity,
    #[error("connecting to its tap port")]
    Connect(#[from] client::Error),
    #[error("{}", rejection_text(.0))]
    Rejected(Status),
    #[error("its sidecar ended the tap or is unreachable: {}", .0.message())]
    Ended(Status),
    #[error("it did not respond within {CONNECT_TIMEOUT:?}")]
    Timeout,
    #[error("{MAX_WATCHED_SIDECARS} other sidecars are tapped, which is the limit; select fewer workloads")]
    TooMany,
}

/// A sidecar whose events are streamed.
struct WatchedSidecar {
    key: SidecarKey,
    workload: Workload,
    sidecar: Sidecar,
    /// Distinguishes the sidecars of one tap.
    number: u32,
}

/// The state of one tap.
struct RunningTap {
    tapper: Tapper,
    request: TapRequest,
    lines: mpsc::Sender<TapLine>,
    /// The sidecars with a stream.
    watched: HashSet<SidecarKey>,
    /// The sidecars without a stream because of the limit. The client was told.
    over_limit: HashSet<SidecarKey>,
    failures: SidecarFailures,
    streams: JoinSet<EndedStream>,
    next_number: u32,
}

/// The failures of the sidecars of one tap.
#[derive(Default)]
struct SidecarFailures {
    /// The sidecars whose last stream failed: its backoff, and the time of the next attempt.
    retries: HashMap<SidecarKey, (BackoffDelays, Instant)>,
    /// The sidecars that were reported to the client as unreachable, and had no stable stream since.
    reported: HashSet<SidecarKey>,
}

/// Why the stream of a sidecar has ended.
struct EndedStream {
    key: SidecarKey,
    workload: ResourceName,
    /// `None` if the sidecar has not accepted the tap.
    opened_at: Option<Instant>,
    result: Result<(), Error>,
}

/// The client has closed the response.
struct ClientGone;

impl SidecarFailures {
    fn is_due(&self, key: &SidecarKey) -> bool {
        self.retries
            .get(key)
            .is_none_or(|(_, retry_at)| *retry_at <= Instant::now())
    }

    /// Records that a stream has ended. If it was open for [`MIN_STABLE_TIME`], earlier failures are forgotten.
    fn record_stream_end(&mut self, key: &SidecarKey, open_for: Duration) {
        if open_for >= MIN_STABLE_TIME {
            self.retries.remove(key);
            self.reported.remove(key);
        }
    }

    /// Schedules the next attempt. Returns whether the failure is the first one, of which the client is told.
    fn record_failure(&mut self, key: &SidecarKey) -> bool {
        let (delays, retry_at) = self
            .retries
            .entry(key.clone())
            .or_insert_with(|| (RECONNECT_BACKOFF.start(), Instant::now()));
        *retry_at = Instant::now() + delays.next_delay();
        self.reported.insert(key.clone())
    }

    /// Permits the next attempt at once: the sidecar ended its stream without an error.
    fn record_success(&mut self, key: &SidecarKey) {
        self.retries.remove(key);
    }
}

impl RunningTap {
    /// Schedules the next attempt for the sidecar, and reports a failure to the client.
    async fn handle_ended_stream(&mut self, ended: EndedStream) -> Result<(), ClientGone> {
        let EndedStream {
            key,
            workload,
            opened_at,
            result,
        } = ended;
        self.watched.remove(&key);
        if let Some(opened_at) = opened_at {
            self.failures.record_stream_end(&key, opened_at.elapsed());
        }
        let Err(err) = result else {
            self.failures.record_success(&key);
            return Ok(());
        };
        if !self.failures.record_failure(&key) {
            return Ok(());
        }
        self.report_unreachable(workload, &err).await
    }

    async fn report_unreachable(&self, workload: ResourceName, err: &Error) -> Result<(), ClientGone> {
        let reason = ErrorChain(err).to_string();
        let unreachable = UnreachableSidecar { workload, reason };
        let sent = self.lines.send(TapLine::Unreachable { unreachable }).await;
        sent.map_err(|_| ClientGone)
    }

    /// Opens a stream to each selected sidecar that has none, unless its next attempt is later. Sidecars above the limit are
    /// reported to the client; they get a stream when another one ends.
    async fn open_streams(&mut self) -> Result<(), ClientGone> {
        let namespace = self.request.namespace.as_deref();
        let workloads = match self.tapper.scraper.workloads(namespace).await {
            Ok(workloads) => workloads,
            Err(err) => {
                warn!(
                    error = &err as &dyn std::error::Error,
                    "looking up the workloads of a tap failed"
                );
                return Ok(());
            }
        };
        let reported = std::mem::take(&mut self.over_limit);
        for workload in workloads.iter() {
            let Some(sidecar) = workload.sidecar.clone() else {
                continue;
            };
            let key = (sidecar.tap_addr, workload.name.clone());
            let is_selected = !self.request.selection.groups(workload).is_empty();
            if !is_selected || !self.failures.is_due(&key) || self.watched.contains(&key) {
                continue;
            }
            if self.watched.len() < MAX_WATCHED_SIDECARS {
                self.watched.insert(key.clone());
                self.open_stream(key, workload, sidecar);
                continue;
            }
            if !reported.contains(&key) {
                self.report_unreachable(rows::own_resource(workload), &Error::TooMany)
                    .await?;
            }
            self.over_limit.insert(key);
        }
        Ok(())
    }

    fn open_stream(&mut self, key: SidecarKey, workload: &Workload, sidecar: Sidecar) {
        let watched = WatchedSidecar {
            key,
            workload: workload.clone(),
            sidecar,
            number: self.next_number,
        };
        self.next_number = self.next_number.wrapping_add(1);
        let stream = self
            .tapper
            .clone()
            .watch(watched, self.request.clone(), self.lines.clone());
        self.streams.spawn(stream);
    }
}

impl Tapper {
    /// Sends a line per event until the receiver is dropped or the drain starts. Workloads that appear after the start
    /// are tapped too.
    pub(super) async fn run(self, request: TapRequest, lines: mpsc::Sender<TapLine>, drain: Watch) {
        let mut tap = RunningTap {
            tapper: self,
            request,
            lines: lines.clone(),
            watched: HashSet::new(),
            over_limit: HashSet::new(),
            failures: SidecarFailures::default(),
            streams: JoinSet::new(),
            next_number: 0,
        };
        let mut ticks = interval(DISCOVERY_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            // Cancel-safe: all branches only wait; events are read in separate tasks.
            tokio::select! {
                () = drain.signaled() => return,
                () = lines.closed() => return,
                Some(ended) = tap.streams.join_next() => {
                    let Ok(ended) = ended else { continue };
                    if let Err(ClientGone) = tap.handle_ended_stream(ended).await {
                        return;
                    }
                }
                _ = ticks.tick() => {
                    if let Err(ClientGone) = tap.open_streams().await {
                        return;
                    }
                }
            }
        }
    }

    async fn watch(self, watched: WatchedSidecar, tap: TapRequest, lines: mpsc::Sender<TapLine>) -> EndedStream {
        let WatchedSidecar {
            key,
            workload,
            sidecar,
            number,
        } = watched;
        let workload = rows::own_resource(&workload);
        let headers = tap.headers;
        let mut opened_at = None;
        let watching = async {
            let observed = timeout(CONNECT_TIMEOUT, self.observe(&sidecar, &tap)).await;
            let mut events = observed.map_err(|_| Error::Timeout)??;
            opened_at = Some(Instant::now());
            while let Some(event) = events.message().await.map_err(Error::Ended)? {
                let Some(event) = TapEvent::from_proto(event, &workload, number, headers) else {
                    continue;
                };
                if lines.send(TapLine::Event(Box::new(event))).await.is_err() {
                    break;
                }
            }
            Ok(())
        };
        let result = watching.await;
        EndedStream {
            key,
            workload,
            opened_at,
            result,
        }
    }

    async fn observe(
        &self,
        sidecar: &Sidecar,
        tap: &TapRequest,
    ) -> Result<tonic::Streaming<tulle_proto::tap::TapEvent>, Error> {
        let identity = sidecar.identity.as_ref().ok_or(Error::NoIdentity)?;
        let (leaf, anchors) = self.creds.client_credentials().ok_or(Error::NoCertificate)?;
        let server = TlsServer {
            addr: &Addr::Socket(sidecar.tap_addr),
            name: identity.server_name(),
            identity: Some(identity.name()),
            anchors: &anchors,
        };
        let channel = client::connect(&server, Some(leaf)).await?;
        let mut client = TapClient::new(channel);
        Ok(client
            .observe(tap.observe_request())
            .await
            .map_err(Error::Rejected)?
            .into_inner())
    }
}

impl TapRequest {
    fn observe_request(&self) -> ObserveRequest {
        let http = |kind| kinds::Match::Http(kinds::Http { r#match: Some(kind) });
        let text = |kind| kinds::http::StringMatch { r#match: Some(kind) };
        let mut matches = Vec::new();
        if let Some(method) = &self.method {
            let method = method.to_ascii_uppercase();
            matches.push(http(kinds::http::Match::Method(HttpMethod {
                r#type: Some(match http_method::Registered::from_str_name(&method) {
                    Some(known) => http_method::Type::Registered(known.into()),
                    None => http_method::Type::Unregistered(method),
                }),
            })));
        }
        if let Some(path) = &self.path {
            let prefix = text(kinds::http::string_match::Match::Prefix(path.clone()));
            matches.push(http(kinds::http::Match::Path(prefix)));
        }
        if let Some(authority) = &self.authority {
            let exact = text(kinds::http::string_match::Match::Exact(authority.clone()));
            matches.push(http(kinds::http::Match::Authority(exact)));
        }
        for (key, value) in &self.to {
            matches.push(kinds::Match::DestinationLabel(kinds::Label {
                key: key.clone(),
                value: value.clone(),
            }));
        }
        let matches = matches.into_iter().map(|kind| Match { r#match: Some(kind) });
        ObserveRequest {
            limit: u32::MAX,
            r#match: Some(Match {
                r#match: Some(kinds::Match::All(kinds::Seq {
                    matches: matches.collect(),
                })),
            }),
            extract: Some(Extract {
                extract: Some(extract::Extract::Http(extract::Http {
                    extract: Some(extract::http::Extract::Headers(extract::http::Headers::default())),
                })),
            }),
            sample_one_in: self.one_in,
        }
    }
}

fn rejection_text(status: &Status) -> String {
    let code = status.code();
    match status.message() {
        "" => format!("its sidecar rejected the tap: {code:?}"),
        message => format!("its sidecar rejected the tap: {message}"),
    }
}

/// Interval at which new workloads are discovered and failed sidecars are retried.
const DISCOVERY_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum time to connect to a sidecar and open the stream.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum sidecars per tap.
const MAX_WATCHED_SIDECARS: usize = 500;
/// Delays between attempts to connect to a sidecar.
const RECONNECT_BACKOFF: Backoff = Backoff {
    min: Duration::from_secs(2),
    max: Duration::from_secs(60),
    jitter: 0.5,
};
/// A stream that was open for this time ends a series of failures.
const MIN_STABLE_TIME: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;
    use crate::telemetry::rows::GroupKind;
    use crate::telemetry::scraper::tests::cluster;
    use crate::tls::mesh_credentials::ClientCertificates;

    #[tokio::test]
    async fn sidecars_above_the_limit_are_reported_once() {
        let n_above_limit = 3;
        let n_pods = u32::try_from(MAX_WATCHED_SIDECARS).unwrap() + n_above_limit;
        let creds = Arc::new(MeshCredentials::new(
            "telemetry".to_owned(),
            ClientCertificates::default(),
        ));
        let (lines, mut received) = mpsc::channel(16);
        let mut tap = RunningTap {
            tapper: Tapper {
                scraper: Arc::new(SidecarScraper::new(cluster(n_pods, 1), creds.clone())),
                creds,
            },
            request: TapRequest {
                namespace: None,
                selection: Selection {
                    by: GroupKind::Pod,
                    name: None,
                },
                method: None,
                path: None,
                authority: None,
                to: Vec::new(),
                headers: Headers::Omitted,
                one_in: 1,
            },
            lines,
            watched: HashSet::new(),
            over_limit: HashSet::new(),
            failures: SidecarFailures::default(),
            streams: JoinSet::new(),
            next_number: 0,
        };
        for n_reported in [n_above_limit, 0] {
            assert!(tap.open_streams().await.is_ok());
            assert_eq!(tap.watched.len(), MAX_WATCHED_SIDECARS);
            for _ in 0..n_reported {
                let line = received.try_recv().unwrap();
                let TapLine::Unreachable { unreachable } = line else {
                    panic!("a sidecar without a stream sent an event")
                };
                assert!(
                    unreachable.reason.contains("500 other sidecars"),
                    "{}",
                    unreachable.reason
                );
            }
            assert!(received.try_recv().is_err());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_after_a_long_stream_is_reported_and_retried_soon() {
        let key = (
            SocketAddr::from(([10, 0, 0, 1], 4190)),
            NamespacedName::new("shop", "web"),
        );
        let mut failures = SidecarFailures::default();
        assert!(failures.record_failure(&key));
        for _ in 0..8 {
            failures.record_stream_end(&key, MIN_STABLE_TIME - Duration::from_secs(1));
            assert!(!failures.record_failure(&key));
        }
        let max_first_delay = RECONNECT_BACKOFF.min.mul_f64(1.0 + RECONNECT_BACKOFF.jitter);
        advance(max_first_delay).await;
        assert!(!failures.is_due(&key));
        failures.record_stream_end(&key, MIN_STABLE_TIME);
        assert!(failures.record_failure(&key));
        advance(max_first_delay).await;
        assert!(failures.is_due(&key));
    }
}
