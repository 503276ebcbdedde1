//! The protobuf message of an HTTP method, which several services send.

use tulle_proto::http_types::{HttpMethod, http_method};

/// Converts a method to its registered value, if it has one.
pub(crate) fn http_method(method: &str) -> HttpMethod {
    use http_method::{Registered, Type};
    let registered = match method.to_ascii_uppercase().as_str() {
        "GET" => Registered::Get,
        "POST" => Registered::Post,
        "PUT" => Registered::Put,
        "DELETE" => Registered::Delete,
        "PATCH" => Registered::Patch,
        "OPTIONS" => Registered::Options,
        "CONNECT" => Registered::Connect,
        "HEAD" => Registered::Head,
        "TRACE" => Registered::Trace,
        _ => {
            return HttpMethod {
                r#type: Some(Type::Unregistered(method.to_owned())),
            };
        }
    };
    HttpMethod {
        r#type: Some(Type::Registered(registered.into())),
    }
}
