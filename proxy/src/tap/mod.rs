//! Taps: live streams of requests for authorized clients. If there are no taps, a request costs one atomic load.

pub(crate) mod matches;
mod request_info;
pub(crate) mod server;

pub(crate) use request_info::RequestInfo;

use std::{
    iter::repeat_n,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use arc_swap::ArcSwap;
use http::{HeaderMap, Method, Response, Version};
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::{sync::mpsc, time::Instant};
use tulle_proto::{
    convert::wire_duration,
    http_types::{self, http_method, scheme},
    tap::{
        Eos, TapEvent, eos,
        tap_event::{
            Event, Http, ProxyDirection,
            http::{self as events, RequestInit, ResponseEnd, ResponseInit, StreamId},
        },
    },
};

use crate::{
    http::{
        body::{Body, BodyObserver},
        error::Error,
        lifecycle::classify,
    },
    tap::{matches::Match, request_info::headers},
};

#[derive(Default)]
pub(crate) struct TapRegistry {
    /// The maximum of [`Tap::sample_threshold`] over all taps; 0 if there are no taps. A request whose random number is larger
    /// is not shown to any tap.
    max_sample_threshold: AtomicU32,
    taps: ArcSwap<Vec<Arc<Tap>>>,
    /// Held while the list is changed.
    update_lock: Mutex<()>,
    /// The id of the next tap.
    next_id: AtomicU32,
}

/// One client's stream of requests.
struct Tap {
    id: u32,
    condition: Match,
    /// Maximum number of requests to show.
    limit: u32,
    n_shown: AtomicU32,
    /// On average, one of this many matching requests is shown.
    sample_one_in: u32,
    shows_headers: bool,
    events: mpsc::Sender<TapEvent>,
}

/// The taps that sample the current request.
pub(crate) struct SamplingTaps(SmallVec<[Arc<Tap>; 1]>);

/// A request that is shown to at least one tap.
pub(crate) struct TappedRequest {
    sinks: Vec<EventSink>,
    /// The fields that all its events have.
    common_fields: TapEvent,
    started_at: Instant,
    response_at: Option<Instant>,
    n_bytes: u64,
    grpc: Option<i32>,
    /// Whether the end event has been sent.
    end_sent: bool,
}

struct EventSink {
    id: StreamId,
    shows_headers: bool,
    events: mpsc::Sender<TapEvent>,
}

/// The parameters of a new tap.
pub(crate) struct TapParams {
    pub(crate) condition: Match,
    pub(crate) limit: u32,
    pub(crate) sample_one_in: u32,
    pub(crate) shows_headers: bool,
}

impl TapRegistry {
    /// The taps that sample the current request; usually none. Events are built only for sampled requests, because that costs much
    /// more than sampling.
    pub(crate) fn sample(&self) -> Option<SamplingTaps> {
        match self.max_sample_threshold.load(Ordering::Relaxed) {
            0 => None,
            max_sample_threshold => {
                let random = fastrand::u32(..);
                if random <= max_sample_threshold {
                    self.sampling_taps(random)
                } else {
                    None
                }
            }
        }
    }

    #[cold]
    fn sampling_taps(&self, random: u32) -> Option<SamplingTaps> {
        let taps = self.taps.load();
        let sampling = taps.iter().filter(|tap| random <= tap.sample_threshold());
        let sampling: SmallVec<_> = sampling.cloned().collect();
        (!sampling.is_empty()).then_some(SamplingTaps(sampling))
    }

    /// Adds a tap; returns its id for [`TapRegistry::remove`] and its events.
    pub(crate) fn add(&self, params: TapParams) -> (u32, mpsc::Receiver<TapEvent>) {
        let (events, events_rx) = mpsc::channel(MAX_QUEUED_EVENTS);
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let tap = Arc::new(Tap {
            id,
            condition: params.condition,
            limit: params.limit,
            n_shown: AtomicU32::new(0),
            sample_one_in: params.sample_one_in.max(1),
            shows_headers: params.shows_headers,
            events,
        });
        self.change(|taps| taps.push(tap.clone()));
        (id, events_rx)
    }

    /// Removes a tap. It still gets the events of requests that it already shows.
    pub(crate) fn remove(&self, id: u32) {
        self.change(|taps| taps.retain(|tap| tap.id != id));
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Arc<Tap>>)) {
        let _update_guard = self.update_lock.lock();
        let mut taps = Vec::clone(&self.taps.load());
        change(&mut taps);
        let max_threshold = taps.iter().map(|tap| tap.sample_threshold()).max();
        self.max_sample_threshold
            .store(max_threshold.unwrap_or(0), Ordering::Relaxed);
        self.taps.store(Arc::new(taps));
    }

    /// Shows a request to those of the sampling taps whose condition it meets.
    pub(crate) fn show(&self, sampling: &SamplingTaps, mut request: RequestInfo<'_>) -> Option<Box<TappedRequest>> {
        let mut sinks = Vec::new();
        let mut finished = Vec::new();
        for tap in sampling.0.iter().filter(|tap| tap.condition.matches(&request)) {
            let stream = tap.n_shown.fetch_add(1, Ordering::Relaxed);
            if stream.saturating_add(1) >= tap.limit {
                finished.push(tap.id);
            }
            if stream < tap.limit {
                sinks.push(EventSink {
                    id: StreamId {
                        base: tap.id,
                        stream: stream.into(),
                    },
                    shows_headers: tap.shows_headers,
                    events: tap.events.clone(),
                });
            }
        }
        for id in finished {
            self.remove(id);
        }
        if sinks.is_empty() {
            return None;
        }
        let tapped = TappedRequest {
            common_fields: request.common_fields(),
            sinks,
            started_at: Instant::now(),
            response_at: None,
            n_bytes: 0,
            grpc: None,
            end_sent: false,
        };
        tapped.send(tapped.common_fields.clone(), |sink| {
            events::Event::RequestInit(RequestInit {
                id: Some(sink.id),
                method: Some(method_message(request.method)),
                scheme: request.uri.scheme().map(|scheme| http_types::Scheme {
                    r#type: Some(match scheme.as_str() {
                        "http" => scheme::Type::Registered(scheme::Registered::Http.into()),
                        "https" => scheme::Type::Registered(scheme::Registered::Https.into()),
                        other => scheme::Type::Unregistered(other.to_owned()),
                    }),
                }),
                authority: request.authority().into_owned(),
                path: request.uri.path().to_owned(),
                headers: sink.shows_headers.then(|| request.all_headers()),
            })
        });
        Some(Box::new(tapped))
    }
}

