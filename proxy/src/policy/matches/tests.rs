use proptest::prelude::*;

use super::*;

fn attributes<'a>(method: &'a Method, uri: &'a Uri, headers: &'a HeaderMap) -> RequestAttributes<'a> {
    RequestAttributes::new(method, uri, headers)
}

#[test]
fn hosts_match_exactly_or_by_suffix() {
    let suffix = || HostMatch::suffix(&["com", "Example"]);
    for (matcher, host, expected) in [
        (HostMatch::exact("Web.Shop"), "web.shop", true),
        (HostMatch::exact("web.shop."), "WEB.shop", true),
        (HostMatch::exact("web.shop"), "a.web.shop", false),
        (suffix(), "a.example.com", true),
        (suffix(), "a.b.EXAMPLE.com", true),
        (suffix(), "example.com", false),
        (suffix(), ".example.com", false),
        (suffix(), "badexample.com", false),
        (HostMatch::suffix::<&str>(&[]), "a", true),
        (suffix(), "größe.example.com", true),
        (suffix(), "é.com", false),
    ] {
        assert_eq!(matcher.score(host).is_some(), expected, "{matcher:?} {host}");
    }
}

#[test]
fn exact_hosts_have_higher_scores_than_suffixes_and_longer_suffixes_than_shorter() {
    let exact = HostMatch::exact("a.b.com").score("a.b.com");
    let long = HostMatch::suffix(&["com", "b"]).score("a.b.com");
    let short = HostMatch::suffix(&["com"]).score("a.b.com");
    assert!(exact > long && long > short && short > None);
}

#[test]
fn the_host_is_parsed_from_the_authority() {
    let headers = HeaderMap::new();
    for (authority, host) in [
        ("web.shop:80", "web.shop"),
        ("web.shop.:80", "web.shop"),
        ("user:pass@web.shop", "web.shop"),
        ("[fd00::1]:80", "[fd00::1]"),
        ("[fd00::1]", "[fd00::1]"),
        ("10.0.0.1:8080", "10.0.0.1"),
        ("", ""),
    ] {
        let head = RequestAttributes {
            method: &Method::GET,
            authority: Some(authority),
            path: "/",
            query: None,
            headers: &headers,
        };
        assert_eq!(head.host(), Some(host), "{authority}");
    }
}

#[test]
fn the_host_header_is_used_if_the_target_has_no_authority() {
    let mut headers = HeaderMap::new();
    headers.insert(HOST, "web:80".parse().unwrap());
    let uri = Uri::from_static("/x");
    assert_eq!(attributes(&Method::GET, &uri, &headers).host(), Some("web"));
    let uri = Uri::from_static("http://other/x");
    assert_eq!(attributes(&Method::GET, &uri, &headers).host(), Some("other"));
}

#[test]
fn paths_match_exactly_by_segments_or_by_pattern() {
    let regex = |source| PathMatch::Regex(Pattern::new(source).unwrap());
    for (matcher, path, expected) in [
        (PathMatch::exact("/a"), "/a", true),
        (PathMatch::exact("/a"), "/a/", false),
        (PathMatch::prefix("/a"), "/a", true),
        (PathMatch::prefix("/a"), "/a/", true),
        (PathMatch::prefix("/a"), "/a/b", true),
        (PathMatch::prefix("/a/"), "/a", true),
        (PathMatch::prefix("/a"), "/ab", false),
        (PathMatch::prefix("/"), "/ab", true),
        (PathMatch::prefix("/"), "*", true),
        (PathMatch::prefix("/"), "", true),
        (regex("/a.*"), "/abc", true),
        (regex("a"), "/a", false),
        (regex("/a|/b"), "/bc", false),
        (regex("/a"), "/a\n", false),
        (regex("(?i)/A"), "/a", true),
    ] {
        assert_eq!(matcher.score(path).is_some(), expected, "{matcher:?} {path:?}");
    }
}

#[test]
fn a_pattern_cannot_leave_its_anchors() {
    for source in ["a)|(?:b", "(", "(?x)a # b)", r"\"] {
        let anchored = Pattern::new(source).map(|pattern| pattern.matches(b"ab"));
        assert_ne!(anchored.ok(), Some(true), "{source}");
    }
    assert!(Pattern::new(&"(a{1000}){1000}".repeat(2)).is_err(), "too large");
}

#[test]
fn any_of_repeated_headers_may_match() {
    let mut headers = HeaderMap::new();
    headers.append("x-kind", "a".parse().unwrap());
    headers.append("x-kind", "bb".parse().unwrap());
    let name = HeaderName::from_static("x-kind");
    for (value, expected) in [
        (ValueMatch::Exact((*b"a").into()), true),
        (ValueMatch::Exact((*b"bb").into()), true),
        (ValueMatch::Exact((*b"b").into()), false),
        (ValueMatch::Regex(Pattern::new("b+").unwrap()), true),
        (ValueMatch::Regex(Pattern::new("b").unwrap()), false),
    ] {
        let matcher = HeaderMatch {
            name: name.clone(),
            value,
        };
        assert_eq!(matcher.matches(&headers), expected, "{matcher:?}");
    }
}

