//! Log lines in the format of Linkerd's controllers: `time="…" level=… msg="…" key=value`.

use std::fmt::{self, Write};

use anyhow::{Context, Result, anyhow};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};
use tulle_core::error_chain::ErrorChain;
use tulle_core::logging;

use crate::config::LogConfig;

/// Formats an event as one line of text.
pub(crate) struct Plain;

impl<S, N> FormatEvent<S, N> for Plain
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let now = OffsetDateTime::now_utc();
        let now = now.replace_nanosecond(0).unwrap_or(now);
        let time = now.format(&Rfc3339).unwrap_or_default();
        let mut line = Line::default();
        event.record(&mut line);
        let level = level_name(*event.metadata().level());
        writeln!(out, "time=\"{time}\" level={level} {}", line.finish())
    }
}

/// Writes the logs of this process to standard error, in the configured format. Can be called once per process.
///
/// # Errors
/// Fails if the log level is invalid.
pub fn start(config: &LogConfig) -> Result<()> {
    let filter = filter_for_level(&config.level);
    match config.format {
        logging::Format::Plain => start_plain(&filter),
        logging::Format::Json => logging::init(&filter, logging::Format::Json)
            .map(drop)
            .context("starting logs"),
    }
}

/// Writes plain log lines to standard error. Can be called once per process.
///
/// # Errors
/// Fails if the filter is invalid or logging has already started.
pub(crate) fn start_plain(filter: &str) -> Result<()> {
    let filter = parse_filter(filter)?;
    let lines = tracing_subscriber::fmt::layer()
        .event_format(Plain)
        .with_writer(std::io::stderr)
        // The process must keep running if standard error is closed.
        .log_internal_errors(false);
    tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .try_init()
        .map_err(|err| anyhow!(err).context("starting logs"))
}

/// Filters for Linkerd's policy controller use the target `linkerd`. Here they apply to `tulle`.
fn parse_filter(filter: &str) -> Result<EnvFilter> {
    EnvFilter::builder()
        .parse(logging::rename_linkerd_target(filter))
        .with_context(|| format!("--log-level={filter:?}; expected a level, or a filter such as warn,tulle=debug"))
}

/// Converts `--log-level` to a filter. A level of Linkerd's controllers (`panic` to `trace`) applies to tulle's own code.
/// Dependencies then log warnings and errors, or only errors if the level is `error` or above.
pub(crate) fn filter_for_level(level: &str) -> String {
    match level {
        "panic" | "fatal" | "error" => "error".to_owned(),
        "warn" | "warning" => "warn".to_owned(),
        "info" | "debug" | "trace" => format!("warn,tulle={level}"),
        filter => filter.to_owned(),
    }
}

/// The name of a level in logrus, which Linkerd's controllers use.
fn level_name(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error",
        Level::WARN => "warning",
        Level::INFO => "info",
        Level::DEBUG => "debug",
        Level::TRACE => "trace",
    }
}

#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Line {
    fn finish(self) -> String {
        let mut line = String::from("msg=");
        // Always quoted, because messages contain spaces.
        let _ = write!(line, "{:?}", self.message);
        line + &self.fields
    }

    fn add(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            return self.message.push_str(value);
        }
        // Removes the prefix of raw identifiers, such as `r#type`. Writing to a string cannot fail.
        let name = field.name().trim_start_matches("r#");
        let _ = match is_unquoted(value) {
            true => write!(self.fields, " {name}={value}"),
            false => write!(self.fields, " {name}={value:?}"),
        };
    }
}

impl Visit for Line {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, &format!("{value:?}"));
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.add(field, &ErrorChain(value).to_string());
    }
}

/// Returns whether a value needs no quotes, by the rules of logrus.
fn is_unquoted(value: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._/@^+".contains(&b);
    !value.is_empty() && value.bytes().all(plain)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io;

    use tulle_core::log_capture::LogCapture;

    use super::*;

    /// Runs a function on this thread and returns its log lines.
    pub(crate) fn capture_lines(run: impl FnOnce()) -> Vec<String> {
        let log = LogCapture::start_with(Plain);
        run();
        log.lines()
    }

    #[test]
    fn a_line_has_time_level_message_and_fields() {
        let lines = capture_lines(|| {
            let addr = "127.0.0.1:8086";
            let err = io::Error::other("a \"quoted\" cause");
            tracing::info!(%addr, n = 3, name = "a b", "caches synced");
            tracing::warn!(error = &err as &dyn std::error::Error, "no\nbreak");
        });
        let lines: Vec<_> = lines.iter().map(|line| line.split_once(" level=").unwrap()).collect();
        assert_eq!(
            lines[0].1,
            "info msg=\"caches synced\" addr=\"127.0.0.1:8086\" n=3 name=\"a b\""
        );
        assert_eq!(lines[1].1, r#"warning msg="no\nbreak" error="a \"quoted\" cause""#);
        let time = lines[0].0.strip_prefix("time=\"").unwrap().strip_suffix("Z\"").unwrap();
        assert_eq!(time.len(), "2025-05-31T12:00:00".len());
    }

    #[test]
    fn log_levels_of_linkerds_controllers_apply_to_tulle() {
        assert_eq!(filter_for_level("fatal"), "error");
        assert_eq!(filter_for_level("debug"), "warn,tulle=debug");
        assert_eq!(filter_for_level("linkerd=info,warn"), "linkerd=info,warn");
    }

    #[test]
    fn filters_for_the_target_linkerd_apply_to_tulle() {
        let check = |filter: &str, expected: &str| assert_eq!(parse_filter(filter).unwrap().to_string(), expected);
        check("linkerd=info", "tulle=info");
        check("linkerd[request]=debug", "tulle[request]=debug");
        assert!(parse_filter("linkerd=loud").is_err());
    }
}
