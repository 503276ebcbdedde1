//! Matchers for one request: host, path, method, headers, query parameters and gRPC names.
//!
//! A match returns a score, by which the most specific rule is found. Nothing here allocates, except to decode a query parameter
//! for a regular expression.

pub(crate) mod path;

use std::str::Split;

use http::header::{HOST, HeaderName};
use http::{HeaderMap, Method, Uri};
use regex::bytes::{Regex, RegexBuilder};
use smallvec::SmallVec;

/// The parts of a request that decide its route.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestAttributes<'a> {
    pub(crate) method: &'a Method,
    /// Authority of the request target. If it is `None`, the `host` header is used.
    pub(crate) authority: Option<&'a str>,
    pub(crate) path: &'a str,
    pub(crate) query: Option<&'a str>,
    pub(crate) headers: &'a HeaderMap,
}

impl<'a> RequestAttributes<'a> {
    pub(crate) fn new(method: &'a Method, uri: &'a Uri, headers: &'a HeaderMap) -> Self {
        Self {
            method,
            authority: uri.authority().map(|authority| authority.as_str()),
            path: uri.path(),
            query: uri.query(),
            headers,
        }
    }

    /// The requested host, without port, user and trailing dot; not lower-cased.
    pub(crate) fn host(&self) -> Option<&'a str> {
        let authority = match self.authority {
            Some(authority) => authority,
            None => self.headers.get(HOST)?.to_str().ok()?,
        };
        Some(host_from_authority(authority))
    }
}

/// A host name, or all names below a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HostMatch {
    /// Lower case, without trailing dot.
    Exact(Box<str>),
    /// Lower case, with a leading dot; empty matches every host.
    Suffix(Box<str>),
}

/// How specific the match of a host is; a greater score is preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HostScore {
    exact: bool,
    length: u32,
}

impl HostMatch {
    pub(crate) fn exact(host: &str) -> Self {
        Self::Exact(host.trim_end_matches('.').to_ascii_lowercase().into())
    }

    /// Creates a match from labels in reverse order: `["com", "example"]` stands for `*.example.com`.
    pub(crate) fn suffix<S: AsRef<str>>(reverse_labels: &[S]) -> Self {
        let mut suffix = String::new();
        for label in reverse_labels.iter().rev() {
            suffix.push('.');
            suffix.push_str(&label.as_ref().to_ascii_lowercase());
        }
        Self::Suffix(suffix.into())
    }

    /// Scores a host without port and trailing dot.
    pub(crate) fn score(&self, host: &str) -> Option<HostScore> {
        match self {
            Self::Exact(exact) => host.eq_ignore_ascii_case(exact).then_some(HostScore {
                exact: true,
                length: saturating_u32(exact.len()),
            }),
            Self::Suffix(suffix) => {
                // At least one more label is required before the suffix.
                let start = host.len().checked_sub(suffix.len()).filter(|start| *start > 0)?;
                host.as_bytes()[start..]
                    .eq_ignore_ascii_case(suffix.as_bytes())
                    .then_some(HostScore {
                        exact: false,
                        length: saturating_u32(suffix.len()),
                    })
            }
        }
    }
}

/// The greatest score of several host matches for one host.
pub(crate) fn best_host_score(hosts: &[HostMatch], host: &str) -> Option<HostScore> {
    hosts.iter().filter_map(|candidate| candidate.score(host)).max()
}

/// A regular expression that must match the whole value.
#[derive(Clone, Debug)]
pub(crate) struct Pattern {
    anchored: Regex,
    source: Box<str>,
}

impl Pattern {
    /// # Errors
    /// The expression does not parse, or compiles to more than 1 MiB.
    pub(crate) fn new(source: &str) -> Result<Self, regex::Error> {
        // The expression must also be valid outside of the group that anchors it. `a)|(b` is valid only inside the group, which it
        // closes: it would not be anchored.
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
    /// A prefix of whole segments. It is stored without trailing `/`, so the root is empty.
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

    fn is_root(&self) -> bool {
        matches!(self, Self::Prefix(prefix) if prefix.is_empty())
    }

    /// Converts the match as [`RequestMatch::with_normalized_path`] does. Regular expressions are unchanged.
    fn normalized(self) -> Self {
        let normal = |path: Box<str>| path::normalize_escapes(&path).into();
        match self {
            Self::Exact(exact) => Self::Exact(normal(exact)),
            Self::Prefix(prefix) => Self::Prefix(normal(prefix)),
            Self::Regex(pattern) => Self::Regex(pattern),
        }
    }

    /// Scores a path; also returns the length of a matched prefix.
    fn score(&self, path: &str) -> Option<(Score, Option<usize>)> {
        match self {
            Self::Exact(exact) => (**exact == *path).then(|| (Score::path(path.len(), PathKind::Exact), None)),
            Self::Prefix(prefix) => {
                let rest = path.as_bytes().strip_prefix(prefix.as_bytes())?;
                // The root also matches requests without a path: `OPTIONS *` and CONNECT.
                let whole_segments = prefix.is_empty() || matches!(rest.first(), None | Some(b'/'));
                whole_segments.then(|| (Score::path(prefix.len().max(1), PathKind::Prefix), Some(prefix.len())))
            }
            Self::Regex(pattern) => pattern
                .matches(path.as_bytes())
                .then(|| (Score::path(path.len(), PathKind::Regex), None)),
        }
    }
}

/// How specific the match of a request is; a greater score is preferred.
///
/// Scores have the order of the Gateway API: longer path match, exact before prefix, then method, headers, query parameters. The
/// Gateway API does not define the order of regular expressions. Here the length of such a match is the length of the path, so that
/// it ranks above a catch-all prefix. At the same length it ranks below an exact or prefix match.
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
            primary: saturating_u32(length),
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
        query_pairs(query).any(|(name, value)| {
            FormDecodedBytes(name.as_bytes()).eq(self.name.bytes())
                && match &self.value {
                    ValueMatch::Exact(exact) => FormDecodedBytes(value.as_bytes()).eq(exact.iter().copied()),
                    ValueMatch::Regex(pattern) => {
                        pattern.matches(&FormDecodedBytes(value.as_bytes()).collect::<SmallVec<[u8; 64]>>())
                    }
                }
        })
    }
}

