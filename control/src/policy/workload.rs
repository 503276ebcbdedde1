//! Parses the workload of a request.

use serde::Deserialize;

use crate::cluster::views::inbound::WorkloadId;
use crate::resources::exported_services::ExportedServices;
use crate::resources::meta::NamespacedName;

#[derive(Deserialize)]
struct RawWorkload {
    ns: String,
    pod: Option<String>,
    external_workload: Option<String>,
    #[serde(rename = "exportedServices", default)]
    exported_services: String,
}

/// The workload that a request names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Workload {
    pub(super) id: WorkloadId,
    /// The Services that the workload serves to other clusters, if it is a gateway.
    pub(super) exported_services: ExportedServices,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid workload {0:?}; expected {{\"ns\":…,\"pod\":…}}, {{\"ns\":…,\"external_workload\":…}}, <namespace>:<pod>"
)]
pub(super) struct InvalidWorkload(String);

/// Parses the JSON form, or the older form `<namespace>:<pod>`.
pub(super) fn parse(text: &str) -> Result<Workload, InvalidWorkload> {
    let invalid = || InvalidWorkload(text.to_owned());
    // A stream holds the names of its client in memory, so their length is limited.
    if text.len() > MAX_WORKLOAD_BYTES {
        return Err(invalid());
    }
    if !text.trim_start().starts_with('{') {
        return match text.split_once(':') {
            Some((namespace, pod)) if !namespace.is_empty() && !pod.is_empty() => Ok(Workload {
                id: WorkloadId::Pod(NamespacedName::new(namespace, pod)),
                exported_services: ExportedServices::All,
            }),
            _ => Err(invalid()),
        };
    }
    let raw: RawWorkload = serde_json::from_str(text).map_err(|_| invalid())?;
    if raw.ns.is_empty() {
        return Err(invalid());
    }
    let id = match (raw.pod, raw.external_workload) {
        (Some(pod), None) if !pod.is_empty() => WorkloadId::Pod(NamespacedName::new(raw.ns, pod)),
        (None, Some(workload)) if !workload.is_empty() => WorkloadId::External(NamespacedName::new(raw.ns, workload)),
        _ => return Err(invalid()),
    };
    Ok(Workload {
        id,
        exported_services: ExportedServices::from_client(&raw.exported_services),
    })
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
        let pod = WorkloadId::Pod(NamespacedName::new("a", "b"));
        let external = WorkloadId::External(NamespacedName::new("a", "b"));
        for (text, id, exported) in [
            (r#"{"ns":"a","pod":"b"}"#, &pod, ""),
            (r#"{"ns":"a","pod":"b","exportedServices":"app=web"}"#, &pod, "app=web"),
            (r#"{"ns":"a","external_workload":"b"}"#, &external, ""),
            ("a:b", &pod, ""),
        ] {
            let expected = Workload {
                id: id.clone(),
                exported_services: ExportedServices::from_client(exported),
            };
            assert_eq!(parse(text), Ok(expected), "{text}");
        }
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