impl Tap {
    /// Each request gets a random number. This tap samples the requests whose number is at most this threshold.
    fn sample_threshold(&self) -> u32 {
        u32::MAX / self.sample_one_in
    }
}

impl TappedRequest {
    /// Shows a response, and later its end.
    pub(crate) fn show_response(mut self: Box<Self>, rsp: Response<Body>) -> Response<Body> {
        self.response_at = Some(Instant::now());
        self.grpc = classify::grpc_status(rsp.headers());
        self.send(self.common_fields.clone(), |sink| {
            let all_headers = || match rsp.version() {
                Version::HTTP_2 => headers([(":status", rsp.status().as_str().to_owned())], rsp.headers()),
                _ => headers([], rsp.headers()),
            };
            events::Event::ResponseInit(ResponseInit {
                id: Some(sink.id),
                since_request_init: Some(wire_duration(self.started_at.elapsed())),
                http_status: rsp.status().as_u16().into(),
                headers: sink.shows_headers.then(all_headers),
            })
        });
        rsp.map(|body| body.with_observer(Box::new(TapBodyObserver(self))))
    }

    /// Shows that the request got no response.
    pub(crate) fn show_failure(mut self: Box<Self>, error: &Error) {
        self.send_error(error);
    }

    /// Shows the error of a request or its response.
    fn send_error(&mut self, error: &Error) {
        let direction = match self.common_fields.proxy_direction() {
            ProxyDirection::Inbound => "inbound",
            _ => "outbound",
        };
        let mut cause = format!("{}; direction={direction}", error.cause_header());
        let own_destination = || SocketAddr::try_from(self.common_fields.destination?).ok();
        if let Some(target) = error.failed_addr().or_else(own_destination) {
            cause = format!("{cause}; target={target}");
        }
        self.send_end(reset_code(error).map(eos::End::ResetErrorCode), None, cause);
    }

