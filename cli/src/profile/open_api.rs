//! Creates one route per operation of an OpenAPI description.

use anyhow::{Context as _, bail};
use serde_json::{Map, Value};

use super::model::{Condition, ResponseClass, ResponseCondition, Route, StatusRange};

/// Parses an OpenAPI 2 (Swagger) or OpenAPI 3 description in YAML or JSON.
///
/// # Errors
/// Fails if the text is not an OpenAPI description, or if the description has no paths.
pub(super) fn routes(text: &str) -> anyhow::Result<Vec<Route>> {
    let description: Value = serde_yaml_ng::from_str(text).context("the text is neither YAML nor JSON")?;
    let Some(paths) = description["paths"].as_object() else {
        bail!("the description has no `paths`");
    };
    let base = base_path(&description);
    let mut routes = Vec::new();
    for (path, item) in paths {
        let path = format!("{}/{}", base.trim_end_matches('/'), path.trim_start_matches('/'));
        for method in METHODS {
            if let Some(operation) = item.get(method).and_then(Value::as_object) {
                routes.push(route(&path, &method.to_ascii_uppercase(), operation)?);
            }
        }
    }
    routes.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(routes)
}

/// The prefix of all paths: `basePath` in version 2, the path of the first server in version 3.
fn base_path(description: &Value) -> String {
    let text = description["basePath"]
        .as_str()
        .or_else(|| description["servers"][0]["url"].as_str());
    let text = text.unwrap_or_default();
    match text.split_once("://") {
        Some((_, rest)) => rest
            .split_once('/')
            .map(|(_, path)| format!("/{path}"))
            .unwrap_or_default(),
        None => text.to_owned(),
    }
}

fn route(path: &str, method: &str, operation: &Map<String, Value>) -> anyhow::Result<Route> {
    let name = format!("{method} {path}");
    let is_retryable = match operation.get("x-linkerd-retryable") {
        None => false,
        Some(Value::Bool(retryable)) => *retryable,
        Some(other) => bail!("x-linkerd-retryable of {name} is {other}; expected true or false"),
    };
    let timeout = match operation.get("x-linkerd-timeout") {
        None => None,
        Some(Value::String(timeout)) => Some(timeout.clone()),
        Some(other) => bail!("x-linkerd-timeout of {name} is {other}; expected a duration such as \"300ms\""),
    };
    let statuses = operation.get("responses").and_then(Value::as_object);
    // Skips `default` and ranges such as `5XX`.
    let mut statuses: Vec<u16> = statuses
        .into_iter()
        .flat_map(Map::keys)
        .filter_map(|code| code.parse().ok())
        .collect();
    statuses.sort_unstable();
    let response_classes = statuses.into_iter().map(|status| ResponseClass {
        condition: ResponseCondition {
            status: StatusRange {
                min: status,
                max: status,
            },
        },
        is_failure: status >= 500,
    });
    Ok(Route {
        name,
        condition: Condition {
            method: method.to_owned(),
            path_regex: path_regex(path),
        },
        response_classes: response_classes.collect(),
        is_retryable,
        timeout,
    })
}

/// Converts a path with parameters to a regular expression: `/a/{b}.json` becomes `/a/[^/]*\.json`.
fn path_regex(path: &str) -> String {
    let mut regex = String::new();
    let mut rest = path;
    while let Some((before, after)) = rest.split_once('{') {
        let Some((_, after)) = after.split_once('}') else { break };
        regex.push_str(&regex::escape(before));
        regex.push_str("[^/]*");
        rest = after;
    }
    regex.push_str(&regex::escape(rest));
    regex
}

const METHODS: [&str; 7] = ["get", "put", "post", "delete", "options", "head", "patch"];

#[cfg(test)]
mod tests {
    use super::*;

    const SWAGGER: &str = r#"
swagger: "2.0"
basePath: /v1
paths:
  /authors/{id}.json:
    get:
      x-linkerd-retryable: true
      x-linkerd-timeout: 300ms
      responses:
        default: {}
        "500": {}
        200: {}
    parameters: []
  books:
    post: {}
"#;

    #[test]
    fn each_operation_is_a_route() {
        let routes = routes(SWAGGER).unwrap();
        assert_eq!(
            routes.iter().map(|route| &*route.name).collect::<Vec<_>>(),
            ["GET /v1/authors/{id}.json", "POST /v1/books"]
        );
        let [author, books] = &routes[..] else { panic!() };
        assert_eq!(author.condition.path_regex, r"/v1/authors/[^/]*\.json");
        assert!(author.is_retryable);
        assert_eq!(author.timeout.as_deref(), Some("300ms"));
        let classes: Vec<_> = author
            .response_classes
            .iter()
            .map(|class| (class.condition.status.min, class.is_failure))
            .collect();
        assert_eq!(classes, [(200, false), (500, true)]);
        assert_eq!((books.is_retryable, books.response_classes.len()), (false, 0));
    }

    #[test]
    fn version_3_takes_the_base_path_from_servers() {
        let json = r#"{ "openapi": "3.0.0", "servers": [{ "url": "https://x.example/api/" }], "paths": { "/a": { "get": {} } } }"#;
        assert_eq!(routes(json).unwrap()[0].condition.path_regex, "/api/a");
    }

    #[test]
    fn invalid_descriptions_are_refused() {
        for text in [
            "",
            "paths: 3",
            ": :",
            "{paths: {/a: {get: {x-linkerd-retryable: maybe}}}}",
        ] {
            assert!(routes(text).is_err(), "{text}");
        }
    }
}
