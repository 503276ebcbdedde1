//! What is asked, from a path and a query.
//!
//! The API server has decided by this path, and by `watch`, whether the caller may ask; so nothing but the plainest form
//! of a path is understood, and every other form, which it might read in another way, is not found.

use std::time::Duration;

use http::Uri;
use tulle_core::names::telemetry::{EDGES, GROUP, ROUTES, TAPS, VERSION, WORKLOADS};

use super::events::Headers;
use super::history::LONGEST;
use super::tap::Wish;
use super::view::{By, Selection};

/// One question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Question {
    /// Which resources there are.
    Resources,
    Rows(Rows),
    Tap(Wish),
}

/// A question about golden metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rows {
    pub(super) of: Of,
    /// All namespaces if absent.
    pub(super) namespace: Option<String>,
    pub(super) selection: Selection,
    pub(super) window: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Of {
    Workloads,
    Edges,
    Routes,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    #[error(
        "there is nothing at this path; expected /apis/{GROUP}/{VERSION}/namespaces/NAMESPACE/workloads, edges, routes or taps"
    )]
    NotFound,
    #[error("{0}")]
    Bad(String),
}

impl Question {
    pub(super) fn parse(uri: &Uri) -> Result<Self, Error> {
        let below = uri.path().strip_prefix("/apis/").ok_or(Error::NotFound)?;
        let mut segments = below.split('/');
        if (segments.next(), segments.next()) != (Some(GROUP), Some(VERSION)) {
            return Err(Error::NotFound);
        }
        let rest: Vec<_> = segments.collect();
        let (namespace, resource) = match rest.as_slice() {
            [] => return Ok(Self::Resources),
            [resource] => (None, *resource),
            ["namespaces", namespace, resource] if crate::trust::is_label(namespace) => (Some(*namespace), *resource),
            _ => return Err(Error::NotFound),
        };
        let namespace = namespace.map(str::to_owned);
        let mut query = Query::parse(uri);
        let selection = Selection {
            by: By::parse(&query.take("by").unwrap_or_else(|| "workload".to_owned())).map_err(Error::Bad)?,
            name: query.take("name"),
        };
        let question = match resource {
            WORKLOADS | EDGES | ROUTES => Self::Rows(Rows {
                of: match resource {
                    WORKLOADS => Of::Workloads,
                    EDGES => Of::Edges,
                    _ => Of::Routes,
                },
                namespace,
                selection,
                window: query.window()?,
            }),
            TAPS => {
                // Others are cut after a minute, and are another permission.
                if query.take("watch").as_deref() != Some("true") {
                    return Err(Error::Bad("taps can only be watched: add watch=true".to_owned()));
                }
                Self::Tap(query.tap(namespace, selection)?)
            }
            _ => return Err(Error::NotFound),
        };
        query.end(question)
    }
}

/// Parameters that nobody has looked at yet.
struct Query(Vec<(String, String)>);

impl Query {
    fn parse(uri: &Uri) -> Self {
        let pairs = form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes());
        Self(pairs.into_owned().collect())
    }

    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.0.iter().position(|(key, _)| key == name)?;
        Some(self.0.swap_remove(at).1)
    }

    fn window(&mut self) -> Result<Duration, Error> {
        let Some(text) = self.take("window") else {
            return Ok(DEFAULT_WINDOW);
        };
        let window = text.parse().ok().map(Duration::from_secs);
        window
            .filter(|window| (Duration::from_secs(1)..=LONGEST).contains(window))
            .ok_or_else(|| {
                Error::Bad(format!(
                    "window={text:?} is none; expected 1 to {} seconds",
                    LONGEST.as_secs()
                ))
            })
    }

    fn tap(&mut self, namespace: Option<String>, selection: Selection) -> Result<Wish, Error> {
        let one_in = match self.take("oneIn") {
            None => 1,
            Some(text) => match text.parse() {
                Ok(n) if n > 0 => n,
                _ => {
                    return Err(Error::Bad(format!(
                        "oneIn={text:?} is no number of requests; expected 1 or more"
                    )));
                }
            },
        };
        let mut labels = Vec::new();
        if let Some(name) = self.take("toName") {
            let kind = self.take("toKind").unwrap_or_else(|| "deployment".to_owned());
            labels.push((label(&kind).to_owned(), name));
        }
        if let Some(namespace) = self.take("toNamespace") {
            labels.push(("namespace".to_owned(), namespace));
        }
        Ok(Wish {
            namespace,
            selection,
            method: self.take("method"),
            path: self.take("path"),
            authority: self.take("authority"),
            to: labels,
            headers: match self.take("headers").as_deref() {
                Some("true") => Headers::Shown,
                _ => Headers::Omitted,
            },
            one_in,
        })
    }

    fn end(&self, question: Question) -> Result<Question, Error> {
        match self.0.first() {
            None => Ok(question),
            Some((name, _)) => Err(Error::Bad(format!(
                "nothing is called {name:?} here, or it is there twice"
            ))),
        }
    }
}

/// The label of endpoints that names what they belong to.
fn label(kind: &str) -> &str {
    match kind {
        "job" => "k8s_job",
        "externalworkload" => "external_workload",
        other => other,
    }
}

const DEFAULT_WINDOW: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(below: &str) -> Result<Question, Error> {
        Question::parse(&format!("/apis/{GROUP}/{VERSION}{below}").parse().unwrap())
    }

    #[test]
    fn a_path_says_which_namespace_and_a_query_the_rest() {
        let expected = Rows {
            of: Of::Routes,
            namespace: Some("shop".to_owned()),
            selection: Selection {
                by: By::Owner("deployment"),
                name: Some("web".to_owned()),
            },
            window: Duration::from_secs(10),
        };
        let asked = parse("/namespaces/shop/routes?by=deployment&name=web&window=10");
        assert_eq!(asked, Ok(Question::Rows(expected)));
        let Ok(Question::Rows(all)) = parse("/edges") else {
            panic!()
        };
        assert_eq!((all.namespace, all.window), (None, DEFAULT_WINDOW));
        assert_eq!(parse(""), Ok(Question::Resources));
        let Ok(Question::Tap(wish)) = parse("/namespaces/shop/taps?watch=true&path=%2Fa%20b&toName=web&toNamespace=x")
        else {
            panic!()
        };
        assert_eq!(wish.path.as_deref(), Some("/a b"));
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(wish.to, [pair("deployment", "web"), pair("namespace", "x")]);
    }

    #[test]
    fn a_path_that_could_be_read_in_another_way_is_not_found() {
        for below in [
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
            assert_eq!(parse(below), Err(Error::NotFound), "{below}");
        }
    }

    #[test]
    fn what_cannot_be_is_refused_with_what_could() {
        let refused = |below: &str| parse(below).unwrap_err().to_string();
        assert!(refused("/edges?window=0").contains("1 to 300"));
        assert!(refused("/edges?by=pods").contains("workload, pod"));
        assert!(refused("/edges?windw=1").contains("windw"));
        assert!(refused("/edges?name=a&name=b").contains("twice"));
        assert!(refused("/taps").contains("watch=true"));
        assert!(refused("/taps?watch=true&oneIn=0").contains("1 or more"));
    }
}
