//! The CORS filter: responses to preflight requests of browsers, and headers that permit cross-origin requests.
//!
//! The proxy sends an origin, method or header of the request instead of `*`, because browsers do not accept `*` for requests
//! with credentials.
//!
//! Source: the Fetch standard, and GEP-1767 of the Gateway API.

use http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, ORIGIN, VARY,
};
use http::{HeaderMap, HeaderValue, Method};

/// The cross-origin requests that browsers may send by a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cors {
    pub(crate) origins: Vec<OriginMatch>,
    pub(crate) allows_credentials: bool,
    pub(crate) methods: AllowedNames,
    pub(crate) headers: AllowedNames,
    /// Response headers that scripts may read.
    pub(crate) exposed_headers: Option<HeaderValue>,
    /// Maximum time that a client may use the response to a preflight request, in seconds.
    pub(crate) max_age: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OriginMatch {
    Any,
    /// This origin: scheme, host and port.
    Exact(Origin),
    /// All origins with this scheme and port whose host is longer than this one and ends with it.
    Suffix(Origin),
}

/// A scheme, a host, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    is_https: bool,
    host: Box<str>,
    port: u16,
}

/// Methods or headers that a request may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AllowedNames {
    /// All names that the client requests.
    Any,
    /// These names, separated by commas. `None`: only the names that browsers always permit.
    Listed(Option<HeaderValue>),
}

/// The CORS filter of one request.
#[derive(Debug)]
pub(crate) struct CorsRequest<'a> {
    cors: &'a Cors,
    /// The origin of the request, if it is allowed.
    allowed_origin: Option<HeaderValue>,
}

impl Cors {
    /// Creates the CORS filter of one request. Reads the origin from `headers`, which must be as the client sent them.
    pub(crate) fn for_request(&self, headers: &HeaderMap) -> CorsRequest<'_> {
        let is_allowed = |origin: &&HeaderValue| self.origins.iter().any(|allowed| allowed.matches(origin));
        CorsRequest {
            cors: self,
            allowed_origin: headers.get(ORIGIN).filter(is_allowed).cloned(),
        }
    }
}

impl CorsRequest<'_> {
    /// The headers of the response to a preflight request; `None` for other requests.
    pub(crate) fn preflight_response(&self, method: &Method, headers: &HeaderMap) -> Option<HeaderMap> {
        let requested_method = headers.get(ACCESS_CONTROL_REQUEST_METHOD)?;
        if *method != Method::OPTIONS || !headers.contains_key(ORIGIN) {
            return None;
        }
        let mut response_headers = HeaderMap::new();
        self.apply_response(&mut response_headers);
        if self.allowed_origin.is_some() {
            let requested_headers = headers.get(ACCESS_CONTROL_REQUEST_HEADERS);
            for (name, value) in [
                (
                    ACCESS_CONTROL_ALLOW_METHODS,
                    self.cors.methods.value(Some(requested_method)),
                ),
                (ACCESS_CONTROL_ALLOW_HEADERS, self.cors.headers.value(requested_headers)),
                (ACCESS_CONTROL_MAX_AGE, Some(self.cors.max_age.into())),
            ] {
                response_headers.extend(value.map(|value| (name, value)));
            }
        }
        Some(response_headers)
    }

    /// Replaces the CORS headers of a response. Adds `vary: origin`, because the response depends on the origin.
    pub(crate) fn apply_response(&self, headers: &mut HeaderMap) {
        let allowed = self.allowed_origin.as_ref().map(|_| self.cors);
        let credentials = allowed.filter(|cors| cors.allows_credentials);
        for (name, value) in [
            (ACCESS_CONTROL_ALLOW_ORIGIN, self.allowed_origin.clone()),
            (
                ACCESS_CONTROL_ALLOW_CREDENTIALS,
                credentials.map(|_| HeaderValue::from_static("true")),
            ),
            (
                ACCESS_CONTROL_EXPOSE_HEADERS,
                allowed.and_then(|cors| cors.exposed_headers.clone()),
            ),
        ] {
            headers.remove(&name);
            headers.extend(value.map(|value| (name, value)));
        }
        let is_origin = |name: &str| name.trim().eq_ignore_ascii_case(ORIGIN.as_str());
        let varies = headers.get_all(VARY).iter().filter_map(|value| value.to_str().ok());
        if !varies.flat_map(|names| names.split(',')).any(is_origin) {
            headers.append(VARY, ORIGIN.into());
        }
    }
}

