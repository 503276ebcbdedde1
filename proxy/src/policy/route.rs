//! Finding the rule for a request: the most specific match wins, the first one among equals.

use std::sync::Arc;

use crate::policy::filter::Filter;
use crate::policy::matches::{self, Head, HostMatch, HostScore, RequestMatch, Score};
use crate::policy::meta::Meta;

/// Rules for some hosts; no hosts means all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route<T> {
    pub meta: Arc<Meta>,
    pub hosts: Vec<HostMatch>,
    pub rules: Vec<Rule<T>>,
}

/// What to do with requests that any of `matches` fits; no matches means every request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule<T> {
    pub matches: Vec<RequestMatch>,
    pub filters: Vec<Filter>,
    pub payload: T,
}

/// The rule that a request falls under.
#[derive(Debug)]
pub struct Found<'a, T> {
    pub route: &'a Route<T>,
    pub rule: &'a Rule<T>,
    /// Bytes of the path that a prefix match covered, for redirects that replace it.
    pub prefix: Option<usize>,
    rank: (Option<HostScore>, Score),
}

/// The most specific rule for a request, or none (the request has no route).
///
/// Order: exact host, longer host suffix, no host; then `Score`; then the order of the list.
pub fn find<'a, T>(routes: &'a [Route<T>], head: &Head<'_>) -> Option<Found<'a, T>> {
    let mut best: Option<Found<'a, T>> = None;
    // Looked up at most once, and only if a route asks for it.
    let mut host: Option<Option<&str>> = None;
    for route in routes {
        let host_score = if route.hosts.is_empty() {
            None
        } else {
            let host = host.get_or_insert_with(|| head.host());
            let Some(score) = host.and_then(|host| matches::best_host(&route.hosts, host)) else {
                continue;
            };
            Some(score)
        };
        for rule in &route.rules {
            let Some((score, prefix)) = rule.score(head) else {
                continue;
            };
            let rank = (host_score, score);
            if best.as_ref().is_none_or(|best| rank > best.rank) {
                best = Some(Found {
                    route,
                    rule,
                    prefix,
                    rank,
                });
            }
        }
    }
    best
}

impl<T> Route<T> {
    /// A route for all hosts and requests.
    pub fn catch_all(meta: Arc<Meta>, payload: T) -> Self {
        Self {
            meta,
            hosts: Vec::new(),
            rules: vec![Rule {
                matches: Vec::new(),
                filters: Vec::new(),
                payload,
            }],
        }
    }

    /// The same route with another payload behind each rule, such as compiled backends.
    pub fn map<U>(&self, mut payload: impl FnMut(&Rule<T>) -> U) -> Route<U> {
        let rules = self.rules.iter().map(|rule| Rule {
            matches: rule.matches.clone(),
            filters: rule.filters.clone(),
            payload: payload(rule),
        });
        Route {
            meta: self.meta.clone(),
            hosts: self.hosts.clone(),
            rules: rules.collect(),
        }
    }
}

impl<T> Rule<T> {
    fn score(&self, head: &Head<'_>) -> Option<(Score, Option<usize>)> {
        if self.matches.is_empty() {
            return Some((Score::default(), None));
        }
        let mut best: Option<(Score, Option<usize>)> = None;
        for (score, prefix) in self.matches.iter().filter_map(|candidate| candidate.score(head)) {
            if best.is_none_or(|(best_score, _)| score > best_score) {
                best = Some((score, prefix));
            }
        }
        best
    }
}

#[cfg(test)]
mod tests;
