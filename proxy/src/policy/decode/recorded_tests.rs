//! Decodes the recorded responses of Linkerd's control plane and compares the results with the text files in `recorded/`.
//!
//! To update the expected files: `TULLE_BLESS=1 ./run with cargo nextest run -p tulle-proxy recorded`.

use std::fmt::Debug;
use std::{env, fs};

use prost::Message;
use tulle_proto::destination;

use self::read::{Recorded, recorded};
use super::{endpoint, inbound, outbound, profile};
use crate::policy::authz::{Authentication, Authorization};
use crate::policy::client::{BackendSpec, ClientHttp, ClientPolicy, ClientProtocol, Distribution, OpaqueRoute};
use crate::policy::endpoint::{EndpointSpec, EndpointUpdate};
use crate::policy::profile::Profile;
use crate::policy::route::Route;
use crate::policy::server::{ServerHttp, ServerPolicy, ServerProtocol};

#[path = "../../../../proto/recorded/read.rs"]
mod read;

#[test]
fn recorded_policies_of_destinations_are_decoded() {
    compare("outbound", |recording| {
        recording.decode_all(|message| client_policy_lines(&outbound::client_policy(message).unwrap()))
    });
}

#[test]
fn recorded_policies_of_ports_are_decoded() {
    compare("inbound", |recording| {
        recording.decode_all(|message| server_policy_lines(&inbound::server_policy(message).unwrap()))
    });
}

#[test]
fn recorded_profiles_and_endpoints_are_decoded() {
    compare("destination", |recording| match &*recording.kind {
        "profile" => recording
            .decode_all(|message| profile_lines(&profile::profile(message, |error| panic!("{error}")).unwrap())),
        _ => recording.decode_all(|message: destination::Update| {
            endpoint_update_lines(&endpoint::endpoint_update(message, |error| panic!("{error}")).unwrap())
        }),
    });
}

impl Recorded {
    /// Decodes each message and returns its lines. Fails if a message has an unknown field.
    fn decode_all<T: Message + Default + Debug>(&self, lines: impl Fn(T) -> Vec<String>) -> Vec<String> {
        let decode = |bytes: &Vec<u8>| {
            let message = T::decode(&**bytes).unwrap();
            // Linkerd encodes labels with empty values, prost does not. Each such entry has two bytes more: the tag of the value
            // and its length, 0.
            let n_occurrences = |entry: &[u8]| bytes.windows(entry.len()).filter(|bytes| *bytes == entry).count();
            let n_empty = n_occurrences(b"\n\x04zone\x12\0") + n_occurrences(b"\n\x05group\x12\0");
            let len = bytes.len() - 2 * n_empty;
            assert_eq!(message.encoded_len(), len, "{}: {message:#?}", self.request());
            lines(message)
        };
        self.messages.iter().flat_map(decode).collect()
    }
}

