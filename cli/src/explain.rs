//! `tulle explain`: explains from a response why the request failed, and how to fix it. The command sends no request.

use std::fmt::Write as _;
use std::io::Read as _;
use std::process::ExitCode;

use anyhow::{Context as _, anyhow};
use clap::ValueEnum;
use regex::Regex;
use serde_json::json;
use tulle_core::causes::{self, Cause, Responsible};

use crate::table;

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// A code, the value of `l5d-proxy-cause`, a line of `tulle tap`, or a link to docs/reference/errors.md; `-` reads a response
    /// or lines from standard input. Without WHAT, all codes are listed
    #[arg(value_name = "WHAT")]
    input: Vec<String>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// Text for people
    Text,
    /// JSON for programs
    Json,
}

/// A cause in the form in which a proxy reports it.
struct ReportedCause<'a> {
    cause: &'static Cause,
    /// The text after the colon that follows the code, usually the object that made the decision.
    detail: Option<&'a str>,
    /// The proxy and direction that failed, its target, and further fields.
    fields: Vec<(&'a str, &'a str)>,
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let words = args.input.join(" ");
    let text = match words.as_str() {
        "" => {
            crate::print(&render_all_causes(args.output)?)?;
            return Ok(ExitCode::SUCCESS);
        }
        "-" => {
            let mut text = String::new();
            std::io::stdin()
                .read_to_string(&mut text)
                .context("reading standard input")?;
            text
        }
        _ => words,
    };
    crate::print(&render(&ReportedCause::parse(&text)?, args.output)?)?;
    Ok(ExitCode::SUCCESS)
}

impl<'a> ReportedCause<'a> {
    /// Finds the first cause in a text.
    ///
    /// # Errors
    /// Fails if the text has no cause, or if the code is unknown. The error then lists similar codes.
    fn parse(text: &'a str) -> anyhow::Result<Self> {
        let value = extract_cause(text)?;
        let mut parts = value.split(';').map(str::trim);
        let first = parts.next().unwrap_or_default();
        let (code, detail) = first
            .split_once(':')
            .map_or((first, None), |(code, detail)| (code, Some(detail.trim())));
        Ok(Self {
            cause: causes::find(code).ok_or_else(|| unknown_code_error(code))?,
            detail,
            fields: parts.filter_map(|part| part.split_once('=')).collect(),
        })
    }

    /// The cause in the field `after`: an earlier failure that led to the reported one. The earlier failure is the one to fix.
    fn preceding_cause(&self) -> Option<&'static Cause> {
        self.field("after").and_then(causes::find)
    }

    fn field(&self, name: &str) -> Option<&'a str> {
        let field = self.fields.iter().find(|(key, _)| *key == name);
        field.map(|(_, value)| *value)
    }

    /// Describes which side of which proxy failed.
    fn origin(&self) -> Option<String> {
        let side = match self.field("direction")? {
            "inbound" => "the server's proxy, before its application",
            "outbound" => "the client's proxy, on the way to the server",
            other => return Some(format!("the {other} side of a proxy")),
        };
        Some(match self.field("hop") {
            Some(hop) => format!("{side}: {hop}"),
            None => side.to_owned(),
        })
    }
}

/// Finds the value of `l5d-proxy-cause` anywhere in the text. Returns the whole text if it is such a value.
fn extract_cause(text: &str) -> anyhow::Result<&str> {
    let text = text.trim();
    // The forms in tap lines and response headers, in JSON, and in links.
    let labelled_value =
        Regex::new(r#"(?i)(?:l5d-proxy-cause|\bcause)"?\s*[:=,]\s*(?:"valueStr"\s*:\s*)?"?([a-z][a-z_-]*[^"\r\n]*)"#)
            .context("compiling the pattern")?;
    let link = Regex::new(r"^\S+://\S*#([a-z_-]+)$").context("compiling the pattern")?;
    if let Some(found) = labelled_value.captures(text).or_else(|| link.captures(text)) {
        return found
            .get(1)
            .map(|found| found.as_str())
            .context("the pattern matched without its group");
    }
    let code = text.split([';', ':']).next().unwrap_or_default();
    let is_code = !code.is_empty()
        && code
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || b"-_".contains(&byte));
    match is_code {
        true => Ok(text),
        false => Err(anyhow!(
            "no cause found: the response is from the application, or the proxy reports causes only to clients with \
             an identity; expected a code such as no-endpoints, or a response with the header l5d-proxy-cause"
        )),
    }
}

