//! Parses the path and the query of a request.
//!
//! The API server authorizes a request by its path and by `watch`. Only the canonical form of a path is accepted; every
//! other form, which the API server might interpret differently, is not found.

use std::time::Duration;

use http::Uri;
use tulle_core::dns_names::is_dns_label;
use tulle_core::names::telemetry::{EDGES, GROUP, ROUTES, TAPS, VERSION, WORKLOADS};

use super::events::Headers;
use super::history::MAX_HISTORY;
use super::rows::{self, GroupKind, Selection};
use super::tap::TapRequest;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ApiRequest {
    /// The list of resources.
    Resources,
    Metrics(MetricsQuery),
    Tap(TapRequest),
}

/// A query for golden metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MetricsQuery {
    pub(super) resource: RequestedResource,
    /// All namespaces if absent.
    pub(super) namespace: Option<String>,
    pub(super) selection: Selection,
    pub(super) window: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestedResource {
    Workloads,
    Edges,
    Routes,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    #[error("not found; expected /apis/{GROUP}/{VERSION}/namespaces/NAMESPACE/workloads, edges, routes or taps")]
    NotFound,
    #[error("{0}")]
    BadRequest(String),
}

impl ApiRequest {
    pub(super) fn parse(uri: &Uri) -> Result<Self, Error> {
        let path = uri.path().strip_prefix("/apis/").ok_or(Error::NotFound)?;
        let mut segments = path.split('/');
        if (segments.next(), segments.next()) != (Some(GROUP), Some(VERSION)) {
            return Err(Error::NotFound);
        }
        let rest: Vec<_> = segments.collect();
        let (namespace, resource) = match rest.as_slice() {
            [] => return Ok(Self::Resources),
            [resource] => (None, *resource),
            ["namespaces", namespace, resource] if is_dns_label(namespace) => (Some(*namespace), *resource),
            _ => return Err(Error::NotFound),
        };
        let namespace = namespace.map(str::to_owned);
        let mut query = Query::parse(uri);
        let selection = Selection {
            by: GroupKind::parse(&query.take("by").unwrap_or_else(|| "workload".to_owned()))
                .map_err(Error::BadRequest)?,
            name: query.take("name"),
        };
        let request = match resource {
            WORKLOADS | EDGES | ROUTES => Self::Metrics(MetricsQuery {
                resource: match resource {
                    WORKLOADS => RequestedResource::Workloads,
                    EDGES => RequestedResource::Edges,
                    _ => RequestedResource::Routes,
                },
                namespace,
                selection,
                window: query.window()?,
            }),
            TAPS => {
                // Without `watch=true` the API server ends a tap after a minute and authorizes it as `list` instead of
                // `watch`.
                if query.take("watch").as_deref() != Some("true") {
                    return Err(Error::BadRequest("taps can only be watched: add watch=true".to_owned()));
                }
                Self::Tap(query.tap(namespace, selection)?)
            }
            _ => return Err(Error::NotFound),
        };
        query.reject_unused_parameters()?;
        Ok(request)
    }
}

/// Query parameters that have not been taken yet.
struct Query(Vec<(String, String)>);

impl Query {
    fn parse(uri: &Uri) -> Self {
        let pairs = form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes());
        Self(pairs.into_owned().collect())
    }

    fn take(&mut self, name: &str) -> Option<String> {
        let index = self.0.iter().position(|(key, _)| key == name)?;
        Some(self.0.swap_remove(index).1)
    }

    fn window(&mut self) -> Result<Duration, Error> {
        let Some(text) = self.take("window") else {
            return Ok(DEFAULT_WINDOW);
        };
        let window = text.parse().ok().map(Duration::from_secs);
        window
            .filter(|window| (Duration::from_secs(1)..=MAX_HISTORY).contains(window))
            .ok_or_else(|| {
                Error::BadRequest(format!(
                    "invalid window={text:?}; expected 1 to {} seconds",
                    MAX_HISTORY.as_secs()
                ))
            })
    }

    fn tap(&mut self, namespace: Option<String>, selection: Selection) -> Result<TapRequest, Error> {
        let one_in = match self.take("oneIn") {
            None => 1,
            Some(text) => match text.parse() {
                Ok(n) if n > 0 => n,
                _ => {
                    return Err(Error::BadRequest(format!("invalid oneIn={text:?}; expected 1 or more")));
                }
            },
        };
        let mut labels = Vec::new();
        match (self.take("toKind"), self.take("toName")) {
            (kind, Some(name)) => {
                let label = destination_label(kind.as_deref().unwrap_or("deployment"))?;
                labels.push((label.to_owned(), name));
            }
            (Some(kind), None) => {
                return Err(Error::BadRequest(format!(
                    "toKind={kind:?} has no effect without toName"
                )));
            }
            (None, None) => {}
        }
        if let Some(namespace) = self.take("toNamespace") {
            labels.push(("namespace".to_owned(), namespace));
        }
        Ok(TapRequest {
            namespace,
            selection,
            method: self.take("method"),
            path: self.take("path"),
            authority: self.take("authority"),
            to: labels,
            headers: match self.take("headers").as_deref() {
                Some("true") => Headers::Shown,
                None | Some("false") => Headers::Omitted,
                Some(text) => {
                    return Err(Error::BadRequest(format!(
                        "invalid headers={text:?}; expected true or false"
                    )));
                }
            },
            one_in,
        })
    }

    fn reject_unused_parameters(&self) -> Result<(), Error> {
        match self.0.first() {
            None => Ok(()),
            Some((name, _)) => Err(Error::BadRequest(format!(
                "unknown parameter {name:?}, or it is set twice"
            ))),
        }
    }
}

