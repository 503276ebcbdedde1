//! Runs the HTTP/1 conformance cases with the sidecars of each peer.

use std::fmt::Write as _;
use std::net::{SocketAddr, TcpListener, TcpStream};

use anyhow::Context as _;

use super::peer;
use super::rows::Scenario;
use super::setup::Peer;
use super::setup::json_name;
use super::testbed::{HTTP_PORT, SERVER_IP, SERVICE_IP, Testbed};
use crate::conformance::cases::CASES;
use crate::conformance::{App, Outcome};

/// Runs the cases with each peer and returns the results as Markdown.
pub(super) fn document(peers: &[Peer]) -> anyhow::Result<String> {
    peer::prepare_run(peers, &[])?;
    let columns = peers
        .iter()
        .map(|peer| {
            eprintln!("testing {peer:?}");
            let outcomes = run_cases(*peer).with_context(|| format!("testing {peer:?}"))?;
            for outcome in outcomes.iter().filter(|outcome| outcome.deviation.is_some()) {
                eprintln!("{outcome}");
            }
            Ok(Column {
                name: json_name(*peer),
                version: peer.version()?,
                outcomes,
            })
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    Ok(markdown(&columns))
}

/// The results of one peer.
struct Column {
    name: String,
    version: String,
    /// In the order of `CASES`.
    outcomes: Vec<Outcome>,
}

fn run_cases(peer: Peer) -> anyhow::Result<Vec<Outcome>> {
    let testbed = Testbed::without_app()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("starting a runtime")?.block_on(async {
        let listening = || -> std::io::Result<TcpListener> {
            let listener = TcpListener::bind(http_port_addr(SERVER_IP)?)?;
            listener.set_nonblocking(true).map(|()| listener)
        };
        let listener = testbed
            .server
            .run(listening)?
            .context("opening the application's port")?;
        let app = App::start(tokio::net::TcpListener::from_std(listener)?);
        let setup = Scenario::HttpC1.setup();
        let _sidecars = peer.start(&testbed, &setup).context("starting")?;
        // The warm-up request of each case is retried until the sidecars are ready.
        let outcomes = app
            .run_all(async || dial(&testbed).await.expect("the sidecar listens"))
            .await;
        peer.verify(&testbed, &setup).context("checking").map(|()| outcomes)
    })
}

/// Connects from the client's namespace to the service. This blocks the thread only until the client's sidecar on the same machine
/// accepts the connection.
async fn dial(testbed: &Testbed) -> anyhow::Result<tokio::net::TcpStream> {
    let dialing = || -> std::io::Result<TcpStream> {
        let stream = TcpStream::connect(http_port_addr(SERVICE_IP)?)?;
        stream.set_nonblocking(true).map(|()| stream)
    };
    let stream = testbed.client.run(dialing)?.context("dialling the service")?;
    Ok(tokio::net::TcpStream::from_std(stream)?)
}

fn http_port_addr(host: &str) -> std::io::Result<SocketAddr> {
    let ip = host.parse().map_err(std::io::Error::other)?;
    Ok(SocketAddr::new(ip, HTTP_PORT))
}

fn markdown(columns: &[Column]) -> String {
    let mut out = String::from(INTRODUCTION);
    out.push_str("\n| Proxy | Version | Deviations |\n|---|---|---:|\n");
    for column in columns {
        let n_differing = column
            .outcomes
            .iter()
            .filter(|outcome| outcome.deviation.is_some() && !is_intentional_deviation(outcome.case.name))
            .count();
        let _ = writeln!(
            out,
            "| {} | {} | {n_differing} of {} |",
            column.name,
            column.version,
            CASES.len() - INTENTIONAL_DEVIATIONS.len()
        );
    }
    out.push_str("\n| Section | Case |");
    for column in columns {
        let _ = write!(out, " {} |", column.name);
    }
    out.push_str("\n|---|---|");
    out.push_str(&"---|".repeat(columns.len()));
    out.push('\n');
    for (index, case) in CASES.iter().enumerate() {
        let _ = write!(
            out,
            "| {} | {}{} |",
            case.section,
            case.name,
            intentional_deviation_mark(case.name)
        );
        for column in columns {
            let deviation = column
                .outcomes
                .get(index)
                .and_then(|outcome| outcome.deviation.as_deref());
            let _ = write!(out, " {} |", deviation.unwrap_or("ok"));
        }
        out.push('\n');
    }
    out
}

fn intentional_deviation_mark(name: &str) -> &'static str {
    if is_intentional_deviation(name) { " (*)" } else { "" }
}

fn is_intentional_deviation(name: &str) -> bool {
    INTENTIONAL_DEVIATIONS.contains(&name)
}

/// Cases in which tulle deviates from the RFC on purpose. They are not counted for any peer.
const INTENTIONAL_DEVIATIONS: [&str; 2] = ["no Host header", "HTTP/1.0"];

const INTRODUCTION: &str = "# HTTP/1 conformance

The results of sending raw HTTP/1 bytes of clients and applications through two sidecars with mutual TLS between them.
The sidecars are those of tulle and of other proxies. The configurations of the others are in `bench/peers`; they are minimal and leave every other option at its default.
Between the two sidecars, tulle, HAProxy and Envoy use HTTP/2, and nginx uses HTTP/1.
`tulle-bench conformance --to docs/reference/conformance.md` writes this file. It needs root and the programs that `./run bench` installs.
The cases, with all their bytes, are in `bench/src/conformance/cases.rs`. Tests run them with both sidecars of tulle and with each sidecar alone.
HTTP/2 is tested with h2spec, in `tests/tests/clients/h2spec.rs`: both sidecars pass all 145 cases on a port that is declared as HTTP/2.
On a port with protocol detection, one case fails (3.5/2): bytes that do not begin with the HTTP/2 preface are forwarded to the application as opaque bytes. HAProxy fails this case, too, when it detects the protocol.

The expected results are a strict reading of RFC 9112. Where the RFC leaves a choice, they are what tulle does.
So this file shows the differences of other proxies and does not judge them.
Some differences are harmless, such as a path in place of an absolute target. Others can make two parsers disagree about where a request ends.
In the cases with a (*), tulle deviates from the RFC, and they are not counted. A request without a Host header is forwarded to its original destination, and HTTP/1.0 stays HTTP/1.0, because an application that works with either must also work in a mesh.

Each connection begins with a valid request and its response, then the bytes of the case follow.
`ok` means the expected result: the request arrives as it was sent, the proxy refuses it with 400 (or 501 for an unknown transfer coding, 505 for an unsupported version), the response arrives, the proxy sends 502 in place of bytes that are not a response, or the client can tell that a response is truncated.
Otherwise the cell describes the result:

- status codes: those that the client received;
- \"no answer\": the client received nothing within five seconds, or before the connection ended;
- \"cut\": the response was truncated;
- \"forwards it\": the application received a request that the proxy should have refused;
- \"forwards N, …\": the application received N requests, and the client the responses that follow; at least one of the two is wrong;
- \"another body\": the application or the client received another body than the expected one;
- \"looks complete\": the client cannot tell that the response was truncated;
- \"left open\": the proxy does not close the connection after it has refused a request, or while the client waits for the rest of a truncated response;
- \"sends\": the request line that the application received;
- \"with\": a header line that should have been removed;
- \"without\": a header line that should have arrived;
- \"other bytes\": the client received bytes that are not an HTTP/1.1 response.
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_table_has_these_cases_and_no_deviation_of_tulle() {
        let rows: Vec<&str> = include_str!("../../../docs/reference/conformance.md")
            .lines()
            .skip_while(|line| !line.starts_with("| Section | Case | tulle |"))
            .skip(2)
            .collect();
        assert_eq!(rows.len(), CASES.len());
        for (row, case) in rows.iter().zip(CASES) {
            let ours = format!(
                "| {} | {}{} | ok |",
                case.section,
                case.name,
                intentional_deviation_mark(case.name)
            );
            assert!(row.starts_with(&ours), "{ours:?} is committed as {row:?}");
        }
    }

    #[test]
    fn the_committed_document_begins_with_the_introduction() {
        let committed = include_str!("../../../docs/reference/conformance.md");
        let introduction = committed.split_inclusive("\n\n| Proxy |").next().unwrap();
        assert_eq!(introduction, format!("{INTRODUCTION}\n| Proxy |"));
    }

    #[test]
    fn each_case_has_a_line_with_the_result_of_each_peer() {
        let outcomes = |deviation: Option<&str>| {
            let outcome = |case: &crate::conformance::cases::Case| Outcome {
                case: *case,
                observed: "forwarded".to_owned(),
                deviation: deviation.map(str::to_owned),
                deviation_details: None,
            };
            CASES.iter().map(outcome).collect()
        };
        let column = |name: &str, deviation| Column {
            name: name.to_owned(),
            version: format!("{name} 1"),
            outcomes: outcomes(deviation),
        };
        let text = markdown(&[column("tulle", None), column("other", Some("502"))]);
        assert!(
            INTENTIONAL_DEVIATIONS
                .iter()
                .all(|name| CASES.iter().any(|case| case.name == *name))
        );
        let n = CASES.len() - INTENTIONAL_DEVIATIONS.len();
        for part in [
            format!("| tulle | tulle 1 | 0 of {n} |"),
            format!("| other | other 1 | {n} of {n} |"),
            "| 3.2 | no Host header (*) | ok | 502 |".to_owned(),
            "| 2.1 | a plain request | ok | 502 |".to_owned(),
        ] {
            assert!(text.contains(&part), "no {part:?} in {text}");
        }
    }
}