fn unknown_code_error(code: &str) -> anyhow::Error {
    let mut codes_by_similarity: Vec<_> = causes::ALL
        .iter()
        .map(|cause| (strsim::jaro_winkler(cause.code, code), cause.code))
        .collect();
    codes_by_similarity.sort_by(|(one, _), (other, _)| other.total_cmp(one));
    let nearest: Vec<_> = codes_by_similarity.iter().take(3).map(|(_, code)| *code).collect();
    anyhow!(
        "{code:?} is not a cause; the nearest are {}, and `tulle explain` lists all",
        nearest.join(", ")
    )
}

fn render(reported: &ReportedCause<'_>, output: Output) -> anyhow::Result<String> {
    let Cause {
        code,
        responsible,
        statuses,
        meaning,
        advice,
    } = reported.cause;
    if output == Output::Json {
        let fields: serde_json::Map<_, _> = reported
            .fields
            .iter()
            .map(|(k, v)| ((*k).to_owned(), json!(v)))
            .collect();
        let value = json!({
            "code": code, "responsible": responsible.name(), "statuses": statuses, "meaning": meaning, "advice": advice,
            "detail": reported.detail, "fields": fields,
            "preceding": reported.preceding_cause().map(|cause| {
                json!({ "code": cause.code, "responsible": cause.responsible.name(), "meaning": cause.meaning, "advice": cause.advice })
            }),
        });
        return Ok(serde_json::to_string_pretty(&value).context("writing JSON")? + "\n");
    }
    let mut text = format!("{code}: {meaning}\n\n");
    let mut line = |title: &str, value: &str| {
        let _ = writeln!(text, "{title:<14}{value}");
    };
    line("What to do", advice);
    line("Responsible", describe_responsible(*responsible));
    line("Response", statuses);
    if let Some(detail) = reported.detail {
        line("Decided by", detail);
    }
    if let Some(origin) = reported.origin() {
        line("Reported by", &origin);
    }
    if let Some(target) = reported.field("target") {
        line("Destination", target);
    }
    for (name, value) in &reported.fields {
        if !["direction", "hop", "target"].contains(name) {
            line(name, value);
        }
    }
    if let Some(preceding) = reported.preceding_cause() {
        let _ = write!(
            text,
            "\n{}: {}\n\n{:<14}{}\n",
            preceding.code, preceding.meaning, "What to do", preceding.advice
        );
    }
    Ok(text)
}

fn describe_responsible(responsible: Responsible) -> &'static str {
    match responsible {
        Responsible::Client => "client: the sender of the request can fix it",
        Responsible::Server => "server: the owner of the requested workload can fix it",
        Responsible::Policy => "policy: the author of the policies and routes can fix it",
        Responsible::Mesh => "mesh: the operator of the mesh can fix it",
    }
}

fn render_all_causes(output: Output) -> anyhow::Result<String> {
    if output == Output::Json {
        let all: Vec<_> = causes::ALL
            .iter()
            .map(|cause| json!({ "code": cause.code, "responsible": cause.responsible.name(), "meaning": cause.meaning }))
            .collect();
        return Ok(serde_json::to_string_pretty(&all).context("writing JSON")? + "\n");
    }
    let rows = causes::ALL
        .iter()
        .map(|cause| [cause.code, cause.responsible.name(), cause.meaning].map(str::to_owned));
    Ok(table::render(&["CAUSE", "RESPONSIBLE", "MEANING"], rows))
}

