//! Matchers for one request: host, path, method, headers, query parameters and gRPC names.
//!
//! A match yields a score, so that the most specific rule wins.
//! Nothing here allocates, except to decode a query parameter that a regular expression has to see.

pub(crate) mod path;

use std::str::Split;

use http::header::{HOST, HeaderName};
use http::{HeaderMap, Method, Uri};
use regex::bytes::{Regex, RegexBuilder};
use smallvec::SmallVec;

/// What of a request decides its route.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head<'a> {
    pub(crate) method: &'a Method,
    /// Authority of the request target; without one the `host` header counts.
    pub(crate) authority: Option<&'a str>,
    pub(crate) path: &'a str,
    pub(crate) query: Option<&'a str>,
    pub(crate) headers: &'a HeaderMap,
}

impl<'a> Head<'a> {
    pub(crate) fn of(method: &'a Method, uri: &'a Uri, headers: &'a HeaderMap) -> Self {
        Self {
            method,
            authority: uri.authority().map(|authority| authority.as_str()),
            path: uri.path(),
            query: uri.query(),
            headers,
        }
    }

    /// The host asked for: no port, no user, no trailing dot; not lower-cased.
    pub(crate) fn host(&self) -> Option<&'a str> {
        let authority = match self.authority {
            Some(authority) => authority,
            None => self.headers.get(HOST)?.to_str().ok()?,
        };
        Some(host_of(authority))
    }
}

/// A host name, or all names below one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HostMatch {
    /// Lower case, without trailing dot.
    Exact(Box<str>),
    /// Lower case, with a leading dot; empty matches every host.
    Suffix(Box<str>),
}

/// How well a host matched; greater wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HostScore {
    exact: bool,
    length: u32,
}

impl HostMatch {
    pub(crate) fn exact(host: &str) -> Self {
        Self::Exact(host.trim_end_matches('.').to_ascii_lowercase().into())
    }

    /// From labels in reverse order: `["com", "example"]` stands for `*.example.com`.
    pub(crate) fn suffix<S: AsRef<str>>(reverse_labels: &[S]) -> Self {
        let mut suffix = String::new();
        for label in reverse_labels.iter().rev() {
            suffix.push('.');
            suffix.push_str(&label.as_ref().to_ascii_lowercase());
        }
        Self::Suffix(suffix.into())
    }

    /// Scores a host that carries neither port nor trailing dot.
    pub(crate) fn score(&self, host: &str) -> Option<HostScore> {
        match self {
            Self::Exact(exact) => host.eq_ignore_ascii_case(exact).then_some(HostScore {
                exact: true,
                length: rank(exact.len()),
            }),
            Self::Suffix(suffix) => {
                // At least one more label must stand in front: the suffix alone, with its dot, is no host.
                let start = host.len().checked_sub(suffix.len()).filter(|start| *start > 0)?;
                host.as_bytes()[start..]
                    .eq_ignore_ascii_case(suffix.as_bytes())
                    .then_some(HostScore {
                        exact: false,
                        length: rank(suffix.len()),
                    })
            }
        }
    }
}

/// The best of several host matches for one host.
pub(crate) fn best_host(hosts: &[HostMatch], host: &str) -> Option<HostScore> {
    hosts.iter().filter_map(|candidate| candidate.score(host)).max()
}

/// A regular expression that has to cover the whole value.
#[derive(Clone, Debug)]
pub(crate) struct Pattern {
    anchored: Regex,
    source: Box<str>,
}

impl Pattern {
    /// # Errors
    /// When the expression does not parse, or compiles to more than a mebibyte.
    pub(crate) fn new(source: &str) -> Result<Self, regex::Error> {
        // Alone first: `a)|(b` would otherwise break out of the group that anchors it.
        RegexBuilder::new(source).size_limit(PATTERN_SIZE_LIMIT).build()?;
        let anchored = RegexBuilder::new(&format!(r"\A(?:{source})\z"))
            .size_limit(PATTERN_SIZE_LIMIT)
            .build()?;
        Ok(Self {
            anchored,
            source: source.into(),
        })
    }

    pub(crate) fn matches(&self, value: &[u8]) -> bool {
        self.anchored.is_match(value)
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.source == other.source
    }
}

impl Eq for Pattern {}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PathMatch {
    Exact(Box<str>),
    /// Whole segments; kept without trailing `/`, so the root is empty.
    Prefix(Box<str>),
    Regex(Pattern),
}

