//! `tulle explain`: why a request failed, from what its response says, and what to do. Asks nobody.

use std::fmt::Write as _;
use std::io::Read as _;
use std::process::ExitCode;

use anyhow::{Context as _, anyhow};
use clap::ValueEnum;
use regex::Regex;
use serde_json::json;
use tulle_core::causes::{self, Cause, Whose};

use crate::table;

/// What to explain.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// A code, the value of `l5d-proxy-cause`, a line of `tulle tap`, or a link to docs/errors.md; `-` reads a response
    /// or lines from standard input. Without it all codes are listed
    #[arg(value_name = "WHAT")]
    what: Vec<String>,
    /// How it is shown
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For people
    Text,
    /// For programs
    Json,
}

/// A cause as a proxy told it.
struct Told<'a> {
    cause: &'static Cause,
    /// What stands behind a colon after the code: who decided, mostly.
    by: Option<&'a str>,
    /// Which side of which proxy gave up, what it wanted to reach, and what else there is.
    fields: Vec<(&'a str, &'a str)>,
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let words = args.what.join(" ");
    let text = match words.as_str() {
        "" => {
            crate::print(&all(args.output)?)?;
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
    crate::print(&shown(&Told::parse(&text)?, args.output)?)?;
    Ok(ExitCode::SUCCESS)
}

impl<'a> Told<'a> {
    /// Finds the first cause in a text.
    ///
    /// # Errors
    /// A text without one, and a code that there is not, with those that are most like it.
    fn parse(text: &'a str) -> anyhow::Result<Self> {
        let value = value(text)?;
        let mut parts = value.split(';').map(str::trim);
        let first = parts.next().unwrap_or_default();
        let (code, by) = first
            .split_once(':')
            .map_or((first, None), |(code, by)| (code, Some(by.trim())));
        Ok(Self {
            cause: causes::find(code).ok_or_else(|| unknown(code))?,
            by,
            fields: parts.filter_map(|part| part.split_once('=')).collect(),
        })
    }

    /// What went before it, and is to be mended.
    fn after(&self) -> Option<&'static Cause> {
        self.field("after").and_then(causes::find)
    }

    fn field(&self, name: &str) -> Option<&'a str> {
        let field = self.fields.iter().find(|(key, _)| *key == name);
        field.map(|(_, value)| *value)
    }

    /// Which side of which proxy gave up, in words.
    fn place(&self) -> Option<String> {
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

/// What `l5d-proxy-cause` says, wherever in the text it stands; or the text itself, if it is nothing but that.
fn value(text: &str) -> anyhow::Result<&str> {
    let text = text.trim();
    // In lines of tap and heads of responses, in JSON, and in links.
    let marked =
        Regex::new(r#"(?i)(?:l5d-proxy-cause|\bcause)"?\s*[:=,]\s*(?:"valueStr"\s*:\s*)?"?([a-z][a-z_-]*[^"\r\n]*)"#)
            .context("the pattern is none")?;
    let link = Regex::new(r"^\S+://\S*#([a-z_-]+)$").context("the pattern is none")?;
    if let Some(found) = marked.captures(text).or_else(|| link.captures(text)) {
        return found
            .get(1)
            .map(|found| found.as_str())
            .context("the pattern has a group");
    }
    let code = text.split([';', ':']).next().unwrap_or_default();
    let is_code = !code.is_empty()
        && code
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || b"-_".contains(&byte));
    match is_code {
        true => Ok(text),
        false => Err(anyhow!(
            "no cause is told there: the application has answered by itself, or the proxy tells its causes to clients with \
             an identity only; expected a code such as no-endpoints, or a response with the header l5d-proxy-cause"
        )),
    }
}

fn unknown(code: &str) -> anyhow::Error {
    let mut alike: Vec<_> = causes::ALL
        .iter()
        .map(|cause| (strsim::jaro_winkler(cause.code, code), cause.code))
        .collect();
    alike.sort_by(|(one, _), (other, _)| other.total_cmp(one));
    let nearest: Vec<_> = alike.iter().take(3).map(|(_, code)| *code).collect();
    anyhow!(
        "{code:?} is not a cause; the nearest are {}, and `tulle explain` lists all",
        nearest.join(", ")
    )
}

fn shown(told: &Told<'_>, output: Output) -> anyhow::Result<String> {
    let Cause {
        code,
        whose,
        answers,
        meaning,
        advice,
    } = told.cause;
    if output == Output::Json {
        let fields: serde_json::Map<_, _> = told.fields.iter().map(|(k, v)| ((*k).to_owned(), json!(v))).collect();
        let value = json!({
            "code": code, "whose": whose.name(), "answers": answers, "meaning": meaning, "advice": advice,
            "by": told.by, "told": fields,
            "after": told.after().map(|after| {
                json!({ "code": after.code, "whose": after.whose.name(), "meaning": after.meaning, "advice": after.advice })
            }),
        });
        return Ok(serde_json::to_string_pretty(&value).context("writing JSON")? + "\n");
    }
    let answers = match answers.is_empty() {
        true => "the connection is closed",
        false => answers,
    };
    let mut text = format!("{code}: {meaning}\n\n");
    let mut line = |title: &str, value: &str| {
        let _ = writeln!(text, "{title:<14}{value}");
    };
    line("What to do", advice);
    line("Whose it is", whose_in_words(*whose));
    line("Answered with", answers);
    if let Some(by) = told.by {
        line("Decided by", by);
    }
    if let Some(place) = told.place() {
        line("Told by", &place);
    }
    if let Some(target) = told.field("target") {
        line("On the way", &format!("to {target}"));
    }
    for (name, value) in &told.fields {
        if !["direction", "hop", "target"].contains(name) {
            line(name, value);
        }
    }
    if let Some(after) = told.after() {
        let _ = write!(
            text,
            "\n{}: {}\n\n{:<14}{}\n",
            after.code, after.meaning, "What to do", after.advice
        );
    }
    Ok(text)
}

fn whose_in_words(whose: Whose) -> &'static str {
    match whose {
        Whose::Client => "client: who sent the request can mend it",
        Whose::Server => "server: the workload that the request was for",
        Whose::Policy => "policy: who wrote the policies and routes",
        Whose::Mesh => "mesh: who runs the mesh",
    }
}

