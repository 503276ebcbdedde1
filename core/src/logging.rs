//! Logs of the process: destination, format and filter.

use std::str::FromStr;
use std::sync::Arc;

use parking_lot::Mutex;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt, reload};

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    #[default]
    Plain,
    Json,
}

/// Reads and changes the log filter of the running process.
#[derive(Clone, Debug)]
pub struct LogHandle {
    filter: Arc<Mutex<String>>,
    reload: reload::Handle<EnvFilter, Registry>,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("{text:?} is not a log filter; expected a comma-separated list such as warn,tulle=info")]
    Filter {
        text: String,
        #[source]
        source: tracing_subscriber::filter::ParseError,
    },
    #[error("{0:?} is not a log format; expected plain or json")]
    Format(String),
    #[error("initializing logging")]
    Init(#[source] tracing_subscriber::util::TryInitError),
    #[error("changing the log filter")]
    Reload(#[source] reload::Error),
}

/// Starts logging to standard error; once per process.
///
/// # Errors
/// If the filter cannot be parsed, or logging was started before.
pub fn init(filter: &str, format: Format) -> Result<LogHandle, Error> {
    let (reloadable, reload) = reload::Layer::new(parse_filter(filter)?);
    let lines = fmt::layer().with_writer(std::io::stderr);
    let lines = match format {
        Format::Plain => lines.with_ansi(false).boxed(),
        Format::Json => lines.json().boxed(),
    };
    tracing_subscriber::registry()
        .with(reloadable)
        .with(lines)
        .try_init()
        .map_err(Error::Init)?;
    Ok(LogHandle {
        filter: Arc::new(Mutex::new(filter.to_owned())),
        reload,
    })
}

impl LogHandle {
    /// The text of the current filter.
    pub fn current(&self) -> String {
        self.filter.lock().clone()
    }

    /// Changes the filter.
    ///
    /// # Errors
    /// If the filter cannot be parsed; then the previous filter stays.
    pub fn set(&self, filter: &str) -> Result<(), Error> {
        let parsed = parse_filter(filter)?;
        let mut current = self.filter.lock();
        self.reload.reload(parsed).map_err(Error::Reload)?;
        filter.clone_into(&mut current);
        Ok(())
    }
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text.to_ascii_lowercase().as_str() {
            "plain" => Ok(Self::Plain),
            "json" => Ok(Self::Json),
            _ => Err(Error::Format(text.to_owned())),
        }
    }
}

fn parse_filter(text: &str) -> Result<EnvFilter, Error> {
    EnvFilter::builder()
        .parse(rename_linkerd_target(text))
        .map_err(|source| Error::Filter {
            text: text.to_owned(),
            source,
        })
}

/// Linkerd's proxy uses the log target `linkerd`; it is replaced by the target of this proxy, `tulle`. A module of Linkerd
/// (`linkerd::name`) has no counterpart and stays.
pub fn rename_linkerd_target(filter: &str) -> String {
    let parts = filter.split(',').map(|part| match part.trim().strip_prefix("linkerd") {
        Some(rest) if rest.is_empty() || rest.starts_with(['=', '[']) => format!("tulle{rest}"),
        _ => part.to_owned(),
    });
    parts.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linkerd_targets_are_renamed() {
        assert_eq!(
            rename_linkerd_target("warn,linkerd=debug,hickory=error"),
            "warn,tulle=debug,hickory=error"
        );
        assert_eq!(rename_linkerd_target("linkerd[request]=debug"), "tulle[request]=debug");
        assert_eq!(
            rename_linkerd_target("linkerd2_proxy=info,[{headers}]=off"),
            "linkerd2_proxy=info,[{headers}]=off"
        );
    }

    #[test]
    fn a_bad_filter_is_refused_and_the_former_one_stays() {
        let handle = init("warn,linkerd=info", Format::Json).unwrap();
        assert_eq!(handle.current(), "warn,linkerd=info");
        assert!(handle.set("tulle=loud").unwrap_err().to_string().contains("tulle=loud"));
        assert_eq!(handle.current(), "warn,linkerd=info");
        handle.set("debug").unwrap();
        assert_eq!(handle.current(), "debug");
        assert!(matches!(init("warn", Format::Plain), Err(Error::Init(_))));
    }

    #[test]
    fn formats_are_parsed_in_any_case() {
        assert_eq!("PLAIN".parse::<Format>().unwrap(), Format::Plain);
        assert_eq!("json".parse::<Format>().unwrap(), Format::Json);
        assert_eq!(
            "xml".parse::<Format>().unwrap_err().to_string(),
            "\"xml\" is not a log format; expected plain or json"
        );
    }
}
