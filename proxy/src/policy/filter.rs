//! Route filters: header edits, URL rewrites, redirects and injected failures.
//!
//! A filter either changes a head in place, or returns a response instead of forwarding the request.

use std::borrow::Cow;
use std::fmt::Write;
use std::sync::Arc;

use http::header::{HOST, HeaderName};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderMap, HeaderValue, StatusCode, Uri};

use crate::policy::cors::Cors;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Filter {
    RequestHeaders(HeaderModifier),
    ResponseHeaders(HeaderModifier),
    Redirect(Redirect),
    UrlRewrite(UrlRewrite),
    /// Applied before the other filters of a request, and after those of a response. [`find_cors`] returns it.
    Cors(Box<Cors>),
    Failure(FailureInjector),
    /// The policy or one of its filters cannot be applied, for this reason. All requests are refused, because without the filter
    /// forbidden requests could pass.
    Invalid(Cow<'static, str>),
    /// The control plane denies this proxy the policy or the profile, for this reason. All requests are refused.
    DiscoveryDenied(Arc<str>),
}

impl Filter {
    /// Replaces a filter of a kind that this proxy does not know.
    pub(crate) const fn unknown() -> Self {
        Self::Invalid(Cow::Borrowed("unknown filter"))
    }
}

/// Changes to headers, made in this order: add, set, remove.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HeaderModifier {
    pub(crate) add: Vec<(HeaderName, HeaderValue)>,
    pub(crate) set: Vec<(HeaderName, HeaderValue)>,
    pub(crate) remove: Vec<HeaderName>,
}

/// The location of a redirect. An absent part is taken from the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Redirect {
    pub(crate) scheme: Option<Scheme>,
    pub(crate) host: Option<Box<str>>,
    pub(crate) path: Option<PathModifier>,
    pub(crate) port: Option<u16>,
    pub(crate) status: StatusCode,
}

/// Changes to the URI of a request before the request is forwarded. An absent part is unchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UrlRewrite {
    pub(crate) host: Option<RewrittenHost>,
    pub(crate) path: Option<PathModifier>,
}

/// The new host, as an authority for HTTP/2 and as a header for HTTP/1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RewrittenHost {
    authority: Authority,
    header: HeaderValue,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PathModifier {
    /// Replaces the whole path; the query stays.
    Full(Box<str>),
    /// Replaces the part of the path that a prefix match covered.
    Prefix(Box<str>),
}

/// A failure that is injected into some of the requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FailureInjector {
    pub(crate) failure: Failure,
    pub(crate) ratio: Ratio,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    Http { status: StatusCode, message: Arc<str> },
    Grpc { code: u16, message: Arc<str> },
}

/// A fraction of requests: `numerator` of `denominator`, which is not zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ratio {
    numerator: u32,
    denominator: u32,
}

/// The response of a filter. The request is not forwarded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FilterResponse {
    Redirect {
        status: StatusCode,
        location: HeaderValue,
    },
    Failure(Failure),
    /// The filters cannot be applied; the response is 500.
    Invalid(Cow<'static, str>),
    /// The response is 503.
    DiscoveryDenied(Arc<str>),
}

/// A request, as filters need it.
#[derive(Debug)]
pub(crate) struct RequestHead<'a> {
    pub(crate) uri: &'a mut Uri,
    pub(crate) headers: &'a mut HeaderMap,
    /// Length in bytes of the path prefix that the rule matched. A rewrite updates it.
    pub(crate) matched_prefix_len: Option<usize>,
}

/// Applies a rule's filters in order; `draw(n)` is a random number below `n`.
///
/// # Errors
/// A filter responds to the request; later filters are not applied.
pub(crate) fn apply_request(
    filters: &[Filter],
    head: &mut RequestHead<'_>,
    mut draw: impl FnMut(u32) -> u32,
) -> Result<(), FilterResponse> {
    for filter in filters {
        match filter {
            Filter::RequestHeaders(modifier) => modifier.apply(head.headers),
            Filter::ResponseHeaders(_) | Filter::Cors(_) => {}
            Filter::Redirect(redirect) => return Err(redirect.response(head)?),
            Filter::UrlRewrite(rewrite) => rewrite.apply(head)?,
            Filter::Failure(injector) => {
                if injector.ratio.includes(&mut draw) {
                    return Err(FilterResponse::Failure(injector.failure.clone()));
                }
            }
            Filter::Invalid(reason) => return Err(FilterResponse::Invalid(reason.clone())),
            Filter::DiscoveryDenied(reason) => return Err(FilterResponse::DiscoveryDenied(reason.clone())),
        }
    }
    Ok(())
}

