//! Decodes the recorded answers of Linkerd's control plane and compares them with the expected policies, which `recorded/` has
//! in words.
//!
//! To update the expected files: `TULLE_BLESS=1 ./run with cargo nextest run -p tulle-proxy recorded`.

use std::fmt::Debug;
use std::{env, fs};

use prost::Message;
use tulle_proto::destination;

use self::read::{Recorded, recorded};
use super::{endpoint, inbound, outbound, profile};
use crate::policy::authz::{Authentication, Authorization};
use crate::policy::client::{Backend, ClientHttp, ClientPolicy, ClientProtocol, Distribution, OpaqueRoute};
use crate::policy::endpoint::{EndpointSpec, EndpointUpdate};
use crate::policy::profile::Profile;
use crate::policy::route::Route;
use crate::policy::server::{ServerHttp, ServerPolicy, ServerProtocol};

#[path = "../../../../proto/recorded/read.rs"]
mod read;

#[test]
fn recorded_policies_of_destinations_are_read() {
    compare("outbound", |one| {
        one.each(|message| client(&outbound::client_policy(message).unwrap()))
    });
}

#[test]
fn recorded_policies_of_ports_are_read() {
    compare("inbound", |one| {
        one.each(|message| server(&inbound::server_policy(message).unwrap()))
    });
}

#[test]
fn recorded_profiles_and_endpoints_are_read() {
    compare("destination", |one| match &*one.kind {
        "profile" => one.each(|message| of_profile(&profile::profile(message).unwrap())),
        _ => one.each(|message: destination::Update| {
            update(&endpoint::endpoint_update(message, |error| panic!("{error}")).unwrap())
        }),
    });
}

impl Recorded {
    /// The lines of each message; fails if a message has a field that is not known.
    fn each<T: Message + Default + Debug>(&self, lines: impl Fn(T) -> Vec<String>) -> Vec<String> {
        let one = |bytes: &Vec<u8>| {
            let message = T::decode(&**bytes).unwrap();
            // Linkerd encodes labels with empty values, prost does not.
            let n_of = |entry: &[u8]| bytes.windows(entry.len()).filter(|bytes| *bytes == entry).count();
            let n_empty = n_of(b"\n\x04zone\x12\0") + n_of(b"\n\x05group\x12\0");
            let len = bytes.len() - 2 * n_empty;
            assert_eq!(message.encoded_len(), len, "{}: {message:#?}", self.question());
            lines(message)
        };
        self.messages.iter().flat_map(one).collect()
    }
}