/// One way to match a request; all fields that are present must match.
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

/// An RPC; an empty name matches any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GrpcMatch {
    pub(crate) service: Box<str>,
    pub(crate) method: Box<str>,
    pub(crate) headers: Vec<HeaderMatch>,
}

impl RequestMatch {
    /// Scores a request; also returns the length of a matched path prefix.
    pub(crate) fn score(&self, attributes: &RequestAttributes<'_>) -> Option<(Score, Option<usize>)> {
        match self {
            Self::Http(http) => http.score(attributes),
            Self::Grpc(grpc) => grpc.score(attributes).map(|score| (score, None)),
        }
    }

    /// Whether this match requires this method.
    pub(crate) fn requires_method(&self, method: &Method) -> bool {
        matches!(self, Self::Http(HttpMatch { method: Some(required), .. }) if required == method)
    }

    /// Whether every HTTP request matches.
    pub(crate) fn matches_all(&self) -> bool {
        matches!(self, Self::Http(HttpMatch { path, method: None, headers, query })
            if headers.is_empty() && query.is_empty() && path.as_ref().is_none_or(PathMatch::is_root))
    }

    /// Whether the match depends on the path. The root prefix does not: it matches every path, and requests without one.
    pub(crate) fn depends_on_path(&self) -> bool {
        match self {
            Self::Http(http) => http.path.as_ref().is_some_and(|path| !path.is_root()),
            Self::Grpc(_) => true,
        }
    }

    /// Converts the match so that it can be compared with normalized paths.
    pub(crate) fn with_normalized_path(mut self) -> Self {
        if let Self::Http(http) = &mut self {
            http.path = http.path.take().map(PathMatch::normalized);
        }
        self
    }
}

impl HttpMatch {
    fn score(&self, attributes: &RequestAttributes<'_>) -> Option<(Score, Option<usize>)> {
        if self.method.as_ref().is_some_and(|method| method != attributes.method) {
            return None;
        }
        let (score, prefix) = match &self.path {
            Some(path) => path.score(attributes.path)?,
            None => (Score::default(), None),
        };
        if !self.headers.iter().all(|header| header.matches(attributes.headers)) {
            return None;
        }
        if !self.query.is_empty() {
            let query = attributes.query?;
            if !self.query.iter().all(|param| param.matches(query)) {
                return None;
            }
        }
        let score = Score {
            method: self.method.is_some(),
            headers: saturating_u32(self.headers.len()),
            query: saturating_u32(self.query.len()),
            ..score
        };
        Some((score, prefix))
    }
}

impl GrpcMatch {
    fn score(&self, attributes: &RequestAttributes<'_>) -> Option<Score> {
        if attributes.method != Method::POST {
            return None;
        }
        let (service, method) = attributes.path.strip_prefix('/')?.split_once('/')?;
        if service.is_empty() || method.is_empty() || method.contains('/') {
            return None;
        }
        let matches = |expected: &str, name: &str| expected.is_empty() || expected == name;
        if !matches(&self.service, service) || !matches(&self.method, method) {
            return None;
        }
        self.headers
            .iter()
            .all(|header| header.matches(attributes.headers))
            .then(|| Score {
                primary: saturating_u32(self.service.len()),
                secondary: saturating_u32(self.method.len()),
                headers: saturating_u32(self.headers.len()),
                ..Score::default()
            })
    }
}

/// A length as `u32`, at most `u32::MAX`. With `u32` a score needs less memory, and every request creates and compares some.
fn saturating_u32(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// The host of an authority: after any user, before any port, without trailing dot.
fn host_from_authority(authority: &str) -> &str {
    let host_port = authority.rsplit_once('@').map_or(authority, |(_, rest)| rest);
    let host = match host_port.rfind(']') {
        Some(end) => &host_port[..=end],
        None => host_port.split_once(':').map_or(host_port, |(host, _)| host),
    };
    host.strip_suffix('.').unwrap_or(host)
}

fn query_pairs(query: &str) -> impl Iterator<Item = (&str, &str)> {
    let params: Split<'_, char> = query.split('&');
    params
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
}

/// Bytes of a form-encoded text: `+` is a space, `%41` an `A`; an invalid escape is kept as it is.
struct FormDecodedBytes<'a>(&'a [u8]);

impl Iterator for FormDecodedBytes<'_> {
    type Item = u8;

    fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        match first {
            b'+' => Some(b' '),
            b'%' => {
                let escaped = rest
                    .first_chunk::<2>()
                    .and_then(|[high, low]| Some(path::nibble(*high)? << 4 | path::nibble(*low)?));
                if escaped.is_some() {
                    self.0 = &rest[2..];
                }
                Some(escaped.unwrap_or(b'%'))
            }
            byte => Some(*byte),
        }
    }
}

/// Maximum memory of a compiled pattern, in bytes. The limit is necessary because patterns come from the network.
const PATTERN_SIZE_LIMIT: usize = 1 << 20;

#[cfg(test)]
mod tests;
