//! List and watch requests, written as client-go writes them: query parameters in alphabetical order.

use http::Request;
use http::header::ACCEPT;
use kube::client::Body;

use crate::resources::protobuf;
use crate::source::kubernetes::kinds::{ObjectDetail, WatchedKind};

impl WatchedKind {
    /// Builds the request for a page of the list. `page` is the token from the previous page.
    pub(super) fn list_request(&self, version: &str, page: Option<&str>) -> Result<Request<Body>, http::Error> {
        let mut query = String::new();
        if let Some(page) = page {
            query += &format!("continue={}&", percent_encode(page));
        }
        query += &format!("limit={LIST_PAGE_SIZE}");
        self.build_request(version, &query, "PartialObjectMetadataList")
    }

    /// Builds the request for changes after resource version `since`, with a timeout in seconds.
    pub(super) fn watch_request(&self, version: &str, since: &str, seconds: u64) -> Result<Request<Body>, http::Error> {
        let query = format!(
            "allowWatchBookmarks=true&resourceVersion={since}&timeout={}&timeoutSeconds={seconds}&watch=true",
            format_go_duration(seconds),
            since = percent_encode(since),
        );
        self.build_request(version, &query, "PartialObjectMetadata")
    }

    fn build_request(&self, version: &str, query: &str, metadata: &str) -> Result<Request<Body>, http::Error> {
        let info = self.kind.info();
        let path = format!("{}/{}?{query}", api_path(info.group, version), info.plural());
        let parameters = match self.detail {
            ObjectDetail::Metadata => format!(";as={metadata};g=meta.k8s.io;v=v1"),
            ObjectDetail::Full => String::new(),
        };
        let mut accept = format!("application/json{parameters}");
        if protobuf::is_decodable(self.kind) {
            accept = format!("application/vnd.kubernetes.protobuf{parameters},{accept}");
        }
        Request::get(path).header(ACCEPT, accept).body(Body::empty())
    }
}

pub(super) fn api_path(group: &str, version: &str) -> String {
    match group {
        "" => format!("/api/{version}"),
        group => format!("/apis/{group}/{version}"),
    }
}

pub(super) fn discovery_request(path: &str) -> Result<Request<Body>, http::Error> {
    Request::get(path)
        .header(ACCEPT, "application/json")
        .body(Body::empty())
}

/// Formats a duration as Go does.
fn format_go_duration(seconds: u64) -> String {
    match (seconds / 60, seconds % 60) {
        (0, seconds) => format!("{seconds}s"),
        (minutes, seconds) => format!("{minutes}m{seconds}s"),
    }
}

/// Percent-encodes the characters that a query must not contain.
fn percent_encode(text: &str) -> String {
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

/// Objects per page. A page of pods takes about 3 MB. Up to two pages are in memory: the next one is received while one is
/// decoded.
const LIST_PAGE_SIZE: u32 = 250;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::Kind;
    use crate::source::kubernetes::kinds::Necessity;

    #[test]
    fn requests_are_those_of_client_go() {
        let watched = |kind, detail| WatchedKind {
            kind,
            detail,
            necessity: Necessity::Required,
        };
        let slices = watched(Kind::EndpointSlice, ObjectDetail::Full);
        let req = slices.watch_request("v1", "751", 284).unwrap();
        assert_eq!(
            req.uri(),
            "/apis/discovery.k8s.io/v1/endpointslices?allowWatchBookmarks=true&resourceVersion=751&timeout=4m44s\
             &timeoutSeconds=284&watch=true"
        );
        assert_eq!(
            req.headers()[ACCEPT],
            "application/vnd.kubernetes.protobuf,application/json"
        );
        let services = watched(Kind::Service, ObjectDetail::Full);
        let req = services.list_request("v1", None).unwrap();
        assert_eq!(req.headers()[ACCEPT], "application/json");
        let req = watched(Kind::Node, ObjectDetail::Metadata)
            .list_request("v1", Some("a=/"))
            .unwrap();
        assert_eq!(req.uri(), "/api/v1/nodes?continue=a%3D%2F&limit=250");
        assert_eq!(
            req.headers()[ACCEPT],
            "application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,\
             application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
        );
        let req = watched(Kind::Pod, ObjectDetail::Full).list_request("v1", None).unwrap();
        assert_eq!(req.uri(), "/api/v1/pods?limit=250");
        assert_eq!(
            req.headers()[ACCEPT],
            "application/vnd.kubernetes.protobuf,application/json"
        );
        assert_eq!(format_go_duration(59), "59s");
    }
}