#[test]
fn query_parameters_are_decoded() {
    for (name, value, query, expected) in [
        ("q", "a b", "q=a+b", true),
        ("q", "a b", "x=1&q=a%20b", true),
        ("q", "a", "q=b&q=a", true),
        ("q", "", "q", true),
        ("q", "", "q=", true),
        ("q", "a", "", false),
        ("q é", "1", "q+%C3%a9=1", true),
        ("q", "%", "q=%", true),
        ("q", "%zz", "q=%zz", true),
        ("q", "a=b", "q=a=b", true),
    ] {
        let exact = QueryMatch {
            name: name.into(),
            value: ValueMatch::Exact(value.as_bytes().into()),
        };
        let pattern = Pattern::new(&regex::escape(value)).unwrap();
        let regex = QueryMatch {
            name: name.into(),
            value: ValueMatch::Regex(pattern),
        };
        assert_eq!(exact.matches(query), expected, "{name}={value} in {query}");
        assert_eq!(regex.matches(query), expected, "{name}~{value} in {query}");
    }
}

#[test]
fn grpc_matches_posts_to_a_service_and_method() {
    let grpc = |service: &str, method: &str| {
        RequestMatch::Grpc(GrpcMatch {
            service: service.into(),
            method: method.into(),
            headers: Vec::new(),
        })
    };
    for (matcher, method, uri, expected) in [
        (grpc("a.B", "C"), Method::POST, "/a.B/C", true),
        (grpc("a.B", ""), Method::POST, "/a.B/D", true),
        (grpc("", "C"), Method::POST, "/x/C", true),
        (grpc("", ""), Method::POST, "/x/y", true),
        (grpc("", ""), Method::GET, "/x/y", false),
        (grpc("", ""), Method::POST, "/x", false),
        (grpc("", ""), Method::POST, "/x/", false),
        (grpc("", ""), Method::POST, "/x/y/z", false),
        (grpc("a.B", "C"), Method::POST, "/a.B/D", false),
    ] {
        let (uri, headers) = (uri.parse::<Uri>().unwrap(), HeaderMap::new());
        let matched = matcher.score(&attributes(&method, &uri, &headers)).is_some();
        assert_eq!(matched, expected, "{matcher:?} {method} {uri}");
    }
}

#[test]
fn all_parts_of_a_match_must_agree() {
    let matcher = HttpMatch {
        path: Some(PathMatch::prefix("/a")),
        method: Some(Method::GET),
        headers: vec![HeaderMatch {
            name: HeaderName::from_static("x-a"),
            value: ValueMatch::Exact((*b"1").into()),
        }],
        query: vec![QueryMatch {
            name: "q".into(),
            value: ValueMatch::Exact((*b"1").into()),
        }],
    };
    let mut headers = HeaderMap::new();
    headers.insert("x-a", "1".parse().unwrap());
    for (method, uri, with_header, expected) in [
        (Method::GET, "/a?q=1", true, true),
        (Method::PUT, "/a?q=1", true, false),
        (Method::GET, "/b?q=1", true, false),
        (Method::GET, "/a", true, false),
        (Method::GET, "/a?q=1", false, false),
    ] {
        let headers = if with_header { headers.clone() } else { HeaderMap::new() };
        let uri: Uri = uri.parse().unwrap();
        assert_eq!(
            matcher.score(&attributes(&method, &uri, &headers)).is_some(),
            expected,
            "{method} {uri}"
        );
    }
}

proptest! {
    #[test]
    fn a_prefix_matches_paths_that_start_with_its_segments(segments in prop::collection::vec("[a-c]{1,2}", 0..4),
                                                      path in prop::collection::vec("[a-c]{1,2}", 0..5)) {
        let prefix = format!("/{}", segments.join("/"));
        let target = format!("/{}", path.join("/"));
        let matched = PathMatch::prefix(&prefix).score(&target).is_some();
        prop_assert_eq!(matched, path.starts_with(&segments));
    }

    #[test]
    fn an_escaped_pattern_matches_its_text_only(text in ".{0,8}", other in ".{0,8}") {
        let pattern = Pattern::new(&regex::escape(&text)).unwrap();
        prop_assert!(pattern.matches(text.as_bytes()));
        prop_assert_eq!(pattern.matches(other.as_bytes()), text == other);
    }

    #[test]
    fn header_matching_never_depends_on_other_headers(value in "[ -~]{0,12}", wanted in "[ -~]{0,12}", noise in "[ -~]{0,12}") {
        let mut headers = HeaderMap::new();
        headers.insert("x-noise", noise.parse().unwrap());
        headers.insert("x-value", value.parse().unwrap());
        let matcher = HeaderMatch {
            name: HeaderName::from_static("x-value"),
            value: ValueMatch::Exact(wanted.as_bytes().into()),
        };
        prop_assert_eq!(matcher.matches(&headers), value == wanted);
    }

    #[test]
    fn percent_encoding_is_undone(bytes: Vec<u8>) {
        let encoded: String = bytes.iter().map(|byte| format!("%{byte:02x}")).collect();
        prop_assert_eq!(FormDecodedBytes(encoded.as_bytes()).collect::<Vec<_>>(), bytes);
    }

    #[test]
    fn no_input_panics(host in ".{0,20}", path in ".{0,20}", query in ".{0,20}", suffix in prop::collection::vec(".{0,4}", 0..3)) {
        host_from_authority(&host);
        HostMatch::suffix(&suffix).score(&host);
        PathMatch::prefix(&path).score(&host);
        QueryMatch { name: "q".into(), value: ValueMatch::Exact((*b"1").into()) }.matches(&query);
        if let Ok(pattern) = Pattern::new(&path) {
            pattern.matches(query.as_bytes());
        }
    }
}
