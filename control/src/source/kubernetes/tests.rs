//! Failures of the API server, simulated by scripted responses.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{Request, Response};
use http_body_util::StreamBody;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Frame;
use kube::Client;
use kube::client::Body;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tower::{BoxError, Service, service_fn};
use tulle_core::drain;
use tulle_core::metrics::Registry;

use super::*;
use crate::resources::Object;

const ABSENT_ROUNDS: usize = reflector::ABSENT_ROUNDS_BEFORE_DELETE as usize;

/// A response: chunks of the body, then an action.
struct ScriptedResponse {
    status: u16,
    chunks: Vec<String>,
    after_chunks: AfterChunks,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AfterChunks {
    End,
    /// The response ends at the timeout that the watch requested.
    EndAtTimeout,
    Hang,
}

fn text_response(status: u16, text: impl Into<String>) -> ScriptedResponse {
    ScriptedResponse {
        status,
        chunks: vec![text.into()],
        after_chunks: AfterChunks::End,
    }
}

fn watch(chunks: &[&str], then: AfterChunks) -> ScriptedResponse {
    ScriptedResponse {
        status: 200,
        chunks: chunks.iter().map(|&chunk| chunk.to_owned()).collect(),
        after_chunks: then,
    }
}

fn list(version: u32, items: &[&str]) -> ScriptedResponse {
    page(version, "", items)
}

fn page(version: u32, next: &str, items: &[&str]) -> ScriptedResponse {
    let items = items.join(",");
    text_response(
        200,
        format!(r#"{{"metadata":{{"resourceVersion":"{version}","continue":"{next}"}},"items":[{items}]}}"#),
    )
}

fn server(name: &str, version: u32) -> String {
    format!(
        r#"{{"metadata":{{"name":"{name}","namespace":"shop","resourceVersion":"{version}"}},
            "spec":{{"podSelector":{{}},"port":80}}}}"#
    )
}

fn watch_line(event_type: &str, object: &str) -> String {
    format!(
        "{{\"type\":\"{event_type}\",\"object\":{}}}\n",
        object.replace('\n', "")
    )
}

type TestBody = UnsyncBoxBody<Bytes, io::Error>;

/// Returns the `timeoutSeconds` of a watch request.
fn requested_timeout(uri: &str) -> Duration {
    let seconds = uri.split_once("timeoutSeconds=").map_or("", |(_, rest)| rest);
    Duration::from_secs(seconds.split('&').next().unwrap().parse().unwrap_or(0))
}

fn response(answer: ScriptedResponse, uri: &str) -> Response<TestBody> {
    let chunks = stream::iter(answer.chunks);
    let rest = match answer.after_chunks {
        AfterChunks::End => stream::empty().boxed(),
        AfterChunks::EndAtTimeout => {
            let end = tokio::time::sleep(requested_timeout(uri));
            stream::once(end).filter_map(|()| std::future::ready(None)).boxed()
        }
        AfterChunks::Hang => stream::pending().boxed(),
    };
    let frames = chunks
        .chain(rest)
        .map(|chunk: String| Ok(Frame::data(Bytes::from(chunk))));
    Response::builder()
        .status(answer.status)
        .body(UnsyncBoxBody::new(StreamBody::new(frames)))
        .unwrap()
}

/// A source with a scripted API server.
struct ScriptedSource {
    /// Each request, with its time in seconds since the start.
    requests: Arc<Mutex<Vec<(u64, String)>>>,
    batches: Arc<Mutex<Vec<String>>>,
    source: RunningSource,
}

struct RunningSource {
    /// Ready while no kind is stale.
    stale_kinds: Readiness,
    registry: Registry,
    running: JoinHandle<Result<(), SourceError>>,
}

impl Drop for RunningSource {
    fn drop(&mut self) {
        self.running.abort();
    }
}

impl Deref for ScriptedSource {
    type Target = RunningSource;

    fn deref(&self) -> &RunningSource {
        &self.source
    }
}

