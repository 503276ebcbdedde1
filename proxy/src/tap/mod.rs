//! A live view of requests, for who may see them; nothing but the look at one number while nobody does.

pub(crate) mod matches;
pub(crate) mod server;

use std::{
    borrow::Cow,
    collections::BTreeMap,
    iter::repeat_n,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use arc_swap::ArcSwap;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Uri, Version, header};
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::{sync::mpsc, time::Instant};
use tulle_core::names;
use tulle_proto::{
    convert::wire_duration,
    http_types::{self, headers::Header, http_method, scheme},
    tap::{
        Eos, TapEvent, eos,
        tap_event::{
            EndpointMeta, Event, Http, ProxyDirection, RouteMeta,
            http::{self as events, RequestInit, ResponseEnd, ResponseInit, StreamId},
        },
    },
};

use crate::{
    http::{
        body::{Body, Observe},
        classify,
        error::Error,
    },
    tap::matches::Match,
};

/// The observers of a process.
#[derive(Default)]
pub(crate) struct Taps {
    /// Up to which number a request may be drawn by somebody: most pass without another look. 0 while there is no observer.
    odds: AtomicU32,
    observers: ArcSwap<Vec<Arc<Observer>>>,
    /// Held while the list is changed.
    changing: Mutex<()>,
    /// Numbers given to observers so far.
    numbers: AtomicU32,
}

/// Who wants to see requests.
struct Observer {
    number: u32,
    matches: Match,
    /// Requests to show at most.
    limit: u32,
    shown: AtomicU32,
    /// Of so many that match, one is shown.
    one_in: u32,
    /// Whether headers are shown.
    headers: bool,
    events: mpsc::Sender<TapEvent>,
}

/// Those of whom it is the turn, of all that see one request in so many.
pub(crate) struct Drawn(SmallVec<[Arc<Observer>; 1]>);

/// A request that somebody may want to see.
pub(crate) struct Subject<'a> {
    pub(crate) direction: ProxyDirection,
    pub(crate) source: SocketAddr,
    pub(crate) source_labels: BTreeMap<String, String>,
    pub(crate) destination: SocketAddr,
    /// What discovery knows of the endpoint.
    pub(crate) destination_labels: Cow<'a, BTreeMap<String, String>>,
    /// Who the endpoint is, or why nobody knows.
    pub(crate) destination_tls: BTreeMap<String, String>,
    pub(crate) route_labels: BTreeMap<String, String>,
    pub(crate) method: &'a Method,
    pub(crate) uri: &'a Uri,
    pub(crate) version: Version,
    pub(crate) headers: &'a HeaderMap,
}

/// A request that somebody sees.
pub(crate) struct Tapped {
    shows: Vec<Show>,
    /// All that the events have in common.
    common: TapEvent,
    began_at: Instant,
    answered_at: Option<Instant>,
    n_bytes: u64,
    grpc: Option<i32>,
    /// Whether its end has been shown.
    is_over: bool,
}

/// A request before one observer.
struct Show {
    id: StreamId,
    headers: bool,
    events: mpsc::Sender<TapEvent>,
}

/// What is asked of a tap.
pub(crate) struct Wish {
    pub(crate) matches: Match,
    pub(crate) limit: u32,
    pub(crate) one_in: u32,
    pub(crate) headers: bool,
}

impl Taps {
    /// Who may see the next request; mostly nobody. What a request is shown as is made after that, as it costs much more.
    pub(crate) fn draw(&self) -> Option<Drawn> {
        match self.odds.load(Ordering::Relaxed) {
            0 => None,
            odds => {
                let drawn = fastrand::u32(..);
                if drawn <= odds { self.drawn(drawn) } else { None }
            }
        }
    }

    #[cold]
    fn drawn(&self, drawn: u32) -> Option<Drawn> {
        let observers = self.observers.load();
        let drawn = observers.iter().filter(|observer| drawn <= observer.odds());
        let drawn: SmallVec<_> = drawn.cloned().collect();
        (!drawn.is_empty()).then_some(Drawn(drawn))
    }