/// Whether one of these filters refuses or redirects all requests. Injected failures do not count: they are random.
pub(crate) fn refuses_all_requests(filters: &[Filter]) -> bool {
    let refuses = |filter: &Filter| {
        matches!(
            filter,
            Filter::Redirect(_) | Filter::Invalid(_) | Filter::DiscoveryDenied(_)
        )
    };
    filters.iter().any(refuses)
}

/// Applies the response filters of a rule.
pub(crate) fn apply_response(filters: &[Filter], headers: &mut HeaderMap) {
    for filter in filters {
        if let Filter::ResponseHeaders(modifier) = filter {
            modifier.apply(headers);
        }
    }
}

/// The CORS filter of a rule.
pub(crate) fn find_cors(filters: &[Filter]) -> Option<&Cors> {
    filters.iter().find_map(|filter| match filter {
        Filter::Cors(cors) => Some(&**cors),
        _ => None,
    })
}

impl HeaderModifier {
    pub(crate) fn apply(&self, headers: &mut HeaderMap) {
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
    pub(crate) const ALWAYS: Self = Self {
        numerator: 1,
        denominator: 1,
    };

    /// Whether a request belongs to the fraction; `draw(n)` is a random number below `n`.
    pub(crate) fn includes(self, draw: impl FnOnce(u32) -> u32) -> bool {
        draw(self.denominator) < self.numerator
    }

    /// `None` if the numerator is larger than the denominator, or the denominator is zero.
    pub(crate) fn new(numerator: u32, denominator: u32) -> Option<Self> {
        (denominator > 0 && numerator <= denominator).then_some(Self { numerator, denominator })
    }
}

impl Redirect {
    /// Returns the redirect response, also for a redirect to the same URI.
    fn response(&self, head: &RequestHead<'_>) -> Result<FilterResponse, FilterResponse> {
        let authority = head
            .uri
            .authority()
            .map(|authority| authority.as_str())
            .or_else(|| head.headers.get(HOST)?.to_str().ok())
            .ok_or(FilterResponse::Invalid("redirect of a request without a host".into()))?;
        let authority = authority.rsplit_once('@').map_or(authority, |(_, rest)| rest);
        let (host, port) = split_port(authority);

        let request_scheme = head.uri.scheme().unwrap_or(&Scheme::HTTP);
        let scheme = self.scheme.as_ref().unwrap_or(request_scheme);
        // The Gateway API requires that a redirect with a scheme and without a port goes to the default port of the scheme, even if
        // the scheme is that of the request. Without a scheme the port of the request stays, also for another host.
        let port = match (self.port, &self.scheme) {
            (Some(port), _) => Some(port),
            (None, Some(_)) => None,
            (None, None) => port,
        };
        let port = port.filter(|port| default_port(scheme) != Some(*port));

        let mut location = format!("{scheme}://{}", self.host.as_deref().unwrap_or(host));
        if let Some(port) = port {
            write!(location, ":{port}").expect("writing to a string cannot fail");
        }
        match &self.path {
            _ if !has_path(head.uri) => {}
            None => location.push_str(head.uri.path()),
            Some(path) => location.push_str(&path.replace(head)?),
        }
        if let Some(query) = head.uri.query() {
            location.push('?');
            location.push_str(query);
        }
        let location = HeaderValue::try_from(location)
            .map_err(|_| FilterResponse::Invalid("redirect to an invalid URI".into()))?;
        Ok(FilterResponse::Redirect {
            status: self.status,
            location,
        })
    }
}

impl UrlRewrite {
    fn apply(&self, head: &mut RequestHead<'_>) -> Result<(), FilterResponse> {
        let mut parts = head.uri.clone().into_parts();
        let Some(path_and_query) = &parts.path_and_query else {
            return Ok(()); // the target of CONNECT is an address
        };
        let mut matched_prefix_len = head.matched_prefix_len;
        if let Some(modifier) = self.path.as_ref().filter(|_| has_path(head.uri)) {
            let mut target = modifier.replace(head)?;
            if let Some(query) = path_and_query.query() {
                target.push('?');
                target.push_str(query);
            }
            let rewritten = PathAndQuery::try_from(target);
            parts.path_and_query =
                Some(rewritten.map_err(|_| FilterResponse::Invalid("rewrite to an invalid path".into()))?);
            matched_prefix_len = modifier.matched_prefix_len();
        }
        let is_origin_form = parts.authority.is_none();
        if let Some(host) = self.host.as_ref().filter(|_| !is_origin_form) {
            parts.authority = Some(host.authority.clone());
        }
        *head.uri = Uri::from_parts(parts)
            .map_err(|_| FilterResponse::Invalid("rewrite to an invalid request target".into()))?;
        head.matched_prefix_len = matched_prefix_len;
        if let Some(host) = self
            .host
            .as_ref()
            .filter(|_| is_origin_form || head.headers.contains_key(HOST))
        {
            head.headers.insert(HOST, host.header.clone());
        }
        Ok(())
    }
}

impl RewrittenHost {
    /// `None` if the host is not an authority, or has a user name, which is not part of the Host header.
    pub(crate) fn new(host: &str) -> Option<Self> {
        let authority: Authority = host.parse().ok()?;
        let header = host.parse().ok()?;
        (!host.contains('@')).then_some(Self { authority, header })
    }
}

impl PathModifier {
    /// The new path of the request, without its query.
    fn replace(&self, head: &RequestHead<'_>) -> Result<String, FilterResponse> {
        match self {
            Self::Full(full) => Ok(full.to_string()),
            Self::Prefix(replacement) => {
                let rest = head.matched_prefix_len.and_then(|length| head.uri.path().get(length..));
                let rest = rest.ok_or(FilterResponse::Invalid(
                    "a filter replaces a path prefix, but the route matched none".into(),
                ))?;
                Ok(replace_prefix(replacement, rest))
            }
        }
    }

