//! The table of HTTP/1 bytes, sent through the sidecars of each peer.

use std::fmt::Write as _;
use std::net::{SocketAddr, TcpListener, TcpStream};

use anyhow::Context as _;

use super::peer::Peer;
use super::report::name;
use super::rows::Row;
use super::scene::{self, HTTP_PORT, SERVER, SERVICE, Scene};
use crate::conformance::cases::CASES;
use crate::conformance::{App, Outcome};

/// Tries the table with each peer, and says in Markdown what came of it.
pub(super) fn document(peers: &[Peer]) -> anyhow::Result<String> {
    scene::prepare(peers, &[])?;
    let columns = peers
        .iter()
        .map(|peer| {
            eprintln!("trying {peer:?}");
            let outcomes = try_all(*peer).with_context(|| format!("trying {peer:?}"))?;
            for outcome in outcomes.iter().filter(|outcome| outcome.instead.is_some()) {
                eprintln!("{outcome}");
            }
            Ok(Column {
                name: name(*peer),
                version: peer.version()?,
                outcomes,
            })
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    Ok(markdown(&columns))
}

/// What came of one peer.
struct Column {
    name: String,
    version: String,
    /// Of each row of the table, in its order.
    outcomes: Vec<Outcome>,
}

fn try_all(peer: Peer) -> anyhow::Result<Vec<Outcome>> {
    let scene = Scene::without_app()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("starting a runtime")?.block_on(async {
        let listening = || -> std::io::Result<TcpListener> {
            let listener = TcpListener::bind(addr(SERVER)?)?;
            listener.set_nonblocking(true).map(|()| listener)
        };
        let listener = scene.server.run(listening)?.context("opening the application's port")?;
        let app = App::start(tokio::net::TcpListener::from_std(listener)?);
        let setup = Row::HttpC1.setup();
        let _sidecars = peer.start(&scene, &setup).context("starting")?;
        // What everybody's rows begin with is tried until the sidecars know each other.
        let outcomes = app
            .try_all(async || dial(&scene).await.expect("the sidecar listens"))
            .await;
        peer.verify(&scene, &setup).context("checking").map(|()| outcomes)
    })
}

/// A connection of the client to the service. Its sidecar accepts it, or the kernel for it, so this does not wait for long.
async fn dial(scene: &Scene) -> anyhow::Result<tokio::net::TcpStream> {
    let dialing = || -> std::io::Result<TcpStream> {
        let stream = TcpStream::connect(addr(SERVICE)?)?;
        stream.set_nonblocking(true).map(|()| stream)
    };
    let stream = scene.client.run(dialing)?.context("dialling the service")?;
    Ok(tokio::net::TcpStream::from_std(stream)?)
}

fn addr(host: &str) -> std::io::Result<SocketAddr> {
    let ip = host.parse().map_err(std::io::Error::other)?;
    Ok(SocketAddr::new(ip, HTTP_PORT))
}

fn markdown(columns: &[Column]) -> String {
    let mut out = String::from(HEAD);
    out.push_str("\n| | Version | Differs in |\n|---|---|---:|\n");
    for column in columns {
        let n_differing = column
            .outcomes
            .iter()
            .filter(|outcome| outcome.instead.is_some() && !is_departure(outcome.case.name))
            .count();
        let _ = writeln!(
            out,
            "| {} | {} | {n_differing} of {} |",
            column.name,
            column.version,
            CASES.len() - DEPARTURES.len()
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
        let _ = write!(out, "| {} | {}{} |", case.section, case.name, mark(case.name));
        for column in columns {
            let instead = column
                .outcomes
                .get(index)
                .and_then(|outcome| outcome.instead.as_deref());
            let _ = write!(out, " {} |", instead.unwrap_or("ok"));
        }
        out.push('\n');
    }
    out
}

fn mark(name: &str) -> &'static str {
    if is_departure(name) { " (*)" } else { "" }
}

fn is_departure(name: &str) -> bool {
    DEPARTURES.contains(&name)
}

/// Rows in which tulle does otherwise than the RFC says, on purpose; they count for nobody.
const DEPARTURES: [&str; 2] = ["no host", "HTTP/1.0"];

const HEAD: &str = "# HTTP/1 to the letter

What becomes of raw bytes of clients and applications on their way through two sidecars with mutual TLS between them.
The sidecars are tulle's, and others with the configurations of `bench/peers`, which are lean and otherwise leave everything at its default.
Between their sidecars tulle, HAProxy and Envoy speak HTTP/2, nginx speaks HTTP/1.
`tulle-bench conformance --to docs/conformance.md` makes this file; it needs root, and what `./run bench` installs.
The rows are in `bench/src/conformance/cases.rs`, with all bytes; tests try them with both sidecars of tulle and with each alone.
HTTP/2 is tried by h2spec, in `tests/tests/clients/h2spec.rs`: both sidecars pass its 145 cases on a port that is said to speak it.
Where that has to be found out, one fails (3.5/2): what does not begin as HTTP/2 is none, and goes to the application as it is; HAProxy fails it, too, where it finds out.

The table is our reading of RFC 9112, and a strict one: where the RFC leaves a choice, it has ours.
So a difference of others is shown here, not judged.
Some are as good as ours, a path in place of an absolute target for instance; with others two readers may disagree on where a request ends.
In the rows with a (*) it is tulle that departs from the RFC, and they are not counted: a request without a host goes on to the address that it was sent to, and HTTP/1.0 stays HTTP/1.0, because an application that has lived with either has to go on doing so in a mesh.

Each connection begins with a plain request that is answered, then come the bytes of the row.
`ok` is what the table wants: a request that arrives as it was sent, a refusal by 400 (or 501 for a coding that nobody knows), an answer that arrives, 502 in place of one that is none, an end that cannot be taken for a good one.
Otherwise the cell says what happened:

- statuses that the client saw, or no answer within five seconds or before the connection ended;
- \"passes it\": the application got what should have been refused;
- \"looks whole\": the client cannot tell that the answer was cut;
- \"left open\": the client still waits for the rest of an answer that was cut;
- \"sends\": the request line that the application got;
- \"with\" and \"without\": a header line that should not, or should, have arrived;
- \"other bytes\": something that is no answer of HTTP/1.1.
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_table_is_of_these_cases_and_has_nothing_wrong_of_ours() {
        let rows: Vec<&str> = include_str!("../../../docs/conformance.md")
            .lines()
            .skip_while(|line| !line.starts_with("| Section | Case | tulle |"))
            .skip(2)
            .collect();
        assert_eq!(rows.len(), CASES.len());
        for (row, case) in rows.iter().zip(CASES) {
            let ours = format!("| {} | {}{} | ok |", case.section, case.name, mark(case.name));
            assert!(row.starts_with(&ours), "{ours:?} is committed as {row:?}");
        }
    }

    #[test]
    fn each_case_has_a_line_with_what_each_peer_did() {
        let outcomes = |instead: Option<&str>| {
            let outcome = |case: &crate::conformance::cases::Case| Outcome {
                case: *case,
                found: "passed".to_owned(),
                instead: instead.map(str::to_owned),
                wrong: None,
            };
            CASES.iter().map(outcome).collect()
        };
        let column = |name: &str, instead| Column {
            name: name.to_owned(),
            version: format!("{name} 1"),
            outcomes: outcomes(instead),
        };
        let text = markdown(&[column("tulle", None), column("other", Some("502"))]);
        assert!(
            DEPARTURES
                .iter()
                .all(|name| CASES.iter().any(|case| case.name == *name))
        );
        let n = CASES.len() - DEPARTURES.len();
        for part in [
            format!("| tulle | tulle 1 | 0 of {n} |"),
            format!("| other | other 1 | {n} of {n} |"),
            "| 3.2 | no host (*) | ok | 502 |".to_owned(),
            "| 2.1 | a plain request | ok | 502 |".to_owned(),
        ] {
            assert!(text.contains(&part), "no {part:?} in {text}");
        }
    }
}