impl AllowedNames {
    fn value(&self, requested: Option<&HeaderValue>) -> Option<HeaderValue> {
        match self {
            Self::Any => requested.cloned(),
            Self::Listed(names) => names.clone(),
        }
    }
}

impl OriginMatch {
    /// Parses `*` or an origin, otherwise returns `None`. A `*` at the start of the host matches any non-empty prefix.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        if text == "*" {
            return Some(Self::Any);
        }
        let origin = Origin::parse(text)?;
        match origin.host.strip_prefix('*').map(Box::from) {
            None => Some(Self::Exact(origin)),
            Some(host) => Some(Self::Suffix(Origin { host, ..origin })),
        }
    }

    fn matches(&self, origin: &HeaderValue) -> bool {
        let origin = || origin.to_str().ok().and_then(Origin::parse);
        let same_scheme_and_port = |a: &Origin, b: &Origin| (a.is_https, a.port) == (b.is_https, b.port);
        match self {
            Self::Any => true,
            Self::Exact(allowed) => origin().is_some_and(|origin| origin == *allowed),
            Self::Suffix(allowed) => origin().is_some_and(|origin| {
                same_scheme_and_port(&origin, allowed)
                    && origin.host.len() > allowed.host.len()
                    && origin.host.ends_with(&*allowed.host)
            }),
        }
    }
}

impl Origin {
    fn parse(text: &str) -> Option<Self> {
        let (scheme, authority) = text.split_once("://")?;
        let (is_https, default_port) = match scheme {
            "http" => (false, 80),
            "https" => (true, 443),
            _ => return None,
        };
        let (host, port) = match authority.rsplit_once(':') {
            // Inside brackets a colon is part of the address.
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok()?),
            _ => (authority, default_port),
        };
        let is_host_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"-._*[:]".contains(&byte);
        (!host.is_empty() && host.bytes().all(is_host_byte)).then(|| Self {
            is_https,
            host: host.to_ascii_lowercase().into(),
            port,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cors(origins: &[&str]) -> Cors {
        Cors {
            origins: origins
                .iter()
                .map(|origin| OriginMatch::parse(origin).unwrap())
                .collect(),
            allows_credentials: false,
            methods: AllowedNames::Listed(Some(HeaderValue::from_static("GET, PUT"))),
            headers: AllowedNames::Listed(None),
            exposed_headers: None,
            max_age: 5,
        }
    }

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &str)| (name.parse().unwrap(), value.parse().unwrap());
        pairs.iter().map(pair).collect()
    }

    /// The response to a preflight request from `https://a.test` for `PUT` with the header `x-a`.
    fn preflight(cors: &Cors) -> HeaderMap {
        let request = headers(&[
            ("origin", "https://a.test"),
            ("access-control-request-method", "PUT"),
            ("access-control-request-headers", "x-a"),
        ]);
        let found = cors
            .for_request(&request)
            .preflight_response(&Method::OPTIONS, &request);
        found.unwrap()
    }

    #[test]
    fn origins_match_by_scheme_host_and_port() {
        for (allowed, origin, is_allowed) in [
            ("*", "https://a.test", true),
            ("*", "null", true),
            ("https://a.test", "https://a.test", true),
            ("https://A.test", "https://a.test", true),
            ("https://a.test", "https://a.test:443", true),
            ("http://a.test:80", "http://a.test", true),
            ("https://a.test", "http://a.test", false),
            ("https://a.test", "https://a.test:444", false),
            ("https://a.test", "https://b.a.test", false),
            ("https://a.test", "null", false),
            ("https://*.a.test", "https://b.a.test", true),
            ("https://*.a.test", "https://c.b.a.test", true),
            ("https://*.a.test", "https://a.test", false),
            ("https://*.a.test", "https://.a.test", false),
            ("https://*.a.test", "https://ba.test", false),
            ("https://*.a.test", "https://b.a.test:444", false),
            ("https://*.a.test", "https://b.a.test.evil", false),
            ("https://*.a.test", "https://evil/.a.test", false),
            ("https://*", "https://a.test", true),
            ("https://*", "http://a.test", false),
            ("http://*:81", "http://[::1]:81", true),
            ("http://*:81", "http://[::1]", false),
        ] {
            let is_matched = OriginMatch::parse(allowed).unwrap().matches(&origin.parse().unwrap());
            assert_eq!(is_matched, is_allowed, "{allowed} {origin}");
        }
        for invalid in [
            "",
            "a.test",
            "ftp://a.test",
            "https://",
            "https://a.test:x",
            "https://a b",
        ] {
            assert_eq!(OriginMatch::parse(invalid), None, "{invalid}");
        }
    }