impl PathMatch {
    pub(crate) fn exact(path: &str) -> Self {
        Self::Exact(path.into())
    }

    pub(crate) fn prefix(path: &str) -> Self {
        Self::Prefix(path.trim_end_matches('/').into())
    }

    /// Whether all paths match.
    fn is_root(&self) -> bool {
        matches!(self, Self::Prefix(prefix) if prefix.is_empty())
    }

    /// The same match for paths in normal form. Patterns stay as they are written.
    fn of_normal_paths(self) -> Self {
        let normal = |path: Box<str>| path::decode(&path).into();
        match self {
            Self::Exact(exact) => Self::Exact(normal(exact)),
            Self::Prefix(prefix) => Self::Prefix(normal(prefix)),
            Self::Regex(pattern) => Self::Regex(pattern),
        }
    }

    /// Scores a path; the length of a matched prefix comes with it.
    fn score(&self, path: &str) -> Option<(Score, Option<usize>)> {
        match self {
            Self::Exact(exact) => (**exact == *path).then(|| (Score::path(path.len(), PathKind::Exact), None)),
            Self::Prefix(prefix) => {
                let rest = path.as_bytes().strip_prefix(prefix.as_bytes())?;
                // The root takes what has no path at all, too: `OPTIONS *` and CONNECT.
                let whole_segments = prefix.is_empty() || matches!(rest.first(), None | Some(b'/'));
                whole_segments.then(|| (Score::path(prefix.len().max(1), PathKind::Prefix), Some(prefix.len())))
            }
            Self::Regex(pattern) => pattern
                .matches(path.as_bytes())
                .then(|| (Score::path(path.len(), PathKind::Regex), None)),
        }
    }
}

/// How specific a match was; greater wins.
///
/// Gateway API's order where it has one: the longer path match, exact before prefix, then method, headers, query parameters.
/// It leaves regular expressions to the implementation. Ours count the path they cover, so that a catch-all prefix does
/// not hide them, and come behind an exact match or a prefix of the same length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Score {
    /// Bytes of the path, or of the gRPC service.
    primary: u32,
    /// Rank of the kind of path match, or bytes of the gRPC method.
    secondary: u32,
    method: bool,
    headers: u32,
    query: u32,
}

#[derive(Clone, Copy)]
enum PathKind {
    Regex = 1,
    Prefix = 2,
    Exact = 3,
}

impl Score {
    fn path(length: usize, kind: PathKind) -> Self {
        Self {
            primary: rank(length),
            secondary: kind as u32,
            ..Self::default()
        }
    }
}

/// A header by name; any of its repeated values may match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeaderMatch {
    pub(crate) name: HeaderName,
    pub(crate) value: ValueMatch,
}

/// A query parameter by decoded name; any of its repeated values may match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QueryMatch {
    pub(crate) name: Box<str>,
    pub(crate) value: ValueMatch,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ValueMatch {
    Exact(Box<[u8]>),
    Regex(Pattern),
}

impl HeaderMatch {
    fn matches(&self, headers: &HeaderMap) -> bool {
        headers.get_all(&self.name).iter().any(|value| match &self.value {
            ValueMatch::Exact(exact) => value.as_bytes() == &**exact,
            ValueMatch::Regex(pattern) => pattern.matches(value.as_bytes()),
        })
    }
}

impl QueryMatch {
    fn matches(&self, query: &str) -> bool {
        pairs(query).any(|(name, value)| {
            Decoded(name.as_bytes()).eq(self.name.bytes())
                && match &self.value {
                    ValueMatch::Exact(exact) => Decoded(value.as_bytes()).eq(exact.iter().copied()),
                    ValueMatch::Regex(pattern) => {
                        pattern.matches(&Decoded(value.as_bytes()).collect::<SmallVec<[u8; 64]>>())
                    }
                }
        })
    }
}

/// One way to match a request; all that is present must agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RequestMatch {
    Http(HttpMatch),
    Grpc(GrpcMatch),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HttpMatch {
    pub(crate) path: Option<PathMatch>,
    pub(crate) method: Option<Method>,
    pub(crate) headers: Vec<HeaderMatch>,
    pub(crate) query: Vec<QueryMatch>,
}

/// An RPC; an empty name stands for any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GrpcMatch {
    pub(crate) service: Box<str>,
    pub(crate) method: Box<str>,
    pub(crate) headers: Vec<HeaderMatch>,
}

