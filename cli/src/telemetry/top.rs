//! `tulle top`: which requests pass, how often, how fast and how well, from a tap.

use std::collections::BTreeMap;
use std::mem;
use std::process::ExitCode;
use std::time::Duration;

use tokio::signal::ctrl_c;
use tokio::time::{MissedTickBehavior, interval};
use tulle_control::telemetry::events::{End, Id, TapEvent};

use super::golden::qualified;
use super::tap::Which;
use crate::screen::Screen;
use crate::{kubernetes, runtime, table};

/// Whose requests, and how they are summed up.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    which: Which,
    /// Sum up requests of all clients
    #[arg(long)]
    hide_sources: bool,
    /// Show so many lines
    #[arg(long, value_name = "N", default_value_t = 25)]
    lines: usize,
}

pub(crate) fn main(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    runtime()?.block_on(async {
        let mut tap = args.which.begin(flags, false).await?;
        let mut screen = Screen::new();
        let mut top = Top::default();
        let mut ticks = interval(REFRESH);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            // What a tap has read stays with it, so it may be dropped.
            tokio::select! {
                event = tap.next() => match event? {
                    Some(event) => top.take(&event, args.hide_sources),
                    None => break,
                },
                _ = ticks.tick() => screen.draw(&top.table(args.lines)),
                _ = ctrl_c() => break,
            }
        }
        // Into a file or a pipe goes what it was in the end.
        if !screen.is_terminal() {
            crate::print(&top.table(args.lines))?;
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// Requests that are alike.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    source: String,
    destination: String,
    method: String,
    path: String,
}

#[derive(Default)]
struct Sum {
    count: u64,
    succeeded: u64,
    /// Microseconds.
    best: i64,
    worst: i64,
    last: i64,
}

#[derive(Default)]
struct Top {
    sums: BTreeMap<Key, Sum>,
    open: Open,
}

/// Requests that have no end yet, and whether their response is a success so far.
///
/// Those that began first are given up once there are too many: streams may have no end for days, and ends are lost
/// where a tap is slow.
#[derive(Default)]
struct Open {
    newer: BTreeMap<(String, Id), (Key, bool)>,
    older: BTreeMap<(String, Id), (Key, bool)>,
}

impl Open {
    fn begin(&mut self, id: (String, Id), key: Key) {
        if self.newer.len() >= MOST_OPEN / 2 {
            self.older = mem::take(&mut self.newer);
        }
        self.newer.insert(id, (key, false));
    }

    fn find(&mut self, id: &(String, Id)) -> Option<&mut (Key, bool)> {
        self.newer.get_mut(id).or_else(|| self.older.get_mut(id))
    }

    fn end(&mut self, id: &(String, Id)) -> Option<(Key, bool)> {
        self.newer.remove(id).or_else(|| self.older.remove(id))
    }
}

impl Top {
    fn take(&mut self, event: &TapEvent, hide_sources: bool) {
        let of = |id: Id| (event.proxy_direction.clone(), id);
        if let Some(init) = &event.request_init_event {
            let own = qualified(&event.workload);
            let (source, destination) = match event.proxy_direction.as_str() {
                "INBOUND" => (who(&event.source), own),
                _ => (own, who(&event.destination)),
            };
            let key = Key {
                source: if hide_sources { String::new() } else { source },
                destination,
                method: init.method.clone(),
                path: init.path.clone(),
            };
            self.open.begin(of(init.id), key);
        } else if let Some(init) = &event.response_init_event {
            if let Some((_, success)) = self.open.find(&of(init.id)) {
                *success = init.http_status < 500;
            }
        } else if let Some(end) = &event.response_end_event
            && let Some((key, success)) = self.open.end(&of(end.id))
        {
            let failed = end.reset_error_code.is_some() || end.grpc_status_code.is_some_and(|code| code != 0);
            let latency = end.since_request_init.micros();
            if self.sums.len() >= MOST_SUMS && !self.sums.contains_key(&key) {
                self.forget_the_rarest();
            }
            let sum = self.sums.entry(key).or_default();
            sum.best = if sum.count == 0 { latency } else { sum.best.min(latency) };
            sum.worst = sum.worst.max(latency);
            sum.last = latency;
            sum.count += 1;
            sum.succeeded += u64::from(success && !failed);
        }
    }

    /// Makes room: paths may have names in them that never come again.
    fn forget_the_rarest(&mut self) {
        let mut counts: Vec<_> = self.sums.values().map(|sum| sum.count).collect();
        let (_, median, _) = counts.select_nth_unstable(MOST_SUMS / 2);
        let median = *median;
        self.sums.retain(|_, sum| sum.count > median);
    }

    /// The most frequent first.
    fn table(&self, lines: usize) -> String {
        let mut sums: Vec<_> = self.sums.iter().collect();
        sums.sort_by_key(|(_, sum)| std::cmp::Reverse(sum.count));
        let ms = |micros: i64| format!("{:.1}ms", micros as f64 / 1e3);
        let rows = sums.into_iter().take(lines).map(|(key, sum)| {
            [
                key.source.clone(),
                key.destination.clone(),
                key.method.clone(),
                key.path.clone(),
                sum.count.to_string(),
                ms(sum.best),
                ms(sum.worst),
                ms(sum.last),
                format!("{:.2}%", sum.succeeded as f64 / sum.count as f64 * 100.0),
            ]
        });
        table::text(&TITLES, rows)
    }
}

/// What the other end is, as far as it is known.
fn who(end: &End) -> String {
    let label = |name: &str| end.metadata.get(name).filter(|value| !value.is_empty());
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
    known.unwrap_or_else(|| end.ip.clone())
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
const REFRESH: Duration = Duration::from_secs(1);
/// Requests whose end is waited for.
const MOST_OPEN: usize = 100_000;
/// Sums of which the most frequent are shown.
const MOST_SUMS: usize = 10_000;

pub(crate) const EXAMPLES: &str = "\
  tulle top deploy/web -n shop
  tulle top ns/shop --hide-sources
  tulle top --control 127.0.0.1:8089          # without Kubernetes

It takes the right to watch taps.telemetry.tulle.dev in the namespace.";

#[cfg(test)]
mod tests {
    use super::super::tap::tests::events;
    use super::*;

    #[test]
    fn requests_that_are_alike_are_summed_up_the_most_frequent_first() {
        let mut top = Top::default();
        for event in [events("/a", 200), events("/b", 200), events("/b", 503)]
            .iter()
            .flatten()
        {
            top.take(event, true);
        }
        let table = top.table(10);
        let lines: Vec<Vec<_>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1][1..], ["GET", "/b", "2", "2.0ms", "2.0ms", "2.0ms", "50.00%"]);
        assert_eq!(lines[2][2..4], ["/a", "1"]);
        assert_eq!(top.table(1).lines().count(), 2);
        assert!(top.open.newer.is_empty());
    }

    #[test]
    fn ends_without_a_beginning_are_left_out() {
        let mut top = Top::default();
        let [_, response, ended] = events("/", 200);
        top.take(&response, false);
        top.take(&ended, false);
        assert!(top.sums.is_empty());
    }

    #[test]
    fn requests_without_an_end_make_room_for_new_ones() {
        let mut open = Open::default();
        let id = |stream| ("INBOUND".to_owned(), Id { base: 0, stream });
        let key = |stream: u64| Key {
            source: String::new(),
            destination: String::new(),
            method: String::new(),
            path: stream.to_string(),
        };
        let last = 2 * MOST_OPEN as u64;
        for stream in 0..=last {
            open.begin(id(stream), key(stream));
        }
        assert!(open.newer.len() + open.older.len() <= MOST_OPEN);
        assert!(open.find(&id(0)).is_none());
        for stream in [last, last - MOST_OPEN as u64 / 2] {
            assert_eq!(open.end(&id(stream)), Some((key(stream), false)));
        }
    }

    #[test]
    fn paths_that_come_once_make_room_and_frequent_ones_stay() {
        let mut top = Top::default();
        for path in ["/often"; 3] {
            events(path, 200).iter().for_each(|event| top.take(event, true));
        }
        for n in 0..MOST_SUMS {
            events(&format!("/{n}"), 200)
                .iter()
                .for_each(|event| top.take(event, true));
        }
        assert!(top.sums.len() < MOST_SUMS);
        assert!(top.table(1).contains("/often"));
    }
}
