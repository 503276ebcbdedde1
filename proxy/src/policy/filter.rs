//! Route filters: header edits, redirects and injected failures.
//!
//! A filter either changes a head in place, or says what to answer instead of going on.

use std::fmt::Write;
use std::sync::Arc;

use http::header::{HOST, HeaderName};
use http::uri::Scheme;
use http::{HeaderMap, HeaderValue, StatusCode, Uri};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Filter {
    RequestHeaders(HeaderModifier),
    ResponseHeaders(HeaderModifier),
    Redirect(Redirect),
    Failure(FailureInjector),
    /// A filter that we do not know. Nobody can tell what passing it by would permit, so no request passes.
    Unknown,
}

/// Changes to headers, made in this order: add, set, remove.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderModifier {
    pub add: Vec<(HeaderName, HeaderValue)>,
    pub set: Vec<(HeaderName, HeaderValue)>,
    pub remove: Vec<HeaderName>,
}

/// Where to send a client instead; what is absent stays as in the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redirect {
    pub scheme: Option<Scheme>,
    pub host: Option<Box<str>>,
    pub path: Option<PathModifier>,
    pub port: Option<u16>,
    pub status: StatusCode,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathModifier {
    /// The whole path; the query stays.
    Full(Box<str>),
    /// The part of the path that a prefix match covered.
    Prefix(Box<str>),
}

/// A failure for some of the requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailureInjector {
    pub failure: Failure,
    pub ratio: Ratio,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    Http { status: StatusCode, message: Arc<str> },
    Grpc { code: u16, message: Arc<str> },
}

/// A part of requests: `numerator` of `denominator`, which is not zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ratio {
    numerator: u32,
    denominator: u32,
}

/// What to answer instead of going on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Redirect {
        status: StatusCode,
        location: HeaderValue,
    },
    Failure(Failure),
    /// The filters cannot be carried out; the answer is 500.
    Broken(&'static str),
}

/// A request as filters see it.
#[derive(Debug)]
pub struct RequestHead<'a> {
    pub uri: &'a Uri,
    pub headers: &'a mut HeaderMap,
    /// Bytes of the path that the rule's prefix match covered.
    pub prefix: Option<usize>,
}

/// Applies a rule's filters in order; `draw(n)` is a random number below `n`.
///
/// # Errors
/// A filter answers the request; later filters are not applied.
pub fn apply_request(
    filters: &[Filter],
    head: &mut RequestHead<'_>,
    mut draw: impl FnMut(u32) -> u32,
) -> Result<(), Answer> {
    for filter in filters {
        match filter {
            Filter::RequestHeaders(modifier) => modifier.apply(head.headers),
            Filter::ResponseHeaders(_) => {}
            Filter::Redirect(redirect) => redirect.apply(head)?,
            Filter::Failure(injector) => {
                if draw(injector.ratio.denominator) < injector.ratio.numerator {
                    return Err(Answer::Failure(injector.failure.clone()));
                }
            }
            Filter::Unknown => return Err(Answer::Broken("unknown filter")),
        }
    }
    Ok(())
}

/// Applies what a rule's filters say of responses.
pub fn apply_response(filters: &[Filter], headers: &mut HeaderMap) {
    for filter in filters {
        if let Filter::ResponseHeaders(modifier) = filter {
            modifier.apply(headers);
        }
    }
}

impl HeaderModifier {
    pub fn apply(&self, headers: &mut HeaderMap) {
        for (name, value) in &self.add {
            headers.append(name, value.clone());
        }
        for (name, value) in &self.set {
            headers.insert(name, value.clone());
        }
        for name in &self.remove {
            headers.remove(name);
        }
    }
}

impl Ratio {
    pub const ALWAYS: Self = Self {
        numerator: 1,
        denominator: 1,
    };

    /// `None` when the part would be larger than the whole, or of nothing.
    pub fn new(numerator: u32, denominator: u32) -> Option<Self> {
        (denominator > 0 && numerator <= denominator).then_some(Self { numerator, denominator })
    }
}

impl Redirect {
    /// Passes when the location would be where the request already is.
    fn apply(&self, head: &RequestHead<'_>) -> Result<(), Answer> {
        let authority = head
            .uri
            .authority()
            .map(|authority| authority.as_str())
            .or_else(|| head.headers.get(HOST)?.to_str().ok())
            .ok_or(Answer::Broken("redirect of a request without a host"))?;
        let authority = authority.rsplit_once('@').map_or(authority, |(_, rest)| rest);
        let (host, port) = split_port(authority);

        let from = head.uri.scheme().unwrap_or(&Scheme::HTTP);
        let scheme = self.scheme.as_ref().unwrap_or(from);
        // A port belongs to the scheme and host that it was given with; another scheme brings its own.
        let port = match self.port {
            Some(port) => Some(port),
            None if self.scheme.is_none() || scheme == from => port,
            None => None,
        };
        let port = port.filter(|port| default_port(scheme) != Some(*port));

        let mut location = format!("{scheme}://{}", self.host.as_deref().unwrap_or(host));
        if let Some(port) = port {
            write!(location, ":{port}").expect("a string takes all that is written");
        }
        let path = head.uri.path();
        match &self.path {
            None => location.push_str(path),
            Some(PathModifier::Full(full)) => location.push_str(full),
            Some(PathModifier::Prefix(replacement)) => {
                let rest = head.prefix.and_then(|prefix| path.get(prefix..));
                let rest = rest.ok_or(Answer::Broken("redirect replaces a prefix where none was matched"))?;
                location.push_str(&replace_prefix(replacement, rest));
            }
        }
        if let Some(query) = head.uri.query() {
            location.push('?');
            location.push_str(query);
        }

        if is_same(&location, head.uri, from, authority) {
            return Ok(());
        }
        let location = HeaderValue::try_from(location).map_err(|_| Answer::Broken("redirect to an invalid URI"))?;
        Err(Answer::Redirect {
            status: self.status,
            location,
        })
    }
}

/// A new prefix in front of what followed the old one, with one slash between them.
fn replace_prefix(replacement: &str, rest: &str) -> String {
    let path = if rest.is_empty() {
        replacement.to_owned()
    } else {
        format!("{}{rest}", replacement.trim_end_matches('/'))
    };
    if path.is_empty() { "/".to_owned() } else { path }
}

fn split_port(authority: &str) -> (&str, Option<u16>) {
    match authority.rsplit_once(':') {
        // Inside brackets a colon is part of the address.
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok()),
        _ => (authority, None),
    }
}

fn default_port(scheme: &Scheme) -> Option<u16> {
    match scheme.as_str() {
        "http" => Some(80),
        "https" => Some(443),
        _ => None,
    }
}

fn is_same(location: &str, uri: &Uri, scheme: &Scheme, authority: &str) -> bool {
    let path_and_query = uri.path_and_query().map_or("/", |path| path.as_str());
    location
        .strip_prefix(scheme.as_str())
        .and_then(|rest| rest.strip_prefix("://"))
        .and_then(|rest| rest.strip_prefix(authority))
        .is_some_and(|rest| rest == path_and_query)
}

#[cfg(test)]
mod tests;