/// Like [`start_with_discovery`], with a discovery that omits Servers.
fn start_scripted(script: impl Fn(usize, &str) -> ScriptedResponse + Send + Sync + 'static) -> ScriptedSource {
    start_with_discovery(|_, uri| discovery_response(uri, false), script)
}

/// Returns a discovery response with or without Servers.
fn discovery_response(uri: &str, has_servers: bool) -> ScriptedResponse {
    match (uri, has_servers) {
        ("/apis", false) => text_response(200, r#"{"groups":[{"name":"apps","versions":[{"version":"v1"}]}]}"#),
        ("/apis", true) => text_response(
            200,
            r#"{"groups":[{"name":"policy.linkerd.io","versions":[{"version":"v1beta3"}]}]}"#,
        ),
        (_, true) => text_response(200, r#"{"resources":[{"name":"servers"}]}"#),
        (_, false) => text_response(404, "404 page not found"),
    }
}

/// Runs a source. `discovery` gets the number of earlier discovery requests, `script` the number of earlier requests
/// for Servers. Requests for all other kinds return empty lists.
fn start_with_discovery(
    discovery: impl Fn(usize, &str) -> ScriptedResponse + Send + Sync + 'static,
    script: impl Fn(usize, &str) -> ScriptedResponse + Send + Sync + 'static,
) -> ScriptedSource {
    let requests = Arc::new(Mutex::new(Vec::new()));
    let batches = Arc::new(Mutex::new(Vec::new()));
    let (seen, start) = (requests.clone(), Instant::now());
    let n_discovery_requests = AtomicUsize::new(0);
    let service = service_fn(move |req: Request<Body>| {
        let uri = req.uri().to_string();
        let answer = if !uri.contains('?') {
            let n = n_discovery_requests.fetch_add(1, Ordering::Relaxed);
            discovery(n, &uri)
        } else if uri.contains("/servers?") {
            let mut seen = seen.lock();
            seen.push((start.elapsed().as_secs(), uri.clone()));
            script(seen.len() - 1, &uri)
        } else if uri.contains("watch=true") {
            watch(&[], AfterChunks::EndAtTimeout)
        } else {
            text_response(200, r#"{"metadata":{"resourceVersion":"1"},"items":null}"#)
        };
        std::future::ready(Ok::<_, Infallible>(response(answer, &uri)))
    });
    let written = batches.clone();
    let sink = EventSink::new(move |events| {
        let events: Vec<_> = events.iter().map(summarize).collect();
        written.lock().push(events.join(" "));
    });
    ScriptedSource {
        requests,
        batches,
        source: start_source(service, sink),
    }
}

/// Runs a source of the kinds that policy needs. `service` is the API server.
fn start_source<S, E>(service: S, sink: EventSink) -> RunningSource
where
    S: Service<Request<Body>, Response = Response<TestBody>, Error = E, Future: Send> + Send + 'static,
    E: Into<BoxError>,
{
    let config = Config {
        requirements: WatchRequirements {
            destination: false,
            policy: true,
            endpoints_source: EndpointsSource::EndpointSlices,
        },
        log_addr: ":8086".to_owned(),
        stale_kinds: Readiness::new(),
    };
    let (stale_kinds, registry) = (config.stale_kinds.clone(), Registry::new());
    let source_registry = registry.clone();
    let (signal, drain) = drain::channel();
    let client = Client::new(service, "default");
    let running = tokio::spawn(async move {
        let _signal = signal;
        run(client, config, sink, source_registry, drain).await
    });
    RunningSource {
        stale_kinds,
        registry,
        running,
    }
}

/// Formats an event in short form.
fn summarize(event: &Event) -> String {
    match event {
        Event::Applied(Object::Server(server)) => format!("+{}@{}", server.meta.name.name, server.meta.version),
        Event::Applied(object) => format!("+{:?}", object.kind()),
        Event::Deleted(_, name) => format!("-{}", name.name),
        Event::Unreadable(unreadable) => format!("?{}", unreadable.name.name),
        Event::Synced => "synced".to_owned(),
    }
}

impl ScriptedSource {
    /// Waits until exactly these batches have been written. `synced` can be anywhere between them.
    async fn wait_for_batches(&self, expected: &[&str]) {
        let written = || {
            let batches = self.batches.lock();
            batches
                .iter()
                .filter(|batch| *batch != "synced")
                .cloned()
                .collect::<Vec<_>>()
        };
        let deadline = Instant::now() + Duration::from_secs(3600);
        while written().len() < expected.len() && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(written(), expected);
    }

    /// Waits until the gauge of stale Servers has this value.
    async fn wait_for_stale(&self, expected: u8) {
        let line = format!(r#"tulle_kind_is_stale{{kind="servers"}} {expected}"#);
        let deadline = Instant::now() + Duration::from_secs(3600);
        while !self.registry.render().contains(&line) {
            assert!(
                Instant::now() < deadline,
                "{line} is not in\n{}",
                self.registry.render()
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn wait_for_synced(&self) {
        let deadline = Instant::now() + Duration::from_secs(3600);
        while !self.batches.lock().iter().any(|batch| batch == "synced") {
            assert!(Instant::now() < deadline, "{:?}", self.batches.lock());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().iter().map(|(_, uri)| uri.clone()).collect()
    }
}

#[tokio::test(start_paused = true)]
async fn a_kind_is_listed_page_by_page_and_watched_from_there() {
    let source = start_scripted(|n, _| match n {
        0 => page(7, "next", &[&server("a", 5)]),
        1 => list(7, &[&server("b", 6)]),
        2 => {
            let (added, changed) = (
                watch_line("ADDED", &server("c", 8)),
                watch_line("MODIFIED", &server("a", 9)),
            );
            let bookmark = watch_line("BOOKMARK", r#"{"metadata":{"resourceVersion":"20"}}"#);
            let (half, rest) = changed.split_at(30);
            watch(&[&(added + half), rest, &bookmark], AfterChunks::End)
        }
        _ => watch(&[&watch_line("DELETED", &server("b", 21))], AfterChunks::Hang),
    });
    source.wait_for_batches(&["+a@5 +b@6", "+c@8 +a@9", "-b"]).await;
    let requests = source.requests();
    assert!(requests[1].contains("continue=next&limit="), "{}", requests[1]);
    assert!(requests[2].contains("resourceVersion=7&"), "{}", requests[2]);
    assert!(
        requests[3].contains("resourceVersion=20&"),
        "the watch continues at the bookmark: {}",
        requests[3]
    );
    let batches = source.batches.lock();
    assert!(batches.contains(&"synced".to_owned()), "{batches:?}");
}

#[tokio::test(start_paused = true)]
async fn an_undecodable_object_is_reported_as_unreadable() {
    let bad = |name: &str, version| server(name, version).replace("\"port\":80", "\"port\":80,\"colour\":\"red\"");
    let source = start_scripted(move |n, _| match n {
        0 => list(7, &[&server("a", 5), &bad("b", 6)]),
        1 => {
            let (broken, fixed) = (
                watch_line("MODIFIED", &bad("a", 8)),
                watch_line("MODIFIED", &server("b", 9)),
            );
            watch(&[&broken, &fixed], AfterChunks::End)
        }
        _ => watch(&[&watch_line("DELETED", &bad("a", 21))], AfterChunks::Hang),
    });
    source.wait_for_batches(&["+a@5 ?b", "?a +b@9", "-a"]).await;
}

#[tokio::test(start_paused = true)]
async fn an_expired_resource_version_is_relisted_and_missing_objects_are_deleted() {
    for gone in [
        text_response(410, r#"{"code":410,"message":"too old"}"#),
        watch(
            &[&watch_line("ERROR", r#"{"code":410,"reason":"Expired"}"#)],
            AfterChunks::Hang,
        ),
    ] {
        let gone = Mutex::new(Some(gone));
        let source = start_scripted(move |n, _| match n {
            0 => list(7, &[&server("a", 5), &server("b", 6), &server("c", 7)]),
            1 => gone.lock().take().unwrap(),
            2 => list(30, &[&server("b", 6), &server("c", 28)]),
            _ => watch(&[], AfterChunks::Hang),
        });
        source.wait_for_batches(&["+a@5 +b@6 +c@7", "+c@28 -a"]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_kind_without_a_change_for_ten_minutes_is_listed_again() {
    let source = start_scripted(|_, uri| match uri.contains("watch=true") {
        true => watch(
            &[&watch_line("BOOKMARK", r#"{"metadata":{"resourceVersion":"20"}}"#)],
            AfterChunks::End,
        ),
        false => list(7, &[&server("a", 5)]),
    });
    tokio::time::sleep(Duration::from_secs(601 + 60)).await;
    let lists: Vec<_> = {
        let requests = source.requests.lock();
        let lists = requests.iter().filter(|(_, uri)| !uri.contains("watch=true"));
        lists.map(|(at, _)| *at).collect()
    };
    assert!(matches!(*lists, [0, 600..660]), "listed at {lists:?} s");
    source.wait_for_batches(&["+a@5"]).await;
}

/// Serves one list with one Server, then 404 for every request, including the watch.
fn one_server_then_404(n: usize, uri: &str) -> ScriptedResponse {
    match (n, uri.contains("watch=true")) {
        (0, false) => list(7, &[&server("a", 5)]),
        _ => text_response(404, "404 page not found"),
    }
}

#[tokio::test(start_paused = true)]
async fn kinds_are_empty_while_their_crd_is_not_installed() {
    // Each round tries all API versions.
    const AT_START: usize = 4 * ABSENT_ROUNDS;
    // `v1beta3`, `v1beta2` and `v1beta1` are listed first.
    const WATCH: usize = AT_START + 3;
    let source = start_scripted(|n, uri| match n {
        0..AT_START => text_response(404, "404 page not found"),
        WATCH => {
            assert!(
                uri.contains("/v1beta1/") && uri.contains("watch=true"),
                "the version that was listed is watched: {uri}"
            );
            text_response(404, "404 page not found")
        }
        _ if n < WATCH && uri.contains("/v1beta1/") => list(3, &[&server("a", 2)]),
        _ => text_response(404, "404 page not found"),
    });
    source.wait_for_batches(&["+a@2", "-a"]).await;
    assert!(
        source.batches.lock()[0] == "synced",
        "kinds that are not installed do not delay readiness"
    );
    source.wait_for_stale(0).await;
    assert!(source.stale_kinds.is_ready());
}

/// Discovery of an API server that has not read the definitions of custom resources yet.
fn starting_discovery_response(_: usize, uri: &str) -> ScriptedResponse {
    match uri {
        "/readyz" => text_response(500, "[-]poststarthook/crd-informer-synced failed: reason withheld"),
        _ => discovery_response(uri, false),
    }
}

#[tokio::test(start_paused = true)]
async fn kinds_that_a_starting_api_server_omits_are_awaited() {
    // Each round tries all API versions.
    const UNTIL_READY: usize = 4 * 3 * ABSENT_ROUNDS;
    let source = start_with_discovery(starting_discovery_response, |n, uri| match n {
        0..UNTIL_READY => text_response(404, "404 page not found"),
        _ if uri.contains("watch=true") => watch(&[], AfterChunks::Hang),
        _ => list(7, &[&server("a", 5)]),
    });
    source.wait_for_batches(&["+a@5"]).await;
    assert_ne!(
        source.batches.lock()[0],
        "synced",
        "no policy is served without the Servers"
    );
}

#[tokio::test(start_paused = true)]
async fn a_few_404s_delete_nothing_and_mark_the_kind_stale() {
    const GONE: usize = 3;
    let source = start_scripted(|n, uri| match n {
        // A list and its watch, then `GONE` rounds that try all four versions.
        0 | 1 => one_server_then_404(n, uri),
        2.. if n < 2 + 4 * GONE => text_response(404, "404 page not found"),
        _ if uri.contains("watch=true") => watch(&[], AfterChunks::Hang),
        _ => list(30, &[&server("a", 5), &server("b", 29)]),
    });
    source.wait_for_batches(&["+a@5"]).await;
    source.wait_for_stale(1).await;
    let reasons = source.stale_kinds.reasons();
    assert_eq!(reasons, ["servers: the API server does not have this kind"]);
    source.wait_for_batches(&["+a@5", "+b@29"]).await;
    source.wait_for_stale(0).await;
    assert!(source.stale_kinds.is_ready());
}

#[tokio::test(start_paused = true)]
async fn objects_are_deleted_only_when_discovery_omits_the_kind() {
    type Discovery = fn(usize, &str) -> ScriptedResponse;
    let never: [(&str, Discovery); 6] = [
        ("it has the kind", |_, uri| discovery_response(uri, true)),
        ("it returns 404", |_, _| text_response(404, "404 page not found")),
        ("it fails", |_, _| {
            text_response(503, r#"{"code":503,"message":"not now"}"#)
        }),
        ("it returns HTML", |_, _| {
            text_response(200, "<html>a login page</html>")
        }),
        ("the API server is not ready", starting_discovery_response),
        ("it omits the kind only in some rounds", |n, uri| {
            discovery_response(uri, n % ABSENT_ROUNDS == 0)
        }),
    ];
    for (case, discovery) in never {
        let source = start_with_discovery(discovery, one_server_then_404);
        source.wait_for_batches(&["+a@5"]).await;
        tokio::time::sleep(Duration::from_secs(3600)).await;
        source.wait_for_batches(&["+a@5"]).await;
        source.wait_for_stale(1).await;
        assert!(!source.stale_kinds.is_ready(), "{case}");
    }
    let gone = start_with_discovery(|_, uri| discovery_response(uri, false), one_server_then_404);
    gone.wait_for_batches(&["+a@5", "-a"]).await;
    let first = gone.requests.lock()[0].0;
    let last = gone.requests.lock().last().unwrap().0;
    assert!(last - first >= 25, "deleted after {first} to {last} s");
}

#[tokio::test(start_paused = true)]
async fn a_kind_that_is_404_only_at_start_is_listed_before_synced() {
    let source = start_scripted(|n, uri| match n {
        0..8 => text_response(404, "404 page not found"),
        _ if uri.contains("watch=true") => watch(&[], AfterChunks::Hang),
        _ => list(7, &[&server("a", 5)]),
    });
    source.wait_for_batches(&["+a@5"]).await;
    source.wait_for_synced().await;
    assert_eq!(*source.batches.lock(), ["+a@5", "synced"]);
}

#[tokio::test(start_paused = true)]
async fn lists_without_watch_progress_back_off() {
    // Expired resource versions, watches that return 404, and watches that are rejected.
    for (status, most) in [(410, 40), (404, 40), (403, 120), (500, 120), (504, 120)] {
        let source = start_scripted(move |_, uri| match uri.contains("watch=true") {
            true => text_response(status, "{}"),
            false => list(7, &[&server("a", 5)]),
        });
        tokio::time::sleep(Duration::from_secs(300)).await;
        let requests = source.requests();
        let lists = requests.iter().filter(|uri| !uri.contains("watch=true")).count();
        assert!((5..=most).contains(&lists), "{status}: {lists} lists in 300 s");
        assert!(requests.len() <= 200, "{status}: {} requests", requests.len());
        source.wait_for_batches(&["+a@5"]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_refused_again_and_again_is_replaced_by_a_list() {
    // After a restore from a backup the server does not know this resource version.
    let source = start_scripted(|n, uri| match (n, uri.contains("watch=true")) {
        (0, _) => list(700, &[&server("a", 5)]),
        (_, true) if uri.contains("resourceVersion=700&") => {
            text_response(504, r#"{"message":"Too large resource version"}"#)
        }
        (_, true) => watch(&[], AfterChunks::Hang),
        (_, false) => list(30, &[&server("b", 6)]),
    });
    source.wait_for_batches(&["+a@5", "+b@6 -a"]).await;
    let took = source.requests.lock().last().unwrap().0;
    assert!(took < 30, "{took} s");
}

#[tokio::test(start_paused = true)]
async fn an_undecodable_object_does_not_block_others() {
    let bad = r#"{"metadata":{"name":"bad","namespace":"shop","resourceVersion":"3"},"spec":{"port":[]}}"#;
    let source = start_scripted(move |n, _| match n {
        0 => list(7, &[bad, &server("a", 5)]),
        1 => watch(
            &[&(watch_line("MODIFIED", &bad.replace("bad", "a")) + &watch_line("ADDED", &server("b", 9)))],
            AfterChunks::Hang,
        ),
        _ => watch(&[], AfterChunks::Hang),
    });
    source.wait_for_batches(&["?bad +a@5", "?a +b@9"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_list_with_an_object_without_metadata_deletes_nothing() {
    let source = start_scripted(|n, uri| match n {
        0 => list(7, &[&server("a", 5)]),
        1 => watch(&[], AfterChunks::End),
        _ if uri.contains("watch=true") => text_response(410, r#"{"code":410,"message":"expired"}"#),
        // The list after the expired watch: `a` is the object that cannot be read.
        2..9 => list(8, &[r#"{"metadata":"a"}"#, &server("b", 6)]),
        _ => list(9, &[&server("a", 5), &server("b", 6)]),
    });
    source.wait_for_batches(&["+a@5", "+b@6"]).await;
}

#[tokio::test(start_paused = true)]
async fn failures_are_retried_with_backoff() {
    let source = start_scripted(|n, _| match n {
        0..=2 => text_response(500, r#"{"code":500,"message":"etcd is away"}"#),
        3 => list(7, &[&server("a", 5)]),
        4..=6 => watch(&[], AfterChunks::End),
        7 => text_response(403, r#"{"code":403,"message":"not yours"}"#),
        _ => watch(&[&watch_line("ADDED", &server("b", 9))], AfterChunks::Hang),
    });
    source.wait_for_batches(&["+a@5", "+b@9"]).await;
    let requests = source.requests();
    assert_eq!(requests.len(), 9, "{requests:?}");
    assert!(requests[8].contains("resourceVersion=7&"), "{}", requests[8]);
}

#[tokio::test(start_paused = true)]
async fn an_idle_watch_lasts_for_its_requested_timeout() {
    let source = start_scripted(|_, uri| match uri.contains("watch=true") {
        true => watch(&[], AfterChunks::EndAtTimeout),
        false => list(7, &[]),
    });
    tokio::time::sleep(Duration::from_secs(595)).await;
    let requests = source.requests.lock();
    let watches: Vec<_> = requests.iter().filter(|(_, uri)| uri.contains("watch=true")).collect();
    assert!(watches.len() >= 3, "{watches:?}");
    for pair in watches.windows(2) {
        let lasted = pair[1].0 - pair[0].0;
        assert!(
            lasted >= requested_timeout(&pair[0].1).as_secs(),
            "after {lasted} s: {watches:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn watches_last_at_random_between_150_and_295_seconds() {
    let source = start_scripted(|_, uri| match uri.contains("watch=true") {
        true => watch(&[], AfterChunks::EndAtTimeout),
        false => list(7, &[]),
    });
    tokio::time::sleep(Duration::from_secs(2 * 3600)).await;
    let requests = source.requests();
    let watches = requests.iter().filter(|uri| uri.contains("watch=true"));
    let lasting: Vec<_> = watches.map(|uri| requested_timeout(uri).as_secs()).collect();
    assert!(lasting.len() > 20, "{lasting:?}");
    assert!(
        lasting.iter().all(|seconds| (150..=295).contains(seconds)),
        "{lasting:?}"
    );
    let different: BTreeSet<_> = lasting.iter().collect();
    assert!(different.len() > lasting.len() / 2, "{lasting:?}");
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_the_server_does_not_end_is_restarted() {
    let source = start_scripted(|n, _| match n {
        0 => list(7, &[]),
        1 => watch(&[], AfterChunks::Hang),
        _ => watch(&[&watch_line("ADDED", &server("b", 9))], AfterChunks::Hang),
    });
    source.wait_for_batches(&["+b@9"]).await;
    assert!(source.requests()[2].contains("resourceVersion=7&"));
}

#[tokio::test(start_paused = true)]
async fn a_start_without_lists_is_not_ready_and_names_the_kinds() {
    let source = start_scripted(|_, uri| match uri.contains("watch=true") {
        true => watch(&[], AfterChunks::Hang),
        false => text_response(403, r#"{"message":"servers is forbidden"}"#),
    });
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(!source.running.is_finished());
    assert!(source.batches.lock().is_empty(), "{:?}", source.batches.lock());
    source.wait_for_stale(1).await;
    let reasons = source.stale_kinds.reasons();
    assert_eq!(
        reasons,
        ["servers: the API server responded with 403 Forbidden: servers is forbidden"]
    );
}

#[tokio::test(start_paused = true)]
async fn an_optional_kind_of_another_cluster_is_empty_until_listing_is_permitted() {
    for (forbidden, is_optional) in [("servers", true), ("pods", false)] {
        let start = Instant::now();
        let service = service_fn(move |req: Request<Body>| {
            let uri = req.uri().to_string();
            let is_forbidden = uri.contains(&format!("/{forbidden}?")) && start.elapsed() < Duration::from_secs(300);
            let answer = match (is_forbidden, uri.contains("watch=true"), uri.contains("/servers?")) {
                (true, _, _) => text_response(403, r#"{"message":"forbidden"}"#),
                (false, true, _) => watch(&[], AfterChunks::EndAtTimeout),
                (false, false, true) => list(7, &[&server("a", 5)]),
                (false, false, false) => list(7, &[]),
            };
            std::future::ready(Ok::<_, Infallible>(response(answer, &uri)))
        });
        let batches = Arc::new(Mutex::new(Vec::new()));
        let written = batches.clone();
        let sink = EventSink::new(move |events| written.lock().extend(events.iter().map(summarize)));
        let (_signal, drain) = drain::channel();
        let config = RemoteConfig {
            cluster: "east".into(),
            endpoints_source: EndpointsSource::EndpointSlices,
            stale_kinds: Readiness::new(),
        };
        let running = run_remote(Client::new(service, "default"), config, sink, drain);
        let _ended = timeout(Duration::from_secs(600), async {
            let before = async {
                tokio::time::sleep(Duration::from_secs(200)).await;
                assert_eq!(
                    batches.lock().contains(&"synced".to_owned()),
                    is_optional,
                    "{forbidden}"
                );
                std::future::pending::<()>().await;
            };
            tokio::join!(running, before)
        })
        .await
        .unwrap_err();
        let mut batches = batches.lock().clone();
        batches.sort();
        assert_eq!(batches, ["+a@5", "synced"], "{forbidden}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_reason_why_a_kind_is_stale_includes_the_causes_of_the_error() {
    let source = start_scripted(|_, _| text_response(200, "garbage"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let reasons = source.stale_kinds.reasons();
    let [reason] = &reasons[..] else {
        panic!("{reasons:?}");
    };
    assert!(
        reason.starts_with("servers: decoding the response: expected value"),
        "{reason}"
    );
}

mod schedules;
