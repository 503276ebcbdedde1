//! Finds the rule for a request: the rule with the most specific match, or the first of equals.

use std::sync::Arc;

use http::Method;

use crate::policy::filter::Filter;
use crate::policy::matches::{self, HostMatch, HostScore, RequestAttributes, RequestMatch, Score, path};
use crate::policy::meta::Meta;

/// Rules for requests to some hosts. If the list of hosts is empty, the rules are for all hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Route<T> {
    pub(crate) meta: Arc<Meta>,
    pub(crate) hosts: Vec<HostMatch>,
    pub(crate) rules: Vec<Rule<T>>,
}

/// The filters and the action of requests that match any of `matches`. If the list is empty, every request matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rule<T> {
    pub(crate) matches: Vec<RequestMatch>,
    pub(crate) filters: Vec<Filter>,
    /// The authorizations of an inbound rule, or the action of an outbound one.
    pub(crate) action: T,
}

/// The rule that a request matched.
#[derive(Debug)]
pub(crate) struct RouteMatch<'a, T> {
    pub(crate) route: &'a Route<T>,
    pub(crate) rule: &'a Rule<T>,
    /// Length in bytes of the path prefix that a prefix match covered, for filters that replace it.
    pub(crate) matched_prefix_len: Option<usize>,
    rank: (Option<HostScore>, Score),
}

impl<T> RouteMatch<'_, T> {
    /// Whether the request satisfies a match of the rule that requires the method of the request.
    pub(crate) fn requires_request_method(&self, attributes: &RequestAttributes<'_>) -> bool {
        let mut matches = self.rule.matches.iter();
        matches.any(|candidate| candidate.requires_method(attributes.method) && candidate.score(attributes).is_some())
    }

    /// Returns the match with another length of the matched prefix.
    fn map_matched_prefix_len(self, map: impl FnOnce(usize) -> usize) -> Self {
        Self {
            matched_prefix_len: self.matched_prefix_len.map(map),
            ..self
        }
    }
}

/// Like [`find`], but compares the normal form of the path. The matches of the rules must be converted by
/// [`RequestMatch::with_normalized_path`].
pub(crate) fn find_by_normalized_path<'a, T>(
    routes: &'a [Route<T>],
    attributes: &RequestAttributes<'_>,
    normalized_path: &str,
) -> Option<RouteMatch<'a, T>> {
    let normalized = RequestAttributes {
        path: normalized_path,
        ..*attributes
    };
    let found = find(routes, &normalized)?;
    Some(found.map_matched_prefix_len(|length| path::original_len(attributes.path, length)))
}

/// Finds the most specific rule for a request; `None` if the request has no route.
///
/// Rules are ordered by host (exact host, then longer host suffix, then no host), then by [`Score`], then by their position in the
/// list.
pub(crate) fn find<'a, T>(routes: &'a [Route<T>], attributes: &RequestAttributes<'_>) -> Option<RouteMatch<'a, T>> {
    let mut best: Option<RouteMatch<'a, T>> = None;
    // Parsed at most once, and only if a route needs it.
    let mut host: Option<Option<&str>> = None;
    for route in routes {
        let host_score = if route.hosts.is_empty() {
            None
        } else {
            let host = host.get_or_insert_with(|| attributes.host());
            let Some(score) = host.and_then(|host| matches::best_host_score(&route.hosts, host)) else {
                continue;
            };
            Some(score)
        };
        for rule in &route.rules {
            let Some((score, matched_prefix_len)) = rule.score(attributes) else {
                continue;
            };
            let rank = (host_score, score);
            if best.as_ref().is_none_or(|best| rank > best.rank) {
                best = Some(RouteMatch {
                    route,
                    rule,
                    matched_prefix_len,
                    rank,
                });
            }
        }
    }
    best
}

impl<T> Route<T> {
    /// A route for all hosts and requests.
    pub(crate) fn catch_all(meta: Arc<Meta>, action: T) -> Self {
        Self {
            meta,
            hosts: Vec::new(),
            rules: vec![Rule {
                matches: Vec::new(),
                filters: Vec::new(),
                action,
            }],
        }
    }

    /// Whether the route is for the host of the request, and a rule of it depends on the path.
    pub(crate) fn depends_on_path_for_host(&self, attributes: &RequestAttributes<'_>) -> bool {
        let is_for_host = || {
            let host = attributes.host();
            self.hosts.is_empty() || host.is_some_and(|host| matches::best_host_score(&self.hosts, host).is_some())
        };
        self.depends_on_path() && is_for_host()
    }

    /// Whether a match of a rule requires this method.
    pub(crate) fn requires_method(&self, method: &Method) -> bool {
        let mut matches = self.rules.iter().flat_map(|rule| &rule.matches);
        matches.any(|candidate| candidate.requires_method(method))
    }

    /// Whether the route comes from a resource of the user; otherwise the control plane has generated it.
    pub(crate) fn is_user_defined(&self) -> bool {
        !self.meta.is_default()
    }