fn all(output: Output) -> anyhow::Result<String> {
    if output == Output::Json {
        let all: Vec<_> = causes::ALL
            .iter()
            .map(|cause| json!({ "code": cause.code, "whose": cause.whose.name(), "meaning": cause.meaning }))
            .collect();
        return Ok(serde_json::to_string_pretty(&all).context("writing JSON")? + "\n");
    }
    let rows = causes::ALL
        .iter()
        .map(|cause| [cause.code, cause.whose.name(), cause.meaning].map(str::to_owned));
    Ok(table::text(&["CAUSE", "WHOSE", "MEANING"], rows))
}

const EXAMPLES: &str = "\
  tulle explain                                   # all codes
  tulle explain no-endpoints
  tulle explain 'policy-denied:Server/web; why=no-tls; direction=inbound; hop=web.shop; target=10.0.0.7:80'
  curl -si http://web.shop | tulle explain -
  tulle tap deploy/web -n shop | grep -m1 cause= | tulle explain -";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_found_wherever_they_stand() {
        let told = "no-endpoints; direction=outbound; hop=web.shop; target=10.0.0.7:80";
        let head = format!("HTTP/1.1 503 Service Unavailable\r\nL5d-Proxy-Cause: {told}\r\ncontent-length: 0\r\n\r\n");
        let line = format!("rsp id=0:1 proxy=out src=10.0.0.1:5 :status=503 latency=9µs cause=\"{told}\"");
        let json = format!(r#"{{"responseInitEvent":{{"httpStatus":503,"cause":"{told}"}}}}"#);
        let headers = format!(r#"{{"headers":[{{"name":"l5d-proxy-cause","valueStr":"{told}"}}]}}"#);
        for text in [told, &head, &line, &json, &headers] {
            let told = Told::parse(text).unwrap();
            assert_eq!(told.cause.code, "no-endpoints", "{text}");
            assert_eq!(told.field("hop"), Some("web.shop"), "{text}");
            assert_eq!(told.field("target"), Some("10.0.0.7:80"), "{text}");
        }
        for text in ["deadline", " deadline\n", "docs://x/errors.md#deadline"] {
            assert_eq!(Told::parse(text).unwrap().cause.code, "deadline", "{text}");
        }
    }

    #[test]
    fn an_explanation_says_who_gave_up_and_what_to_do() {
        let told =
            Told::parse("policy-denied:Server/web; why=no-tls; direction=inbound; hop=web.shop; target=1.2.3.4:80");
        let text = shown(&told.unwrap(), Output::Text).unwrap();
        for part in [
            "policy-denied: No authorization",
            "What to do    `no-tls`",
            "Decided by    Server/web",
            "the server's proxy, before its application: web.shop",
            "to 1.2.3.4:80",
            "why           no-tls",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }

    #[test]
    fn what_went_before_is_explained_too() {
        let told = Told::parse("endpoints-unready; after=tls-identity-mismatch; direction=outbound").unwrap();
        let mismatch = causes::find("tls-identity-mismatch").unwrap();
        for output in [Output::Text, Output::Json] {
            let text = shown(&told, output).unwrap();
            for part in [told.cause.advice, mismatch.meaning, mismatch.advice] {
                assert!(text.contains(part), "{part:?} is not in\n{text}");
            }
        }
    }

    #[test]
    fn what_is_no_cause_is_answered_with_the_nearest_or_the_reason() {
        let refused = |text: &str| Told::parse(text).err().unwrap().to_string();
        assert!(
            refused("no-endpoint").contains("no-endpoints"),
            "{}",
            refused("no-endpoint")
        );
        assert!(refused("rsp id=0:1 proxy=in :status=500 latency=1ms").contains("answered by itself"));
        assert!(refused("HTTP/1.1 200 OK\r\n\r\n").contains("answered by itself"));
    }

    #[test]
    fn every_code_explains_itself() {
        for cause in causes::ALL {
            let told = Told::parse(cause.code).unwrap();
            assert!(shown(&told, Output::Text).unwrap().contains(cause.advice));
        }
        assert_eq!(all(Output::Text).unwrap().lines().count(), causes::ALL.len() + 1);
    }
}
