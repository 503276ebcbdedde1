//! Creates one route per method of the services in a `.proto` file.

use anyhow::{Context as _, ensure};
use prost_types::{FileDescriptorProto, MethodDescriptorProto};
use protox::file::File;

use super::model::{Condition, Route};

/// Parses one file. Imports are not read, because only the names and options of methods are used.
///
/// # Errors
/// Fails if the text is not protobuf, or if the file has no services.
pub(super) fn routes(text: &str) -> anyhow::Result<Vec<Route>> {
    let file = File::from_source("input.proto", text).context("parsing protobuf")?;
    let file = FileDescriptorProto::from(file);
    ensure!(!file.service.is_empty(), "the file has no service");
    let package = match file.package() {
        "" => String::new(),
        package => format!("{package}."),
    };
    let mut routes = Vec::new();
    for service in &file.service {
        for method in &service.method {
            let path = format!("/{package}{}/{}", service.name(), method.name());
            routes.push(Route {
                name: method.name().to_owned(),
                condition: Condition {
                    method: "POST".to_owned(),
                    path_regex: regex::escape(&path),
                },
                is_retryable: is_idempotent(method),
                ..Route::default()
            });
        }
    }
    Ok(routes)
}

/// Whether the method's `idempotency_level` permits retries.
fn is_idempotent(method: &MethodDescriptorProto) -> bool {
    let Some(options) = &method.options else { return false };
    // Without the imports, the parser leaves options uninterpreted.
    let uninterpreted = options.uninterpreted_option.iter().find(|option| {
        let name: Vec<_> = option.name.iter().map(|part| part.name_part.as_str()).collect();
        name == ["idempotency_level"]
    });
    let level = match uninterpreted {
        Some(option) => option.identifier_value(),
        None => options.idempotency_level().as_str_name(),
    };
    matches!(level, "NO_SIDE_EFFECTS" | "IDEMPOTENT")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_method_is_a_route_and_idempotent_ones_are_retryable() {
        let routes = routes(
            r#"
            syntax = "proto3";
            package emoji.v1;
            import "elsewhere.proto";
            service Emoji {
              rpc List (elsewhere.Request) returns (elsewhere.Reply) { option idempotency_level = NO_SIDE_EFFECTS; }
              rpc Vote (elsewhere.Request) returns (stream elsewhere.Reply);
              rpc Put (elsewhere.Request) returns (elsewhere.Reply) { option idempotency_level = IDEMPOTENT; }
              rpc Odd (elsewhere.Request) returns (elsewhere.Reply) {
                option deprecated = true;
                option idempotency_level = IDEMPOTENCY_UNKNOWN;
              }
            }
            "#,
        )
        .unwrap();
        let seen: Vec<_> = routes
            .iter()
            .map(|r| (&*r.name, &*r.condition.path_regex, r.is_retryable))
            .collect();
        assert_eq!(
            seen,
            [
                ("List", r"/emoji\.v1\.Emoji/List", true),
                ("Vote", r"/emoji\.v1\.Emoji/Vote", false),
                ("Put", r"/emoji\.v1\.Emoji/Put", true),
                ("Odd", r"/emoji\.v1\.Emoji/Odd", false),
            ]
        );
        assert!(routes.iter().all(|route| route.condition.method == "POST"));
    }

    #[test]
    fn a_file_without_a_service_is_refused() {
        for text in ["service {", "syntax = \"proto3\";", "hello"] {
            assert!(routes(text).is_err(), "{text}");
        }
    }
}
