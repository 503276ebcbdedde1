//! `tulle top`: shows the most frequent requests with count, latency and success rate, computed from a tap.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::mem;
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use tokio::signal::ctrl_c;
use tokio::time::{MissedTickBehavior, interval};
use tulle_control::telemetry::events::{StreamId, TapEndpoint, TapEvent};

use super::golden::kind_and_name;
use super::tap::TapFilter;
use crate::screen::Screen;
use crate::{kubernetes, runtime, table};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    filter: TapFilter,
    /// Combine the requests of all clients
    #[arg(long)]
    hide_sources: bool,
    /// Maximum number of lines to show
    #[arg(long, value_name = "N", default_value_t = 25)]
    lines: usize,
}

pub(crate) fn main(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    runtime()?.block_on(async {
        let mut tap = args.filter.start(flags, false).await?;
        // Created once: a new future per iteration could miss a signal between two iterations.
        let mut interrupted = pin!(ctrl_c());
        let mut screen = Screen::new();
        let mut top = Top::default();
        let mut ticks = interval(REFRESH_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            // Cancel-safe: the tap keeps the bytes that it has read.
            tokio::select! {
                event = tap.next() => match event? {
                    Some(event) => top.record(&event, args.hide_sources),
                    None => break,
                },
                _ = ticks.tick() => screen.draw(&top.table(args.lines)),
                _ = &mut interrupted => break,
            }
        }
        // A file or a pipe gets only the final table.
        if !screen.is_terminal() {
            crate::print(&top.table(args.lines))?;
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// The fields by which requests are grouped.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct RequestKey {
    source: String,
    destination: String,
    method: String,
    path: String,
}

#[derive(Default)]
struct RequestStats {
    count: u64,
    succeeded: u64,
    /// Lowest latency in microseconds.
    best: i64,
    /// Highest latency in microseconds.
    worst: i64,
    /// Latency of the last request in microseconds.
    last: i64,
}

#[derive(Default)]
struct Top {
    stats: BTreeMap<RequestKey, RequestStats>,
    pending: PendingRequests,
}

/// A request without an end event.
struct PendingRequest {
    key: RequestKey,
    /// Whether a response with a status below 500 has begun.
    response_is_success: bool,
}

/// Requests without an end event.
///
/// The oldest requests are dropped when there are too many: streams can last for days, and a slow tap loses end events. When `newer`
/// is full, it replaces `older`.
#[derive(Default)]
struct PendingRequests {
    newer: BTreeMap<(String, StreamId), PendingRequest>,
    older: BTreeMap<(String, StreamId), PendingRequest>,
}

impl PendingRequests {
    fn begin(&mut self, id: (String, StreamId), key: RequestKey) {
        if self.newer.len() >= MAX_PENDING_REQUESTS / 2 {
            self.older = mem::take(&mut self.newer);
        }
        let request = PendingRequest {
            key,
            response_is_success: false,
        };
        self.newer.insert(id, request);
    }

    fn find(&mut self, id: &(String, StreamId)) -> Option<&mut PendingRequest> {
        self.newer.get_mut(id).or_else(|| self.older.get_mut(id))
    }

    fn end(&mut self, id: &(String, StreamId)) -> Option<PendingRequest> {
        self.newer.remove(id).or_else(|| self.older.remove(id))
    }
}

impl Top {
    fn record(&mut self, event: &TapEvent, hide_sources: bool) {
        let request_id = |id: StreamId| (event.proxy_direction.clone(), id);
        if let Some(init) = &event.request_init_event {
            let workload = kind_and_name(&event.workload);
            let (source, destination) = match event.proxy_direction.as_str() {
                "INBOUND" => (peer_name(&event.source), workload),
                _ => (workload, peer_name(&event.destination)),
            };
            let key = RequestKey {
                source: if hide_sources { String::new() } else { source },
                destination,
                method: init.method.clone(),
                path: init.path.clone(),
            };
            self.pending.begin(request_id(init.id), key);
        } else if let Some(init) = &event.response_init_event {
            if let Some(request) = self.pending.find(&request_id(init.id)) {
                request.response_is_success = init.http_status < 500;
            }
        } else if let Some(end) = &event.response_end_event
            && let Some(PendingRequest {
                key,
                response_is_success,
            }) = self.pending.end(&request_id(end.id))
        {
            let failed = end.reset_error_code.is_some() || end.grpc_status_code.is_some_and(|code| code != 0);
            let latency = end.since_request_init.micros();
            if self.stats.len() >= MAX_TRACKED_KEYS && !self.stats.contains_key(&key) {
                self.evict_less_frequent_half();
            }
            let stats = self.stats.entry(key).or_default();
            stats.best = if stats.count == 0 {
                latency
            } else {
                stats.best.min(latency)
            };
            stats.worst = stats.worst.max(latency);
            stats.last = latency;
            stats.count += 1;
            stats.succeeded += u64::from(response_is_success && !failed);
        }
    }

    /// Removes the less frequent half of the entries, because paths can contain names that never occur again.
    fn evict_less_frequent_half(&mut self) {
        let n_kept = self.stats.len() / 2;
        let mut counts: Vec<_> = self.stats.values().map(|stats| stats.count).collect();
        counts.sort_unstable_by_key(|count| Reverse(*count));
        let Some(&least_kept) = counts[..n_kept].last() else {
            return;
        };
        // If more entries have this count than fit into the half, the rest of them is removed.
        let mut n_kept_with_least = counts[..n_kept].iter().filter(|count| **count == least_kept).count();
        self.stats.retain(|_, stats| {
            if stats.count == least_kept && n_kept_with_least > 0 {
                n_kept_with_least -= 1;
                return true;
            }
            stats.count > least_kept
        });
    }

    /// Formats the table, most frequent requests first.
    fn table(&self, lines: usize) -> String {
        let mut entries: Vec<_> = self.stats.iter().collect();
        entries.sort_by_key(|(_, stats)| Reverse(stats.count));
        let ms = |micros: i64| format!("{:.1}ms", micros as f64 / 1e3);
        let rows = entries.into_iter().take(lines).map(|(key, stats)| {
            [
                key.source.clone(),
                key.destination.clone(),
                key.method.clone(),
                key.path.clone(),
                stats.count.to_string(),
                ms(stats.best),
                ms(stats.worst),
                ms(stats.last),
                format!("{:.2}%", stats.succeeded as f64 / stats.count as f64 * 100.0),
            ]
        });
        table::render(&TITLES, rows)
    }
}

/// The name of the other end: its identity if it is known, otherwise its workload, otherwise its IP address.
fn peer_name(endpoint: &TapEndpoint) -> String {
    let label = |name: &str| endpoint.metadata.get(name).filter(|value| !value.is_empty());
    if let Some(id) = label("client_id") {
        return id.split(".serviceaccount.").next().unwrap_or(id).to_owned();
    }
    let owners = [
        ("deployment", "deploy"),
        ("statefulset", "sts"),
        ("daemonset", "ds"),
        ("external_workload", "ew"),
        ("pod", "pod"),
    ];
    let known = owners
        .iter()
        .find_map(|(kind, short)| Some(format!("{short}/{}", label(kind)?)));
    known.unwrap_or_else(|| endpoint.ip.clone())
}

const TITLES: [&str; 9] = [
    "SOURCE",
    "DESTINATION",
    "METHOD",
    "PATH",
    "COUNT",
    "BEST",
    "WORST",
    "LAST",
    "SUCCESS",
];
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of requests without an end event.
const MAX_PENDING_REQUESTS: usize = 100_000;
/// Maximum number of groups that are counted; the most frequent of them are shown.
const MAX_TRACKED_KEYS: usize = 10_000;

pub(crate) const EXAMPLES: &str = "\
  tulle top deploy/web -n shop
  tulle top ns/shop --hide-sources
  tulle top --control 127.0.0.1:8089          # without Kubernetes

Requires permission to watch taps.telemetry.tulle.dev in the namespace.";

#[cfg(test)]
mod tests {
    use super::super::tap::tests::events;
    use super::*;

    #[test]
    fn similar_requests_are_aggregated_most_frequent_first() {
        let mut top = Top::default();
        for event in [events("/a", 200), events("/b", 200), events("/b", 503)]
            .iter()
            .flatten()
        {
            top.record(event, true);
        }
        let table = top.table(10);
        let lines: Vec<Vec<_>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1][1..], ["GET", "/b", "2", "2.0ms", "2.0ms", "2.0ms", "50.00%"]);
        assert_eq!(lines[2][2..4], ["/a", "1"]);
        assert_eq!(top.table(1).lines().count(), 2);
        assert!(top.pending.newer.is_empty());
    }

    #[test]
    fn events_without_a_request_event_are_ignored() {
        let mut top = Top::default();
        let [_, response, ended] = events("/", 200);
        top.record(&response, false);
        top.record(&ended, false);
        assert!(top.stats.is_empty());
    }

    #[test]
    fn the_oldest_pending_requests_are_dropped() {
        let mut pending = PendingRequests::default();
        let id = |stream| ("INBOUND".to_owned(), StreamId { base: 0, stream });
        let key = |stream: u64| RequestKey {
            source: String::new(),
            destination: String::new(),
            method: String::new(),
            path: stream.to_string(),
        };
        let last = 2 * MAX_PENDING_REQUESTS as u64;
        for stream in 0..=last {
            pending.begin(id(stream), key(stream));
        }
        assert!(pending.newer.len() + pending.older.len() <= MAX_PENDING_REQUESTS);
        assert!(pending.find(&id(0)).is_none());
        for stream in [last, last - MAX_PENDING_REQUESTS as u64 / 2] {
            let ended = pending.end(&id(stream)).unwrap();
            assert_eq!(ended.key, key(stream));
        }
    }

    #[test]
    fn rare_paths_are_evicted_and_frequent_paths_are_kept() {
        let mut top = Top::default();
        for path in ["/often"; 3] {
            events(path, 200).iter().for_each(|event| top.record(event, true));
        }
        for n in 0..MAX_TRACKED_KEYS {
            events(&format!("/{n}"), 200)
                .iter()
                .for_each(|event| top.record(event, true));
        }
        assert_eq!(top.stats.len(), MAX_TRACKED_KEYS / 2 + 1);
        assert!(top.table(1).contains("/often"));
    }
}