    /// Whether a rule depends on the path.
    pub(crate) fn depends_on_path(&self) -> bool {
        let mut matches = self.rules.iter().flat_map(|rule| &rule.matches);
        matches.any(RequestMatch::depends_on_path)
    }

    pub(crate) fn matches_all_requests(&self) -> bool {
        let is_for_all = |rule: &Rule<T>| rule.matches.is_empty() || rule.matches.iter().any(RequestMatch::matches_all);
        self.hosts.is_empty() && self.rules.iter().any(is_for_all)
    }

    /// Returns the route with another action for each rule, such as a compiled one.
    pub(crate) fn map<U>(&self, mut action: impl FnMut(&Rule<T>) -> U) -> Route<U> {
        let rules = self.rules.iter().map(|rule| Rule {
            matches: rule.matches.clone(),
            filters: rule.filters.clone(),
            action: action(rule),
        });
        Route {
            meta: self.meta.clone(),
            hosts: self.hosts.clone(),
            rules: rules.collect(),
        }
    }
}

impl<T> Rule<T> {
    fn score(&self, attributes: &RequestAttributes<'_>) -> Option<(Score, Option<usize>)> {
        if self.matches.is_empty() {
            return Some((Score::default(), None));
        }
        let mut best: Option<(Score, Option<usize>)> = None;
        for (score, matched_prefix_len) in self.matches.iter().filter_map(|candidate| candidate.score(attributes)) {
            if best.is_none_or(|(best_score, _)| score > best_score) {
                best = Some((score, matched_prefix_len));
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use http::header::HeaderName;
    use http::{HeaderMap, Uri};

    use super::*;
    use crate::policy::matches::{GrpcMatch, HeaderMatch, HttpMatch, PathMatch, Pattern, QueryMatch, ValueMatch};

    fn http(edit: impl FnOnce(&mut HttpMatch)) -> RequestMatch {
        let mut http = HttpMatch::default();
        edit(&mut http);
        RequestMatch::Http(http)
    }

    fn exact(path: &str) -> RequestMatch {
        http(|http| http.path = Some(PathMatch::exact(path)))
    }

    fn prefix(path: &str) -> RequestMatch {
        http(|http| http.path = Some(PathMatch::prefix(path)))
    }

    fn regex(path: &str) -> RequestMatch {
        http(|http| http.path = Some(PathMatch::Regex(Pattern::new(path).unwrap())))
    }

    fn header(name: &'static str) -> HeaderMatch {
        HeaderMatch {
            name: HeaderName::from_static(name),
            value: ValueMatch::Exact((*b"1").into()),
        }
    }

    fn query(name: &str) -> QueryMatch {
        QueryMatch {
            name: name.into(),
            value: ValueMatch::Exact((*b"1").into()),
        }
    }

    fn grpc(service: &str, method: &str) -> RequestMatch {
        RequestMatch::Grpc(GrpcMatch {
            service: service.into(),
            method: method.into(),
            headers: Vec::new(),
        })
    }

    fn route(hosts: &[HostMatch], matches: Vec<RequestMatch>, action: usize) -> Route<usize> {
        let rule = Rule {
            matches,
            filters: Vec::new(),
            action,
        };
        Route {
            meta: Meta::default_named("test"),
            hosts: hosts.to_vec(),
            rules: vec![rule],
        }
    }

    /// The action of the rule that is found for a request to `http://a.b.c<target>` with the headers `x-a: 1` and `x-b: 1`.
    fn winner(routes: &[Route<usize>], method: Method, target: &str) -> Option<usize> {
        let uri: Uri = format!("http://a.b.c:80{target}").parse().unwrap();
        let mut headers = HeaderMap::new();
        headers.insert("x-a", "1".parse().unwrap());
        headers.insert("x-b", "1".parse().unwrap());
        find(routes, &RequestAttributes::new(&method, &uri, &headers)).map(|found| found.rule.action)
    }

    /// In each case, the first match must be preferred to the second one, in either order.
    #[test]
    fn the_more_specific_rule_is_found_in_any_order() {
        let matching = |edit: fn(&mut HttpMatch)| http(edit);
        let cases: Vec<(&str, RequestMatch, RequestMatch)> = vec![
            ("exact over prefix of the same length", exact("/x/y"), prefix("/x/y")),
            ("exact over regex", exact("/x/y"), regex("/x/.*")),
            ("exact over a longer pattern", exact("/x/y"), regex("/x/yyyyyyyyy*")),
            ("whole prefix over regex", prefix("/x/y"), regex("/x/.*")),
            ("regex over a shorter prefix", regex("/x/.*"), prefix("/")),
            ("longer prefix", prefix("/x/y"), prefix("/x")),
            (
                "any path match over none",
                prefix("/"),
                matching(|http| http.method = Some(Method::POST)),
            ),
            (
                "path over headers",
                prefix("/x/y"),
                matching(|http| {
                    http.path = Some(PathMatch::prefix("/x"));
                    http.headers = vec![header("x-a"), header("x-b")];
                }),
            ),
            (
                "method over headers",
                matching(|http| http.method = Some(Method::POST)),
                matching(|http| {
                    http.headers = vec![header("x-a"), header("x-b")];
                }),
            ),
            (
                "more headers",
                matching(|http| http.headers = vec![header("x-a"), header("x-b")]),
                matching(|http| {
                    http.headers = vec![header("x-a")];
                }),
            ),
            (
                "headers over query",
                matching(|http| http.headers = vec![header("x-a")]),
                matching(|http| {
                    http.query = vec![query("p"), query("q")];
                }),
            ),
            (
                "more query parameters",
                matching(|http| http.query = vec![query("p"), query("q")]),
                matching(|http| {
                    http.query = vec![query("p")];
                }),
            ),
            ("longer service", grpc("x", ""), grpc("", "y")),
            ("with method", grpc("x", "y"), grpc("x", "")),
        ];
        for (name, better, worse) in cases {
            let (better, worse) = (vec![better], vec![worse]);
            let apart = [route(&[], better.clone(), 1), route(&[], worse.clone(), 2)];
            assert_eq!(winner(&apart, Method::POST, "/x/y?p=1&q=1"), Some(1), "{name}");
            let reversed = [route(&[], worse.clone(), 2), route(&[], better.clone(), 1)];
            assert_eq!(
                winner(&reversed, Method::POST, "/x/y?p=1&q=1"),
                Some(1),
                "{name}, reversed"
            );
            let mut within = route(&[], worse, 2);
            within.rules.push(Rule {
                matches: better,
                filters: Vec::new(),
                action: 1,
            });
            assert_eq!(
                winner(&[within], Method::POST, "/x/y?p=1&q=1"),
                Some(1),
                "{name}, in one route"
            );
        }
    }

    #[test]
    fn the_first_of_equally_specific_rules_is_found() {
        let routes = [route(&[], vec![prefix("/x")], 1), route(&[], vec![prefix("/x")], 2)];
        assert_eq!(winner(&routes, Method::GET, "/x"), Some(1));
        let routes = [route(&[], vec![], 1), route(&[], vec![], 2)];
        assert_eq!(winner(&routes, Method::GET, "/x"), Some(1));
    }

    #[test]
    fn the_host_counts_before_the_path() {
        let suffix = HostMatch::suffix(&["c", "b"]);
        let wider = HostMatch::suffix(&["c"]);
        let routes = [
            route(&[], vec![exact("/x")], 1),
            route(&[wider], vec![exact("/x")], 2),
            route(&[suffix], vec![prefix("/x")], 3),
            route(&[HostMatch::exact("a.b.c")], vec![prefix("/")], 4),
            route(&[HostMatch::exact("other")], vec![exact("/x")], 5),
        ];
        assert_eq!(winner(&routes, Method::GET, "/x"), Some(4));
        assert_eq!(winner(&routes[..3], Method::GET, "/x"), Some(3));
        assert_eq!(winner(&routes[..2], Method::GET, "/x"), Some(2));
        assert_eq!(winner(&routes[4..], Method::GET, "/x"), None);
    }

    #[test]
    fn the_best_of_several_matches_counts() {
        let routes = [
            route(&[], vec![prefix("/x")], 1),
            route(&[], vec![prefix("/"), exact("/x"), prefix("/y")], 2),
        ];
        assert_eq!(winner(&routes, Method::GET, "/x"), Some(2));
        assert_eq!(winner(&routes, Method::GET, "/x/z"), Some(1));
        assert_eq!(winner(&routes, Method::GET, "/z"), Some(2));
    }

    #[test]
    fn without_a_match_there_is_no_route() {
        assert_eq!(winner(&[], Method::GET, "/"), None);
        assert_eq!(winner(&[route(&[], vec![exact("/a")], 1)], Method::GET, "/b"), None);
        let no_rules = Route::<usize> {
            meta: Meta::default_named("test"),
            hosts: Vec::new(),
            rules: Vec::new(),
        };
        assert_eq!(winner(&[no_rules], Method::GET, "/"), None);
    }

    #[test]
    fn the_matched_prefix_is_reported() {
        let headers = HeaderMap::new();
        for (matcher, expected) in [(prefix("/x/"), Some(2)), (prefix("/"), Some(0)), (exact("/x/y"), None)] {
            let uri = Uri::from_static("/x/y");
            let routes = [route(&[], vec![matcher], 1)];
            let found = find(&routes, &RequestAttributes::new(&Method::GET, &uri, &headers)).unwrap();
            assert_eq!(found.matched_prefix_len, expected);
        }
    }

    #[test]
    fn a_mapped_route_matches_as_before() {
        let routes = [route(&[HostMatch::exact("a.b.c")], vec![prefix("/x")], 1).map(|rule| rule.action + 1)];
        assert_eq!(winner(&routes, Method::GET, "/x/y"), Some(2));
        assert_eq!(winner(&routes, Method::GET, "/y"), None);
    }
}
