//! Route filters: header edits, redirects and injected failures.
//!
//! A filter either changes a head in place, or returns a response instead of forwarding the request.

use std::borrow::Cow;
use std::fmt::Write;
use std::sync::Arc;

use http::header::{HOST, HeaderName};
use http::uri::Scheme;
use http::{HeaderMap, HeaderValue, StatusCode, Uri};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Filter {
    RequestHeaders(HeaderModifier),
    ResponseHeaders(HeaderModifier),
    Redirect(Redirect),
    Failure(FailureInjector),
    /// The policy or a filter of it cannot be applied, for this reason. Skipping it could permit anything, so no request passes.
    Invalid(Cow<'static, str>),
}

impl Filter {
    /// For a filter of a kind that this proxy does not know.
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

/// Where to redirect a client; an absent part stays as in the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Redirect {
    pub(crate) scheme: Option<Scheme>,
    pub(crate) host: Option<Box<str>>,
    pub(crate) path: Option<PathModifier>,
    pub(crate) port: Option<u16>,
    pub(crate) status: StatusCode,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PathModifier {
    /// The whole path; the query stays.
    Full(Box<str>),
    /// The part of the path that a prefix match covered.
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

/// The response instead of forwarding the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FilterResponse {
    Redirect {
        status: StatusCode,
        location: HeaderValue,
    },
    Failure(Failure),
    /// The filters cannot be applied; the response is 500.
    Invalid(Cow<'static, str>),
}

/// A request, as filters need it.
#[derive(Debug)]
pub(crate) struct RequestHead<'a> {
    pub(crate) uri: &'a Uri,
    pub(crate) headers: &'a mut HeaderMap,
    /// Number of bytes of the path that the rule's prefix match covered.
    pub(crate) prefix: Option<usize>,
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
            Filter::ResponseHeaders(_) => {}
            Filter::Redirect(redirect) => redirect.apply(head)?,
            Filter::Failure(injector) => {
                if draw(injector.ratio.denominator) < injector.ratio.numerator {
                    return Err(FilterResponse::Failure(injector.failure.clone()));
                }
            }
            Filter::Invalid(reason) => return Err(FilterResponse::Invalid(reason.clone())),
        }
    }
    Ok(())
}

/// Applies the response filters of a rule.
pub(crate) fn apply_response(filters: &[Filter], headers: &mut HeaderMap) {
    for filter in filters {
        if let Filter::ResponseHeaders(modifier) = filter {
            modifier.apply(headers);
        }
    }
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

    /// `None` if the numerator is larger than the denominator, or the denominator is zero.
    pub(crate) fn new(numerator: u32, denominator: u32) -> Option<Self> {
        (denominator > 0 && numerator <= denominator).then_some(Self { numerator, denominator })
    }
}

impl Redirect {
    /// Does not redirect if the location equals the request's URI.
    fn apply(&self, head: &RequestHead<'_>) -> Result<(), FilterResponse> {
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
        // With the same scheme the request's port stays, also for another host. With another scheme it is dropped, because that
        // scheme has another default port.
        let port = match self.port {
            Some(port) => Some(port),
            None if self.scheme.is_none() || scheme == request_scheme => port,
            None => None,
        };
        let port = port.filter(|port| default_port(scheme) != Some(*port));

        let mut location = format!("{scheme}://{}", self.host.as_deref().unwrap_or(host));
        if let Some(port) = port {
            write!(location, ":{port}").expect("writing to a string cannot fail");
        }
        let path = head.uri.path();
        match &self.path {
            None => location.push_str(path),
            Some(PathModifier::Full(full)) => location.push_str(full),
            Some(PathModifier::Prefix(replacement)) => {
                let rest = head.prefix.and_then(|prefix| path.get(prefix..));
                let rest = rest.ok_or(FilterResponse::Invalid(
                    "redirect replaces a prefix, but no prefix was matched".into(),
                ))?;
                location.push_str(&replace_prefix(replacement, rest));
            }
        }
        if let Some(query) = head.uri.query() {
            location.push('?');
            location.push_str(query);
        }

        if is_location_of_request(&location, head.uri, request_scheme, authority) {
            return Ok(());
        }
        let location = HeaderValue::try_from(location)
            .map_err(|_| FilterResponse::Invalid("redirect to an invalid URI".into()))?;
        Err(FilterResponse::Redirect {
            status: self.status,
            location,
        })
    }
}

/// A new prefix before the rest of the path, with one slash between them.
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