    #[test]
    fn a_preflight_request_gets_what_the_filter_allows() {
        let found = preflight(&cors(&["https://a.test", "https://b.test"]));
        let expected = headers(&[
            ("access-control-allow-origin", "https://a.test"),
            ("access-control-allow-methods", "GET, PUT"),
            ("access-control-max-age", "5"),
            ("vary", "origin"),
        ]);
        assert_eq!(found, expected);
        let found = preflight(&Cors {
            allows_credentials: true,
            methods: AllowedNames::Any,
            headers: AllowedNames::Any,
            exposed_headers: Some(HeaderValue::from_static("x-b, x-c")),
            ..cors(&["*"])
        });
        let expected = headers(&[
            ("access-control-allow-origin", "https://a.test"),
            ("access-control-allow-credentials", "true"),
            ("access-control-expose-headers", "x-b, x-c"),
            ("access-control-allow-methods", "PUT"),
            ("access-control-allow-headers", "x-a"),
            ("access-control-max-age", "5"),
            ("vary", "origin"),
        ]);
        assert_eq!(found, expected);
        // Another origin, or none.
        for origins in [&["https://b.test"][..], &[]] {
            assert_eq!(preflight(&cors(origins)), headers(&[("vary", "origin")]));
        }
    }

    #[test]
    fn a_request_without_options_origin_and_requested_method_is_not_a_preflight_request() {
        let cors = cors(&["*"]);
        let (origin, method) = (("origin", "https://a.test"), ("access-control-request-method", "PUT"));
        for (request_method, pairs) in [
            (Method::GET, &[origin, method][..]),
            (Method::OPTIONS, &[origin]),
            (Method::OPTIONS, &[method]),
        ] {
            let request = headers(pairs);
            let found = cors.for_request(&request).preflight_response(&request_method, &request);
            assert_eq!(found, None, "{request_method} {pairs:?}");
        }
    }

    #[test]
    fn cors_headers_of_a_response_are_replaced() {
        let cors = Cors {
            allows_credentials: true,
            ..cors(&["https://a.test"])
        };
        let application_headers = [
            ("access-control-allow-origin", "*"),
            ("access-control-expose-headers", "x-secret"),
            ("x-other", "1"),
        ];
        let check =
            |request: &[(&'static str, &str)], more: &[(&'static str, &str)], expected: &[(&'static str, &str)]| {
                let mut response = headers(&[&application_headers[..], more].concat());
                cors.for_request(&headers(request)).apply_response(&mut response);
                assert_eq!(response, headers(expected), "{request:?} {more:?}");
            };
        let allowed = [
            ("access-control-allow-origin", "https://a.test"),
            ("access-control-allow-credentials", "true"),
            ("x-other", "1"),
        ];
        let with_vary = |vary: &'static str| [&allowed[..], &[("vary", vary)]].concat();
        let origin = [("origin", "https://a.test")];
        check(&origin, &[], &with_vary("origin"));
        check(&origin, &[("vary", "Accept, Origin")], &with_vary("Accept, Origin"));
        let both = [&with_vary("accept")[..], &[("vary", "origin")]].concat();
        check(&origin, &[("vary", "accept")], &both);
        let denied = [("x-other", "1"), ("vary", "origin")];
        check(&[("origin", "https://b.test")], &[], &denied);
        check(&[], &[], &denied);
    }
}