    /// Begins to show requests; the number ends that again.
    pub(crate) fn add(&self, wish: Wish) -> (u32, mpsc::Receiver<TapEvent>) {
        let (events, shown) = mpsc::channel(MOST_WAITING);
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let observer = Arc::new(Observer {
            number,
            matches: wish.matches,
            limit: wish.limit,
            shown: AtomicU32::new(0),
            one_in: wish.one_in.max(1),
            headers: wish.headers,
            events,
        });
        self.change(|observers| observers.push(observer.clone()));
        (number, shown)
    }

    /// Shows an observer no further requests; what it sees already goes on.
    pub(crate) fn remove(&self, number: u32) {
        self.change(|observers| observers.retain(|observer| observer.number != number));
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Arc<Observer>>)) {
        let _turn = self.changing.lock();
        let mut observers = Vec::clone(&self.observers.load());
        change(&mut observers);
        let odds = observers.iter().map(|observer| observer.odds()).max();
        self.odds.store(odds.unwrap_or(0), Ordering::Relaxed);
        self.observers.store(Arc::new(observers));
    }

    /// Shows a request to those of the drawn who want to see it.
    pub(crate) fn show(&self, drawn: &Drawn, mut subject: Subject<'_>) -> Option<Box<Tapped>> {
        let mut shows = Vec::new();
        let mut spent = Vec::new();
        for observer in drawn.0.iter().filter(|observer| observer.matches.fits(&subject)) {
            let stream = observer.shown.fetch_add(1, Ordering::Relaxed);
            if stream.saturating_add(1) >= observer.limit {
                spent.push(observer.number);
            }
            if stream < observer.limit {
                shows.push(Show {
                    id: StreamId {
                        base: observer.number,
                        stream: stream.into(),
                    },
                    headers: observer.headers,
                    events: observer.events.clone(),
                });
            }
        }
        for number in spent {
            self.remove(number);
        }
        if shows.is_empty() {
            return None;
        }
        let tapped = Tapped {
            common: subject.common(),
            shows,
            began_at: Instant::now(),
            answered_at: None,
            n_bytes: 0,
            grpc: None,
            is_over: false,
        };
        tapped.tell(tapped.common.clone(), |show| {
            events::Event::RequestInit(RequestInit {
                id: Some(show.id),
                method: Some(method(subject.method)),
                scheme: subject.uri.scheme().map(|scheme| http_types::Scheme {
                    r#type: Some(match scheme.as_str() {
                        "http" => scheme::Type::Registered(scheme::Registered::Http.into()),
                        "https" => scheme::Type::Registered(scheme::Registered::Https.into()),
                        other => scheme::Type::Unregistered(other.to_owned()),
                    }),
                }),
                authority: subject.authority().into_owned(),
                path: subject.uri.path().to_owned(),
                headers: show.headers.then(|| subject.all_headers()),
            })
        });
        Some(Box::new(tapped))
    }
}

impl Observer {
    /// Up to which of all numbers it sees a request.
    fn odds(&self) -> u32 {
        u32::MAX / self.one_in
    }
}

impl<'a> Subject<'a> {
    /// The request as it is now, between these.
    pub(crate) fn of(
        req: &'a Request<Body>,
        direction: ProxyDirection,
        source: SocketAddr,
        destination: SocketAddr,
    ) -> Self {
        Self {
            direction,
            source,
            source_labels: BTreeMap::new(),
            destination,
            destination_labels: Cow::default(),
            destination_tls: BTreeMap::new(),
            route_labels: BTreeMap::new(),
            method: req.method(),
            uri: req.uri(),
            version: req.version(),
            headers: req.headers(),
        }
    }

