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

/// The location that a redirect of `uri` names, or none where it lets the request pass.
fn location(redirect: &Redirect, uri: &str, prefix: Option<usize>) -> Result<Option<String>, &'static str> {
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
        Err(Answer::Redirect { status, location }) => {
            assert_eq!(status, StatusCode::MOVED_PERMANENTLY);
            Ok(Some(location.to_str().unwrap().to_owned()))
        }
        Err(Answer::Broken(reason)) => Err(reason),
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
fn failures_strike_the_given_part_of_requests() {
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
        [Err(Answer::Failure(failure)), Ok(()), Ok(()), Ok(())]
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
        apply_request(&[Filter::Unknown], &mut head, |_| 0),
        Err(Answer::Broken(_))
    ));
}