/// Returns the endpoint label that names a resource of this kind.
fn destination_label(kind: &str) -> Result<&str, Error> {
    match kind {
        "job" => Ok("k8s_job"),
        "externalworkload" => Ok("external_workload"),
        other if DESTINATION_KINDS.contains(&other) || rows::OWNERS.contains(&other) => Ok(other),
        other => Err(Error::BadRequest(format!(
            "unknown kind toKind={other:?}; expected {}, {}",
            DESTINATION_KINDS.join(", "),
            rows::OWNERS.join(", ")
        ))),
    }
}

/// Kinds of destinations, in addition to the owners.
const DESTINATION_KINDS: [&str; 4] = ["pod", "service", "serviceaccount", "namespace"];

const DEFAULT_WINDOW: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(path: &str) -> Result<ApiRequest, Error> {
        ApiRequest::parse(&format!("/apis/{GROUP}/{VERSION}{path}").parse().unwrap())
    }

    #[test]
    fn the_path_sets_the_namespace_and_the_query_sets_the_other_parameters() {
        let expected = MetricsQuery {
            resource: RequestedResource::Routes,
            namespace: Some("shop".to_owned()),
            selection: Selection {
                by: GroupKind::Owner("deployment"),
                name: Some("web".to_owned()),
            },
            window: Duration::from_secs(10),
        };
        let parsed = parse("/namespaces/shop/routes?by=deployment&name=web&window=10");
        assert_eq!(parsed, Ok(ApiRequest::Metrics(expected)));
        let Ok(ApiRequest::Metrics(all)) = parse("/edges") else {
            panic!()
        };
        assert_eq!((all.namespace, all.window), (None, DEFAULT_WINDOW));
        assert_eq!(parse(""), Ok(ApiRequest::Resources));
        let Ok(ApiRequest::Tap(tap)) = parse("/namespaces/shop/taps?watch=true&path=%2Fa%20b&toName=web&toNamespace=x")
        else {
            panic!()
        };
        assert_eq!(tap.path.as_deref(), Some("/a b"));
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(tap.to, [pair("deployment", "web"), pair("namespace", "x")]);
    }

    #[test]
    fn a_path_that_is_not_canonical_is_not_found() {
        for path in [
            "/",
            "//edges",
            "/edges/",
            "/namespaces/shop/edges/",
            "/namespaces/shop/../edges",
            "/namespaces/sh%6fp/edges",
            "/namespaces//edges",
            "/namespaces/shop/edges/web",
            "/namespaces/shop/pods",
            "/nodes/x/edges",
        ] {
            assert_eq!(parse(path), Err(Error::NotFound), "{path}");
        }
    }

    #[test]
    fn invalid_parameters_are_refused_with_the_accepted_values() {
        let refused = |path: &str| parse(path).unwrap_err().to_string();
        assert!(refused("/edges?window=0").contains("1 to 300"));
        assert!(refused("/edges?by=pods").contains("workload, pod"));
        assert!(refused("/edges?windw=1").contains("windw"));
        assert!(refused("/edges?name=a&name=b").contains("twice"));
        assert!(refused("/taps").contains("watch=true"));
        assert!(refused("/taps?watch=true&oneIn=0").contains("1 or more"));
        assert!(refused("/taps?watch=true&headers=yes").contains("true or false"));
        assert!(refused("/taps?watch=true&toKind=pod").contains("without toName"));
        assert!(refused("/taps?watch=true&toKind=pods&toName=web").contains("expected pod, service"));
        assert!(parse("/taps?watch=true&toKind=statefulset&toName=db").is_ok());
        assert!(parse("/taps?watch=true&headers=false").is_ok());
    }
}
