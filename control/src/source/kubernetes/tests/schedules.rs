//! A thousand random schedules of failures of the API server, in virtual time. A seed determines each schedule.
//!
//! While objects are created, changed and deleted, the server is killed, partitioned, slow, loses a CRD, forgets its history,
//! and responds with errors and garbage. Each second, the reported state of each kind is compared with that of the server.

use std::collections::BTreeMap;
use std::io;

use futures_util::Stream;
use tokio::sync::Notify;
use tokio::time::{sleep, sleep_until};

use super::*;
use crate::resources::meta::NamespacedName;

/// Time with random failures. After it, the server has `RECOVERY_TIME` to become healthy.
const CHAOS_TIME: Duration = Duration::from_secs(600);
const RECOVERY_TIME: Duration = Duration::from_secs(90);

/// Maximum age of the reported state of a kind that is not reported as stale.
const MAX_UNNOTICED_AGE: Duration = Duration::from_secs(60);

/// Number of object names of each kind.
const N_NAMES: usize = 12;
const PAGE_SIZE: usize = 5;

/// Seconds until TCP keep-alive closes the connection to an unreachable server.
const KEEP_ALIVE_SECONDS: std::ops::Range<u64> = 15..35;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
const BOOKMARK_INTERVAL: Duration = Duration::from_secs(60);

struct SimulatedKind {
    kind: Kind,
    plural: &'static str,
    spec: &'static str,
}

const SIMULATED_KINDS: [SimulatedKind; 3] = [
    SimulatedKind {
        kind: Kind::Service,
        plural: "services",
        spec: r#"{"clusterIP":"10.0.0.1","ports":[{"port":80}]}"#,
    },
    SimulatedKind {
        kind: Kind::Server,
        plural: "servers",
        spec: r#"{"podSelector":{},"port":80}"#,
    },
    SimulatedKind {
        kind: Kind::NetworkAuthentication,
        plural: "networkauthentications",
        spec: r#"{"networks":[{"cidr":"10.0.0.0/8"}]}"#,
    },
];

/// The index in `SIMULATED_KINDS` of the kind whose CRD can be uninstalled.
const KIND_WITH_REMOVABLE_CRD: usize = 1;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Condition {
    Healthy,
    /// Connections are reset and refused.
    Down,
    /// Packets are dropped.
    Partitioned,
    /// Responses and changes are delayed.
    Slow,
    /// Every response has this status.
    Failing(u16),
    /// Every response is random bytes or a document of another type.
    Garbage,
    /// Each request has a random fault or none.
    Flaky,
    /// A CRD is not installed.
    Uninstalled,
}

#[derive(Clone, Copy, Debug)]
struct Change {
    revision: u64,
    at: Instant,
    /// Whether the object exists after the change.
    exists: bool,
}

struct ApiServer {
    rng: fastrand::Rng,
    condition: Condition,
    /// Revision of the last change.
    revision: u64,
    /// The changes of each object, by kind and name.
    changes: BTreeMap<(usize, usize), Vec<Change>>,
    /// Watches from an earlier revision get 410.
    compacted_revision: u64,
    /// Connections of an earlier start are broken.
    n_starts: u64,
}

/// The server, and the notification of its changes.
type Shared = Arc<(Mutex<ApiServer>, Notify)>;

/// The reported objects, with their revisions.
type ReportedObjects = BTreeMap<(usize, usize), u64>;

fn kind_index(uri: &str) -> Option<usize> {
    let path = uri.split('?').next().unwrap_or_default();
    SIMULATED_KINDS
        .iter()
        .position(|kind| path.ends_with(&format!("/{}", kind.plural)))
}

fn query_value<'a>(uri: &'a str, key: &str) -> Option<&'a str> {
    let (_, query) = uri.split_once('?')?;
    query
        .split('&')
        .find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='))
}