    /// Length of the matched prefix in the new path; `None` if no part of the matched path is left.
    fn matched_prefix_len(&self) -> Option<usize> {
        match self {
            Self::Full(_) => None,
            Self::Prefix(replacement) => Some(replacement.trim_end_matches('/').len()),
        }
    }
}

/// Whether the target has a path. `OPTIONS *` and CONNECT have none: filters do not change their target, and a redirect of them has
/// no path.
fn has_path(uri: &Uri) -> bool {
    uri.path().starts_with('/')
}

/// Returns the new prefix and the rest of the path, with one slash between them.
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

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn name(name: &'static str) -> HeaderName {
        HeaderName::from_static(name)
    }

    fn value(value: &'static str) -> HeaderValue {
        HeaderValue::from_static(value)
    }

    fn redirect() -> Redirect {
        Redirect {
            scheme: None,
            host: None,
            path: None,
            port: None,
            status: StatusCode::MOVED_PERMANENTLY,
        }
    }

    fn rewrite(host: Option<&str>, path: Option<PathModifier>) -> Filter {
        Filter::UrlRewrite(UrlRewrite {
            host: host.map(|host| RewrittenHost::new(host).unwrap()),
            path,
        })
    }

    /// Applies a filter to a request, and returns the request and the result. If `uri` is in origin form, the host is `web:8080`.
    fn apply(
        filter: Filter,
        uri: &str,
        matched_prefix_len: Option<usize>,
    ) -> (Request<()>, Result<(), FilterResponse>) {
        let mut req = Request::get(uri).body(()).unwrap();
        if !uri.contains("://") {
            req.headers_mut().insert(HOST, value("web:8080"));
        }
        let mut uri = req.uri().clone();
        let mut head = RequestHead {
            uri: &mut uri,
            headers: req.headers_mut(),
            matched_prefix_len,
        };
        let result = apply_request(&[filter], &mut head, |_| 0);
        *req.uri_mut() = uri;
        (req, result)
    }