/// Compares the decoded policies with the file of that name.
fn compare(name: &str, lines: impl Fn(&Recorded) -> Vec<String>) {
    let mut text = String::new();
    for one in recorded(name) {
        let (status, lines) = (one.status.iter().cloned(), lines(&one));
        let all: Vec<_> = [one.question()].into_iter().chain(lines).chain(status).collect();
        text += &format!("{}\n", all.join("\n  "));
    }
    let path = format!("{}/src/policy/decode/recorded/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    if env::var_os("TULLE_BLESS").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let expected = fs::read_to_string(&path).unwrap();
    for (at, (expected, found)) in expected.lines().zip(text.lines()).enumerate() {
        assert_eq!(found, expected, "{path}:{}", at + 1);
    }
    assert_eq!(text.len(), expected.len(), "{path} has more or fewer answers");
}

fn client(policy: &ClientPolicy) -> Vec<String> {
    let (what, mut lines) = match &policy.protocol {
        ClientProtocol::Detect {
            timeout,
            http1,
            http2,
            opaque,
        } => {
            assert_eq!(http1, http2);
            let bytes = opaque.iter().flat_map(|route| of_bytes("bytes", route));
            (
                format!("detect {timeout:?}"),
                [of_http(http1), bytes.collect()].concat(),
            )
        }
        ClientProtocol::Http1(http) => ("HTTP/1".to_owned(), of_http(http)),
        ClientProtocol::Http2(http) => ("HTTP/2".to_owned(), of_http(http)),
        ClientProtocol::Grpc(http) => ("gRPC".to_owned(), of_http(http)),
        ClientProtocol::Opaque(route) => (
            "opaque".to_owned(),
            route.iter().flat_map(|route| of_bytes("bytes", route)).collect(),
        ),
        ClientProtocol::Tls(routes) => (
            "TLS".to_owned(),
            routes
                .iter()
                .flat_map(|route| of_bytes(&format!("TLS {:?}", route.snis), &route.route))
                .collect(),
        ),
    };
    lines.insert(0, format!("{what} of {}", policy.meta));
    lines
}

fn of_http(http: &ClientHttp) -> Vec<String> {
    let accrual = http.failure_accrual.iter().map(|accrual| format!("{accrual:?}"));
    let routes = http.routes.iter().flat_map(|route| {
        of_route(route, |target| {
            let what = format!("{:?} {:?}", target.timeouts, target.request_headers);
            let retry = target.retry.iter().map(|retry| format!("{retry:?}"));
            [what].into_iter().chain(retry).chain(to(&target.backends)).collect()
        })
    });
    accrual.chain(routes).collect()
}

/// The lines of a route, with those of its rules' payloads.
fn of_route<T>(route: &Route<T>, payload: impl Fn(&T) -> Vec<String>) -> Vec<String> {
    let mut lines = vec![format!("route {} {:?}", route.meta, route.hosts)];
    for rule in &route.rules {
        lines.push("- rule".to_owned());
        lines.extend(indented(rule.matches.iter().map(|one| format!("{one:?}"))));
        lines.extend(indented(rule.filters.iter().map(|one| format!("{one:?}"))));
        lines.extend(indented(payload(&rule.payload)));
    }
    lines
}

fn of_bytes(what: &str, route: &OpaqueRoute) -> Vec<String> {
    let head = format!("{what} {} {:?}", route.meta, route.filters);
    [head].into_iter().chain(indented(to(&route.backends))).collect()
}

fn to<F: Debug>(backends: &Distribution<F>) -> Vec<String> {
    let line = |weight: String, backend: &Backend, filters: &Vec<F>| {
        let Backend { meta, queue, target } = backend;
        format!("-> {weight} {meta} {target:?} {queue:?} {filters:?}")
    };
    match backends {
        Distribution::Empty => vec!["-> nowhere".to_owned()],
        Distribution::FirstAvailable(all) => all
            .iter()
            .map(|one| line("first".to_owned(), &one.backend, &one.filters))
            .collect(),
        Distribution::RandomAvailable(all) => all
            .iter()
            .map(|(one, weight)| line(weight.to_string(), &one.backend, &one.filters))
            .collect(),
    }
}

fn server(policy: &ServerPolicy) -> Vec<String> {
    let (what, routes) = match &policy.protocol {
        ServerProtocol::Detect { timeout, http } => (format!("detect {timeout:?}"), served(http)),
        ServerProtocol::Http1(http) => ("HTTP/1".to_owned(), served(http)),
        ServerProtocol::Http2(http) => ("HTTP/2".to_owned(), served(http)),
        ServerProtocol::Grpc(http) => ("gRPC".to_owned(), served(http)),
        ServerProtocol::Opaque => ("opaque".to_owned(), Vec::new()),
        ServerProtocol::Tls => ("TLS".to_owned(), Vec::new()),
    };
    let mut lines = vec![format!("{what} of {}", policy.meta)];
    lines.extend(policy.authorizations.iter().map(authorization));
    lines.extend(routes);
    lines
}

fn served(http: &ServerHttp) -> Vec<String> {
    let limit = http.rate_limit.iter().map(|limit| format!("{limit:?}"));
    let routes = http.routes.iter().flat_map(|route| {
        of_route(route, |authorizations| {
            let names: Vec<_> = authorizations.iter().map(|one| one.meta.to_string()).collect();
            vec![format!("for {}", names.join(", "))]
        })
    });
    limit.chain(routes).collect()
}

fn authorization(one: &Authorization) -> String {
    let clients = match &one.authentication {
        Authentication::TlsIdentities { identities, suffixes } => {
            let mut identities: Vec<_> = identities.iter().collect();
            identities.sort();
            format!("{identities:?} {suffixes:?}")
        }
        other => format!("{other:?}"),
    };
    format!("{} permits {clients} from {:?}", one.meta, one.networks)
}

fn of_profile(profile: &Profile) -> Vec<String> {
    let Profile {
        name,
        is_opaque,
        routes,
        retry_budget,
        overrides,
        endpoint,
        parent,
        resource,
    } = profile;
    let mut lines = vec![format!(
        "{name:?} is_opaque: {is_opaque} {retry_budget:?} {parent:?} {resource:?}"
    )];
    lines.extend(routes.iter().map(|route| format!("{route:?}")));
    lines.extend(overrides.iter().map(|one| format!("{one:?}")));
    lines.extend(endpoint.iter().map(|one| spec(one)));
    lines
}

fn update(update: &EndpointUpdate) -> Vec<String> {
    match update {
        EndpointUpdate::Add(all) => all.iter().map(spec).collect(),
        other => vec![format!("{other:?}")],
    }
}

fn spec(spec: &EndpointSpec) -> String {
    format!("{spec:?}")
}

fn indented(lines: impl IntoIterator<Item = String>) -> impl Iterator<Item = String> {
    lines.into_iter().map(|line| format!("  {line}"))
}