    /// Whom the request is addressed to, by its target or its `host`.
    pub(crate) fn authority(&self) -> Cow<'_, str> {
        match (self.uri.authority(), self.headers.get(header::HOST)) {
            (Some(authority), _) => authority.as_str().into(),
            (None, Some(host)) => String::from_utf8_lossy(host.as_bytes()),
            (None, None) => "".into(),
        }
    }

    /// What all events of this request have in common. Takes the labels: each is a string or two, and copied with every event.
    fn common(&mut self) -> TapEvent {
        let meta = |labels| EndpointMeta { labels };
        let mut destination = std::mem::take(&mut self.destination_labels).into_owned();
        destination.append(&mut self.destination_tls);
        let route = std::mem::take(&mut self.route_labels);
        TapEvent {
            source: Some(self.source.into()),
            destination: Some(self.destination.into()),
            event: None,
            destination_meta: (!destination.is_empty()).then(|| meta(destination)),
            source_meta: Some(meta(std::mem::take(&mut self.source_labels))),
            proxy_direction: self.direction.into(),
            route_meta: (!route.is_empty()).then_some(RouteMeta { labels: route }),
        }
    }

    fn all_headers(&self) -> http_types::Headers {
        if self.version != Version::HTTP_2 {
            return headers([], self.headers);
        }
        let pseudo = [
            (":method", self.method.as_str().to_owned()),
            (":scheme", self.uri.scheme_str().unwrap_or_default().to_owned()),
            (":authority", self.authority().into_owned()),
            // Without the query, which may have credentials.
            (":path", self.uri.path().to_owned()),
        ];
        headers(pseudo, self.headers)
    }
}

impl Tapped {
    /// Shows a response, and its end when that comes.
    pub(crate) fn response(mut self: Box<Self>, rsp: Response<Body>) -> Response<Body> {
        self.answered_at = Some(Instant::now());
        self.grpc = classify::grpc_status(rsp.headers());
        self.tell(self.common.clone(), |show| {
            let all = || match rsp.version() {
                Version::HTTP_2 => headers([(":status", rsp.status().as_str().to_owned())], rsp.headers()),
                _ => headers([], rsp.headers()),
            };
            events::Event::ResponseInit(ResponseInit {
                id: Some(show.id),
                since_request_init: Some(wire_duration(self.began_at.elapsed())),
                http_status: rsp.status().as_u16().into(),
                headers: show.headers.then(all),
            })
        });
        rsp.map(|body| body.observed(Box::new(Ending(self))))
    }

    /// Shows that there is no response.
    pub(crate) fn failed(mut self: Box<Self>, error: &Error) {
        self.broken(error);
    }

    /// Shows what a request or its response failed by.
    fn broken(&mut self, error: &Error) {
        let direction = match self.common.proxy_direction() {
            ProxyDirection::Inbound => "inbound",
            _ => "outbound",
        };
        let mut cause = format!("{}; direction={direction}", error.told());
        let own = || SocketAddr::try_from(self.common.destination?).ok();
        if let Some(target) = error.target().or_else(own) {
            cause = format!("{cause}; target={target}");
        }
        self.ended(reset_code(error).map(eos::End::ResetErrorCode), None, cause);
    }

    fn ended(&mut self, end: Option<eos::End>, trailers: Option<&HeaderMap>, cause: String) {
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        let common = std::mem::take(&mut self.common);
        self.tell(common, |show| {
            events::Event::ResponseEnd(ResponseEnd {
                id: Some(show.id),
                since_request_init: Some(wire_duration(self.began_at.elapsed())),
                since_response_init: self.answered_at.map(|at| wire_duration(at.elapsed())),
                response_bytes: self.n_bytes,
                eos: Some(Eos { end }),
                trailers: trailers.filter(|_| show.headers).map(|trailers| headers([], trailers)),
                cause: cause.clone(),
            })
        });
    }

    /// Sends an event to each observer that has room for it.
    fn tell(&self, common: TapEvent, event: impl Fn(&Show) -> events::Event) {
        // The last of them takes what is there.
        for (show, common) in self.shows.iter().zip(repeat_n(common, self.shows.len())) {
            let http = Http {
                event: Some(event(show)),
            };
            let whole = TapEvent {
                event: Some(Event::Http(http)),
                ..common
            };
            // Who does not keep up misses something: it is a view, and not a record.
            let _ = show.events.try_send(whole);
        }
    }
}