/// Compares the decoded messages of a recording with the expected file of the same name.
fn compare(name: &str, lines: impl Fn(&Recorded) -> Vec<String>) {
    let mut text = String::new();
    for recording in recorded(name) {
        let (status, lines) = (recording.status.iter().cloned(), lines(&recording));
        let all: Vec<_> = [recording.request()].into_iter().chain(lines).chain(status).collect();
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
    assert_eq!(text.len(), expected.len(), "{path} has more or fewer responses");
}

fn client_policy_lines(policy: &ClientPolicy) -> Vec<String> {
    let (what, mut lines) = match &policy.protocol {
        ClientProtocol::Detect {
            timeout,
            http1,
            http2,
            opaque,
        } => {
            assert_eq!(http1, http2);
            let bytes = opaque.iter().flat_map(|route| opaque_route_lines("bytes", route));
            (
                format!("detect {timeout:?}"),
                [http_lines(http1), bytes.collect()].concat(),
            )
        }
        ClientProtocol::Http1(http) => ("HTTP/1".to_owned(), http_lines(http)),
        ClientProtocol::Http2(http) => ("HTTP/2".to_owned(), http_lines(http)),
        ClientProtocol::Grpc(http) => ("gRPC".to_owned(), http_lines(http)),
        ClientProtocol::Opaque(route) => (
            "opaque".to_owned(),
            route
                .iter()
                .flat_map(|route| opaque_route_lines("bytes", route))
                .collect(),
        ),
        ClientProtocol::Tls(routes) => (
            "TLS".to_owned(),
            routes
                .iter()
                .flat_map(|route| opaque_route_lines(&format!("TLS {:?}", route.snis), &route.route))
                .collect(),
        ),
    };
    lines.insert(0, format!("{what} of {}", policy.meta));
    lines
}

fn http_lines(http: &ClientHttp) -> Vec<String> {
    let accrual = http.failure_accrual.iter().map(|accrual| format!("{accrual:?}"));
    let routes = http.routes.iter().flat_map(|route| {
        route_lines(route, |action| {
            let what = format!("{:?} {:?}", action.timeouts, action.header_overrides);
            let retry = action.retry.iter().map(|retry| format!("{retry:?}"));
            [what]
                .into_iter()
                .chain(retry)
                .chain(distribution_lines(&action.backends))
                .collect()
        })
    });
    accrual.chain(routes).collect()
}

/// The lines of a route, with those of its rules' actions.
fn route_lines<T>(route: &Route<T>, action_lines: impl Fn(&T) -> Vec<String>) -> Vec<String> {
    let mut lines = vec![format!("route {} {:?}", route.meta, route.hosts)];
    for rule in &route.rules {
        lines.push("- rule".to_owned());
        lines.extend(indented(rule.matches.iter().map(|one| format!("{one:?}"))));
        lines.extend(indented(rule.filters.iter().map(|one| format!("{one:?}"))));
        lines.extend(indented(action_lines(&rule.action)));
    }
    lines
}

fn opaque_route_lines(what: &str, route: &OpaqueRoute) -> Vec<String> {
    let head = format!("{what} {} {:?}", route.meta, route.filters);
    [head]
        .into_iter()
        .chain(indented(distribution_lines(&route.backends)))
        .collect()
}

fn distribution_lines<F: Debug>(backends: &Distribution<F>) -> Vec<String> {
    let line = |weight: String, backend: &BackendSpec, filters: &Vec<F>| {
        let BackendSpec { meta, queue, target } = backend;
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

fn server_policy_lines(policy: &ServerPolicy) -> Vec<String> {
    let (what, routes) = match &policy.protocol {
        ServerProtocol::Detect { timeout, http } => (format!("detect {timeout:?}"), server_http_lines(http)),
        ServerProtocol::Http1(http) => ("HTTP/1".to_owned(), server_http_lines(http)),
        ServerProtocol::Http2(http) => ("HTTP/2".to_owned(), server_http_lines(http)),
        ServerProtocol::Grpc(http) => ("gRPC".to_owned(), server_http_lines(http)),
        ServerProtocol::Opaque => ("opaque".to_owned(), Vec::new()),
        ServerProtocol::Tls => ("TLS".to_owned(), Vec::new()),
    };
    let mut lines = vec![format!("{what} of {}", policy.meta)];
    lines.extend(policy.authorizations.iter().map(authorization_line));
    lines.extend(routes);
    lines
}

fn server_http_lines(http: &ServerHttp) -> Vec<String> {
    let limit = http.rate_limit.iter().map(|limit| format!("{limit:?}"));
    let routes = http.routes.iter().flat_map(|route| {
        route_lines(route, |authorizations| {
            let names: Vec<_> = authorizations.iter().map(|one| one.meta.to_string()).collect();
            vec![format!("for {}", names.join(", "))]
        })
    });
    limit.chain(routes).collect()
}

fn authorization_line(one: &Authorization) -> String {
    let clients = match &one.authentication {
        Authentication::TlsIdentities { identities, patterns } => {
            let mut identities: Vec<_> = identities.iter().collect();
            identities.sort();
            format!("{identities:?} {patterns:?}")
        }
        other => format!("{other:?}"),
    };
    format!("{} permits {clients} from {:?}", one.meta, one.networks)
}

fn profile_lines(profile: &Profile) -> Vec<String> {
    let Profile {
        name,
        is_opaque,
        routes,
        retry_budget,
        traffic_split,
        endpoint,
        parent,
        resource,
    } = profile;
    let mut lines = vec![format!(
        "{name:?} is_opaque: {is_opaque} {retry_budget:?} {parent:?} {resource:?}"
    )];
    lines.extend(routes.iter().map(|route| format!("{route:?}")));
    lines.extend(traffic_split.iter().map(|one| format!("{one:?}")));
    lines.extend(endpoint.iter().map(|endpoint| endpoint_line(endpoint)));
    lines
}

fn endpoint_update_lines(update: &EndpointUpdate) -> Vec<String> {
    match update {
        EndpointUpdate::Add(all) => all.iter().map(endpoint_line).collect(),
        other => vec![format!("{other:?}")],
    }
}

fn endpoint_line(endpoint: &EndpointSpec) -> String {
    format!("{endpoint:?}")
}

fn indented(lines: impl IntoIterator<Item = String>) -> impl Iterator<Item = String> {
    lines.into_iter().map(|line| format!("  {line}"))
}
