//! Parses the workload of a request.

use serde::Deserialize;

use crate::cluster::views::inbound::WorkloadId;
use crate::resources::meta::NamespacedName;

#[derive(Deserialize)]
struct RawWorkload {
    ns: String,
    pod: Option<String>,
    external_workload: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid workload {0:?}; expected {{\"ns\":…,\"pod\":…}}, {{\"ns\":…,\"external_workload\":…}}, <namespace>:<pod>"
)]
pub(super) struct InvalidWorkload(String);

/// Parses the JSON form, or the older form `<namespace>:<pod>`.
pub(super) fn parse(text: &str) -> Result<WorkloadId, InvalidWorkload> {
    let invalid = || InvalidWorkload(text.to_owned());
    // A stream holds the names of its client in memory, so their length is limited.
    if text.len() > MAX_WORKLOAD_BYTES {
        return Err(invalid());
    }
    if !text.trim_start().starts_with('{') {
        return match text.split_once(':') {
            Some((namespace, pod)) if !namespace.is_empty() && !pod.is_empty() => {
                Ok(WorkloadId::Pod(NamespacedName::new(namespace, pod)))
            }
            _ => Err(invalid()),
        };
    }
    let raw: RawWorkload = serde_json::from_str(text).map_err(|_| invalid())?;
    if raw.ns.is_empty() {
        return Err(invalid());
    }
    match (raw.pod, raw.external_workload) {
        (Some(pod), None) if !pod.is_empty() => Ok(WorkloadId::Pod(NamespacedName::new(raw.ns, pod))),
        (None, Some(workload)) if !workload.is_empty() => {
            Ok(WorkloadId::External(NamespacedName::new(raw.ns, workload)))
        }
        _ => Err(invalid()),
    }
}

/// Maximum length of a workload. Two names of 253 bytes fit, with other fields that clients send.
const MAX_WORKLOAD_BYTES: usize = 1024;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parsing_a_workload_never_panics(text in ".*|[a-z.:\\[\\]0-9{}\"]*") {
            let _ = parse(&text);
        }
    }

    #[test]
    fn workloads_are_json_or_namespace_and_pod() {
        assert_eq!(
            parse(r#"{"ns":"a","pod":"b"}"#),
            Ok(WorkloadId::Pod(NamespacedName::new("a", "b")))
        );
        assert_eq!(
            parse(r#"{"ns":"a","external_workload":"b"}"#),
            Ok(WorkloadId::External(NamespacedName::new("a", "b")))
        );
        assert_eq!(parse("a:b"), Ok(WorkloadId::Pod(NamespacedName::new("a", "b"))));
        for invalid in [
            "",
            "a",
            ":",
            "a:",
            ":b",
            "{",
            "{}",
            r#"{"ns":"a"}"#,
            r#"{"ns":"","pod":"b"}"#,
        ] {
            assert!(parse(invalid).is_err(), "{invalid}");
        }
        assert!(parse(r#"{"ns":"a","pod":"b","external_workload":"c"}"#).is_err());
        assert!(parse(&format!("a:{}", "b".repeat(1024))).is_err());
    }
}
