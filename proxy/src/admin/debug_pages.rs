//! `/debug`: the current state of this process, as YAML text and as JSON.
//!
//! A page is a value that is computed for each request. Pages are served to clients on loopback only, because they name peers and
//! policies; they never show keys.

use http::{HeaderValue, Method, StatusCode, header::CONTENT_TYPE};
use serde::Serialize;
use tulle_core::admin::{Admin, AdminRequest, text};

use crate::admin::response::{AdminResponse, forbidden, method_not_allowed, wants_json};

pub(crate) struct DebugPage {
    path: &'static str,
    description: &'static str,
    render: Box<dyn Fn(PageFormat) -> Result<String, String> + Send + Sync>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PageFormat {
    Text,
    Json,
}

impl DebugPage {
    /// A page that shows the value that `compute` returns.
    pub(crate) fn new<V: Serialize>(
        path: &'static str,
        description: &'static str,
        compute: impl Fn() -> V + Send + Sync + 'static,
    ) -> Self {
        Self {
            path,
            description,
            render: Box::new(move |format| format.write(&compute())),
        }
    }
}

/// Adds a route for each page, and an index of the pages.
pub(super) fn add_routes(admin: Admin, pages: Vec<DebugPage>) -> Admin {
    let index: Vec<_> = pages
        .iter()
        .map(|page| IndexEntry {
            path: page.path,
            about: page.description,
        })
        .collect();
    let index = DebugPage::new("/debug", "this list of pages", move || index.clone());
    pages.into_iter().chain([index]).fold(admin, |admin, page| {
        admin.route(page.path, move |req| std::future::ready(respond(&req, &page)))
    })
}

#[derive(Clone, Serialize)]
struct IndexEntry {
    path: &'static str,
    about: &'static str,
}

impl PageFormat {
    fn write(self, value: &impl Serialize) -> Result<String, String> {
        match self {
            Self::Text => serde_yaml_ng::to_string(value).map_err(|error| error.to_string()),
            Self::Json => serde_json::to_string_pretty(value)
                .map(|json| json + "\n")
                .map_err(|error| error.to_string()),
        }
    }
}

fn respond(req: &AdminRequest, page: &DebugPage) -> AdminResponse {
    if req.method != Method::GET {
        return method_not_allowed("GET");
    }
    if !req.is_loopback() {
        return forbidden();
    }
    let format = match req.query.as_deref() {
        None | Some("") if wants_json(req) => PageFormat::Json,
        None | Some("" | "format=text") => PageFormat::Text,
        Some("format=json") => PageFormat::Json,
        Some(query) => {
            let message = format!("{query:?} is not supported, expected ?format=json or ?format=text\n");
            return text(StatusCode::BAD_REQUEST, message);
        }
    };
    match (page.render)(format) {
        Ok(body) => {
            let mut rsp = text(StatusCode::OK, body);
            if format == PageFormat::Json {
                rsp.headers_mut()
                    .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            }
            rsp
        }
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}