fn object_json(kind: usize, name: usize, revision: u64) -> String {
    let spec = SIMULATED_KINDS[kind].spec;
    format!(r#"{{"metadata":{{"name":"o{name}","namespace":"shop","resourceVersion":"{revision}"}},"spec":{spec}}}"#)
}

fn connection_error(kind: io::ErrorKind) -> io::Error {
    io::Error::new(kind, "simulated")
}

impl ApiServer {
    /// Returns the objects of a kind, each with its changes.
    fn objects(&self, kind: usize) -> impl Iterator<Item = (usize, &[Change])> {
        let objects = self.changes.range((kind, 0)..(kind + 1, 0));
        objects.map(|(&(_, name), changes)| (name, &**changes))
    }

    /// Returns the revisions of the objects of a kind that exist at `revision`.
    fn objects_at(&self, kind: usize, revision: u64) -> BTreeMap<usize, u64> {
        let last = |changes: &[Change]| changes.iter().rfind(|change| change.revision <= revision).copied();
        self.objects(kind)
            .filter_map(|(name, changes)| {
                last(changes)
                    .filter(|last| last.exists)
                    .map(|last| (name, last.revision))
            })
            .collect()
    }

    fn change(&mut self, kind: usize, name: usize, exists: bool) {
        self.revision += self.rng.u64(1..4);
        let (revision, at) = (self.revision, Instant::now());
        let change = Change { revision, at, exists };
        self.changes.entry((kind, name)).or_default().push(change);
    }

    fn change_random_object(&mut self) {
        let (kind, name) = (self.rng.usize(..SIMULATED_KINDS.len()), self.rng.usize(..N_NAMES));
        if self.condition == Condition::Uninstalled && kind == KIND_WITH_REMOVABLE_CRD {
            return;
        }
        let last = self.changes.get(&(kind, name)).and_then(|changes| changes.last());
        let exists = !last.is_some_and(|last| last.exists) || self.rng.u8(..3) > 0;
        self.change(kind, name, exists);
    }

    fn set_condition(&mut self, condition: Condition) {
        self.condition = condition;
        if condition == Condition::Down {
            self.n_starts += 1;
        }
        if condition == Condition::Uninstalled {
            for (name, _) in self.objects_at(KIND_WITH_REMOVABLE_CRD, u64::MAX) {
                self.change(KIND_WITH_REMOVABLE_CRD, name, false);
            }
        }
        if self.rng.u8(..4) == 0 {
            self.compacted_revision = self.revision;
        }
    }

    fn random_condition(&mut self) -> Condition {
        const STATUSES: [u16; 7] = [404, 410, 429, 500, 503, 403, 504];
        match self.rng.u8(..10) {
            0 | 1 => Condition::Healthy,
            2 => Condition::Down,
            3 => Condition::Partitioned,
            4 => Condition::Slow,
            5 => Condition::Failing(STATUSES[self.rng.usize(..STATUSES.len())]),
            6 => Condition::Garbage,
            7 => Condition::Uninstalled,
            _ => Condition::Flaky,
        }
    }

    /// Returns the condition for one request: for a flaky server a random one.
    fn request_condition(&mut self) -> Condition {
        match self.condition {
            Condition::Flaky => match self.random_condition() {
                Condition::Uninstalled | Condition::Partitioned | Condition::Flaky => Condition::Healthy,
                condition => condition,
            },
            condition => condition,
        }
    }

    fn garbage(&mut self) -> String {
        const GARBAGE: [&str; 9] = [
            "",
            "<html>a login page</html>",
            "{}",
            "null",
            r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","code":500}"#,
            r#"{"metadata":{"resourceVersion":"7"}}"#,
            r#"{"metadata":{"resourceVersion":"7"},"items":[{"metadata""#,
            r#"{"type":"ADDED","object":{"spec":{}}}"#,
            "\u{0}\u{1}\u{2}",
        ];
        GARBAGE[self.rng.usize(..GARBAGE.len())].to_owned() + if self.rng.bool() { "\n" } else { "" }
    }
}

async fn respond(server: Shared, uri: String) -> io::Result<Response<TestBody>> {
    let condition = server.0.lock().request_condition();
    match condition {
        Condition::Down => return Err(connection_error(io::ErrorKind::ConnectionRefused)),
        Condition::Partitioned => {
            let deadline = Instant::now() + CONNECT_TIMEOUT;
            while server.0.lock().condition == Condition::Partitioned {
                if Instant::now() >= deadline {
                    return Err(connection_error(io::ErrorKind::TimedOut));
                }
                sleep(Duration::from_secs(1)).await;
            }
        }
        Condition::Slow => {
            let seconds = server.0.lock().rng.u64(..40);
            sleep(Duration::from_secs(seconds)).await;
        }
        Condition::Failing(status) => {
            return Ok(text_body(
                status,
                format!(r#"{{"code":{status},"message":"simulated"}}"#),
            ));
        }
        Condition::Garbage => {
            let garbage = server.0.lock().garbage();
            return Ok(text_body(200, garbage));
        }
        Condition::Healthy | Condition::Flaky | Condition::Uninstalled => {}
    }
    let is_uninstalled = server.0.lock().condition == Condition::Uninstalled;
    let Some(kind) = kind_index(&uri) else {
        return Ok(other_response(&uri, !is_uninstalled));
    };
    if kind == KIND_WITH_REMOVABLE_CRD && is_uninstalled {
        return Ok(text_body(404, "404 page not found"));
    }
    Ok(match query_value(&uri, "resourceVersion") {
        Some(since) => watch_response(server, kind, since.parse().unwrap(), requested_timeout(&uri)),
        None => list_response(&server, kind, query_value(&uri, "continue")),
    })
}

/// Responds to discovery, and to requests for kinds that are not simulated, which have no objects.
fn other_response(uri: &str, has_servers: bool) -> Response<TestBody> {
    let scripted = match (uri.contains('?'), uri.contains("watch=true")) {
        (false, _) => discovery_response(uri, has_servers),
        (true, false) => text_response(200, r#"{"metadata":{"resourceVersion":"1"},"items":null}"#),
        (true, true) => {
            let bookmark = watch_line("BOOKMARK", r#"{"metadata":{"resourceVersion":"1"}}"#);
            watch(&[&bookmark], AfterChunks::EndAtTimeout)
        }
    };
    response(scripted, uri)
}

fn text_body(status: u16, text: impl Into<String>) -> Response<TestBody> {
    response(text_response(status, text), "")
}

fn list_response(server: &Shared, kind: usize, token: Option<&str>) -> Response<TestBody> {
    let server = server.0.lock();
    let (revision, start) = match token {
        Some(token) => {
            let (revision, start) = token.split_once('-').unwrap();
            (revision.parse().unwrap(), start.parse().unwrap())
        }
        None => (server.revision, 0),
    };
    if revision < server.compacted_revision {
        return text_body(410, r#"{"code":410,"message":"the token has expired"}"#);
    }
    let objects = server.objects_at(kind, revision);
    let items: Vec<_> = objects.iter().skip(start).take(PAGE_SIZE).collect();
    let end = start + items.len();
    let next = if end < objects.len() {
        format!("{revision}-{end}")
    } else {
        String::new()
    };
    let items: Vec<_> = items
        .into_iter()
        .map(|(name, revision)| object_json(kind, *name, *revision))
        .collect();
    let items = items.join(",");
    text_body(
        200,
        format!(r#"{{"metadata":{{"resourceVersion":"{revision}","continue":"{next}"}},"items":[{items}]}}"#),
    )
}

fn watch_response(server: Shared, kind: usize, since: u64, limit: Duration) -> Response<TestBody> {
    let (is_expired, as_event) = {
        let mut server = server.0.lock();
        (since < server.compacted_revision, server.rng.bool())
    };
    if is_expired {
        return match as_event {
            true => text_body(200, watch_line("ERROR", r#"{"code":410,"reason":"Expired"}"#)),
            false => text_body(410, r#"{"code":410,"message":"too old"}"#),
        };
    }
    let frames = watch_chunks(server, kind, since, limit).map(|chunk| Ok(Frame::data(Bytes::from(chunk?))));
    Response::new(UnsyncBoxBody::new(StreamBody::new(frames)))
}

/// What a watch does next.
enum WatchStep {
    Send(String),
    Wait(Instant),
    Fail(io::ErrorKind),
    End,
    /// All packets are lost for this time.
    Lose(Duration),
}

struct WatchState {
    server: Shared,
    kind: usize,
    sent_revision: u64,
    n_starts: u64,
    ends_at: Instant,
    bookmark_at: Instant,
}

impl WatchState {
    fn next_step(&mut self) -> WatchStep {
        let mut server = self.server.0.lock();
        if server.n_starts != self.n_starts {
            return WatchStep::Fail(io::ErrorKind::ConnectionReset);
        }
        if server.condition == Condition::Partitioned {
            return WatchStep::Lose(Duration::from_secs(server.rng.u64(KEEP_ALIVE_SECONDS)));
        }
        let is_flaky = server.condition == Condition::Flaky && server.rng.u8(..20) == 0;
        if is_flaky {
            return match server.rng.u8(..3) {
                0 => WatchStep::Send(server.garbage() + "\n"),
                1 => WatchStep::Send(watch_line("ERROR", r#"{"code":500,"message":"simulated"}"#)),
                _ => WatchStep::Fail(io::ErrorKind::ConnectionReset),
            };
        }
        let mut changes: Vec<(u64, String)> = Vec::new();
        for (name, changes_of_object) in server.objects(self.kind) {
            let unsent = changes_of_object.iter().rev();
            let unsent = unsent.take_while(|change| change.revision > self.sent_revision);
            changes.extend(unsent.map(|change| {
                let event_type = if change.exists { "MODIFIED" } else { "DELETED" };
                let object = object_json(self.kind, name, change.revision);
                (change.revision, watch_line(event_type, &object))
            }));
        }
        changes.sort_unstable();
        let lines: String = changes.into_iter().map(|(_, line)| line).collect();
        let revision = server.revision;
        let now = Instant::now();
        if !lines.is_empty() {
            self.sent_revision = revision;
            return WatchStep::Send(lines);
        }
        if server.condition == Condition::Uninstalled && self.kind == KIND_WITH_REMOVABLE_CRD || now >= self.ends_at {
            return WatchStep::End;
        }
        if now >= self.bookmark_at {
            self.bookmark_at = now + BOOKMARK_INTERVAL;
            let bookmark = format!(r#"{{"metadata":{{"resourceVersion":"{revision}"}}}}"#);
            return WatchStep::Send(watch_line("BOOKMARK", &bookmark));
        }
        WatchStep::Wait(self.ends_at.min(self.bookmark_at))
    }
}

fn watch_chunks(server: Shared, kind: usize, since: u64, limit: Duration) -> impl Stream<Item = io::Result<String>> {
    let now = Instant::now();
    let n_starts = server.0.lock().n_starts;
    let state = WatchState {
        server,
        kind,
        sent_revision: since,
        n_starts,
        ends_at: now + limit,
        bookmark_at: now + BOOKMARK_INTERVAL,
    };
    stream::unfold(Some(state), |state| async {
        let mut state = state?;
        let server = state.server.clone();
        loop {
            // Created before the look at the server, so that no change is missed.
            let changed = server.1.notified();
            match state.next_step() {
                WatchStep::Send(lines) => {
                    let seconds = match server.0.lock() {
                        mut server if server.condition == Condition::Slow => server.rng.u64(..10),
                        _ => 0,
                    };
                    sleep(Duration::from_secs(seconds)).await;
                    return Some((Ok(lines), Some(state)));
                }
                WatchStep::Wait(until) => tokio::select! {
                    () = changed => {}
                    () = sleep_until(until) => {}
                },
                WatchStep::Fail(error) => return Some((Err(connection_error(error)), None)),
                WatchStep::End => return None,
                WatchStep::Lose(time) => {
                    sleep(time).await;
                    if server.0.lock().condition == Condition::Partitioned {
                        return Some((Err(connection_error(io::ErrorKind::TimedOut)), None));
                    }
                }
            }
        }
    })
}

/// Applies an event to the reported objects. Panics if the event loses an object that the server has, or goes back to an earlier
/// revision.
fn apply_to_reported_objects(server: &ApiServer, reported: &mut ReportedObjects, event: &Event) {
    let index = |kind: Kind, name: &NamespacedName| {
        let kind = SIMULATED_KINDS.iter().position(|simulated| simulated.kind == kind)?;
        Some((kind, name.name.strip_prefix('o')?.parse::<usize>().ok()?))
    };
    match event {
        Event::Applied(object) => {
            let Some(key) = index(object.kind(), &object.meta().name) else {
                return;
            };
            let revision: u64 = object.meta().version.parse().unwrap();
            if let Some(before) = reported.insert(key, revision) {
                assert!(
                    before < revision,
                    "{key:?} went from revision {before} back to {revision}"
                );
            }
        }
        Event::Deleted(kind, name) => {
            let key = index(*kind, name).unwrap();
            let seen = reported
                .remove(&key)
                .unwrap_or_else(|| panic!("{key:?} was deleted twice"));
            let was_deleted = server.changes[&key]
                .iter()
                .any(|change| change.revision > seen && !change.exists);
            assert!(
                was_deleted,
                "{key:?} was lost: the server has had it since revision {seen}"
            );
        }
        Event::Unreadable(unreadable) => panic!("{:?} cannot be read", unreadable.name),
        Event::Synced => {}
    }
}

/// Returns for how long a reported object has differed from the server, or zero if it does not differ.
fn age_of_reported_object(server: &ApiServer, key: (usize, usize), seen: Option<u64>) -> Duration {
    let Some(changes) = server.changes.get(&key) else {
        return Duration::ZERO;
    };
    let outdated_by = match seen {
        Some(seen) => changes.iter().find(|change| change.revision > seen),
        // The creation of the object that exists now.
        None => match changes.last() {
            Some(last) if last.exists => {
                let absent = changes.iter().rposition(|change| !change.exists);
                changes.get(absent.map_or(0, |index| index + 1))
            }
            _ => None,
        },
    };
    outdated_by.map_or(Duration::ZERO, |change| change.at.elapsed())
}

/// Compares the reported objects with the server. Panics if one is outdated for too long and its kind is not reported as stale.
fn check_ages(server: &ApiServer, reported: &ReportedObjects, stale: &[String], max_age: Duration) {
    for (index, kind) in SIMULATED_KINDS.iter().enumerate() {
        if stale
            .iter()
            .any(|reason| reason.starts_with(&format!("{}:", kind.plural)))
        {
            continue;
        }
        for name in 0..N_NAMES {
            let seen = reported.get(&(index, name)).copied();
            let age = age_of_reported_object(server, (index, name), seen);
            assert!(
                age <= max_age,
                "object {name} of {} is outdated for {age:?} at {seen:?}, and not reported as stale: {:?}, {stale:?}",
                kind.plural,
                server.condition,
            );
        }
    }
}

/// Runs the schedule of a seed. Panics if a property does not hold.
async fn run_schedule(seed: u64) {
    let server: Shared = Arc::new((
        Mutex::new(ApiServer {
            rng: fastrand::Rng::with_seed(seed),
            condition: Condition::Healthy,
            revision: 1,
            changes: BTreeMap::new(),
            compacted_revision: 0,
            n_starts: 0,
        }),
        Notify::new(),
    ));
    let reported = Arc::new(Mutex::new(ReportedObjects::new()));
    let (server_of_service, server_of_sink, reported_by_sink) = (server.clone(), server.clone(), reported.clone());
    let service = service_fn(move |req: Request<Body>| respond(server_of_service.clone(), req.uri().to_string()));
    let sink = EventSink::new(move |events| {
        let server = server_of_sink.0.lock();
        let mut reported = reported_by_sink.lock();
        events
            .iter()
            .for_each(|event| apply_to_reported_objects(&server, &mut reported, event));
    });
    let source = start_source(service, sink);
    let start = Instant::now();
    let mut next_condition_at = start;
    while start.elapsed() < CHAOS_TIME {
        {
            let mut server = server.0.lock();
            if Instant::now() >= next_condition_at {
                let condition = server.random_condition();
                server.set_condition(condition);
                next_condition_at = Instant::now() + Duration::from_secs(server.rng.u64(1..120));
            }
            if server.rng.u8(..3) == 0 {
                server.change_random_object();
            }
            check_ages(
                &server,
                &reported.lock(),
                &source.stale_kinds.reasons(),
                MAX_UNNOTICED_AGE,
            );
        }
        server.1.notify_waiters();
        sleep(Duration::from_secs(1)).await;
        assert!(!source.running.is_finished(), "the source ended");
    }
    server.0.lock().set_condition(Condition::Healthy);
    server.1.notify_waiters();
    sleep(RECOVERY_TIME).await;
    assert_eq!(source.stale_kinds.reasons(), [""; 0], "after recovery");
    check_ages(&server.0.lock(), &reported.lock(), &[], Duration::ZERO);
}

/// Runs the schedules of every fourth of these seeds, or of all with `TULLE_TEST_FULL=1`: all of them take minutes of CPU time.
fn run_schedules(seeds: std::ops::Range<u64>) {
    let step = if std::env::var_os("TULLE_TEST_FULL").is_some() {
        1
    } else {
        4
    };
    for seed in seeds.step_by(step) {
        fastrand::seed(seed);
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_time().start_paused(true).build().unwrap();
        let schedule = std::panic::AssertUnwindSafe(|| runtime.block_on(run_schedule(seed)));
        if std::panic::catch_unwind(schedule).is_err() {
            panic!("the schedule of seed {seed} failed");
        }
    }
}

// The schedules are divided into four tests, because a single test would exceed its timeout while other tests use the CPUs.

#[test]
fn the_source_follows_an_api_server_with_random_failures_in_schedules_0_to_249() {
    run_schedules(0..250);
}

#[test]
fn the_source_follows_an_api_server_with_random_failures_in_schedules_250_to_499() {
    run_schedules(250..500);
}

#[test]
fn the_source_follows_an_api_server_with_random_failures_in_schedules_500_to_749() {
    run_schedules(500..750);
}

#[test]
fn the_source_follows_an_api_server_with_random_failures_in_schedules_750_to_999() {
    run_schedules(750..1000);
}