    /// The location of a redirect of `uri`.
    fn location(redirect: &Redirect, uri: &str, matched_prefix_len: Option<usize>) -> Result<String, String> {
        match apply(Filter::Redirect(redirect.clone()), uri, matched_prefix_len).1 {
            Err(FilterResponse::Redirect { status, location }) => {
                assert_eq!(status, StatusCode::MOVED_PERMANENTLY);
                Ok(location.to_str().unwrap().to_owned())
            }
            Err(FilterResponse::Invalid(reason)) => Err(reason.into_owned()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn headers_are_added_then_set_then_removed() {
        let modifier = HeaderModifier {
            add: vec![
                (name("x-a"), value("2")),
                (name("x-b"), value("1")),
                (name("x-c"), value("1")),
            ],
            set: vec![(name("x-b"), value("2"))],
            remove: vec![name("x-c")],
        };
        let mut headers = HeaderMap::new();
        headers.insert("x-a", value("1"));
        headers.insert("x-c", value("0"));
        modifier.apply(&mut headers);
        assert_eq!(headers.get_all("x-a").iter().collect::<Vec<_>>(), ["1", "2"]);
        assert_eq!(headers.get_all("x-b").iter().collect::<Vec<_>>(), ["2"]);
        assert!(!headers.contains_key("x-c"));
    }

    #[test]
    fn requests_and_responses_have_filters_of_their_own() {
        let set = |header| HeaderModifier {
            set: vec![(name(header), value("1"))],
            ..HeaderModifier::default()
        };
        let filters = [
            Filter::RequestHeaders(set("x-req")),
            Filter::ResponseHeaders(set("x-rsp")),
        ];
        let (mut req, mut rsp) = (HeaderMap::new(), HeaderMap::new());
        let mut uri = Uri::from_static("http://web/");
        apply_request(
            &filters,
            &mut RequestHead {
                uri: &mut uri,
                headers: &mut req,
                matched_prefix_len: None,
            },
            |_| 0,
        )
        .unwrap();
        apply_response(&filters, &mut rsp);
        assert!(req.contains_key("x-req") && !req.contains_key("x-rsp"));
        assert!(rsp.contains_key("x-rsp") && !rsp.contains_key("x-req"));
    }

    #[test]
    fn redirects_change_the_parts_that_they_set_and_keep_the_others() {
        let with = |edit: fn(&mut Redirect)| {
            let mut redirect = redirect();
            edit(&mut redirect);
            redirect
        };
        for (redirect, uri, expected) in [
            (
                with(|r| r.host = Some("new".into())),
                "http://web/a?q=1",
                "http://new/a?q=1",
            ),
            (with(|r| r.host = Some("new".into())), "/a", "http://new:8080/a"),
            (
                with(|r| r.scheme = Some(Scheme::HTTPS)),
                "http://web:8080/a",
                "https://web/a",
            ),
            // The scheme is that of the request.
            (with(|r| r.scheme = Some(Scheme::HTTP)), "/a", "http://web/a"),
            (
                with(|r| {
                    r.scheme = Some(Scheme::HTTP);
                    r.port = Some(81);
                }),
                "/a",
                "http://web:81/a",
            ),
            (with(|r| r.port = Some(81)), "http://web/a", "http://web:81/a"),
            (with(|r| r.port = Some(80)), "http://web:8080/a", "http://web/a"),
            (
                with(|r| {
                    r.scheme = Some(Scheme::HTTPS);
                    r.port = Some(443);
                }),
                "http://web/",
                "https://web/",
            ),
            (
                with(|r| r.path = Some(PathModifier::Full("/b".into()))),
                "http://web/a?q=1",
                "http://web/b?q=1",
            ),
            (
                with(|r| r.port = Some(81)),
                "http://[fd00::1]:8080/",
                "http://[fd00::1]:81/",
            ),
            (with(|r| r.port = Some(81)), "http://[fd00::1]/", "http://[fd00::1]:81/"),
            // The location is the URI of the request.
            (with(|_| ()), "http://web/a?q=1", "http://web/a?q=1"),
            (with(|r| r.host = Some("web".into())), "http://web/a", "http://web/a"),
            (
                with(|r| r.path = Some(PathModifier::Full("/b".into()))),
                "/b",
                "http://web:8080/b",
            ),
        ] {
            assert_eq!(
                location(&redirect, uri, None),
                Ok(expected.to_owned()),
                "{redirect:?} {uri}"
            );
        }
    }

    #[test]
    fn redirects_and_rewrites_replace_a_matched_prefix() {
        for (path, matched, replacement, expected) in [
            ("/foo/bar", 4, "/xyz", "/xyz/bar"),
            ("/foo/bar", 4, "/xyz/", "/xyz/bar"),
            ("/foo", 4, "/xyz", "/xyz"),
            ("/foo", 4, "/xyz/", "/xyz/"),
            ("/foo/", 4, "/xyz", "/xyz/"),
            ("/foo/bar", 4, "/", "/bar"),
            ("/foo/", 4, "/", "/"),
            ("/foo", 4, "/", "/"),
            ("/foo", 0, "/xyz", "/xyz/foo"),
        ] {
            let redirect = Redirect {
                path: Some(PathModifier::Prefix(replacement.into())),
                ..redirect()
            };
            let found = location(&redirect, &format!("http://web{path}"), Some(matched));
            assert_eq!(
                found,
                Ok(format!("http://web{expected}")),
                "{path} {matched} {replacement}"
            );
            let (req, result) = apply(rewrite(None, redirect.path), &format!("{path}?q=/foo"), Some(matched));
            assert_eq!(result, Ok(()));
            assert_eq!(
                req.uri(),
                &*format!("{expected}?q=/foo"),
                "{path} {matched} {replacement}"
            );
        }
    }

    #[test]
    fn a_rewrite_changes_the_host_and_the_path_and_keeps_the_query() {
        let full = || Some(PathModifier::Full("/full".into()));
        let prefix = || Some(PathModifier::Prefix("/new".into()));
        for (host, path, uri, matched, expected_uri, expected_host) in [
            (None, full(), "/a/b?q=1", None, "/full?q=1", Some("web:8080")),
            (None, prefix(), "/a/b?q=1", Some(2), "/new/b?q=1", Some("web:8080")),
            (None, prefix(), "/a", Some(2), "/new", Some("web:8080")),
            (Some("other"), None, "/a/b", None, "/a/b", Some("other")),
            (
                Some("other:81"),
                full(),
                "http://web/a?q",
                None,
                "http://other:81/full?q",
                None,
            ),
            (
                Some("other"),
                prefix(),
                "http://web:8080/a/",
                Some(2),
                "http://other/new/",
                None,
            ),
        ] {
            let (req, result) = apply(rewrite(host, path), uri, matched);
            assert_eq!(result, Ok(()), "{uri}");
            assert_eq!(req.uri(), expected_uri, "{uri}");
            let host = req.headers().get(HOST).map(|host| host.to_str().unwrap());
            assert_eq!(host, expected_host, "{uri}");
        }
    }

    #[test]
    fn a_host_with_a_user_name_is_refused() {
        let is_accepted = |host: &str| RewrittenHost::new(host).is_some();
        assert!(is_accepted("web") && is_accepted("web:8080") && is_accepted("[::1]:80"));
        assert!(!is_accepted("user@web") && !is_accepted("user:password@web:80") && !is_accepted("a b"));
    }

    #[test]
    fn a_rewrite_of_a_prefix_that_was_not_matched_is_an_error() {
        let prefix = rewrite(Some("other"), Some(PathModifier::Prefix("/new".into())));
        let (req, result) = apply(prefix, "/a", None);
        assert!(matches!(result, Err(FilterResponse::Invalid(_))), "{result:?}");
        assert_eq!(req.uri(), "/a");
        assert_eq!(req.headers()[HOST], "web:8080");
    }

    #[test]
    fn a_rewrite_replaces_the_host_header_next_to_an_authority() {
        let mut uri = Uri::from_static("http://web/a");
        let mut headers = HeaderMap::from_iter([(HOST, value("web"))]);
        let mut head = RequestHead {
            uri: &mut uri,
            headers: &mut headers,
            matched_prefix_len: None,
        };
        apply_request(&[rewrite(Some("other"), None)], &mut head, |_| 0).unwrap();
        assert_eq!(
            (uri, &headers[HOST]),
            (Uri::from_static("http://other/a"), &value("other"))
        );
    }

    #[test]
    fn targets_without_a_path_keep_their_form() {
        for path in [PathModifier::Full("/b".into()), PathModifier::Prefix("/b".into())] {
            let filter = || rewrite(Some("other"), Some(path.clone()));
            let (options, result) = apply(filter(), "*", Some(0));
            assert_eq!((options.uri(), result), (&Uri::from_static("*"), Ok(())));
            assert_eq!(options.headers()[HOST], "other");
            // CONNECT
            let (connect, result) = apply(filter(), "web:443", Some(0));
            assert_eq!((connect.uri(), result), (&Uri::from_static("web:443"), Ok(())));
            assert_eq!(connect.headers()[HOST], "web:8080");
            let redirect = Redirect {
                port: Some(81),
                path: Some(path),
                ..redirect()
            };
            assert_eq!(location(&redirect, "*", Some(0)), Ok("http://web:81".to_owned()));
            assert_eq!(location(&redirect, "web:443", Some(0)), Ok("http://web:81".to_owned()));
        }
        let to_port = Redirect {
            port: Some(81),
            ..redirect()
        };
        assert_eq!(location(&to_port, "*", None), Ok("http://web:81".to_owned()));
    }

    #[test]
    fn a_rewrite_after_another_one_replaces_the_new_prefix() {
        let to_prefix = |prefix: &str| rewrite(None, Some(PathModifier::Prefix(prefix.into())));
        for (first, second, expected) in [
            ("/longer/x", "/y", "/y/rest?q"),
            ("/longer/", "/y", "/y/rest?q"),
            ("/", "/y", "/y/rest?q"),
            ("/b", "/", "/rest?q"),
        ] {
            let mut uri = Uri::from_static("/a/rest?q");
            let mut headers = HeaderMap::new();
            let mut head = RequestHead {
                uri: &mut uri,
                headers: &mut headers,
                matched_prefix_len: Some(2),
            };
            let result = apply_request(&[to_prefix(first), to_prefix(second)], &mut head, |_| 0);
            assert_eq!(result, Ok(()));
            assert_eq!(uri, expected, "{first} {second}");
        }
        let mut uri = Uri::from_static("/a/rest");
        let mut headers = HeaderMap::new();
        let mut head = RequestHead {
            uri: &mut uri,
            headers: &mut headers,
            matched_prefix_len: Some(2),
        };
        let full = rewrite(None, Some(PathModifier::Full("/full".into())));
        let result = apply_request(&[full, to_prefix("/y")], &mut head, |_| 0);
        assert!(matches!(result, Err(FilterResponse::Invalid(_))), "{result:?}");
    }

    #[test]
    fn a_ratio_includes_its_fraction_of_requests() {
        for (numerator, denominator) in [(0, 100), (1, 3), (25, 100), (3, 3), (1, 1)] {
            let ratio = Ratio::new(numerator, denominator).unwrap();
            let included = (0..denominator).filter(|random| ratio.includes(|below| random % below));
            assert_eq!(included.count(), numerator as usize, "{numerator}/{denominator}");
        }
    }

    #[test]
    fn a_redirect_that_cannot_be_made_is_an_error() {
        let prefix = Redirect {
            path: Some(PathModifier::Prefix("/x".into())),
            ..redirect()
        };
        assert!(location(&prefix, "http://web/a", None).is_err());
        let host = Redirect {
            host: Some("a\nb".into()),
            ..redirect()
        };
        assert!(location(&host, "http://web/a", None).is_err());
    }

    #[test]
    fn filters_that_refuse_only_some_requests_do_not_refuse_all() {
        let failure = Failure::Grpc {
            code: 14,
            message: "no".into(),
        };
        let ratio = Ratio::ALWAYS;
        let edits = Filter::RequestHeaders(HeaderModifier::default());
        let mut filters = vec![edits, Filter::Failure(FailureInjector { failure, ratio })];
        assert!(!refuses_all_requests(&filters));
        for refusing in [Filter::Redirect(redirect()), Filter::unknown()] {
            filters.push(refusing);
            assert!(refuses_all_requests(&filters));
            filters.pop();
        }
    }

    #[test]
    fn failures_are_injected_into_the_given_fraction_of_requests() {
        let failure = Failure::Http {
            status: StatusCode::SERVICE_UNAVAILABLE,
            message: "no".into(),
        };
        let ratio = Ratio::new(1, 4).unwrap();
        let filters = [Filter::Failure(FailureInjector {
            failure: failure.clone(),
            ratio,
        })];
        let mut uri = Uri::from_static("http://web/");
        let mut headers = HeaderMap::new();
        let answers = (0..4).map(|random| {
            let mut head = RequestHead {
                uri: &mut uri,
                headers: &mut headers,
                matched_prefix_len: None,
            };
            apply_request(&filters, &mut head, |below| {
                assert_eq!(below, 4);
                random
            })
        });
        assert_eq!(
            answers.collect::<Vec<_>>(),
            [Err(FilterResponse::Failure(failure)), Ok(()), Ok(()), Ok(())]
        );
        assert_eq!(Ratio::new(1, 0), None);
        assert_eq!(Ratio::new(2, 1), None);
    }

    #[test]
    fn an_unknown_filter_refuses_every_request() {
        let mut uri = Uri::from_static("http://web/");
        let mut headers = HeaderMap::new();
        let mut head = RequestHead {
            uri: &mut uri,
            headers: &mut headers,
            matched_prefix_len: None,
        };
        assert!(matches!(
            apply_request(&[Filter::unknown()], &mut head, |_| 0),
            Err(FilterResponse::Invalid(_))
        ));
    }
}