/// The client has left.
impl Drop for Tapped {
    fn drop(&mut self) {
        if !self.is_over {
            let cancelled = Some(eos::End::ResetErrorCode(h2::Reason::CANCEL.into()));
            self.ended(cancelled, None, Error::Left.cause().to_owned());
        }
    }
}

/// Waits for the end of a response.
struct Ending(Box<Tapped>);

impl Observe for Ending {
    fn data(&mut self, len: usize) {
        self.0.n_bytes += len as u64;
    }

    fn trailers(&mut self, trailers: &HeaderMap) {
        let grpc = classify::grpc_status(trailers).and_then(|code| u32::try_from(code).ok());
        self.0
            .ended(grpc.map(eos::End::GrpcStatusCode), Some(trailers), String::new());
    }

    fn end(&mut self, result: Result<(), &Error>) {
        let grpc = self.0.grpc.and_then(|code| u32::try_from(code).ok());
        match result {
            Ok(()) => self.0.ended(grpc.map(eos::End::GrpcStatusCode), None, String::new()),
            Err(error) => self.0.broken(error),
        }
    }
}

fn reset_code(error: &Error) -> Option<u32> {
    match error {
        Error::H2(error) => error.reason().map(Into::into),
        _ => None,
    }
}

fn method(method: &Method) -> http_types::HttpMethod {
    let registered = http_method::Registered::from_str_name(method.as_str());
    http_types::HttpMethod {
        r#type: Some(match registered {
            Some(known) => http_method::Type::Registered(known.into()),
            None => http_method::Type::Unregistered(method.to_string()),
        }),
    }
}

fn headers<const N: usize>(pseudo: [(&str, String); N], rest: &HeaderMap) -> http_types::Headers {
    let line = |name: &str, value: &[u8]| Header {
        name: name.to_owned(),
        value: value.to_vec(),
    };
    let rest = rest.iter().map(|(name, value): (&HeaderName, &HeaderValue)| {
        // A client marks what it wants nobody on the way to keep.
        let is_secret = names::header::CREDENTIALS.contains(name) || value.is_sensitive();
        line(name.as_str(), if is_secret { NOT_SHOWN } else { value.as_bytes() })
    });
    let pseudo = pseudo.iter().map(|(name, value)| line(name, value.as_bytes()));
    http_types::Headers {
        headers: pseudo.chain(rest).collect(),
    }
}

/// In place of a value that lets whoever knows it act for somebody else.
const NOT_SHOWN: &[u8] = b"(not shown)";
/// Events that wait for an observer at most.
const MOST_WAITING: usize = 400;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_named_and_not_shown() {
        let mut all = HeaderMap::new();
        for name in ["Authorization", "proxy-authorization", "cookie", "set-cookie", "accept"] {
            let name: HeaderName = name.parse().unwrap();
            all.append(&name, HeaderValue::from_static("a value"));
            all.append(&name, HeaderValue::from_static("a value"));
        }
        let mut marked = HeaderValue::from_static("a value");
        marked.set_sensitive(true);
        all.append("x-key", marked);
        let shown = headers([(":path", "/a value".to_owned())], &all).headers;
        let of = |name: &str| -> Vec<&[u8]> {
            let of_name = shown.iter().filter(|header| header.name == name);
            of_name.map(|header| &header.value[..]).collect()
        };
        for name in ["authorization", "proxy-authorization", "cookie", "set-cookie"] {
            assert_eq!(of(name), [NOT_SHOWN; 2], "{name}");
        }
        assert_eq!(of("x-key"), [NOT_SHOWN]);
        assert_eq!(of("accept"), [b"a value"; 2]);
        assert_eq!(of(":path"), [b"/a value"]);
    }
}