fn is_location_of_request(location: &str, uri: &Uri, scheme: &Scheme, authority: &str) -> bool {
    let path_and_query = uri.path_and_query().map_or("/", |path| path.as_str());
    location
        .strip_prefix(scheme.as_str())
        .and_then(|rest| rest.strip_prefix("://"))
        .and_then(|rest| rest.strip_prefix(authority))
        .is_some_and(|rest| rest == path_and_query)
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

    /// The location of a redirect of `uri`, or `None` if the request passes.
    fn location(redirect: &Redirect, uri: &str, prefix: Option<usize>) -> Result<Option<String>, String> {
        let mut req = Request::get(uri).body(()).unwrap();
        if !uri.contains("://") {
            req.headers_mut().insert(HOST, value("web:8080"));
        }
        let (mut parts, ()) = req.into_parts();
        let mut head = RequestHead {
            uri: &parts.uri,
            headers: &mut parts.headers,
            prefix,
        };
        match apply_request(&[Filter::Redirect(redirect.clone())], &mut head, |_| 0) {
            Ok(()) => Ok(None),
            Err(FilterResponse::Redirect { status, location }) => {
                assert_eq!(status, StatusCode::MOVED_PERMANENTLY);
                Ok(Some(location.to_str().unwrap().to_owned()))
            }
            Err(FilterResponse::Invalid(reason)) => Err(reason.into_owned()),
            Err(answer) => panic!("{answer:?}"),
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
        let uri = Uri::from_static("http://web/");
        apply_request(
            &filters,
            &mut RequestHead {
                uri: &uri,
                headers: &mut req,
                prefix: None,
            },
            |_| 0,
        )
        .unwrap();
        apply_response(&filters, &mut rsp);
        assert!(req.contains_key("x-req") && !req.contains_key("x-rsp"));
        assert!(rsp.contains_key("x-rsp") && !rsp.contains_key("x-req"));
    }

    #[test]
    fn redirects_change_what_they_name_and_keep_the_rest() {
        let with = |edit: fn(&mut Redirect)| {
            let mut redirect = redirect();
            edit(&mut redirect);
            redirect
        };
        for (redirect, uri, expected) in [
            (
                with(|r| r.host = Some("new".into())),
                "http://web/a?q=1",
                Some("http://new/a?q=1"),
            ),
            (with(|r| r.host = Some("new".into())), "/a", Some("http://new:8080/a")),
            (
                with(|r| r.scheme = Some(Scheme::HTTPS)),
                "http://web:8080/a",
                Some("https://web/a"),
            ),
            (with(|r| r.port = Some(81)), "http://web/a", Some("http://web:81/a")),
            (with(|r| r.port = Some(80)), "http://web:8080/a", Some("http://web/a")),
            (
                with(|r| {
                    r.scheme = Some(Scheme::HTTPS);
                    r.port = Some(443);
                }),
                "http://web/",
                Some("https://web/"),
            ),
            (
                with(|r| r.path = Some(PathModifier::Full("/b".into()))),
                "http://web/a?q=1",
                Some("http://web/b?q=1"),
            ),
            (
                with(|r| r.port = Some(81)),
                "http://[fd00::1]:8080/",
                Some("http://[fd00::1]:81/"),
            ),
            (
                with(|r| r.port = Some(81)),
                "http://[fd00::1]/",
                Some("http://[fd00::1]:81/"),
            ),
            (with(|_| ()), "http://web/a?q=1", None),
            (with(|r| r.host = Some("web".into())), "http://web/a", None),
            (with(|r| r.path = Some(PathModifier::Full("/b".into()))), "/b", None),
        ] {
            assert_eq!(
                location(&redirect, uri, None),
                Ok(expected.map(str::to_owned)),
                "{redirect:?} {uri}"
            );
        }
    }

    #[test]
    fn redirects_replace_a_matched_prefix() {
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
                Ok(Some(format!("http://web{expected}"))),
                "{path} {matched} {replacement}"
            );
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
        let uri = Uri::from_static("http://web/");
        let mut headers = HeaderMap::new();
        let answers = (0..4).map(|random| {
            let mut head = RequestHead {
                uri: &uri,
                headers: &mut headers,
                prefix: None,
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
    fn nothing_passes_an_unknown_filter() {
        let uri = Uri::from_static("http://web/");
        let mut headers = HeaderMap::new();
        let mut head = RequestHead {
            uri: &uri,
            headers: &mut headers,
            prefix: None,
        };
        assert!(matches!(
            apply_request(&[Filter::unknown()], &mut head, |_| 0),
            Err(FilterResponse::Invalid(_))
        ));
    }
}
