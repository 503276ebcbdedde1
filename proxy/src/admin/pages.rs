//! `/debug`: what this process knows at the moment, for people and for programs.
//!
//! A page is a value that is made when it is asked for. Who may see them is who may change the log level: they name peers and
//! policies, though no keys.

use http::{HeaderValue, Method, StatusCode, header::CONTENT_TYPE};
use serde::Serialize;
use tulle_core::admin::{Admin, AdminRequest, text};

use crate::admin::{Answer, loopback_only, only, wants_json};

/// One page below `/debug`.
pub(crate) struct Page {
    path: &'static str,
    about: &'static str,
    show: Box<dyn Fn(Form) -> Result<String, String> + Send + Sync>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Text,
    Json,
}

impl Page {
    /// A page that shows what `value` gives when it is asked for.
    pub(crate) fn new<V: Serialize>(
        path: &'static str,
        about: &'static str,
        value: impl Fn() -> V + Send + Sync + 'static,
    ) -> Self {
        Self {
            path,
            about,
            show: Box::new(move |form| form.write(&value())),
        }
    }
}

/// Adds the pages, and an index of them.
pub(super) fn routes(admin: Admin, pages: Vec<Page>) -> Admin {
    let index: Vec<_> = pages
        .iter()
        .map(|page| Entry {
            path: page.path,
            about: page.about,
        })
        .collect();
    let index = Page::new("/debug", "these pages", move || index.clone());
    pages.into_iter().chain([index]).fold(admin, |admin, page| {
        admin.route(page.path, move |req| std::future::ready(answer(&req, &page)))
    })
}

#[derive(Clone, Serialize)]
struct Entry {
    path: &'static str,
    about: &'static str,
}

impl Form {
    fn write(self, value: &impl Serialize) -> Result<String, String> {
        match self {
            Self::Text => serde_yaml_ng::to_string(value).map_err(|error| error.to_string()),
            Self::Json => serde_json::to_string_pretty(value)
                .map(|json| json + "\n")
                .map_err(|error| error.to_string()),
        }
    }
}

fn answer(req: &AdminRequest, page: &Page) -> Answer {
    if req.method != Method::GET {
        return only("GET");
    }
    if !req.is_loopback() {
        return loopback_only();
    }
    let form = match req.query.as_deref() {
        None | Some("") if wants_json(req) => Form::Json,
        None | Some("" | "format=text") => Form::Text,
        Some("format=json") => Form::Json,
        Some(query) => {
            let expected = format!("{query:?} is not understood; expected ?format=json or ?format=text\n");
            return text(StatusCode::BAD_REQUEST, expected);
        }
    };
    match (page.show)(form) {
        Ok(body) => {
            let mut rsp = text(StatusCode::OK, body);
            if form == Form::Json {
                rsp.headers_mut()
                    .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            }
            rsp
        }
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}