impl RequestMatch {
    /// Scores a request; the length of a matched path prefix comes with it.
    pub(crate) fn score(&self, head: &Head<'_>) -> Option<(Score, Option<usize>)> {
        match self {
            Self::Http(http) => http.score(head),
            Self::Grpc(grpc) => grpc.score(head).map(|score| (score, None)),
        }
    }
}

impl RequestMatch {
    /// Whether every request of HTTP matches.
    pub(crate) fn takes_all(&self) -> bool {
        matches!(self, Self::Http(HttpMatch { path, method: None, headers, query })
            if headers.is_empty() && query.is_empty() && path.as_ref().is_none_or(PathMatch::is_root))
    }

    /// Whether it depends on more of the path than that there is one.
    pub(crate) fn looks_at_path(&self) -> bool {
        match self {
            Self::Http(http) => http.path.as_ref().is_some_and(|path| !path.is_root()),
            Self::Grpc(_) => true,
        }
    }

    /// The same match for paths in normal form.
    pub(crate) fn of_normal_paths(mut self) -> Self {
        if let Self::Http(http) = &mut self {
            http.path = http.path.take().map(PathMatch::of_normal_paths);
        }
        self
    }
}

impl HttpMatch {
    fn score(&self, head: &Head<'_>) -> Option<(Score, Option<usize>)> {
        if self.method.as_ref().is_some_and(|method| method != head.method) {
            return None;
        }
        let (score, prefix) = match &self.path {
            Some(path) => path.score(head.path)?,
            None => (Score::default(), None),
        };
        if !self.headers.iter().all(|header| header.matches(head.headers)) {
            return None;
        }
        if !self.query.is_empty() {
            let query = head.query?;
            if !self.query.iter().all(|param| param.matches(query)) {
                return None;
            }
        }
        let score = Score {
            method: self.method.is_some(),
            headers: rank(self.headers.len()),
            query: rank(self.query.len()),
            ..score
        };
        Some((score, prefix))
    }
}

impl GrpcMatch {
    fn score(&self, head: &Head<'_>) -> Option<Score> {
        if head.method != Method::POST {
            return None;
        }
        let (service, method) = head.path.strip_prefix('/')?.split_once('/')?;
        if service.is_empty() || method.is_empty() || method.contains('/') {
            return None;
        }
        let same = |wanted: &str, name: &str| wanted.is_empty() || wanted == name;
        if !same(&self.service, service) || !same(&self.method, method) {
            return None;
        }
        self.headers
            .iter()
            .all(|header| header.matches(head.headers))
            .then(|| Score {
                primary: rank(self.service.len()),
                secondary: rank(self.method.len()),
                headers: rank(self.headers.len()),
                ..Score::default()
            })
    }
}

/// A length in a score, which is small because scores are made and compared for every request.
fn rank(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// The host of an authority: after any user, before any port, without trailing dot.
fn host_of(authority: &str) -> &str {
    let host_port = authority.rsplit_once('@').map_or(authority, |(_, rest)| rest);
    let host = match host_port.rfind(']') {
        Some(end) => &host_port[..=end],
        None => host_port.split_once(':').map_or(host_port, |(host, _)| host),
    };
    host.strip_suffix('.').unwrap_or(host)
}

fn pairs(query: &str) -> impl Iterator<Item = (&str, &str)> {
    let params: Split<'_, char> = query.split('&');
    params
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
}

/// Bytes of a form-encoded text: `+` is a space, `%41` an `A`, a broken escape stands for itself.
struct Decoded<'a>(&'a [u8]);

impl Iterator for Decoded<'_> {
    type Item = u8;

    fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        match first {
            b'+' => Some(b' '),
            b'%' => {
                let escaped = rest
                    .first_chunk::<2>()
                    .and_then(|[high, low]| Some(nibble(*high)? << 4 | nibble(*low)?));
                if escaped.is_some() {
                    self.0 = &rest[2..];
                }
                Some(escaped.unwrap_or(b'%'))
            }
            byte => Some(*byte),
        }
    }
}

pub(super) fn nibble(digit: u8) -> Option<u8> {
    // At most 15, so it fits.
    char::from(digit).to_digit(16).map(|value| value as u8)
}

/// Patterns come over the network; one may not claim more memory than this, in bytes.
const PATTERN_SIZE_LIMIT: usize = 1 << 20;

#[cfg(test)]
mod tests;