const EXAMPLES: &str = "\
  tulle explain                                   # all codes
  tulle explain no-endpoints
  tulle explain 'policy-denied:server/web-http; why=no-tls; direction=inbound; hop=web.shop; target=10.0.0.7:80'
  curl -si http://web.shop | tulle explain -
  tulle tap deploy/web -n shop | grep -m1 cause= | tulle explain -";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_found_in_codes_headers_and_responses() {
        let reported = "no-endpoints; direction=outbound; hop=web.shop; target=10.0.0.7:80";
        let head =
            format!("HTTP/1.1 503 Service Unavailable\r\nL5d-Proxy-Cause: {reported}\r\ncontent-length: 0\r\n\r\n");
        let line = format!("rsp id=0:1 proxy=out src=10.0.0.1:5 :status=503 latency=9µs cause=\"{reported}\"");
        let json = format!(r#"{{"responseInitEvent":{{"httpStatus":503,"cause":"{reported}"}}}}"#);
        let headers = format!(r#"{{"headers":[{{"name":"l5d-proxy-cause","valueStr":"{reported}"}}]}}"#);
        for text in [reported, &head, &line, &json, &headers] {
            let reported = ReportedCause::parse(text).unwrap();
            assert_eq!(reported.cause.code, "no-endpoints", "{text}");
            assert_eq!(reported.field("hop"), Some("web.shop"), "{text}");
            assert_eq!(reported.field("target"), Some("10.0.0.7:80"), "{text}");
        }
        for text in ["deadline", " deadline\n", "docs://x/errors.md#deadline"] {
            assert_eq!(ReportedCause::parse(text).unwrap().cause.code, "deadline", "{text}");
        }
    }

    #[test]
    fn an_explanation_names_the_failed_proxy_and_the_fix() {
        let reported = ReportedCause::parse(
            "policy-denied:server/web-http; why=no-tls; direction=inbound; hop=web.shop; target=1.2.3.4:80",
        );
        let text = render(&reported.unwrap(), Output::Text).unwrap();
        for part in [
            "policy-denied: No authorization",
            "What to do    `no-tls`",
            "Decided by    server/web-http",
            "the server's proxy, before its application: web.shop",
            "Destination   1.2.3.4:80",
            "why           no-tls",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }

    #[test]
    fn the_earlier_failure_is_explained_too() {
        let reported =
            ReportedCause::parse("endpoints-unready; after=tls-identity-mismatch; direction=outbound").unwrap();
        let mismatch = causes::find("tls-identity-mismatch").unwrap();
        for output in [Output::Text, Output::Json] {
            let text = render(&reported, output).unwrap();
            for part in [reported.cause.advice, mismatch.meaning, mismatch.advice] {
                assert!(text.contains(part), "{part:?} is not in\n{text}");
            }
        }
    }

    #[test]
    fn an_unknown_cause_gets_a_suggestion_or_an_error() {
        let refused = |text: &str| ReportedCause::parse(text).err().unwrap().to_string();
        assert!(
            refused("no-endpoint").contains("no-endpoints"),
            "{}",
            refused("no-endpoint")
        );
        assert!(refused("rsp id=0:1 proxy=in :status=500 latency=1ms").contains("from the application"));
        assert!(refused("HTTP/1.1 200 OK\r\n\r\n").contains("from the application"));
    }

    #[test]
    fn every_code_can_be_explained() {
        for cause in causes::ALL {
            let reported = ReportedCause::parse(cause.code).unwrap();
            assert!(render(&reported, Output::Text).unwrap().contains(cause.advice));
        }
        assert_eq!(
            render_all_causes(Output::Text).unwrap().lines().count(),
            causes::ALL.len() + 1
        );
    }
}
