//! What goes wrong between an API server and us, told by a script, because no API server does it when asked.

use std::collections::BTreeSet;
use std::convert::Infallible;
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
use tokio::time::Instant;
use tower::service_fn;
use tulle_core::drain;
use tulle_core::metrics::Registry;

use super::*;
use crate::resources::Object;

const GONE_ROUNDS: usize = reflector::GONE_ROUNDS as usize;

/// An answer: chunks of a body, and what follows them.
struct Answer {
    status: u16,
    chunks: Vec<String>,
    then: Then,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    End,
    /// Nothing more comes, and the answer ends when the watch was asked to.
    Quiet,
    /// Nothing more comes, for ever.
    Silence,
}

fn answer(status: u16, text: impl Into<String>) -> Answer {
    Answer {
        status,
        chunks: vec![text.into()],
        then: Then::End,
    }
}

fn watch(chunks: &[&str], then: Then) -> Answer {
    Answer {
        status: 200,
        chunks: chunks.iter().map(|&chunk| chunk.to_owned()).collect(),
        then,
    }
}

fn list(version: u32, items: &[&str]) -> Answer {
    page(version, "", items)
}

fn page(version: u32, next: &str, items: &[&str]) -> Answer {
    let items = items.join(",");
    answer(
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

fn line(what: &str, object: &str) -> String {
    format!("{{\"type\":\"{what}\",\"object\":{}}}\n", object.replace('\n', ""))
}

type Body_ = UnsyncBoxBody<Bytes, Infallible>;

/// How long a watch is asked to last.
fn asked(uri: &str) -> Duration {
    let seconds = uri.split_once("timeoutSeconds=").map_or("", |(_, rest)| rest);
    Duration::from_secs(seconds.split('&').next().unwrap().parse().unwrap_or(0))
}

fn response(answer: Answer, uri: &str) -> Response<Body_> {
    let chunks = stream::iter(answer.chunks);
    let rest = match answer.then {
        Then::End => stream::empty().boxed(),
        Then::Quiet => {
            let end = tokio::time::sleep(asked(uri));
            stream::once(end).filter_map(|()| std::future::ready(None)).boxed()
        }
        Then::Silence => stream::pending().boxed(),
    };
    let frames = chunks
        .chain(rest)
        .map(|chunk: String| Ok(Frame::data(Bytes::from(chunk))));
    Response::builder()
        .status(answer.status)
        .body(UnsyncBoxBody::new(StreamBody::new(frames)))
        .unwrap()
}

/// A source whose API server answers by a script.
struct Scripted {
    /// Each request, and when it came, in seconds since the start.
    requests: Arc<Mutex<Vec<(u64, String)>>>,
    /// Each batch of events.
    batches: Arc<Mutex<Vec<String>>>,
    /// What `/ready` shows of kinds.
    kinds: Readiness,
    registry: Registry,
    running: JoinHandle<Result<(), SourceError>>,
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.running.abort();
    }
}

/// As [`with_discovery`], of an API server whose discovery has no Servers.
fn scripted(script: impl Fn(usize, &str) -> Answer + Send + Sync + 'static) -> Scripted {
    with_discovery(|_, uri| discovered(uri, false), script)
}

/// What discovery answers, with or without Servers.
fn discovered(uri: &str, has_servers: bool) -> Answer {
    match (uri, has_servers) {
        ("/apis", false) => answer(200, r#"{"groups":[{"name":"apps","versions":[{"version":"v1"}]}]}"#),
        ("/apis", true) => answer(
            200,
            r#"{"groups":[{"name":"policy.linkerd.io","versions":[{"version":"v1beta3"}]}]}"#,
        ),
        (_, true) => answer(200, r#"{"resources":[{"name":"servers"}]}"#),
        (_, false) => answer(404, "404 page not found"),
    }
}

/// Runs a source; the script sees requests for Servers and how many came before, and so does that of discovery, which
/// counts its own; everything else is empty.
fn with_discovery(
    discovery: impl Fn(usize, &str) -> Answer + Send + Sync + 'static,
    script: impl Fn(usize, &str) -> Answer + Send + Sync + 'static,
) -> Scripted {
    let requests = Arc::new(Mutex::new(Vec::new()));
    let batches = Arc::new(Mutex::new(Vec::new()));
    let (seen, start) = (requests.clone(), Instant::now());
    let asked_before = AtomicUsize::new(0);
    let service = service_fn(move |req: Request<Body>| {
        let uri = req.uri().to_string();
        let answer = if !uri.contains('?') {
            let n = asked_before.fetch_add(1, Ordering::Relaxed);
            discovery(n, &uri)
        } else if uri.contains("/servers?") {
            let mut seen = seen.lock();
            seen.push((start.elapsed().as_secs(), uri.clone()));
            script(seen.len() - 1, &uri)
        } else if uri.contains("watch=true") {
            watch(&[], Then::Silence)
        } else {
            answer(200, r#"{"metadata":{"resourceVersion":"1"},"items":null}"#)
        };
        std::future::ready(Ok::<_, Infallible>(response(answer, &uri)))
    });
    let written = batches.clone();
    let writer = Writer::new(move |events| {
        let events: Vec<_> = events.iter().map(short).collect();
        written.lock().push(events.join(" "));
    });
    let config = Config {
        needs: Needs {
            destination: false,
            policy: true,
            drives: Drives::Slices,
        },
        addr: ":8086".to_owned(),
        kinds: Readiness::new(),
    };
    let (kinds, registry) = (config.kinds.clone(), Registry::new());
    let counted = registry.clone();
    let (signal, drain) = drain::channel();
    let client = Client::new(service, "default");
    let running = tokio::spawn(async move {
        let _signal = signal;
        run(client, config, writer, counted, drain).await
    });
    Scripted {
        requests,
        batches,
        kinds,
        registry,
        running,
    }
}

/// One event in short.
fn short(event: &Event) -> String {
    match event {
        Event::Applied(Object::Server(server)) => format!("+{}@{}", server.meta.name.name, server.meta.version),
        Event::Applied(object) => format!("+{:?}", object.kind()),
        Event::Deleted(_, name) => format!("-{}", name.name),
        Event::Unreadable(unreadable) => format!("?{}", unreadable.name.name),
        Event::Synced => "synced".to_owned(),
    }
}

impl Scripted {
    /// Waits for these batches and no others; `synced` may be anywhere between them.
    async fn wrote(&self, expected: &[&str]) {
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

    /// Waits until Servers are stale, or are not.
    async fn stale(&self, expected: u8) {
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

    async fn synced(&self) {
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
    let source = scripted(|n, _| match n {
        0 => page(7, "next", &[&server("a", 5)]),
        1 => list(7, &[&server("b", 6)]),
        2 => {
            let (added, changed) = (line("ADDED", &server("c", 8)), line("MODIFIED", &server("a", 9)));
            let bookmark = line("BOOKMARK", r#"{"metadata":{"resourceVersion":"20"}}"#);
            let (half, rest) = changed.split_at(30);
            watch(&[&(added + half), rest, &bookmark], Then::End)
        }
        _ => watch(&[&line("DELETED", &server("b", 21))], Then::Silence),
    });
    source.wrote(&["+a@5 +b@6", "+c@8", "+a@9", "-b"]).await;
    let requests = source.requests();
    assert!(requests[1].contains("continue=next&limit="), "{}", requests[1]);
    assert!(requests[2].contains("resourceVersion=7&"), "{}", requests[2]);
    assert!(
        requests[3].contains("resourceVersion=20&"),
        "a bookmark is where to go on: {}",
        requests[3]
    );
    let batches = source.batches.lock();
    assert!(batches.contains(&"synced".to_owned()), "{batches:?}");
}

#[tokio::test(start_paused = true)]
async fn an_object_that_cannot_be_read_is_told_by_its_name() {
    let bad = |name: &str, version| server(name, version).replace("\"port\":80", "\"port\":80,\"colour\":\"red\"");
    let source = scripted(move |n, _| match n {
        0 => list(7, &[&server("a", 5), &bad("b", 6)]),
        1 => {
            let (broken, mended) = (line("MODIFIED", &bad("a", 8)), line("MODIFIED", &server("b", 9)));
            watch(&[&broken, &mended], Then::End)
        }
        _ => watch(&[&line("DELETED", &bad("a", 21))], Then::Silence),
    });
    source.wrote(&["+a@5 ?b", "?a", "+b@9", "-a"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_version_that_is_gone_is_listed_anew_and_what_vanished_is_deleted_with_it() {
    for gone in [
        answer(410, r#"{"code":410,"message":"too old"}"#),
        watch(&[&line("ERROR", r#"{"code":410,"reason":"Expired"}"#)], Then::Silence),
    ] {
        let gone = Mutex::new(Some(gone));
        let source = scripted(move |n, _| match n {
            0 => list(7, &[&server("a", 5), &server("b", 6), &server("c", 7)]),
            1 => gone.lock().take().unwrap(),
            2 => list(30, &[&server("b", 6), &server("c", 28)]),
            _ => watch(&[], Then::Silence),
        });
        source.wrote(&["+a@5 +b@6 +c@7", "+c@28 -a"]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_kind_without_a_change_for_ten_minutes_is_listed_anew() {
    let source = scripted(|_, uri| match uri.contains("watch=true") {
        true => watch(
            &[&line("BOOKMARK", r#"{"metadata":{"resourceVersion":"20"}}"#)],
            Then::End,
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
    source.wrote(&["+a@5"]).await;
}

/// A list of one Server, its watch, and 404 for whatever else is asked.
fn one_server_then_404(n: usize, uri: &str) -> Answer {
    match (n, uri.contains("watch=true")) {
        (0, false) => list(7, &[&server("a", 5)]),
        _ => answer(404, "404 page not found"),
    }
}

#[tokio::test(start_paused = true)]
async fn kinds_that_are_not_installed_are_empty_until_they_are_and_again_once_they_are_removed() {
    // Each version of the API is tried in each round.
    const AT_START: usize = 4 * GONE_ROUNDS;
    let source = scripted(|n, uri| match n {
        0..AT_START => answer(404, "404 page not found"),
        _ if n < AT_START + 3 && uri.contains("watch=true") => {
            assert!(
                uri.contains("/v1beta1/"),
                "the version that was listed is watched: {uri}"
            );
            answer(404, "404 page not found")
        }
        _ if n < AT_START + 3 && uri.contains("/v1beta1/") => list(3, &[&server("a", 2)]),
        _ => answer(404, "404 page not found"),
    });
    source.wrote(&["+a@2", "-a"]).await;
    assert!(
        source.batches.lock()[0] == "synced",
        "the mesh does not wait for what is not installed"
    );
    source.stale(0).await;
    assert!(source.kinds.is_ready());
}

#[tokio::test(start_paused = true)]
async fn a_round_of_404s_deletes_nothing_and_is_told() {
    const GONE: usize = 3;
    let source = scripted(|n, uri| match n {
        // A list, its watch, and then as many rounds of all four versions.
        0 | 1 => one_server_then_404(n, uri),
        2.. if n < 2 + 4 * GONE => answer(404, "404 page not found"),
        _ if uri.contains("watch=true") => watch(&[], Then::Silence),
        _ => list(30, &[&server("a", 5), &server("b", 29)]),
    });
    source.wrote(&["+a@5"]).await;
    source.stale(1).await;
    let reasons = source.kinds.reasons();
    assert_eq!(reasons, ["servers: the API server does not have this kind"]);
    source.wrote(&["+a@5", "+b@29"]).await;
    source.stale(0).await;
    assert!(source.kinds.is_ready());
}

#[tokio::test(start_paused = true)]
async fn only_discovery_that_leaves_a_kind_out_says_that_it_is_gone() {
    type Discovery = fn(usize, &str) -> Answer;
    let never: [(&str, Discovery); 5] = [
        ("it has the kind", |_, uri| discovered(uri, true)),
        ("it is not there itself", |_, _| answer(404, "404 page not found")),
        ("it fails", |_, _| answer(503, r#"{"code":503,"message":"not now"}"#)),
        ("it is something else", |_, _| answer(200, "<html>a login page</html>")),
        ("it says so now and then", |n, uri| {
            discovered(uri, n % GONE_ROUNDS == 0)
        }),
    ];
    for (what, discovery) in never {
        let source = with_discovery(discovery, one_server_then_404);
        source.wrote(&["+a@5"]).await;
        tokio::time::sleep(Duration::from_secs(3600)).await;
        source.wrote(&["+a@5"]).await;
        source.stale(1).await;
        assert!(!source.kinds.is_ready(), "{what}");
    }
    let gone = with_discovery(|_, uri| discovered(uri, false), one_server_then_404);
    gone.wrote(&["+a@5", "-a"]).await;
    let first = gone.requests.lock()[0].0;
    let last = gone.requests.lock().last().unwrap().0;
    assert!(last - first >= 25, "deleted after {first} to {last} s");
}

#[tokio::test(start_paused = true)]
async fn a_start_with_404s_takes_no_kind_for_empty_that_comes_a_moment_later() {
    let source = scripted(|n, uri| match n {
        0..8 => answer(404, "404 page not found"),
        _ if uri.contains("watch=true") => watch(&[], Then::Silence),
        _ => list(7, &[&server("a", 5)]),
    });
    source.wrote(&["+a@5"]).await;
    source.synced().await;
    assert_eq!(*source.batches.lock(), ["+a@5", "synced"]);
}

#[tokio::test(start_paused = true)]
async fn lists_that_lead_nowhere_come_with_growing_pauses() {
    // Versions that are gone at once, watches that are not found, and watches that are refused.
    for (status, most) in [(410, 40), (404, 40), (403, 120), (500, 120), (504, 120)] {
        let source = scripted(move |_, uri| match uri.contains("watch=true") {
            true => answer(status, "{}"),
            false => list(7, &[&server("a", 5)]),
        });
        tokio::time::sleep(Duration::from_secs(300)).await;
        let requests = source.requests();
        let lists = requests.iter().filter(|uri| !uri.contains("watch=true")).count();
        assert!((5..=most).contains(&lists), "{status}: {lists} lists in 300 s");
        assert!(requests.len() <= 200, "{status}: {} requests", requests.len());
        source.wrote(&["+a@5"]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_refused_again_and_again_is_replaced_by_a_list() {
    // As after a restore from a backup: the server has never had this resource version.
    let source = scripted(|n, uri| match (n, uri.contains("watch=true")) {
        (0, _) => list(700, &[&server("a", 5)]),
        (_, true) if uri.contains("resourceVersion=700&") => answer(504, r#"{"message":"Too large resource version"}"#),
        (_, true) => watch(&[], Then::Silence),
        (_, false) => list(30, &[&server("b", 6)]),
    });
    source.wrote(&["+a@5", "+b@6 -a"]).await;
    let took = source.requests.lock().last().unwrap().0;
    assert!(took < 30, "{took} s");
}

#[tokio::test(start_paused = true)]
async fn an_object_that_cannot_be_understood_stands_in_nobodys_way() {
    let bad = r#"{"metadata":{"name":"bad","namespace":"shop","resourceVersion":"3"},"spec":{"port":[]}}"#;
    let source = scripted(move |n, _| match n {
        0 => list(7, &[bad, &server("a", 5)]),
        1 => watch(
            &[&(line("MODIFIED", &bad.replace("bad", "a")) + &line("ADDED", &server("b", 9)))],
            Then::Silence,
        ),
        _ => watch(&[], Then::Silence),
    });
    source.wrote(&["?bad +a@5", "?a +b@9"]).await;
}

#[tokio::test(start_paused = true)]
async fn failures_are_tried_again_with_growing_pauses() {
    let source = scripted(|n, _| match n {
        0..=2 => answer(500, r#"{"code":500,"message":"etcd is away"}"#),
        3 => list(7, &[&server("a", 5)]),
        4..=6 => watch(&[], Then::End),
        7 => answer(403, r#"{"code":403,"message":"not yours"}"#),
        _ => watch(&[&line("ADDED", &server("b", 9))], Then::Silence),
    });
    source.wrote(&["+a@5", "+b@9"]).await;
    let requests = source.requests();
    assert_eq!(requests.len(), 9, "{requests:?}");
    assert!(requests[8].contains("resourceVersion=7&"), "{}", requests[8]);
}

#[tokio::test(start_paused = true)]
async fn a_kind_of_which_nothing_is_heard_is_watched_to_the_end_that_was_asked_for() {
    let source = scripted(|_, uri| match uri.contains("watch=true") {
        true => watch(&[], Then::Quiet),
        false => list(7, &[]),
    });
    tokio::time::sleep(Duration::from_secs(595)).await;
    let requests = source.requests.lock();
    let watches: Vec<_> = requests.iter().filter(|(_, uri)| uri.contains("watch=true")).collect();
    assert!(watches.len() >= 3, "{watches:?}");
    for pair in watches.windows(2) {
        let lasted = pair[1].0 - pair[0].0;
        assert!(lasted >= asked(&pair[0].1).as_secs(), "after {lasted} s: {watches:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn watches_last_at_random_between_150_and_295_seconds() {
    let source = scripted(|_, uri| match uri.contains("watch=true") {
        true => watch(&[], Then::Quiet),
        false => list(7, &[]),
    });
    tokio::time::sleep(Duration::from_secs(2 * 3600)).await;
    let requests = source.requests();
    let watches = requests.iter().filter(|uri| uri.contains("watch=true"));
    let lasting: Vec<_> = watches.map(|uri| asked(uri).as_secs()).collect();
    assert!(lasting.len() > 20, "{lasting:?}");
    assert!(
        lasting.iter().all(|seconds| (150..=295).contains(seconds)),
        "{lasting:?}"
    );
    let different: BTreeSet<_> = lasting.iter().collect();
    assert!(different.len() > lasting.len() / 2, "{lasting:?}");
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_the_server_does_not_end_is_begun_again() {
    let source = scripted(|n, _| match n {
        0 => list(7, &[]),
        1 => watch(&[], Then::Silence),
        _ => watch(&[&line("ADDED", &server("b", 9))], Then::Silence),
    });
    source.wrote(&["+b@9"]).await;
    assert!(source.requests()[2].contains("resourceVersion=7&"));
}

#[tokio::test(start_paused = true)]
async fn a_start_without_an_answer_waits_and_names_what_is_missing() {
    let source = scripted(|_, uri| match uri.contains("watch=true") {
        true => watch(&[], Then::Silence),
        false => answer(403, r#"{"message":"servers is forbidden"}"#),
    });
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(!source.running.is_finished());
    assert!(source.batches.lock().is_empty(), "{:?}", source.batches.lock());
    source.stale(1).await;
    let reasons = source.kinds.reasons();
    assert_eq!(
        reasons,
        ["servers: the API server answered 403 Forbidden: servers is forbidden"]
    );
}