    fn send_end(&mut self, end: Option<eos::End>, trailers: Option<&HeaderMap>, cause: String) {
        if std::mem::replace(&mut self.end_sent, true) {
            return;
        }
        let common_fields = std::mem::take(&mut self.common_fields);
        self.send(common_fields, |sink| {
            events::Event::ResponseEnd(ResponseEnd {
                id: Some(sink.id),
                since_request_init: Some(wire_duration(self.started_at.elapsed())),
                since_response_init: self.response_at.map(|at| wire_duration(at.elapsed())),
                response_bytes: self.n_bytes,
                eos: Some(Eos { end }),
                trailers: trailers
                    .filter(|_| sink.shows_headers)
                    .map(|trailers| headers([], trailers)),
                cause: cause.clone(),
            })
        });
    }

    /// Sends an event to each tap whose queue is not full.
    fn send(&self, common_fields: TapEvent, event: impl Fn(&EventSink) -> events::Event) {
        // The last tap gets the value itself, the others clones.
        for (sink, common_fields) in self.sinks.iter().zip(repeat_n(common_fields, self.sinks.len())) {
            let http = Http {
                event: Some(event(sink)),
            };
            let tap_event = TapEvent {
                event: Some(Event::Http(http)),
                ..common_fields
            };
            // A slow client misses events: a tap is a live view, not a record.
            let _ = sink.events.try_send(tap_event);
        }
    }
}

/// If a request is dropped before its end event, the client has disconnected.
impl Drop for TappedRequest {
    fn drop(&mut self) {
        if !self.end_sent {
            let cancelled = Some(eos::End::ResetErrorCode(h2::Reason::CANCEL.into()));
            self.send_end(cancelled, None, Error::ClientClosed.cause().to_owned());
        }
    }
}

struct TapBodyObserver(Box<TappedRequest>);

impl BodyObserver for TapBodyObserver {
    fn data(&mut self, len: usize) {
        self.0.n_bytes += len as u64;
    }

    fn trailers(&mut self, trailers: &HeaderMap) {
        let grpc = classify::grpc_status(trailers).and_then(|code| u32::try_from(code).ok());
        self.0
            .send_end(grpc.map(eos::End::GrpcStatusCode), Some(trailers), String::new());
    }

    fn end(&mut self, result: Result<(), &Error>) {
        let grpc = self.0.grpc.and_then(|code| u32::try_from(code).ok());
        match result {
            Ok(()) => self.0.send_end(grpc.map(eos::End::GrpcStatusCode), None, String::new()),
            Err(error) => self.0.send_error(error),
        }
    }
}

fn reset_code(error: &Error) -> Option<u32> {
    match error {
        Error::H2(error) => error.reason().map(Into::into),
        _ => None,
    }
}

fn method_message(method: &Method) -> http_types::HttpMethod {
    let registered = http_method::Registered::from_str_name(method.as_str());
    http_types::HttpMethod {
        r#type: Some(match registered {
            Some(known) => http_method::Type::Registered(known.into()),
            None => http_method::Type::Unregistered(method.to_string()),
        }),
    }
}

/// Maximum number of queued events of a tap.
const MAX_QUEUED_EVENTS: usize = 400;
