//! Watches the requests of workloads: a stream from each of their sidecars, by mutual TLS, and one line for each event.

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
use tulle_core::backoff::{Backoff, Steps};
use tulle_core::drain::Watch;
use tulle_proto::http_types::{HttpMethod, http_method};
use tulle_proto::tap::ObserveRequest;
use tulle_proto::tap::observe_request::{Extract, Match, extract, r#match as kinds};
use tulle_proto::tap::tap_client::TapClient;

use super::api::{Named, Silent};
use super::events::{Headers, Line, TapEvent};
use super::recorder::Recorder;
use super::view::{self, Selection};
use crate::cluster::members::{Member, Sidecar};
use crate::resources::meta::Name;
use crate::tls::client::{self, Peer};
use crate::tls::creds::ServerCreds;
use crate::webhook::with_causes;

/// What to watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wish {
    pub(super) namespace: Option<String>,
    pub(super) selection: Selection,
    pub(super) method: Option<String>,
    /// How paths begin.
    pub(super) path: Option<String>,
    pub(super) authority: Option<String>,
    /// What the destination's labels must be.
    pub(super) to: Vec<(String, String)>,
    pub(super) headers: Headers,
    /// Of so many requests one is shown.
    pub(super) one_in: u32,
}

/// The address and the name of a sidecar, because a new pod may have the address of an old one.
type Key = (SocketAddr, Name);

/// Whom sidecars take us for.
#[derive(Clone)]
pub(super) struct Tapper {
    pub(super) recorder: Arc<Recorder>,
    pub(super) creds: Arc<ServerCreds>,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("we have no certificate yet")]
    NoCertificate,
    #[error("nobody knows who its sidecar is: another control plane gives it its certificate")]
    NoIdentity,
    #[error("connecting to its tap port")]
    Connect(#[from] client::Error),
    #[error("{}", refused(.0))]
    Refused(Status),
    #[error("its sidecar ended the tap, or is gone: {}", .0.message())]
    Ended(Status),
    #[error("it did not answer within {LIMIT:?}")]
    Timeout,
}

impl Tapper {
    /// Sends a line for each event until nobody reads them, or the drain; workloads that come later are watched too.
    pub(super) async fn run(self, wish: Wish, lines: mpsc::Sender<Line>, drain: Watch) {
        let mut watched: HashSet<Key> = HashSet::new();
        let mut later: HashMap<Key, (Steps, Instant)> = HashMap::new();
        let mut told = HashSet::new();
        let mut streams = JoinSet::new();
        let mut ticks = interval(LOOK_AGAIN);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut numbers = 0..;
        loop {
            // All of them only wait; an event is in its own task.
            tokio::select! {
                () = drain.signaled() => return,
                () = lines.closed() => return,
                Some(ended) = streams.join_next() => {
                    let Ok((key, workload, result)) = ended else { continue };
                    watched.remove(&key);
                    match &result {
                        Ok(()) => drop(later.remove(&key)),
                        Err(_) => {
                            let (steps, at) = later.entry(key.clone()).or_insert_with(|| (AGAIN.steps(), Instant::now()));
                            *at = Instant::now() + steps.next_delay();
                        }
                    }
                    if let Err(err) = result && told.insert(key) {
                        let reason = with_causes(&err);
                        let silent = Silent { workload, reason };
                        if lines.send(Line::Silent { silent }).await.is_err() {
                            return;
                        }
                    }
                }
                _ = ticks.tick() => {
                    let members = match self.recorder.members(wish.namespace.as_deref()).await {
                        Ok(members) => members,
                        Err(err) => {
                            warn!(error = &err as &dyn std::error::Error, "a tap cannot look for workloads");
                            continue;
                        }
                    };
                    for member in members.iter() {
                        let Some(sidecar) = member.sidecar.clone() else { continue };
                        let key = (sidecar.tap, member.name.clone());
                        let is_due = later.get(&key).is_none_or(|(_, at)| *at <= Instant::now());
                        let is_wanted = is_due && watched.len() < MOST_WATCHED;
                        if !is_wanted || wish.selection.groups(member).is_empty() || !watched.insert(key.clone()) {
                            continue;
                        }
                        let number = numbers.next().unwrap_or_default();
                        let stream = self.clone().watch(member.clone(), sidecar, wish.clone(), number, lines.clone());
                        streams.spawn(async move {
                            let (workload, result) = stream.await;
                            (key, workload, result)
                        });
                    }
                }
            }
        }
    }

    async fn watch(
        self,
        member: Member,
        sidecar: Sidecar,
        wish: Wish,
        number: u32,
        lines: mpsc::Sender<Line>,
    ) -> (Named, Result<(), Error>) {
        let workload = view::itself(&member);
        let headers = wish.headers;
        let watching = async {
            let observed = timeout(LIMIT, self.observe(&sidecar, &wish)).await;
            let mut events = observed.map_err(|_| Error::Timeout)??;
            while let Some(event) = events.message().await.map_err(Error::Ended)? {
                let Some(event) = TapEvent::read(event, &workload, number, headers) else {
                    continue;
                };
                if lines.send(Line::Event(Box::new(event))).await.is_err() {
                    break;
                }
            }
            Ok(())
        };
        let result = watching.await;
        (workload, result)
    }

    async fn observe(
        &self,
        sidecar: &Sidecar,
        wish: &Wish,
    ) -> Result<tonic::Streaming<tulle_proto::tap::TapEvent>, Error> {
        let identity = sidecar.identity.as_ref().ok_or(Error::NoIdentity)?;
        let (leaf, anchors) = self.creds.as_client().ok_or(Error::NoCertificate)?;
        let peer = Peer {
            addr: &Addr::Socket(sidecar.tap),
            name: identity.server_name(),
            identity: Some(identity.name()),
            anchors: &anchors,
        };
        let channel = client::connect(&peer, Some(leaf)).await?;
        let mut client = TapClient::new(channel);
        Ok(client
            .observe(wish.request())
            .await
            .map_err(Error::Refused)?
            .into_inner())
    }
}

impl Wish {
    fn request(&self) -> ObserveRequest {
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

fn refused(status: &Status) -> String {
    let code = status.code();
    match status.message() {
        "" => format!("its sidecar refused: {code:?}"),
        message => format!("its sidecar refused: {message}"),
    }
}

/// How often workloads are looked for that have come meanwhile, and sidecars that did not answer are tried again.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
/// How long a sidecar may take to begin.
const LIMIT: Duration = Duration::from_secs(10);
/// Sidecars that one tap watches at most.
const MOST_WATCHED: usize = 500;
/// Before a sidecar that did not answer is asked again.
const AGAIN: Backoff = Backoff {
    min: Duration::from_secs(2),
    max: Duration::from_secs(60),
    jitter: 0.5,
};
