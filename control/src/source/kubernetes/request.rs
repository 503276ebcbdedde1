//! Requests for lists and watches, written as client-go writes them: parameters in alphabetical order.

use http::Request;
use http::header::ACCEPT;
use kube::client::Body;

use crate::source::kubernetes::kinds::{Part, Watched};

impl Watched {
    /// Asks for a page of the list; the token continues the page before.
    pub(super) fn list_request(&self, version: &str, page: Option<&str>) -> Result<Request<Body>, http::Error> {
        let mut query = String::new();
        if let Some(page) = page {
            query += &format!("continue={}&", escape(page));
        }
        query += &self.selector();
        query += &format!("limit={PAGE}");
        self.request(version, &query, "PartialObjectMetadataList")
    }

    /// Asks for changes after a resource version, for so many seconds.
    pub(super) fn watch_request(&self, version: &str, since: &str, seconds: u64) -> Result<Request<Body>, http::Error> {
        let selector = self.selector();
        let query = format!(
            "allowWatchBookmarks=true&{selector}resourceVersion={since}&timeout={}&timeoutSeconds={seconds}&watch=true",
            minutes(seconds),
            since = escape(since),
        );
        self.request(version, &query, "PartialObjectMetadata")
    }

    fn selector(&self) -> String {
        let label = self.label.map(|label| format!("labelSelector={}&", escape(label)));
        label.unwrap_or_default()
    }

    fn request(&self, version: &str, query: &str, metadata: &str) -> Result<Request<Body>, http::Error> {
        let info = self.kind.info();
        let path = format!("{}/{}?{query}", root(info.group, version), info.plural());
        let accept = match self.part {
            Part::Metadata => format!("application/json;as={metadata};g=meta.k8s.io;v=v1"),
            Part::Whole | Part::Nothing => "application/json".to_owned(),
        };
        Request::get(path).header(ACCEPT, accept).body(Body::empty())
    }
}

/// Where a version of a group is.
pub(super) fn root(group: &str, version: &str) -> String {
    match group {
        "" => format!("/api/{version}"),
        group => format!("/apis/{group}/{version}"),
    }
}

/// Asks what there is at a path of discovery.
pub(super) fn discovery(path: &str) -> Result<Request<Body>, http::Error> {
    Request::get(path)
        .header(ACCEPT, "application/json")
        .body(Body::empty())
}

/// A duration as Go prints it.
fn minutes(seconds: u64) -> String {
    match (seconds / 60, seconds % 60) {
        (0, seconds) => format!("{seconds}s"),
        (minutes, seconds) => format!("{minutes}m{seconds}s"),
    }
}

/// Percent-encodes what a query must not hold.
fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            escaped.push(byte.into());
        } else {
            escaped += &format!("%{byte:02X}");
        }
    }
    escaped
}

/// Objects a page: a page of pods is some 3 MB, and is gone before the next is asked for.
const PAGE: u32 = 250;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::Kind;

    #[test]
    fn requests_are_those_of_client_go() {
        let watched = |kind, part| Watched {
            kind,
            part,
            label: (kind == Kind::Pod).then_some("linkerd.io/control-plane-ns"),
        };
        let slices = watched(Kind::EndpointSlice, Part::Whole);
        let req = slices.watch_request("v1", "751", 284).unwrap();
        assert_eq!(
            req.uri(),
            "/apis/discovery.k8s.io/v1/endpointslices?allowWatchBookmarks=true&resourceVersion=751&timeout=4m44s\
             &timeoutSeconds=284&watch=true"
        );
        assert_eq!(req.headers()[ACCEPT], "application/json");
        let req = watched(Kind::Node, Part::Metadata)
            .list_request("v1", Some("a=/"))
            .unwrap();
        assert_eq!(req.uri(), "/api/v1/nodes?continue=a%3D%2F&limit=250");
        assert_eq!(
            req.headers()[ACCEPT],
            "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
        );
        let req = watched(Kind::Pod, Part::Whole).list_request("v1", None).unwrap();
        assert_eq!(
            req.uri(),
            "/api/v1/pods?labelSelector=linkerd.io%2Fcontrol-plane-ns&limit=250"
        );
        assert_eq!(minutes(59), "59s");
    }
}
